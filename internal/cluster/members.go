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

// Member is a node that takes part in consensus.
type Member struct {
	UID   string
	Voter bool // false: a standby, which has the log and no vote
}

// Members returns the nodes that take part in consensus by this node's log. The last change may not be
// committed yet.
func (c *Cluster) Members() []Member {
	servers := c.run.Load().raft.GetConfiguration().Configuration().Servers
	all := make([]Member, len(servers))
	for i, s := range servers {
		all[i] = Member{UID: string(s.ID), Voter: s.Suffrage == raft.Voter}
	}
	return all
}

// findMember reports whether a node takes part, and whether it votes.
func (c *Cluster) findMember(uid string) (votes, in bool) {
	all := c.Members()
	i := slices.IndexFunc(all, func(m Member) bool { return m.UID == uid })
	return i >= 0 && all[i].Voter, i >= 0
}

// closeBehind is how many entries a node may lack to get a vote: raft sends as many in one message. The
// cluster makes no progress while a voter that the majority needs lacks entries.
const closeBehind = 64

// IsCloseBehind reports whether a node answers this leader's raft and lacks at most closeBehind committed
// entries.
func (c *Cluster) IsCloseBehind(uid string) bool {
	if uid == c.ident.UID {
		return true
	}
	if c.net == nil {
		return false
	}
	last, ok := c.net.logOf(uid)
	return ok && last+closeBehind >= c.run.Load().raft.CommitIndex()
}

// AddStandby sends the log to a node without giving it a vote. It changes nothing for a node that takes part
// already. AddStandby, Promote, Demote and Remove work on the leader only (ErrNotLeader elsewhere), return
// when the change is committed, and may be repeated.
func (c *Cluster) AddStandby(ctx context.Context, uid string) error {
	if _, in := c.findMember(uid); in {
		return c.awaitCommitted(ctx)
	}
	return c.changeMembers(ctx, func(r *raft.Raft) raft.IndexFuture {
		return r.AddNonvoter(raft.ServerID(uid), raft.ServerAddress(uid), 0, proposeTimeout)
	})
}

// Promote gives a node a vote. From then on its vote counts for the majority: promote only a standby that
// IsCloseBehind, or the cluster makes no progress until the node has caught up.
func (c *Cluster) Promote(ctx context.Context, uid string) error {
	if votes, _ := c.findMember(uid); votes {
		return c.awaitCommitted(ctx)
	}
	return c.changeMembers(ctx, func(r *raft.Raft) raft.IndexFuture {
		return r.AddVoter(raft.ServerID(uid), raft.ServerAddress(uid), 0, proposeTimeout)
	})
}

// Demote takes a node's vote and makes it a standby. A leader that demotes itself stops leading. It is
// refused for the last voter.
func (c *Cluster) Demote(ctx context.Context, uid string) error {
	if votes, _ := c.findMember(uid); !votes {
		return c.awaitCommitted(ctx)
	}
	return c.changeMembers(ctx, func(r *raft.Raft) raft.IndexFuture {
		return r.DemoteVoter(raft.ServerID(uid),
			0, proposeTimeout)
	})
}

// Remove takes a node out of consensus. It is refused for the last voter.
func (c *Cluster) Remove(ctx context.Context, uid string) error {
	if _, in := c.findMember(uid); !in {
		return c.awaitCommitted(ctx)
	}
	return c.changeMembers(ctx,
		func(r *raft.Raft) raft.IndexFuture { return r.RemoveServer(raft.ServerID(uid), 0, proposeTimeout) })
}

// changeMembers makes one change of the members.
func (c *Cluster) changeMembers(ctx context.Context, call func(*raft.Raft) raft.IndexFuture) error {
	return c.submit(ctx, func() applyResult {
		err := call(c.run.Load().raft).Error()
		if err != nil {
			err = c.changeError(err)
		}
		return applyResult{err: err}
	}).err
}

// awaitCommitted waits until a change that this node's log has already is committed: a Barrier after it is
// enough.
func (c *Cluster) awaitCommitted(ctx context.Context) error { return c.Barrier(ctx) }

// changeError is proposeError plus the refusals of raft's own rules.
func (c *Cluster) changeError(err error) error {
	known := c.proposeError(err)
	if problem.CodeOf(known) != problem.Internal {
		return known
	}
	return problem.New(problem.Conflict, "change the voters: %w", err).
		WithHint("a cluster needs a voter: make another node one first")
}

// StepDown hands leadership to the voter that has most of the log, before a node leaves or drains. It returns
// nil if this node does not lead, and Conflict if no other node votes.
func (c *Cluster) StepDown(ctx context.Context) error {
	r := c.run.Load().raft
	if r.State() != raft.Leader {
		return nil
	}
	others := func(m Member) bool { return m.Voter && m.UID != c.ident.UID }
	if !slices.ContainsFunc(c.Members(), others) {
		return problem.New(problem.Conflict, "hand over leadership: no other node votes").
			WithHint("join another control node first")
	}
	return c.submit(ctx, func() applyResult {
		err := r.LeadershipTransfer().Error()
		if err == nil || r.State() != raft.Leader {
			return applyResult{}
		}
		return applyResult{err: problem.New(problem.Unavailable, "hand over leadership: %w", err).
			WithHint("%s", c.leaderHint())}
	}).err
}

// addressBook has the names and addresses of nodes from the entries of this node's log, committed or not. A
// node without a leader does not know which entries are committed, so the state may lack the addresses of
// nodes whose votes are needed. A wrong address does no harm, because a Layer connects only to the node that
// was asked for.
type addressBook struct {
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
func (c *Cluster) addresses(uid string) []string {
	var all []string
	add := func(address string) {
		for _, a := range all {
			if a == address {
				return
			}
		}
		if address != "" {
			all = append(all, address)
		}
	}
	if c.cfg.Resolve != nil {
		if address, ok := c.cfg.Resolve(uid); ok {
			add(address)
		}
	}
	add(c.book.lookup(uid).Address)
	add(nodeByUID(c.State(), uid).Address)
	return all
}

// nameOf returns the name of a node; "" if neither the state nor the log has it.
func (c *Cluster) nameOf(uid string) string {
	if n := nodeByUID(c.State(), uid); n.ID != "" {
		return n.ID
	}
	return c.book.lookup(uid).ID
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
		turn := s.Leadership()
		if uid, ok := s.LeaderNode(); ok {
			return s.findNode(uid), nil
		}
		if err := s.refusal(); err != nil {
			return state.Node{}, err
		}
		select {
		case <-turn:
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

// send sends a command to the leader once.
func (f forwarder) send(ctx context.Context, leader state.Node, cmd state.Command) (state.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	res, err := f(ctx, leader, cmd)
	var known *problem.Error
	if err == nil || errors.As(err, &known) || ctx.Err() != nil {
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
		"" + strings.Join(names, ", ")
}

// proposeAtLeader sends a command to the leader and waits until this node has applied it too.
func (c *Cluster) proposeAtLeader(ctx context.Context, cmd state.Command) (state.Result, error) {
	leader, err := awaitLeader(ctx, c)
	if err != nil {
		return state.Result{}, err
	}
	if leader.UID == c.ident.UID {
		return c.ProposeHere(ctx, cmd)
	}
	res, err := forwarder(c.cfg.Forward).send(ctx, leader, cmd)
	if err == nil {
		c.awaitApplied(ctx, res)
	}
	return res, err
}

// awaitApplied waits until this node's copy shows a command that the leader has acknowledged. A copy that
// lags does not make the command a failure.
func (c *Cluster) awaitApplied(ctx context.Context, res state.Result) {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	_ = c.fsm.await(ctx, res.Index)
}

func (c *Cluster) closing() <-chan struct{} { return c.done }

func (c *Cluster) refusal() error { return firstError(c.endError(), c.Fault()) }

func (c *Cluster) findNode(uid string) state.Node {
	n := nodeByUID(c.State(), uid)
	if all := c.addresses(uid); len(all) > 0 {
		n.Address = all[0]
	}
	return n
}

func (c *Cluster) leaderHint() string {
	if c.net == nil {
		return "the disk of the data dir may be full or very slow; look for raft errors in the log"
	}
	var voters []string
	for _, m := range c.Members() {
		if m.Voter {
			voters = append(voters, m.UID)
		}
	}
	return controlNodesHint(c.State(), voters)
}

const (
	// followHeartbeat is how often a follower gets the confirmation that its copy is the newest.
	followHeartbeat = time.Second
	// followGap is the least pause between two states sent to one follower. Changes in between are sent
	// together.
	followGap = 20 * time.Millisecond
)

// update is one message to a follower: the state if it has changed, and the leader.
type update struct {
	Leader string          `json:"leader,omitempty"` // UID
	State  json.RawMessage `json:"state,omitempty"`  // state.State without its secrets
}

// Follow sends the state to a node that takes no part in consensus: at once if it is newer than the index
// from, then whenever the state or the leader has changed. Close changes are sent together. Without changes
// it sends a heartbeat (nil data) every second. While this node knows no leader it sends no heartbeats: its
// copy may be old, and the follower should ask another control node. A Watcher reads data. Follow ends with
// an error of send, with ctx, and with Close.
func (c *Cluster) Follow(ctx context.Context, from uint64, send func(data []byte, index uint64) error) error {
	told := ""
	for {
		changed, turn, st := c.Changed(), c.Leadership(), c.State()
		leader, _ := c.LeaderNode()
		data, err := encodeUpdate(st, from, leader, told)
		if err != nil {
			return err
		}
		if data != nil || leader != "" {
			if err := send(data, max(st.Index, from)); err != nil {
				return err
			}
		}
		from, told = max(from, st.Index), leader
		if err := c.awaitChange(ctx, changed, turn, data != nil); err != nil {
			return err
		}
	}
}

// encodeUpdate returns the next message to a follower; nil if nothing has changed.
func encodeUpdate(st *state.State, from uint64, leader, told string) ([]byte, error) {
	if st.Index <= from && leader == told {
		return nil, nil
	}
	u := update{Leader: leader}
	var err error
	if st.Index > from {
		if u.State, err = st.Public().Encode(); err != nil {
			return nil, fmt.Errorf("encode the state for a follower: %w", err)
		}
	}
	return json.Marshal(u)
}

// awaitChange waits for a change or the next heartbeat. If the last message had data, it also waits for
// followGap.
func (c *Cluster) awaitChange(ctx context.Context, changed, turn <-chan struct{}, told bool) error {
	beat, gap := time.NewTimer(followHeartbeat), time.NewTimer(followGap)
	defer beat.Stop()
	defer gap.Stop()
	select {
	case <-changed:
	case <-turn:
	case <-beat.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("follow: %w", context.Cause(ctx))
	case <-c.done:
		return c.endError()
	}
	if !told {
		return nil
	}
	select {
	case <-gap.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("follow: %w", context.Cause(ctx))
	}
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

// decodeUpdate reads a message of Follow; st is nil if only the leader has changed.
func decodeUpdate(data []byte) (st *stateCopy, leader string, err error) {
	var u update
	if err := json.Unmarshal(data, &u); err != nil {
		return nil, "", problem.New(problem.Internal, "decode the state of a control node: %w", err).
			WithHint("run the same version of dpserve on every node")
	}
	if len(u.State) > 0 {
		st, err = decodeCopy(u.State)
	}
	return st, u.Leader, err
}
