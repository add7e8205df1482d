package memnet

import (
	"net"
	"sync"
)

// packetQueue bounds the unread packets; further ones are lost, as on a socket.
const packetQueue = 256

// Packets is a bound packet address. Packets to an address that is not bound are lost without an error.
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
