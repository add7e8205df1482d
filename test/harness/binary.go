// Package harness runs dpserve for tests: the built binary with real processes, sockets and files (Real), and whole nodes in one
// process on memory transports and fake time (New).
package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

var build struct {
	once sync.Once
	path string
	out  []byte
	err  error
}

// Binary builds dpserve once per test process and gives its path. Tests use the built program, never `go run` (TRAPS 8).
func Binary(t testing.TB) string {
	t.Helper()
	build.once.Do(func() {
		dir, err := os.MkdirTemp("", "dpserve-bin-")
		if err != nil {
			build.err = err
			return
		}
		build.path = filepath.Join(dir, "dpserve")
		root, err := Root()
		if err != nil {
			build.err = err
			return
		}
		cmd := exec.Command("go", "build", "-o", build.path, "./cmd/dpserve")
		cmd.Dir = root
		build.out, build.err = cmd.CombinedOutput()
	})
	if build.err != nil {
		t.Fatalf("build dpserve: %v\n%s", build.err, build.out)
	}
	return build.path
}

// RemoveBinary deletes what Binary built; call it at the end of TestMain.
func RemoveBinary() {
	if build.path != "" {
		_ = os.RemoveAll(filepath.Dir(build.path))
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
