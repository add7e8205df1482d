//go:build race

package kvindex

// scale divides the size of the large tests: the race detector makes them ten times as slow.
const scale = 8
