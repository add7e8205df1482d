package cluster

import (
	"errors"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
)

const (
	// transportTimeout bounds one message of raft and its answer; a snapshot gets as much per 256 KiB.
	transportTimeout = 5 * time.Second
	// transportPool is how many idle connections are kept per peer.
	transportPool = 3
)

// Layer connects control nodes by their node ports.
type Layer interface {
	net.Listener // of connections that other control nodes of this cluster made for consensus

	// Dial connects to the node with a UID at HOST:PORT. It must refuse everybody else who answers there: raft would take the
	// one's votes and acknowledgements for the other's.
	Dial(uid, address string, timeout time.Duration) (net.Conn, error)
}

// network carries raft's messages between nodes, over all runs of raft in this process. Raft knows nodes by their UID only, as
// id and as address: an address in its log would be stale when the node moves, and raft takes two candidates with one address
// for the same.
type network struct {
	*raft.NetworkTransport
	uid   raft.ServerAddress
	layer *layer
	once  sync.Once
	idle  chan struct{} // closed ends the shedding of messages between two runs; nil while raft runs
	shed  sync.WaitGroup
}

// newNetwork starts to accept. Messages wait for the first run of raft.
func newNetwork(cfg Config, uid string, resolve func(uid string) []string) *network {
	l := &layer{Layer: cfg.Layer, resolve: resolve, conns: map[net.Conn]struct{}{}}
	return &network{uid: raft.ServerAddress(uid), layer: l, NetworkTransport: raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: l, MaxPool: transportPool, Timeout: transportTimeout, Logger: newRaftLog(cfg.Log), MsgpackUseNewTimeFormat: true,
	})}
}

// LocalAddr is this node's UID.
func (n *network) LocalAddr() raft.ServerAddress { return n.uid }

// EncodePeer is the UID: what candidates and leaders sign with.
func (n *network) EncodePeer(id raft.ServerID, _ raft.ServerAddress) []byte { return []byte(id) }

// Close does nothing: raft calls it at the end of a run, and the next one needs the network again.
func (n *network) Close() error { return nil }

// rest answers every message with an error until wake: no raft runs here. Heartbeats take the same way as the others, because
// a raft that has stopped would never answer them.
func (n *network) rest(why error) {
	idle := make(chan struct{})
	n.idle = idle
	n.shed.Go(func() {
		for {
			select {
			case rpc := <-n.Consumer():
				rpc.Respond(nil, why)
			case <-idle:
				return
			}
		}
	})
}

// wake ends rest.
func (n *network) wake() {
	if n.idle != nil {
		close(n.idle)
		n.shed.Wait()
		n.idle = nil
	}
}

// shut ends it all, for good.
func (n *network) shut() {
	n.once.Do(func() {
		n.wake()
		_ = n.NetworkTransport.Close() // closes the layer; it has no error of its own
		n.CloseStreams()
		n.layer.closeConns()
	})
}

// layer is a raft.StreamLayer that dials by UID and remembers what it accepted, which raft's transport does not close.
type layer struct {
	Layer
	resolve func(uid string) []string

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]struct{}
}

// Dial connects to a node by its UID, wherever it may be.
func (l *layer) Dial(uid raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	var errs []error
	for _, address := range l.resolve(string(uid)) {
		conn, err := l.Layer.Dial(string(uid), address, timeout)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	if errs == nil {
		return nil, problem.New(problem.Unavailable, "no address is known of the node with UID %s", uid)
	}
	return nil, errors.Join(errs...)
}

// Accept waits for the next connection.
func (l *layer) Accept() (net.Conn, error) {
	conn, err := l.Layer.Accept()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = conn.Close()
		return nil, net.ErrClosed
	}
	l.conns[conn] = struct{}{}
	return &accepted{Conn: conn, layer: l}, nil
}

// closeConns closes what was accepted; nothing is accepted any more.
func (l *layer) closeConns() {
	l.mu.Lock()
	conns := slices.Collect(maps.Keys(l.conns))
	l.closed = true
	clear(l.conns)
	l.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}

func (l *layer) forget(conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, conn)
}

// accepted is a connection that another node made.
type accepted struct {
	net.Conn
	layer *layer
}

// Close closes and forgets.
func (a *accepted) Close() error {
	a.layer.forget(a.Conn)
	return a.Conn.Close()
}
