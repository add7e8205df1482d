package memnet

import (
	"fmt"
	"net"
	"strconv"
	"sync"
)

// packetQueue bounds packets that nobody read yet; what comes on top is lost, as it would be on a socket.
const packetQueue = 256

// Packets is a bound packet address. Packets to where nobody is bound are lost without an error.
type Packets struct {
	net  *Network
	addr address
	in   chan packet
	done chan struct{}
	once sync.Once
}

type packet struct {
	data []byte
	from net.Addr
}

// ListenPacket binds addr for packets ("host:port"; port 0 picks a free one). Streams have ports of their
// own, as TCP and UDP have.
func (n *Network) ListenPacket(addr string) (*Packets, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("listen for packets on %q: %w", addr, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.packets == nil {
		n.packets = map[string]*Packets{}
	}
	for next := 50000; port == "0" || port == ""; next++ {
		if p := strconv.Itoa(next); n.packets[net.JoinHostPort(host, p)] == nil {
			port = p
		}
	}
	key := net.JoinHostPort(host, port)
	if n.packets[key] != nil {
		return nil, fmt.Errorf("listen for packets on %s: address already in use", key)
	}
	p := &Packets{net: n, addr: address(key), in: make(chan packet, packetQueue), done: make(chan struct{})}
	n.packets[key] = p
	return p, nil
}

// ReadFrom waits for a packet, or for Close.
func (p *Packets) ReadFrom(b []byte) (int, net.Addr, error) {
	select {
	case got := <-p.in:
		return copy(b, got.data), got.from, nil
	case <-p.done:
		return 0, nil, net.ErrClosed
	}
}

// WriteTo sends a packet. It never blocks.
func (p *Packets) WriteTo(b []byte, to net.Addr) (int, error) {
	select {
	case <-p.done:
		return 0, net.ErrClosed
	default:
	}
	p.net.mu.Lock()
	there := p.net.packets[to.String()]
	p.net.mu.Unlock()
	if there != nil {
		select {
		case there.in <- packet{data: append([]byte(nil), b...), from: p.addr}:
		default:
		}
	}
	return len(b), nil
}

// LocalAddr is where it is bound.
func (p *Packets) LocalAddr() net.Addr { return p.addr }

// Close frees the address.
func (p *Packets) Close() error {
	p.once.Do(func() {
		p.net.mu.Lock()
		delete(p.net.packets, string(p.addr))
		p.net.mu.Unlock()
		close(p.done)
	})
	return nil
}
