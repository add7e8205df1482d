package membership

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/dpserve/dpserve/internal/problem"
)

// Packets is the part of net.PacketConn that gossip needs.
type Packets interface {
	ReadFrom(b []byte) (int, net.Addr, error)
	WriteTo(b []byte, to net.Addr) (int, error)
	LocalAddr() net.Addr
	Close() error
}

// Network is UDP and TCP, or their replacement in tests. Nil fields are the real ones.
type Network struct {
	ListenPacket func(ctx context.Context, addr string) (Packets, error)
	Listen       func(ctx context.Context, addr string) (net.Listener, error)
	Dial         func(ctx context.Context, network, addr string) (net.Conn, error)
}

func (n Network) withDefaults() Network {
	if n.ListenPacket == nil {
		n.ListenPacket = listenUDP
	}
	if n.Listen == nil {
		n.Listen = func(ctx context.Context, addr string) (net.Listener, error) {
			return (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		}
	}
	if n.Dial == nil {
		n.Dial = (&net.Dialer{}).DialContext
	}
	return n
}

// udpBuffer is the wanted receive buffer in bytes, so that a burst of gossip of many nodes is not lost. A
// smaller one is no error.
const udpBuffer = 2 << 20

func listenUDP(ctx context.Context, addr string) (Packets, error) {
	c, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", addr)
	if err != nil {
		return nil, err
	}
	if udp, ok := c.(*net.UDPConn); ok {
		_ = udp.SetReadBuffer(udpBuffer)
	}
	return c, nil
}

// bindTries bounds the search for a port that is free for both UDP and TCP.
const bindTries = 10

// maxPacket is the largest UDP packet.
const maxPacket = 64 << 10

// transport carries memberlist's messages over a Network.
type transport struct {
	network Network
	ip      net.IP // advertised; nil: the bound one
	port    int    // advertised; 0: the bound one

	packets  Packets
	streams  net.Listener
	packetCh chan *memberlist.Packet
	streamCh chan net.Conn

	within func(time.Duration) (context.Context, context.CancelFunc) // context of a dial; Shutdown ends it
	cancel context.CancelFunc
	done   <-chan struct{}
	wg     sync.WaitGroup
}

var _ memberlist.NodeAwareTransport = (*transport)(nil)

// newTransport binds and begins to read.
func newTransport(
	ctx context.Context, network Network, bind string, ip net.IP, port int,
) (*transport, error) {
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	t := &transport{
		network: network, ip: ip, port: port, cancel: cancel, done: life.Done(),
		packetCh: make(chan *memberlist.Packet), streamCh: make(chan net.Conn),
		within: func(d time.Duration) (context.Context, context.CancelFunc) {
			return context.WithTimeout(life, d)
		},
	}
	if err := t.bind(ctx, bind); err != nil {
		cancel()
		return nil, problem.New(problem.Unavailable, "gossip cannot listen on %s: %w", bind, err).
			WithHint("is another dpserve running there? choose another --advertise, or stop it")
	}
	t.wg.Go(t.readPackets)
	t.wg.Go(t.acceptStreams)
	return t, nil
}

// bind binds one port for streams and packets.
func (t *transport) bind(ctx context.Context, addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	for range bindTries {
		if t.streams, err = t.network.Listen(ctx, addr); err != nil {
			return err
		}
		if t.packets, err = t.network.ListenPacket(ctx,
			net.JoinHostPort(host, portOf(t.streams.Addr()))); err == nil {
			return nil
		}
		_ = t.streams.Close()
		if port != "0" {
			return err
		}
	}
	return err
}

func portOf(a net.Addr) string {
	_, port, _ := net.SplitHostPort(a.String())
	return port
}

func (t *transport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	host, boundPort, err := net.SplitHostPort(t.streams.Addr().String())
	if err != nil {
		return nil, 0, err
	}
	ip, port := t.ip, t.port
	if port == 0 {
		if port, err = strconv.Atoi(boundPort); err != nil {
			return nil, 0, err
		}
	}
	if ip == nil {
		ip = net.ParseIP(host)
	}
	if ip == nil || ip.IsUnspecified() {
		return nil, 0, problem.New(problem.InvalidArgument, "gossip on %s needs an address that others reach",
			t.streams.Addr()).WithHint("set --advertise IP")
	}
	if ip4 := ip.To4(); ip4 != nil {
		ip = ip4
	}
	return ip, port, nil
}

func (t *transport) WriteTo(b []byte, addr string) (time.Time, error) {
	return t.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (t *transport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	to, err := netip.ParseAddrPort(a.Addr)
	if err != nil {
		return time.Time{}, err
	}
	_, err = t.packets.WriteTo(b, net.UDPAddrFromAddrPort(to))
	return time.Now(), err
}

func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packetCh }
func (t *transport) StreamCh() <-chan net.Conn           { return t.streamCh }

func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := t.within(timeout)
	defer cancel()
	return t.network.Dial(ctx, "tcp", addr)
}

func (t *transport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	return t.DialTimeout(a.Addr, timeout)
}

func (t *transport) Shutdown() error {
	t.cancel()
	err := errors.Join(t.streams.Close(), t.packets.Close())
	t.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil // Shutdown was called before
	}
	return err
}

func (t *transport) readPackets() {
	buf := make([]byte, maxPacket)
	for {
		n, from, err := t.packets.ReadFrom(buf)
		if err != nil {
			if !t.waitAfterError() {
				return
			}
			continue
		}
		if n == 0 {
			continue
		}
		p := &memberlist.Packet{Buf: append([]byte(nil), buf[:n]...), From: from, Timestamp: time.Now()}
		select {
		case t.packetCh <- p:
		case <-t.done:
			return
		}
	}
}

func (t *transport) acceptStreams() {
	for {
		c, err := t.streams.Accept()
		if err != nil {
			if !t.waitAfterError() {
				return
			}
			continue
		}
		select {
		case t.streamCh <- c:
		case <-t.done:
			_ = c.Close()
			return
		}
	}
}

// errorPause is the pause after an error of a socket.
const errorPause = 50 * time.Millisecond

// waitAfterError waits for errorPause; false after Shutdown.
func (t *transport) waitAfterError() bool {
	timer := time.NewTimer(errorPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-t.done:
		return false
	}
}
