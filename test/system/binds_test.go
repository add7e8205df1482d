package system

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// SP1: every port is on loopback; a public bind is refused with the flag's name.
func TestSP1LoopbackOnly(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"--http-bind", "--admin-bind", "--metrics-bind"} {
		for _, addr := range []string{"0.0.0.0:0", "[::]:0", ":0", "192.0.2.1:0"} {
			r := harness.Run(t, "start", flag, addr, "--data-dir", t.TempDir())
			assert.Equal(t, 2, r.ExitCode(), "%s %s", flag, addr)
			assert.Contains(t, r.Output(), flag)
			assert.Contains(t, r.Output(), "hint:")
		}
	}
	r := harness.Start(t)
	r.Deploy(simApp("a", 2, "lockstep", ""))
	st := r.WaitStatus("a", "RUNNING")
	inodes := map[string]bool{}
	for _, pid := range append(pids(st), r.PID) {
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		require.NoError(t, err)
		for _, f := range files {
			if l, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, f.Name())); err == nil &&
				strings.HasPrefix(l, "socket:[") {
				inodes[strings.TrimSuffix(strings.TrimPrefix(l, "socket:["), "]")] = true
			}
		}
	}
	listening := 0
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6", "/proc/net/udp", "/proc/net/udp6"} {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		for line := range strings.SplitSeq(string(b), "\n") {
			f := strings.Fields(line)
			if len(f) < 10 || !inodes[f[9]] || (strings.Contains(file, "tcp") && f[3] != "0A") {
				continue
			}
			listening++
			assert.True(t, loopbackHex(f[1]), "%s listens on %s", file, f[1])
		}
	}
	assert.GreaterOrEqual(t, listening, 4, "ingress, admin and two engines listen")
}

// loopbackHex reads the local address of /proc/net/tcp.
func loopbackHex(addr string) bool {
	host, _, _ := strings.Cut(addr, ":")
	var ip net.IP
	for i := 0; i+8 <= len(host); i += 8 {
		var b [4]byte
		if _, err := fmt.Sscanf(host[i:i+8], "%02x%02x%02x%02x", &b[3], &b[2], &b[1], &b[0]); err != nil {
			return false
		}
		ip = append(ip, b[:]...)
	}
	return ip.IsLoopback()
}
