// Package parallel lets tests that wait do so side by side.
package parallel

import (
	"flag"
	"runtime"
	"strconv"
)

// AtLeast lets at least n parallel tests of this process run at a time, unless -parallel says otherwise.
// Go's default is one per core; tests of processes, networks and deadlines wait most of their time. Call it
// in TestMain.
func AtLeast(n int) {
	flag.Parse()
	cores := runtime.GOMAXPROCS(0)
	p := flag.Lookup("test.parallel")
	if p.Value.String() != strconv.Itoa(cores) || cores >= n {
		return
	}
	if err := p.Value.Set(strconv.Itoa(n)); err != nil {
		panic(err)
	}
}
