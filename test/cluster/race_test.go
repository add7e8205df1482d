//go:build race

package cluster_test

// raced says that the race detector is on: a run is one goroutine and takes ten times as long, so there are
// fewer.
const raced = true
