package main

import (
	"context"
	"net"
	"strconv"

	"github.com/dpserve/dpserve/wiring"
)

// A node owns its port range, but several `up` on one machine start with the same default. So each takes a slice of it: from the
// top, because a node of `start` fills the range from the bottom. One slice holds the blocks of all ranks of the default slots.
const (
	sliceTop   = 29_999
	sliceSize  = 1_250
	sliceCount = 8
)

// slicePorts gives an up a part of the default port range that no other up has, and keeps it until release. The last port of
// the slice is the lock: it is bound, and the system frees it whenever and however the process ends. If every slice is taken,
// the config stays as it is, and bind tests find free blocks.
func slicePorts(ctx context.Context, c *wiring.Config) (release func()) {
	var bind net.ListenConfig
	for i := range sliceCount {
		hi := sliceTop - i*sliceSize
		lo := hi - sliceSize + 1
		lock, err := bind.Listen(ctx, "tcp", loopback(hi))
		if err != nil {
			continue
		}
		first, err := bind.Listen(ctx, "tcp", loopback(lo)) // somebody else's engines begin here
		if err != nil {
			_ = lock.Close()
			continue
		}
		_ = first.Close()
		c.PortRange = strconv.Itoa(lo) + "-" + strconv.Itoa(hi-1)
		return func() { _ = lock.Close() }
	}
	return func() {}
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
