//go:build !race

package kvindex

// scale divides the size of the large tests: nothing slows them here.
const scale = 1
