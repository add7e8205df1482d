package main

import (
	"io/fs"
	"math"
	"os"
	"path"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/wiring"
)

// newNode makes a node of this process, which gets a memory limit first.
func newNode(c wiring.Config) (node, error) {
	if os.Getenv("GOMEMLIMIT") == "" { // also "off" is the user's word
		if limit := containerMemory(os.DirFS("/")); limit > 0 {
			debug.SetMemoryLimit(limit / 10 * ownShare)
		}
	}
	return wiring.New(c)
}

// ownShare is how many tenths of a container's memory the runtime may take: the rest is what the kernel counts and the runtime does
// not, as buffers of sockets.
const ownShare = 9

// containerMemory is the memory limit in bytes of the control group that this process is in, or of one above it; 0: there is none.
func containerMemory(root fs.FS) int64 {
	groups, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return 0
	}
	least := int64(math.MaxInt64)
	for line := range strings.Lines(string(groups)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3) // number, controllers, path
		if len(part) != 3 {
			continue
		}
		folder, file := "sys/fs/cgroup", "memory.max"
		if part[1] == "memory" { // version 1
			folder, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		} else if part[1] != "" {
			continue
		}
		for group := path.Clean("/" + part[2]); ; group = path.Dir(group) {
			text, err := fs.ReadFile(root, path.Join(folder, group, file))
			if err == nil {
				if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && n > 0 {
					least = min(least, n)
				}
			}
			if group == "/" {
				break
			}
		}
	}
	if least >= unlimitedMemory {
		return 0
	}
	return least
}

// unlimitedMemory is beyond every machine: version 1 says "none" by a number near the largest one.
const unlimitedMemory = 1 << 60
