// Package parallel helps tests that run side by side.
package parallel

import (
	"bytes"
	"flag"
	"os"
	"runtime"
	"strconv"
	"sync"
	"syscall"
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

// WriteProgram writes a program that a test runs. Other tests start no process meanwhile: their child would
// hold the file open until it runs its own program, and the kernel runs no file that is open for writing.
func WriteProgram(path string, text []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, text, 0o755)
}

// Buffer is a log or an output that a test reads while others write it.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// String is all that was written so far.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
