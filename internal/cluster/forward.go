package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// addressBook has the names and addresses of nodes from the snapshots and the entries of this node's log,
// committed or not. A node without a leader does not know which entries are committed, so the state may lack
// the addresses of nodes whose votes are needed; and a node that was removed is a member of consensus for a
// while after the state has forgotten it. A wrong address does no harm, because a Layer connects only to the
// node that was asked for.
type addressBook struct {
	resolve func(uid string) (address string, ok bool) // Config.Resolve; may be nil
	state   func() *state.State

	mu    sync.Mutex
	byUID map[string]state.Node
}

// putNodeMark is in every entry that concerns the book. It spares decoding the other entries.
func putNodeMark() []byte { return []byte(`"put_node"`) }

// readEntry takes the address out of one entry.
func (b *addressBook) readEntry(l *raft.Log) {
	if l.Type != raft.LogCommand || !bytes.Contains(l.Data, putNodeMark()) {
		return
	}
	var entry struct { // only the fields that the book needs: a newer version may have written the entry
		PutNode *struct {
			Node struct{ UID, ID, Address string }
		} `json:"put_node"`
	}
	if err := json.Unmarshal(l.Data, &entry); err != nil || entry.PutNode == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.byUID == nil {
		b.byUID = map[string]state.Node{}
	}
	b.byUID[entry.PutNode.Node.UID] = state.Node{
		ID:      entry.PutNode.Node.ID,
		Address: entry.PutNode.Node.Address,
	}
}

// readState takes the nodes that are not in the book from a snapshot: the log before it is cut off.
func (b *addressBook) readState(st *state.State) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.byUID == nil {
		b.byUID = map[string]state.Node{}
	}
	for _, n := range st.Nodes {
		if _, known := b.byUID[n.UID]; !known {
			b.byUID[n.UID] = state.Node{ID: n.ID, Address: n.Address}
		}
	}
}

// readAll reads a whole log. It returns the newest list of members in the log and its index; 0 = there is
// none.
func (b *addressBook) readAll(log raft.LogStore) (members raft.Configuration, index uint64, err error) {
	first, err := log.FirstIndex()
	if err != nil {
		return members, 0, err
	}
	last, err := log.LastIndex()
	if err != nil || last == 0 {
		return members, 0, err
	}
	for i := first; i <= last; i++ {
		var l raft.Log
		if err := log.GetLog(i, &l); err != nil {
			return members, 0, err
		}
		b.readEntry(&l)
		if l.Type == raft.LogConfiguration {
			members, index = raft.DecodeConfiguration(l.Data), i
		}
	}
	return members, index, nil
}

// lookup returns the name and address of a node.
func (b *addressBook) lookup(uid string) state.Node {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.byUID[uid]
}

// addresses returns the possible addresses of a node's port, the most likely first: Config.Resolve, log,
// state.
func (b *addressBook) addresses(uid string) []string {
	var all []string
	add := func(address string) {
		if address != "" && !slices.Contains(all, address) {
			all = append(all, address)
		}
	}
	if b.resolve != nil {
		if address, ok := b.resolve(uid); ok {
			add(address)
		}
	}
	add(b.lookup(uid).Address)
	add(nodeByUID(b.state(), uid).Address)
	return all
}

// nameOf returns the name of a node, also of one that was removed; "" if neither the state nor the book has
// it.
func (b *addressBook) nameOf(uid string) string {
	if n := nodeByUID(b.state(), uid); n.ID != "" {
		return n.ID
	}
	return b.lookup(uid).ID
}

// findNode returns a node with the most likely address.
func (b *addressBook) findNode(uid string) state.Node {
	n := nodeByUID(b.state(), uid)
	if all := b.addresses(uid); len(all) > 0 {
		n.Address = all[0]
	}
	return n
}

// ErrNoMajority is in the error of a proposal that found no leader.
var ErrNoMajority = errors.New("no majority of control nodes answers")

// leaderSource is what Cluster and Watcher share: what awaitLeader needs to find the leader.
type leaderSource interface {
	State() *state.State
	LeaderNode() (uid string, known bool)
	Leadership() <-chan struct{}
	refusal() error // why proposals fail here, however long the caller waits
	closing() <-chan struct{}
	leaderHint() string
	findNode(uid string) state.Node
}

// forwarder has the type of Config.Forward.
type forwarder func(ctx context.Context, leader state.Node, c state.Command) (state.Result, error)

// awaitLeader waits until this node knows the leader, at most proposeTimeout.
func awaitLeader(ctx context.Context, s leaderSource) (state.Node, error) {
	waiting, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	for {
		leaderChanged := s.Leadership()
		if uid, ok := s.LeaderNode(); ok {
			return s.findNode(uid), nil
		}
		if err := s.refusal(); err != nil {
			return state.Node{}, err
		}
		select {
		case <-leaderChanged:
		case <-s.closing():
		case <-waiting.Done():
			return state.Node{}, noLeaderError(ctx, s)
		}
	}
}

// noLeaderError is the result of a wait for a leader. It is the context's cause if the caller gave up on
// purpose, and says what to check if the time ran out.
func noLeaderError(ctx context.Context, s leaderSource) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("propose: %w", cause)
	}
	return problem.New(problem.Unavailable, "propose: %w", ErrNoMajority).WithHint("%s", s.leaderHint())
}

func (f forwarder) send(ctx context.Context, leader state.Node, cmd state.Command) (state.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	res, err := f(ctx, leader, cmd)
	if _, ok := errors.AsType[*problem.Error](err); err == nil || ok || ctx.Err() != nil {
		return res, err
	}
	return res, problem.New(problem.Unavailable, "propose at the leader, node %s: %w", leader.ID, err).
		WithHint("look at the state, then try again")
}

// nodeByUID returns a node of the state. For an unknown node the result has only its UID.
func nodeByUID(st *state.State, uid string) state.Node {
	for _, n := range st.Nodes {
		if n.UID == uid {
			return *n
		}
	}
	return state.Node{UID: uid}
}

// controlNodesHint is the hint for a caller that finds no leader.
func controlNodesHint(st *state.State, voters []string) string {
	var names []string
	for _, uid := range voters {
		if n := nodeByUID(st, uid); n.ID != "" {
			names = append(names, n.ID)
		}
	}
	if len(names) == 0 {
		return "look whether the control nodes run and reach each other"
	}
	slices.Sort(names)
	return "start the control nodes that are down and look whether they reach each other; these vote: " +
		strings.Join(names, ", ")
}

const (
	// followHeartbeat is how often a follower gets the confirmation that its copy is the newest.
	followHeartbeat = time.Second
	// followGap is the least pause between two states sent to one follower. Changes in between are sent
	// together.
	followGap = 20 * time.Millisecond
)

// Update is one message to a node that follows the state.
type Update struct {
	Leader string          `json:"leader,omitempty"` // UID; "": none is known, and the copy may be old
	State  json.RawMessage `json:"state,omitempty"`  // state.State without its secrets, if it has changed
}

// stateCopy is a follower's copy of the state. It keeps the bytes too, because they contain fields that this
// version does not know: a newer version that is started on the data dir finds them there.
type stateCopy struct {
	state *state.State
	data  []byte
	newer string // the first unknown field; "" = none
}

func decodeCopy(data []byte) (*stateCopy, error) {
	st, newer, err := state.DecodeCopy(data)
	if err != nil {
		return nil, err
	}
	return &stateCopy{state: st, data: data, newer: newer}, nil
}
