// Package harness runs dpserve for tests: the built binary with real processes, sockets and files (Real), and
// whole nodes in one process on memory transports and fake time (New).
package harness

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// built is one build of a program of this repository, made once per test process.
type built struct {
	program string // its folder; "" = dpserve
	once    sync.Once
	path    string
	out     []byte
	err     error
}

var (
	build, buildNext built
	buildStub        = built{program: "./test/stubengine"}
)

// Binary builds dpserve once per test process and returns its path. Tests use the built program, never `go
// run`: that turns every exit code into 1, and a SIGTERM to it leaves the program alive.
func Binary(t testing.TB) string { return build.binary(t) }

// NextBinary is Binary of a version after this one: it has a kind of command, fields and events that this one
// does not know (test/next).
func NextBinary(t testing.TB) string {
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	write := exec.Command("go", "run", "./test/next", t.TempDir())
	write.Dir, write.Stderr = root, os.Stderr
	path, err := write.Output()
	if err != nil {
		t.Fatalf("make the overlay of the next version: %v", err)
	}
	return buildNext.binary(t, "-overlay", strings.TrimSpace(string(path)))
}

// StubEngine builds the program that stands for vLLM and SGLang and returns its path.
func StubEngine(t testing.TB) string { return buildStub.binary(t) }

func (b *built) binary(t testing.TB, flags ...string) string {
	t.Helper()
	b.once.Do(func() {
		dir, err := os.MkdirTemp("", "dpserve-bin-")
		if err != nil {
			b.err = err
			return
		}
		program := cmp.Or(b.program, "./cmd/dpserve")
		b.path = filepath.Join(dir, filepath.Base(program))
		root, err := Root()
		if err != nil {
			b.err = err
			return
		}
		// -w leaves out what only a debugger reads: linking takes two thirds of the time
		cmd := exec.Command("go", slices.Concat([]string{"build", "-ldflags=-w"}, flags,
			[]string{"-o", b.path, program})...)
		cmd.Dir = root
		b.out, b.err = cmd.CombinedOutput()
	})
	if b.err != nil {
		t.Fatalf("build %s %v: %v\n%s", filepath.Base(b.path), flags, b.err, b.out)
	}
	return b.path
}

// RemoveBinary deletes what Binary, NextBinary and StubEngine built; call it at the end of TestMain.
func RemoveBinary() {
	for _, b := range []*built{&build, &buildNext, &buildStub} {
		if b.path != "" {
			_ = os.RemoveAll(filepath.Dir(b.path))
		}
	}
}

// Root is the checkout's top folder: the nearest parent with a go.mod.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", fmt.Errorf("no go.mod above %s: %w", dir, os.ErrNotExist)
		}
		dir = up
	}
}
