package noderpc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// How long one node may take to answer, and how long a query lasts over changes of leader if its caller sets
// no limit.
const (
	renewLimit   = time.Second
	assignLimit  = 2 * time.Second
	certifyLimit = 5 * time.Second
	persistLimit = 150 * time.Second // longer than a rendezvous, whose error names the missing ranks
	publishLimit = 10 * time.Second  // longer than an election
	maxPublished = 1024              // publications that wait for a leader; far more than a node starts
)

// LeaderConfig is the configuration of a LeaderClient. All fields are required.
type LeaderConfig struct {
	Self    string // node id
	Conns   *Conns
	Hint    Hint
	Leading Leading   // a node that leads is asked in-process
	Store   msg.Store // a node with role control signs its certificate from it
	Log     *slog.Logger
}

// LeaderClient is the leader for every node, wherever it runs and however often it changes. It implements
// msg.Leader, msg.Assigner and msg.Proposer. Safe for concurrent use.
type LeaderClient struct {
	cfg LeaderConfig

	ctx        context.Context //nolint:containedctx // of the publications
	stop       context.CancelFunc
	running    sync.WaitGroup
	publishing chan struct{} // one slot per publication

	mu         sync.Mutex
	lastLeader string // the node that answered as the leader, or was named as it; "": none
	lastSilent string // the node that gave no answer last: it is asked after the others
	watches    int    // how many copies of the state were requested
}

var (
	_ msg.Leader   = (*LeaderClient)(nil)
	_ msg.Assigner = (*LeaderClient)(nil)
	_ msg.Proposer = (*LeaderClient)(nil)
)

// NewLeaderClient makes a LeaderClient. Close it.
func NewLeaderClient(cfg LeaderConfig) *LeaderClient {
	c := &LeaderClient{cfg: cfg, publishing: make(chan struct{}, maxPublished)}
	c.ctx, c.stop = context.WithCancel(context.Background())
	return c
}

// Close drops publications that no leader has taken, and waits.
func (c *LeaderClient) Close() error {
	c.stop()
	c.running.Wait()
	return nil
}

// Renew implements msg.Leader. It asks one round: without an answer the caller tries again, as its lease
// allows.
func (c *LeaderClient) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, renewLimit)
	defer cancel()
	return askLeader(ctx, c, leaderQuery[msg.NodeReport, msg.Lease]{
		call: renewCall, in: r, limit: renewLimit,
		local: func(l msg.Leader, _ msg.Assigner) (msg.Lease, error) { return l.Renew(ctx, r) },
	})
}

// Assign implements msg.Assigner; it survives changes of leader.
func (c *LeaderClient) Assign(
	ctx context.Context, app string, group int, replicaID string,
) (msg.AssignReply, error) {
	return askUntilAnswered(ctx, c, leaderQuery[msg.Assign, msg.AssignReply]{
		call: assignCall, in: &msg.Assign{App: app, Group: group, ReplicaID: replicaID}, limit: assignLimit,
		local: func(_ msg.Leader, a msg.Assigner) (msg.AssignReply, error) {
			return a.Assign(ctx, app, group, replicaID)
		},
	})
}

// Await implements msg.Assigner; it survives changes of leader. The leader answers every awaitHold that there
// is no address yet, so that a silent leader is noticed.
func (c *LeaderClient) Await(
	ctx context.Context, unit string, epoch uint64, rank int,
) (msg.AwaitReply, error) {
	ctx, cancel := context.WithTimeout(ctx, persistLimit)
	defer cancel()
	q := leaderQuery[msg.Await, msg.AwaitReply]{
		call: awaitCall, in: &msg.Await{Unit: unit, Epoch: epoch, Rank: rank}, limit: 2 * awaitHold,
		local: func(_ msg.Leader, a msg.Assigner) (msg.AwaitReply, error) {
			return a.Await(ctx, unit, epoch, rank)
		},
	}
	for {
		r, err := askUntilAnswered(ctx, c, q)
		if err != nil || r.Addr != "" {
			return r, err
		}
	}
}

// Publish implements msg.Assigner: it returns at once, and a leader that comes within publishLimit receives
// it. Later ones get the repetitions, which the node sends while the unit starts.
func (c *LeaderClient) Publish(p msg.Publish) {
	select {
	case c.publishing <- struct{}{}:
	default:
		c.cfg.Log.Error("rendezvous address not published: too many wait for the leader",
			"component", "remote", "unit", p.Unit, "epoch", p.Epoch)
		return
	}
	c.running.Go(func() {
		defer func() { <-c.publishing }()
		ctx, cancel := context.WithTimeout(c.ctx, publishLimit)
		defer cancel()
		_, err := askUntilAnswered(ctx, c, leaderQuery[msg.Publish, struct{}]{
			call: publishCall, in: &p, limit: assignLimit,
			local: func(_ msg.Leader, a msg.Assigner) (none struct{}, err error) {
				a.Publish(p)
				return none, nil
			},
		})
		if err != nil && ctx.Err() == nil {
			c.cfg.Log.Error("rendezvous address refused", "component", "remote", "unit", p.Unit,
				"epoch", p.Epoch, "err", err)
		}
	})
}

// Propose implements msg.Proposer for a node that is not part of consensus, with one round. The error is
// cluster.ErrOutcomeUnknown if a node got the command and did not answer.
func (c *LeaderClient) Propose(ctx context.Context, cmd state.Command) (state.Result, error) {
	return askLeader(ctx, c, proposal(&cmd))
}

// Forward proposes a command at the node that leads, and once more at the node that a refusal names instead.
// It fits cluster.Config and cluster.WatcherConfig.
func (c *LeaderClient) Forward(
	ctx context.Context, leader state.Node, cmd state.Command,
) (state.Result, error) {
	node := nameOf(c.cfg.Conns.cfg.Nodes(), leader.UID)
	if node == "" || node == c.cfg.Self {
		return c.Propose(ctx, cmd)
	}
	r, err := askNode(ctx, c, node, proposal(&cmd))
	if next := leaderOf(err); next != "" && next != node && next != c.cfg.Self {
		return askNode(ctx, c, next, proposal(&cmd))
	}
	return r, err
}

func proposal(cmd *state.Command) leaderQuery[state.Command, state.Result] {
	return leaderQuery[state.Command, state.Result]{
		call: proposeCall, in: cmd, limit: proposalLimit, once: true,
	}
}

// Certify returns the next certificate of this node, whose current identity is own. A node with role control
// signs for itself, others ask any control node.
func (c *LeaderClient) Certify(
	ctx context.Context, own pki.Identity, csr []byte,
) (cert, authority []byte, err error) {
	var next certificate
	if st := c.cfg.Store.State(); len(st.Secrets.AuthorityKey) > 0 {
		next, err = certifyMember(st, own, csr, time.Now())
	} else {
		next, err = askLeader(ctx, c, leaderQuery[[]byte, certificate]{
			call: certifyCall, in: &csr, limit: certifyLimit, any: true,
		})
	}
	return next.Certificate, next.Authority, err
}

// CertifyExpired is Certify for a node whose certificate has expired. It asks every control node, over a
// connection that allows this call alone (nodeport.Renew), until one signs; dial makes the connection.
func (c *LeaderClient) CertifyExpired(
	ctx context.Context, csr []byte, dial func(address, uid string) (*grpc.ClientConn, error),
) (cert, authority []byte, err error) {
	nodes := c.cfg.Conns.cfg.Nodes()
	err = problem.New(problem.Unavailable,
		"no control node is known").
		WithHint("start it with `dpserve join ADDR --token TOKEN`, ADDR of a control node")
	for _, node := range c.controlNodes() {
		r, failed := certifyAt(ctx, node, csr,
			func() (*grpc.ClientConn, error) { return dial(nodes[node].Address, nodes[node].UID) })
		if failed == nil {
			return r.Certificate, r.Authority, nil
		}
		err = failed
		if ctx.Err() != nil || problem.CodeOf(failed) == problem.PermissionDenied {
			break // the node was removed: the other nodes would answer the same
		}
	}
	return nil, nil, err
}

func certifyAt(
	ctx context.Context, node string, csr []byte, dial func() (*grpc.ClientConn, error),
) (none certificate, err error) {
	ctx, cancel := context.WithTimeout(ctx, certifyLimit)
	defer cancel()
	conn, err := dial()
	if err != nil {
		return none, err
	}
	defer func() { _ = conn.Close() }() // no call is open
	next, err := certifyCall.to(ctx, conn, &csr)
	return next, fromStatus(node, err)
}

// Watch follows the state from a control node, another one at each call, until the stream breaks or ctx ends.
// It fits cluster.WatcherConfig.
func (c *LeaderClient) Watch(ctx context.Context, from uint64, apply func(*cluster.Update)) error {
	node, ok := c.watchSource()
	if !ok {
		return problem.New(problem.Unavailable,
			"no control node is known").WithHint("join again, or look at `dpserve nodes` on another node")
	}
	conn, err := c.cfg.Conns.Get(node)
	if err != nil {
		return err
	}
	updates, err := watchStream.ask(ctx, conn, &from)
	for err == nil {
		var u *cluster.Update
		if u, err = updates.Recv(); err == nil {
			apply(u)
		}
	}
	if hasEnded(ctx) {
		return context.Cause(ctx)
	}
	if errors.Is(err, io.EOF) {
		return problem.New(problem.Unavailable, "node %s %w: it ended the stream", node, errUnreachable)
	}
	return fromStatus(node, err)
}

// watchSource is the control node to copy the state from. Different nodes start with different ones.
func (c *LeaderClient) watchSource() (string, bool) {
	nodes := c.controlNodes()
	if len(nodes) == 0 {
		return "", false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watches++
	spread := 0
	for _, b := range []byte(c.cfg.Self) {
		spread += int(b)
	}
	return nodes[(spread+c.watches)%len(nodes)], true
}

// controlNodes are the other nodes with role control by name, lost ones last.
func (c *LeaderClient) controlNodes() []string {
	var live, lost []string
	for name, n := range c.cfg.Conns.cfg.Nodes() {
		switch {
		case name == c.cfg.Self || n.Address == "" || !slices.Contains(n.Roles, state.RoleControl):
		case n.Lost:
			lost = append(lost, name)
		default:
			live = append(live, name)
		}
	}
	slices.Sort(live)
	slices.Sort(lost)
	return append(live, lost...)
}

// nextNode is the node to ask next: the last leader, the leader by the hint, then the others.
func (c *LeaderClient) nextNode(tried map[string]bool) (string, bool) {
	hint := c.cfg.Hint.nodeName(c.cfg.Conns.cfg.Nodes())
	c.mu.Lock()
	known, avoid := c.lastLeader, c.lastSilent
	c.mu.Unlock()
	order := append([]string{known, hint}, c.controlNodes()...)
	for _, pass := range []bool{false, true} {
		for _, node := range order {
			if node != "" && node != c.cfg.Self && !tried[node] && (pass || node != avoid) {
				return node, true
			}
		}
	}
	return "", false
}

// updateLeader updates lastLeader and lastSilent from a node's answer.
func (c *LeaderClient) updateLeader(node string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil || !mayRetryElsewhere(err):
		c.lastLeader = node
		if c.lastSilent == node {
			c.lastSilent = ""
		}
	case errors.Is(err, cluster.ErrNotLeader):
		if c.lastLeader = leaderOf(err); c.lastLeader == c.lastSilent {
			c.lastSilent = "" // other nodes get its heartbeats
		}
	default:
		c.lastSilent = node
		if c.lastLeader == node {
			c.lastLeader = ""
		}
	}
}

// Pauses between two rounds of a query that no node answered.
const (
	roundPauseMin = 50 * time.Millisecond
	roundPauseMax = 500 * time.Millisecond // so that grants are accepted again within 3 s after an election
)

// fairWait is the shortest time after which a node without an answer counts as silent. A node that got only
// the rest of the caller's time after another node is not at fault.
const fairWait = 100 * time.Millisecond

// leaderQuery is a question to the leader, in-process (local, nil = never) or over the wire.
type leaderQuery[In, Out any] struct {
	call  call[In, Out]
	in    *In
	limit time.Duration // for one node
	once  bool          // after a node that may have received it, no other node is asked
	any   bool          // every control node may answer it
	local func(msg.Leader, msg.Assigner) (Out, error)
}

// askLeader is one round: this node if it leads, else each control node until one answers. A node that does
// not lead names the leader, which is asked next.
func askLeader[In, Out any](
	ctx context.Context, c *LeaderClient, q leaderQuery[In, Out],
) (none Out, err error) {
	last := error(&notLeaderError{})
	if leader, assigner, ok := c.cfg.Leading(); ok && q.local != nil {
		r, err := q.local(leader, assigner)
		if err == nil || ctx.Err() != nil || !mayRetryElsewhere(err) {
			return r, err
		}
		last = err
	}
	tried := map[string]bool{}
	for node, ok := c.nextNode(tried); ok; node, ok = c.nextNode(tried) {
		tried[node] = true
		r, err := askNode(ctx, c, node, q)
		if err == nil || ctx.Err() != nil || !mayRetryElsewhere(err) ||
			errors.Is(err, cluster.ErrOutcomeUnknown) {
			return r, err
		}
		last = err
	}
	return none, problem.New(problem.Unavailable, "no leader answers: %w", last).
		WithHint("wait for the election; if it does not end, look at `dpserve nodes`: " +
			"most control nodes must be alive")
}

func askNode[In, Out any](
	ctx context.Context, c *LeaderClient, node string, q leaderQuery[In, Out],
) (Out, error) {
	began := time.Now()
	r, err := callNode(ctx, c.cfg.Conns, node, q.limit, q.call, q.in)
	if !q.any {
		c.noteResult(ctx, node, err, time.Since(began))
	}
	if q.once && mayHaveApplied(err) {
		return r, problem.New(problem.Unavailable, "propose at %s: %w", node,
			cluster.ErrOutcomeUnknown).WithHint("look at the state, then try again")
	}
	return r, err
}

// noteResult notes the result of asking a node, which took the time asked. A node that was silent until the
// caller's own deadline counts like one that was silent for the limit.
func (c *LeaderClient) noteResult(ctx context.Context, node string, err error, asked time.Duration) {
	switch {
	case err == nil:
		c.updateLeader(node, nil)
	case errors.Is(ctx.Err(), context.Canceled): // the caller left
	case errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil:
		if asked >= fairWait {
			c.updateLeader(node, context.DeadlineExceeded)
		}
	default:
		c.updateLeader(node, err)
	}
}

// mayHaveApplied says whether a node may have taken a call that it did not answer.
func mayHaveApplied(err error) bool {
	return err != nil && !errors.Is(err, errUnsent) && mayRetryElsewhere(err) &&
		!errors.Is(err, cluster.ErrNotLeader)
}

// askUntilAnswered repeats rounds until a leader answers, or ctx ends; without a deadline until persistLimit.
func askUntilAnswered[In, Out any](
	ctx context.Context, c *LeaderClient, q leaderQuery[In, Out],
) (Out, error) {
	ctx, cancel := context.WithTimeout(ctx, persistLimit)
	defer cancel()
	for wait := roundPauseMin; ; wait = min(2*wait, roundPauseMax) {
		r, err := askLeader(ctx, c, q)
		if err == nil || ctx.Err() != nil || !mayRetryElsewhere(err) {
			return r, err
		}
		if pause.For(ctx, wait/2+rand.N(wait)/2) != nil {
			return r, err
		}
	}
}
