package cluster

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
)

const (
	// transportTimeout bounds one message of raft and its answer. A snapshot gets as much per 256 KiB.
	transportTimeout = 5 * time.Second
	// transportInFlight is how many messages with entries are in flight to a node: one, which turns raft's
	// pipeline off. If the connection of a pipeline ends during two messages, its sender may wait forever for
	// a reader that has given up: heartbeats go on, but the node never gets an entry from this leader again
	// (raft 1.8, net_transport.go and replication.go). Commands are few here, and one message carries 64
	// entries.
	transportInFlight = 1
	// transportPool is how many idle connections are kept per peer.
	transportPool = 3
)

// Layer connects control nodes by their node ports.
type Layer interface {
	net.Listener // of connections that other control nodes of this cluster opened for consensus

	// Dial connects to the node with a UID at HOST:PORT. It must refuse any other node that answers there:
	// raft would count that node's votes and acknowledgements for the one with the UID.
	Dial(uid, address string, timeout time.Duration) (net.Conn, error)
}

// network carries raft's messages between nodes, for all runs of raft in this process. Raft uses a node's UID
// both as id and as address: a real address in its log would be wrong after the node moves, and raft takes
// two candidates with one address for the same node.
type network struct {
	*raft.NetworkTransport
	uid           raft.ServerAddress
	layer         *layer
	once          sync.Once
	stopRejecting chan struct{} // closed to stop rejecting messages between two runs; nil while raft runs
	rejecting     sync.WaitGroup

	isResting atomic.Bool // no raft runs, or it was told to stop: nothing is sent

	mu         sync.Mutex
	confirming map[raft.ServerID]chan struct{} // one slot each: taken while the node is asked
	logs       map[raft.ServerID]logEnd        // of the nodes that this node leads or led
}

// logEnd is how far a node's log goes, by its newest answer to this leader.
type logEnd struct {
	index         uint64
	at            time.Time
	beat, entries time.Time // when it answered a heartbeat, and entries
}

// errResting is the answer of a network whose raft was told to stop.
var errResting = errors.New("this node has left consensus")

// newNetwork starts to accept connections. Messages wait for the first run of raft.
func newNetwork(cfg Config, uid string, resolve func(uid string) []string,
	nameOf func(uid string) string,
) *network {
	l := &layer{Layer: cfg.Layer, resolve: resolve, nameOf: nameOf, conns: map[net.Conn]struct{}{}}
	return &network{
		uid: raft.ServerAddress(uid), layer: l, confirming: map[raft.ServerID]chan struct{}{},
		logs: map[raft.ServerID]logEnd{},
		NetworkTransport: raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
			Stream: l, MaxPool: transportPool, Timeout: transportTimeout, MaxRPCsInFlight: transportInFlight,
			Logger: newRaftLog(cfg.Log, nameOf, never), MsgpackUseNewTimeFormat: true,
		}),
	}
}

func (n *network) LocalAddr() raft.ServerAddress { return n.uid }

// EncodePeer returns the UID, which is how candidates and leaders sign their messages.
func (n *network) EncodePeer(id raft.ServerID, _ raft.ServerAddress) []byte { return []byte(id) }

// AppendEntries sends entries or a heartbeat, and records from the answer how far the node's log goes: raft
// itself does not expose it. A raft that was told to stop sends nothing: while its disk hangs in the main
// loop, its heartbeats would keep the other nodes from an election.
func (n *network) AppendEntries(
	id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest,
	resp *raft.AppendEntriesResponse,
) error {
	if n.isResting.Load() {
		return errResting
	}
	if err := n.NetworkTransport.AppendEntries(id, target, args, resp); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	end, now := n.logs[id], time.Now()
	if len(args.Entries) == 0 && args.PrevLogEntry == 0 {
		end.beat = now
	} else {
		end.entries = now
	}
	if resp.Success {
		end.index, end.at = resp.LastLog, now
	}
	n.logs[id] = end
	return nil
}

// lastAnswer returns a time by which the node had answered both a heartbeat and entries.
func (n *network) lastAnswer(uid string) time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	end := n.logs[raft.ServerID(uid)]
	if end.beat.Before(end.entries) {
		return end.beat
	}
	return end.entries
}

// never is for logs without messages about other nodes.
func never(string) time.Time { return time.Time{} }

// logOf returns how far a node's log goes; ok is false if its last answer is older than transportTimeout.
func (n *network) logOf(uid string) (index uint64, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	end, known := n.logs[raft.ServerID(uid)]
	return end.index, known && time.Since(end.at) < transportTimeout
}

// confirm sends a heartbeat of the leader of a term, and reports whether the node has accepted it. A node is
// asked once at a time: a caller that waits for an earlier question asks again afterwards, or gives up with
// ctx.
func (n *network) confirm(ctx context.Context, id raft.ServerID, term uint64) bool {
	n.mu.Lock()
	slot := n.confirming[id]
	if slot == nil {
		slot = make(chan struct{}, 1)
		n.confirming[id] = slot
	}
	n.mu.Unlock()
	select {
	case slot <- struct{}{}:
		defer func() { <-slot }()
	case <-ctx.Done():
		return false
	}
	self := n.EncodePeer(raft.ServerID(n.uid), n.uid)
	var resp raft.AppendEntriesResponse
	err := n.AppendEntries(id, raft.ServerAddress(id), &raft.AppendEntriesRequest{
		RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: self, Addr: self}, Term: term,
	}, &resp)
	return err == nil && resp.Success
}

// Close does nothing: raft calls it at the end of a run, and the next run needs the network.
func (n *network) Close() error { return nil }

// rejectMessages answers every message with an error until acceptMessages, because no raft runs. Heartbeats
// are rejected here too, because a raft that has stopped would never answer them.
func (n *network) rejectMessages(why error) {
	n.isResting.Store(true)
	idle := make(chan struct{})
	n.stopRejecting = idle
	n.rejecting.Go(func() {
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

// acceptMessages ends rejectMessages.
func (n *network) acceptMessages() {
	if n.stopRejecting != nil {
		close(n.stopRejecting)
		n.rejecting.Wait()
		n.stopRejecting = nil
	}
	n.isResting.Store(false)
}

// closeConnections closes every connection for good. Raft may still run and then gets errors.
func (n *network) closeConnections() {
	n.once.Do(func() {
		_ = n.NetworkTransport.Close() // closes the layer; it has no error of its own
		n.CloseStreams()
		n.layer.closeConns()
	})
}

// closeAll closes everything when no raft runs any more.
func (n *network) closeAll() {
	n.acceptMessages()
	n.closeConnections()
}

// layer is a raft.StreamLayer that dials by UID and remembers accepted connections, which raft's transport
// does not close.
type layer struct {
	Layer
	resolve func(uid string) []string
	nameOf  func(uid string) string // "" = not known

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]struct{}
}

// Dial connects to a node by its UID at any of its addresses.
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
		return nil, problem.New(problem.Unavailable, "no address is known of node %s",
			cmp.Or(l.nameOf(string(uid)), string(uid)))
	}
	return nil, errors.Join(errs...)
}

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

// closeConns closes the accepted connections. Afterwards none is accepted.
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

// accepted is a connection that another node opened.
type accepted struct {
	net.Conn
	layer *layer
}

func (a *accepted) Close() error {
	a.layer.forget(a.Conn)
	return a.Conn.Close()
}

// confirmLimit is how long a round of Confirm may take. A lease renewal waits no longer for it.
const confirmLimit = time.Second

// confirmRounds lets all callers that come during a round share the next one.
type confirmRounds struct {
	mu    sync.Mutex
	busy  bool
	next  *round // not begun; nil = no caller waits
	loops sync.WaitGroup
}

// round is one question to all voters.
type round struct {
	done chan struct{} // closed when err is set
	err  error
}

// join returns a round that begins after the call.
func (c *confirmRounds) join(ask func() error) *round {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next == nil {
		c.next = &round{done: make(chan struct{})}
	}
	if !c.busy {
		c.busy = true
		c.loops.Go(func() { c.run(ask) })
	}
	return c.next
}

func (c *confirmRounds) run(ask func() error) {
	for {
		c.mu.Lock()
		q := c.next
		c.next, c.busy = nil, q != nil
		c.mu.Unlock()
		if q == nil {
			return
		}
		q.err = ask()
		close(q.done)
	}
}

// askVoters sends a heartbeat of this term to every other voter. It waits until a majority, with this
// node, has accepted the heartbeat.
func (c *confirmRounds) askVoters(r *raft.Raft, net *network, self string) error {
	term := r.CurrentTerm() // read before State: if raft leads then, it leads in this term or a later one
	if r.State() != raft.Leader {
		return errUnconfirmed()
	}
	voters, taken := 0, 0
	var others []raft.ServerID
	for _, s := range r.GetConfiguration().Configuration().Servers {
		switch {
		case s.Suffrage != raft.Voter:
			continue
		case string(s.ID) == self:
			taken++
		default:
			others = append(others, s.ID)
		}
		voters++
	}
	ctx, cancel := context.WithTimeout(context.Background(), confirmLimit)
	defer cancel()
	answers := make(chan bool, len(others))
	for _, id := range others {
		c.loops.Go(func() { answers <- net.confirm(ctx, id, term) })
	}
	for range others {
		if 2*taken > voters {
			break
		}
		select {
		case yes := <-answers:
			if yes {
				taken++
			}
		case <-ctx.Done():
			return errUnconfirmed()
		}
	}
	if 2*taken <= voters {
		return errUnconfirmed()
	}
	return nil
}

func errUnconfirmed() error {
	return problem.New(problem.Unavailable, "confirm the leadership: %w", ErrNotLeader).
		WithHint("wait for the election and try again")
}
