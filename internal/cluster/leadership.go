package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// leadRetry is the pause before a failed step of becoming ready is tried again.
const leadRetry = 100 * time.Millisecond

// Leader reports whether this node leads and has applied everything that was committed before it led.
func (c *Cluster) Leader() bool { return c.leader.Load() }

// LeaderNode returns the UID of the leader as this node knows it. A new leader may not be ready yet.
func (c *Cluster) LeaderNode() (uid string, known bool) {
	r := c.run.Load().raft
	_, id := r.LeaderWithID()
	if string(id) == c.ident.UID && r.State() != raft.Leader {
		return "", false // raft was told to stop but has not stopped yet: its disk hangs
	}
	return string(id), id != ""
}

// Leadership is closed at the next change of the leader, or of whether this node leads and is ready. Take it
// before Leader, LeaderNode and Term, or a change in between goes unnoticed. A leadership that was lost and
// won again has a higher Term.
func (c *Cluster) Leadership() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leaderChanged
}

// Term returns raft's term. It grows with every election.
func (c *Cluster) Term() uint64 { return c.run.Load().raft.CurrentTerm() }

// Barrier waits until everything committed so far is applied here. Only the leader can do it: ErrNotLeader
// elsewhere.
func (c *Cluster) Barrier(ctx context.Context) error { return c.submit(ctx, c.runBarrier).err }

func (c *Cluster) wakeLeadership() {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.leaderChanged)
	c.leaderChanged = make(chan struct{})
}

// watchLeadership follows the leadership of one run to its end. Only it sets leader.
func (c *Cluster) watchLeadership(r *run) {
	defer c.clearReady()
	for {
		select {
		case won := <-r.lead:
			c.clearReady()
			if won {
				c.becomeReady(r)
			}
		case <-r.seen:
			c.wakeLeadership()
		case <-r.over:
			return
		}
	}
}

// clearReady records that this node does not lead, or is not ready.
func (c *Cluster) clearReady() {
	if c.leader.Swap(false) {
		c.log.Debug("leads no longer", "component", "cluster")
	}
	c.wakeLeadership()
}

// becomeReady makes a new leader ready: it applies everything that was committed before, then names the
// cluster.
func (c *Cluster) becomeReady(r *run) {
	warned := false
	for r.raft.State() == raft.Leader && c.endError() == nil {
		err := c.prepareLeadership()
		if err == nil {
			c.setReady(r)
			return
		}
		if problem.CodeOf(err) == problem.Conflict {
			c.log.Error("cluster cannot start", "component", "cluster", "err", err)
			c.end(err)
			return
		}
		// A leader that hands over meanwhile is no fault, nor is one that ends.
		if !warned && !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrClosed) {
			c.log.Warn("leader not ready yet", "component", "cluster", "err", err)
			warned = true
		}
		r.waitRetry()
	}
}

// setReady wakes everything that waits for the leader to be ready.
func (c *Cluster) setReady(r *run) {
	c.log.Debug("leads", "component", "cluster", "term", r.raft.CurrentTerm())
	c.leader.Store(true)
	c.holds.Store(false)
	c.wakeLeadership()
}

// prepareLeadership applies all committed entries, because the state of a new leader is old until a Barrier.
// Then it gives the cluster what it lacks: its name, its secret, and its authority if nodes may join.
func (c *Cluster) prepareLeadership() error {
	ctx, cancel := context.WithTimeout(context.Background(), proposeTimeout)
	defer cancel()
	if err := c.Barrier(ctx); err != nil {
		return err
	}
	switch st := c.State(); {
	case st.Cluster != "" && st.Cluster != c.ident.Cluster:
		return problem.New(problem.Conflict, "the log in the data dir is of cluster %s, its %s says %s",
			c.State().Cluster, identityFile, c.ident.Cluster).
			WithHint("two data dirs were mixed; restore one from a backup or choose an empty --data-dir")
	case st.Cluster != "" && len(st.Secret) > 0 && (c.cfg.Secrets == nil || len(st.Secrets.Authority) > 0):
		return nil
	}
	_, err := c.ProposeHere(ctx, c.initCommand())
	return err
}

// initCommand returns the first command of a cluster. A cluster that has some of its values keeps them.
func (c *Cluster) initCommand() state.Command {
	first := &state.Init{Cluster: c.ident.Cluster, Secret: newSecret()}
	if c.cfg.Secrets != nil {
		first.Secrets, first.LeaseTTL = c.cfg.Secrets(), c.cfg.LeaseTTL.Milliseconds()
	}
	return state.Command{Init: first}
}

// secretBytes is the length of a cluster's secret.
const secretBytes = 32

func newSecret() []byte {
	b := make([]byte, secretBytes)
	_, _ = rand.Read(b) // never fails since Go 1.24
	return b
}

// Ready waits until this node's copy of the state has everything that was committed before the call: on the
// leader by a Barrier, on other nodes by a command that changes nothing. Before that, State may be older than
// what was acknowledged before a restart: grant nothing from it, or a rank might be granted twice.
// ErrUnreadable: this version cannot read what was committed.
func (c *Cluster) Ready(ctx context.Context) error {
	if err := c.endError(); err != nil {
		return err
	}
	for {
		leaderChanged, retry := c.Leadership(), (<-chan time.Time)(nil)
		if err := c.Fault(); errors.Is(err, ErrUnreadable) {
			return err
		}
		if c.Leader() {
			return nil
		}
		if leader, ok := c.LeaderNode(); ok && leader != c.ident.UID {
			err := c.catchUp(ctx)
			if err == nil || problem.CodeOf(err) == problem.Conflict {
				return err
			}
			retry = time.After(leadRetry)
		}
		if err := c.awaitLeader(ctx, leaderChanged, retry); err != nil {
			return err
		}
	}
}

// awaitLeader waits for a change of the leadership, or for retry.
func (c *Cluster) awaitLeader(ctx context.Context, changed <-chan struct{}, retry <-chan time.Time) error {
	select {
	case <-changed:
		return nil
	case <-retry:
		return nil
	case <-ctx.Done():
		return problem.New(problem.Timeout, "wait for a leader: %w", context.Cause(ctx)).
			WithHint("%s", c.leaderHint())
	case <-c.done:
		return c.endError()
	}
}

// catchUp waits until this node has applied what the leader had committed. Conflict: the leader is of another
// cluster.
func (c *Cluster) catchUp(ctx context.Context) error {
	if c.cfg.Forward == nil {
		return c.fsm.awaitCluster(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	res, err := c.proposeAtLeader(ctx, state.Command{Init: &state.Init{Cluster: c.ident.Cluster}})
	if err != nil {
		return err
	}
	return c.fsm.await(ctx, res.Index)
}

// Sentinels for errors.Is. Users see them inside a *problem.Error with code Unavailable.
var (
	ErrNotLeader      = errors.New("this node is not the leader")
	ErrClosed         = errors.New("cluster is closed")
	ErrOutcomeUnknown = errors.New("leadership was lost before the answer: the command may or may not have " +
		"been applied")
)

func errClosed() error {
	return problem.New(problem.Unavailable, "propose: %w", ErrClosed).
		WithHint("dpserve is stopping; start it again")
}

// Propose puts a command through consensus and returns the result or the unchanged typed error of
// state.Apply. A node that does not lead sends the command to the leader once. If Propose returns nil, the
// command is durable and this node has applied it. If ctx ends first, the error is ctx's cause and the
// command may still be applied later: propose only commands that are safe to repeat, with an expected
// revision or epoch.
func (c *Cluster) Propose(ctx context.Context, cmd state.Command) (state.Result, error) {
	cmd, err := c.State().Readable(cmd)
	if err != nil {
		return state.Result{}, err
	}
	res, err := c.ProposeHere(ctx, cmd)
	if c.cfg.Forward == nil || !errors.Is(err, ErrNotLeader) {
		return res, err
	}
	return c.proposeAtLeader(ctx, cmd)
}

// ProposeHere is Propose on the node that takes itself for the leader: it never forwards. ErrNotLeader:
// nothing was done. It refuses a command that some control node could not read (state.ErrControlTooOld),
// because that node would leave consensus.
func (c *Cluster) ProposeHere(ctx context.Context, cmd state.Command) (state.Result, error) {
	cmd, err := c.State().Readable(cmd)
	if err != nil {
		return state.Result{}, err
	}
	data, err := state.EncodeCommand(&cmd)
	if err != nil {
		return state.Result{}, err
	}
	started := time.Now()
	a := c.submit(ctx, func() applyResult { return c.applyCommand(ctx, data) })
	c.cfg.ApplySeconds(time.Since(started))
	return a.result, a.err
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

// submit makes a call of raft, which no context can end, in a goroutine. It waits for the answer, ctx or
// Close. The goroutine ends when raft answers; Close waits for it.
func (c *Cluster) submit(ctx context.Context, call func() applyResult) applyResult {
	if err := c.takeSlot(ctx); err != nil {
		return applyResult{err: err}
	}
	answer := make(chan applyResult, 1)
	go func() {
		defer c.freeSlot()
		answer <- call()
	}()
	select {
	case a := <-answer:
		return a
	case <-ctx.Done():
		return applyResult{err: fmt.Errorf("propose: %w", context.Cause(ctx))}
	case <-c.done:
		return applyResult{err: c.endError()}
	}
}

// runBarrier waits until everything committed so far is applied.
func (c *Cluster) runBarrier() applyResult {
	if err := c.run.Load().raft.Barrier(proposeTimeout).Error(); err != nil {
		return applyResult{err: c.proposeError(err)}
	}
	return applyResult{}
}

// takeSlot takes a slot; freeSlot frees it.
func (c *Cluster) takeSlot(ctx context.Context) error {
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("propose: %w", context.Cause(ctx))
	case <-c.done:
		return c.endError()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if why := c.why; why != nil || c.stopping {
		<-c.slots
		return cmp.Or(why, errClosed())
	}
	c.proposals.Add(1)
	return nil
}

func (c *Cluster) freeSlot() {
	<-c.slots
	c.proposals.Done()
}

// applyCommand gives the command to raft, which batches waiting commands, and waits until it is applied.
func (c *Cluster) applyCommand(ctx context.Context, data []byte) applyResult {
	f := c.run.Load().raft.Apply(data, enqueueTimeout(ctx))
	if err := f.Error(); err != nil {
		return applyResult{err: c.proposeError(err)}
	}
	a, ok := f.Response().(applyResult)
	if !ok {
		return applyResult{err: problem.New(problem.Internal, "propose: raft answered %T", f.Response())}
	}
	return a
}

// enqueueTimeout is how long raft may take to accept the command: the rest of ctx, at most proposeTimeout.
func enqueueTimeout(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return proposeTimeout
	}
	return max(time.Millisecond, min(time.Until(deadline), proposeTimeout))
}

// diskFault returns the fault of the disk behind an error of raft; nil if there is none.
func (c *Cluster) diskFault(err error) error {
	switch {
	case errors.Is(err, ErrDisk):
		return c.diskProblem(err)
	case errors.Is(err, raft.ErrRaftShutdown):
		return c.Fault()
	}
	return nil
}

// proposeError turns raft's errors into ours: the disk's fault, ErrNotLeader if nothing was done, or another.
func (c *Cluster) proposeError(err error) error {
	if fault := c.diskFault(err); fault != nil {
		return fault
	}
	switch {
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return errNotLeader()
	case errors.Is(err, raft.ErrRaftShutdown):
		return errClosed()
	case errors.Is(err, raft.ErrLeadershipLost), errors.Is(err, raft.ErrAbortedByRestore):
		return problem.New(problem.Unavailable, "propose: %w", ErrOutcomeUnknown).
			WithHint("look at the state, then try again")
	case errors.Is(err, raft.ErrEnqueueTimeout):
		return problem.New(problem.Timeout, "propose: the log did not take the command: %w", err).
			WithHint("the disk of the data dir is full or very slow")
	default:
		return problem.New(problem.Internal, "propose: %w", err).
			WithHint("look for raft errors in the log; the disk may be full")
	}
}

func errNotLeader() error {
	return problem.New(problem.Unavailable, "propose: %w", ErrNotLeader).
		WithHint("wait for the election and try again")
}

// Confirm asks a majority of the voters whether this node still leads. A leader that was suspended does not
// know that another node leads now. Only answers of voters count, and only answers to messages that are sent
// after the call. Raft's own VerifyLeader does not suit: it also counts answers of standbys and answers that
// waited in a socket buffer since before a suspension, and it never returns after raft was told to stop.
// ErrNotLeader: this node does not lead, or no majority confirms it. A node that Holds asks no other node.
func (c *Cluster) Confirm(ctx context.Context) error {
	if c.Holds() {
		return nil
	}
	if !c.Leader() {
		return errUnconfirmed()
	}
	q := c.confirmRounds.join(func() error { //nolint:contextcheck // callers share a round: none ends it
		return c.confirmRounds.askVoters(c.run.Load().raft, c.net, c.ident.UID)
	})
	select {
	case <-q.done:
		return q.err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.done:
		return c.endError()
	}
}

// StepDown hands leadership to the voter that has most of the log, before a node leaves or drains. It returns
// nil if this node does not lead, and Conflict if no other node votes, also while this one Holds.
func (c *Cluster) StepDown(ctx context.Context) error {
	r := c.run.Load().raft
	if r.State() != raft.Leader && !c.Holds() {
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

func (c *Cluster) closing() <-chan struct{} { return c.done }

func (c *Cluster) refusal() error { return cmp.Or(c.endError(), c.Fault()) }

func (c *Cluster) findNode(uid string) state.Node { return c.book.findNode(uid) }

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

// Follow sends the state to a node that takes no part in consensus: at once if it is newer than the index
// from, then whenever the state or the leader has changed. Close changes are sent together. Without changes
// it sends a heartbeat every second. While this node knows no leader it sends no heartbeats: its copy may be
// old, and the follower should ask another control node. Follow ends with an error of send, with ctx, and
// with Close.
func (c *Cluster) Follow(ctx context.Context, from uint64, send func(*Update) error) error {
	told := ""
	for {
		changed, leaderChanged, st := c.Changed(), c.Leadership(), c.State()
		leader, _ := c.LeaderNode()
		u := Update{Leader: leader}
		if st.Index > from {
			data, err := st.Public().Encode()
			if err != nil {
				return fmt.Errorf("encode the state for a follower: %w", err)
			}
			u.State = data
		}
		hasChanged := u.State != nil || leader != told
		if hasChanged || leader != "" {
			if err := send(&u); err != nil {
				return err
			}
		}
		from, told = max(from, st.Index), leader
		if err := c.awaitChange(ctx, changed, leaderChanged, hasChanged); err != nil {
			return err
		}
	}
}

// awaitChange waits for a change or the next heartbeat. If the last message told a change, it also waits for
// followGap.
func (c *Cluster) awaitChange(ctx context.Context, changed, leaderChanged <-chan struct{}, told bool) error {
	beat, gap := time.NewTimer(followHeartbeat), time.NewTimer(followGap)
	defer beat.Stop()
	defer gap.Stop()
	select {
	case <-changed:
	case <-leaderChanged:
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
