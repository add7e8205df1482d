package memnet

import (
	"context"
	"net"
	"time"
)

// Host is one machine on a Network. The links between two hosts can be cut, silenced and delayed; connections
// inside a host are not affected. Safe for concurrent use.
type Host struct {
	net  *Network
	name string
}

// link is one direction between two hosts.
type link struct{ from, to string }

func (l link) back() link { return link{l.to, l.from} }

// Pauses of TCP before it resends unacknowledged data; each is twice the one before.
const (
	firstRetransmit = 200 * time.Millisecond
	firstSYN        = time.Second
)

// Listen binds addr; it fails once the host is down.
func (h *Host) Listen(addr string) (net.Listener, error) {
	h.net.mu.Lock()
	down := h.net.down[h.name]
	h.net.mu.Unlock()
	if down {
		return nil, &net.OpError{Op: "listen", Net: "mem", Addr: address(addr), Err: net.ErrClosed}
	}
	return h.net.Listen(addr)
}

// DialContext connects this host with a listener, here or on another host. While either direction is silent
// it waits, as TCP does, until the next SYN gets through.
func (h *Host) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	to, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	if to == h.name {
		return h.net.DialContext(ctx, network, addr)
	}
	way := link{h.name, to}
	if err := h.net.reach(ctx, way, addr); err != nil {
		return nil, err
	}
	here, there, l := h.net.connect(way, addr)
	if l == nil {
		return nil, refused(addr)
	}
	if err := l.take(ctx, there); err != nil {
		_ = there.Close()
		_ = here.Close()
		return nil, err
	}
	return here, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// again is the time at which TCP next resends data that it first sent at the given time.
func again(sent, now time.Time, pause time.Duration) time.Time {
	at := sent
	for ; !at.After(now); pause *= 2 {
		at = at.Add(pause)
	}
	return at
}

// Down ends the host: its listeners close, its connections are reset, and it neither receives nor sends.
// Other hosts see the resets unless the direction to them is silent.
func (h *Host) Down() {
	n := h.net
	var bound []*listener
	n.change(func() {
		n.down[h.name] = true
		for addr, l := range n.listeners {
			if host, _, err := net.SplitHostPort(addr); err == nil && host == h.name {
				bound = append(bound, l)
			}
		}
		for w := range n.wires {
			if !w.joins(h.name) {
				continue
			}
			w.reset(h.name)
			if peer := w.other(h.name); !n.silent[link{h.name, peer}] {
				w.reset(peer)
			}
		}
	})
	for _, l := range bound {
		_ = l.Close()
	}
}
