package rankleg

import (
	"net/netip"
	"syscall"
)

// connectNow is the Control of a net.Dialer: it begins the connection before package net does. A connection
// to an engine on this machine is complete when the system call returns, although the call says that it is in
// progress. Package net then connects again, hears that the socket is connected, and does not wait for the
// poller. That wait lasts some microseconds on an idle machine. On a busy one it lasts until no other
// goroutine is ready, or until Go's monitor looks at the poller, which it does every 10 ms.
func connectNow(_, address string, c syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil || !to.Addr().IsLoopback() {
		return nil //nolint:nilerr // such a connection is package net's alone
	}
	return c.Control(func(fd uintptr) {
		if syscall.Connect(int(fd), socketAddress(to)) != nil {
			return // it is in progress; or it has failed, which package net finds out as well
		}
	})
}

func socketAddress(a netip.AddrPort) syscall.Sockaddr {
	if a.Addr().Is4() {
		return &syscall.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &syscall.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
