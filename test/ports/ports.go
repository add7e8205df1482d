// Package ports reserves blocks of TCP and UDP ports for tests, beside other test processes and beside
// programs of the machine's user. Every test that needs a port number before something listens on it takes
// the number from here.
package ports

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// A block consists of whole cells. A process owns a cell, on every address of the machine, while it listens
// on the cell's own lock port. The operating system closes that listener however the process ends.
const (
	cellSize = 50
	signLow  = 19_000 // the sign of cell i is signLow+i on loopback
)

// patience is how long a test waits for others to release their blocks, on a machine with many cores.
const patience = time.Minute

// retryEvery is the pause between two searches.
const retryEvery = 20 * time.Millisecond

// Loopback is where a block must be free unless the test names other addresses.
const Loopback = "127.0.0.1"

var errNoBlock = errors.New("no block of this size is free")

// Take reserves size consecutive ports until t ends and returns the first. Every port is free on the hosts
// (none means Loopback) when Take returns.
func Take(t testing.TB, size int, hosts ...string) (base int) {
	t.Helper()
	base, release, err := Hold(t.Context(), size, hosts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return base
}

// TakeAddr reserves one port until t ends and returns it as an address of Loopback.
func TakeAddr(t testing.TB) string {
	t.Helper()
	return address(Loopback, Take(t, 1))
}

// Hold is Take for callers without a test: the block is theirs until release.
func Hold(ctx context.Context, size int, hosts ...string) (base int, release func(), err error) {
	if len(hosts) == 0 {
		hosts = []string{Loopback}
	}
	for end := time.Now().Add(patience); ; time.Sleep(retryEvery) {
		if base, release, err = search(ctx, cells(), size, hosts); err == nil || time.Now().After(end) ||
			ctx.Err() != nil {
			return base, release, err
		}
	}
}

// FreeRun is a run of size ports in dpserve's default range of engine ports that are all free on host at this
// moment. The run is not reserved: host must be an address that the caller alone uses.
func FreeRun(t testing.TB, size int, host string) (base int) {
	t.Helper()
	const lo, hi = 20_000, 29_999
	base = lo
	for port := lo; port <= hi; port++ {
		if !areFree(port, 1, []string{host}) {
			base = port + 1
		} else if port-base+1 == size {
			return base
		}
	}
	t.Fatalf("%d ports in %d to %d on %s: %v", size, lo, hi, host, errNoBlock)
	return 0
}

// TakeFixed makes addresses taken until release: by listeners of its own, which close every connection, or
// because a program of the machine's user is there. Test processes take turns: what one has is not taken for
// good. A call waits for its turn for at most five minutes, also within one process.
func TakeFixed(ctx context.Context, addrs ...string) (release func(), err error) {
	turn, err := awaitTurn(ctx)
	if err != nil {
		return nil, err
	}
	open := []io.Closer{turn}
	for _, addr := range addrs {
		if l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr); err == nil {
			open = append(open, l)
			go closeConnections(l)
		}
	}
	return func() {
		for _, l := range slices.Backward(open) {
			_ = l.Close()
		}
	}, nil
}

// closeConnections closes each connection, so that a client learns at once that no node is there. It ends
// with the listener.
func closeConnections(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_ = c.Close()
	}
}

// awaitTurn waits for the lock that one test process of a user has at a time. It ends when the file is
// closed, and with the process.
func awaitTurn(ctx context.Context) (io.Closer, error) {
	path := filepath.Join(os.TempDir(), fmt.Sprintf("dpserve-test-turn-%d", os.Getuid()))
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(5 * patience); ; time.Sleep(retryEvery) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
	}
}

// cells are the first ports of the cells. They lie outside the range from which the kernel takes the ports of
// outgoing connections, and outside 20000 to 29999, where dpserve puts engines by default.
func cells() []int {
	lo, hi := ephemeral()
	var out []int
	for _, region := range [][2]int{{10_000, signLow}, {30_000, 65_500}} {
		for base := region[0]; base+cellSize <= region[1]; base += cellSize {
			if base+cellSize <= lo || base > hi {
				out = append(out, base)
			}
		}
	}
	// the kernel's range is wider than any default: then a connection may take a port first
	if len(out) == 0 {
		for base := 10_000; base < signLow; base += cellSize {
			out = append(out, base)
		}
	}
	return out
}

// ephemeral is the range of ports that the kernel gives to connections: Linux says it, other systems have the
// IANA's.
func ephemeral() (lo, hi int) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(text), &lo, &hi)
	}
	if err != nil {
		return 49_152, 65_535
	}
	return lo, hi
}

// search looks once at every run of cells, from a random one on.
func search(ctx context.Context, bases []int, size int, hosts []string) (base int, release func(),
	err error,
) {
	width := (size + cellSize - 1) / cellSize
	runs := len(bases) / max(width, 1)
	if size < 1 || runs == 0 {
		return 0, nil, fmt.Errorf("%d ports: %w", size, errNoBlock)
	}
	first := rand.IntN(runs)
	if width == 1 { // small blocks stay together, so that wide ones find room
		first = runs - 1 - rand.IntN((runs+3)/4)
	}
	for i := range runs {
		at := (first + i) % runs * width
		if bases[at+width-1]-bases[at] != (width-1)*cellSize {
			continue // the run would span two regions
		}
		release, err := own(ctx, at, width)
		if err != nil {
			continue
		}
		if areFree(bases[at], size, hosts) {
			return bases[at], release, nil
		}
		release()
	}
	return 0, nil, fmt.Errorf("%d ports on %v: %w", size, hosts, errNoBlock)
}

// own takes the lock ports of width cells, or none.
func own(ctx context.Context, at, width int) (release func(), err error) {
	var bind net.ListenConfig
	var signs []net.Listener
	release = func() {
		for _, s := range signs {
			_ = s.Close()
		}
	}
	for i := range width {
		sign, err := bind.Listen(ctx, "tcp", address(Loopback, signLow+at+i))
		if err != nil {
			release()
			return nil, err
		}
		signs = append(signs, sign)
	}
	return release, nil
}

// areFree says whether all ports can be bound on all hosts, which are IP addresses. A listener on the
// wildcard address makes a port taken on every host.
func areFree(base, size int, hosts []string) bool {
	defer awaitForks()
	for port := base; port < base+size; port++ {
		for _, host := range hosts {
			ip := netip.MustParseAddr(host)
			if !isFree(ip, port, syscall.SOCK_STREAM) || !isFree(ip, port, syscall.SOCK_DGRAM) {
				return false
			}
		}
	}
	return true
}

// isFree binds a port as package net does, for a moment. Clusters look at hundreds of ports when they start,
// so it leaves out what package net prepares for the use of a socket.
func isFree(ip netip.Addr, port, kind int) bool {
	family, at := syscall.AF_INET6, syscall.Sockaddr(&syscall.SockaddrInet6{Port: port, Addr: ip.As16()})
	if ip.Is4() {
		family, at = syscall.AF_INET, &syscall.SockaddrInet4{Port: port, Addr: ip.As4()}
	}
	syscall.ForkLock.RLock()
	fd, err := syscall.Socket(family, kind, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return false
	}
	defer func() { _ = syscall.Close(fd) }()
	if kind == syscall.SOCK_DGRAM {
		return syscall.Bind(fd, at) == nil
	}
	return syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1) == nil &&
		syscall.Bind(fd, at) == nil && syscall.Listen(fd, 1) == nil
}

// awaitForks waits until no child process of this one is about to be executed. A child that was forked while
// a listener was open keeps the port taken until then, although the listener is closed.
func awaitForks() {
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
}

func address(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
