//go:build !linux

package system

import (
	"testing"

	"github.com/dpserve/dpserve/test/harness"
)

// diskWrites needs Linux, where the limits of a running process can be changed.
func diskWrites(t *testing.T, _ *harness.Member, _ bool) {
	t.Helper()
	t.Skip("the limits of another process can be changed on Linux alone")
}
