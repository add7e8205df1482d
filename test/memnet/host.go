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

// Host returns a machine by its name: the host part of the addresses it listens at.
func (n *Network) Host(name string) *Host { return &Host{net: n, name: name} }

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

// reach waits until a SYN gets to the other host and its answer comes back.
func (n *Network) reach(ctx context.Context, way link, addr string) error {
	began := time.Now()
	for {
		n.mu.Lock()
		silent := n.silent[way] || n.silent[way.back()]
		rest := n.delays[way] + n.delays[way.back()]
		dead := n.down[way.from]
		turned := n.watch()
		n.mu.Unlock()
		switch {
		case dead:
			return refused(addr)
		case !silent:
			// the link was silent, so nothing arrives before the next one
			if now := time.Now(); now.After(began) {
				rest += again(began, now, firstSYN).Sub(now)
			}
			return sleep(ctx, rest)
		}
		select {
		case <-turned:
		case <-ctx.Done():
			return &net.OpError{Op: "dial", Net: "mem", Addr: address(addr), Err: ctx.Err()}
		}
	}
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

// watch returns the channel that closes with the next change of links. Called under mu.
func (n *Network) watch() <-chan struct{} {
	if n.turned == nil {
		n.turned = make(chan struct{})
	}
	return n.turned
}

// change alters links under mu and wakes all that wait for a change.
func (n *Network) change(alter func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.silent == nil {
		n.silent, n.cut, n.delays, n.down = map[link]bool{}, map[link]bool{}, map[link]time.Duration{},
			map[string]bool{}
	}
	alter()
	if n.turned != nil {
		close(n.turned)
		n.turned = nil
	}
}

// Silence drops the data of one direction without an error. Connections stay, and data sent meanwhile arrives
// after Heal, when TCP would resend it.
func (n *Network) Silence(from, to string) {
	n.change(func() {
		n.silent[link{from, to}] = true
		for w := range n.wires {
			w.hold(link{from, to})
		}
	})
}

// Cut breaks every connection between two hosts, and refuses new ones.
func (n *Network) Cut(a, b string) {
	n.change(func() {
		n.cut[link{a, b}], n.cut[link{b, a}] = true, true
		for w := range n.wires {
			if w.joins(a) && w.joins(b) {
				w.reset(a)
				w.reset(b)
			}
		}
	})
}

// Heal ends silence and cuts between two hosts, both ways.
func (n *Network) Heal(a, b string) {
	n.change(func() {
		for _, l := range []link{{a, b}, {b, a}} {
			delete(n.silent, l)
			delete(n.cut, l)
			for w := range n.wires {
				w.release(l)
			}
		}
	})
}

// Delay delays the data of one direction; 0 = no delay.
func (n *Network) Delay(from, to string, d time.Duration) {
	n.change(func() { n.delays[link{from, to}] = d })
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
