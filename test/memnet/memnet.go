// Package memnet is a network inside one process: named listeners over net.Pipe, for whole-node tests on fake
// time (testing/synctest sees pipe reads as durable waits, socket reads it does not).
package memnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/pause"
)

// ErrRefused is returned by Dial for an address without a listener, as by the kernel.
var ErrRefused = errors.New("connection refused")

// backlog bounds connections that were dialled and not yet accepted.
const backlog = 128

// Network is a set of listeners by address. The zero value is ready; safe for
// concurrent use.
type Network struct {
	mu        sync.Mutex
	listeners map[string]*listener
	next      int

	silent map[link]bool // data of that direction does not arrive
	cut    map[link]bool // both ways
	delays map[link]time.Duration
	down   map[string]bool // hosts
	wires  map[*wire]bool
	turned chan struct{} // closed when links change; nil = no waiter
}

// Host returns a machine by its name: the host part of the addresses it listens at.
func (n *Network) Host(name string) *Host { return &Host{net: n, name: name} }

// Listen binds addr ("host:port"; port 0 picks a free one).
func (n *Network) Listen(addr string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %q: %w", addr, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners == nil {
		n.listeners = map[string]*listener{}
		n.next = 40000
	}
	for port == "0" || port == "" {
		n.next++
		if p := strconv.Itoa(n.next); n.listeners[net.JoinHostPort(host, p)] == nil {
			port = p
		}
	}
	key := net.JoinHostPort(host, port)
	if n.listeners[key] != nil {
		return nil, fmt.Errorf("listen on %s: %w", key, syscall.EADDRINUSE)
	}
	l := &listener{net: n, addr: address(key), conns: make(chan net.Conn, backlog), done: make(chan struct{})}
	n.listeners[key] = l
	return l, nil
}

// DialContext connects to a listener; its shape fits http.Transport.DialContext.
func (n *Network) DialContext(ctx context.Context, _, addr string) (net.Conn, error) {
	n.mu.Lock()
	l := n.listeners[addr]
	n.mu.Unlock()
	if l == nil {
		return nil, refused(addr)
	}
	here, there := net.Pipe()
	if err := l.take(ctx, there); err != nil {
		return nil, err
	}
	return here, nil
}

// connect makes a wire; l is nil without a listener.
func (n *Network) connect(way link, addr string) (here, there *end, l *listener) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.cut[way] || n.down[way.to] || n.down[way.from] || n.listeners[addr] == nil {
		return nil, nil, nil
	}
	n.next++
	from := address(net.JoinHostPort(way.from, "0"))
	w := &wire{net: n}
	here = &end{wire: w, way: way, local: from, remote: address(addr), changed: make(chan struct{})}
	there = &end{wire: w, way: way.back(), local: address(addr), remote: from, changed: make(chan struct{})}
	here.peer, there.peer = there, here
	w.ends = [2]*end{here, there}
	if n.wires == nil {
		n.wires = map[*wire]bool{}
	}
	n.wires[w] = true
	return here, there, n.listeners[addr]
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
			if rest <= 0 {
				return nil
			}
			return pause.For(ctx, rest)
		}
		select {
		case <-turned:
		case <-ctx.Done():
			return &net.OpError{Op: "dial", Net: "mem", Addr: address(addr), Err: ctx.Err()}
		}
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

// watch returns the channel that closes with the next change of links. Called under mu.
func (n *Network) watch() <-chan struct{} {
	if n.turned == nil {
		n.turned = make(chan struct{})
	}
	return n.turned
}

func refused(addr string) error {
	return &net.OpError{Op: "dial", Net: "mem", Addr: address(addr), Err: ErrRefused}
}

type listener struct {
	net   *Network
	addr  address
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

// take queues a dialled connection.
func (l *listener) take(ctx context.Context, c net.Conn) error {
	select {
	case l.conns <- c:
		select {
		case <-l.done: // closed meanwhile: this call or Close empties the queue
			l.empty()
		default:
		}
		return nil
	case <-l.done:
		return refused(string(l.addr))
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() {
		l.net.mu.Lock()
		delete(l.net.listeners, string(l.addr))
		l.net.mu.Unlock()
		close(l.done)
		l.empty()
	})
	return nil
}

func (l *listener) empty() {
	for {
		select {
		case c := <-l.conns:
			_ = c.Close()
		default:
			return
		}
	}
}

func (l *listener) Addr() net.Addr { return l.addr }

type address string

func (address) Network() string { return "mem" }

func (a address) String() string { return string(a) }
