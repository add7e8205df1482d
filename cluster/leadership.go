package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
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
	return c.turn
}

// Term returns raft's term. It grows with every election.
func (c *Cluster) Term() uint64 { return c.run.Load().raft.CurrentTerm() }

// Barrier waits until everything committed so far is applied here. Only the leader can do it: ErrNotLeader
// elsewhere.
func (c *Cluster) Barrier(ctx context.Context) error { return c.submit(ctx, c.runBarrier).err }

func (c *Cluster) wakeLeadership() {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.turn)
	c.turn = make(chan struct{})
}

// watchLeadership follows the leadership of one run to its end. Only it writes leader and ready.
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
		c.log.Debug("leads no longer", "room", "cluster")
	}
	c.mu.Lock()
	select {
	case <-c.ready:
		c.ready = make(chan struct{})
	default:
	}
	c.mu.Unlock()
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
			c.log.Error("cluster cannot start", "room", "cluster", "err", err)
			c.end(err)
			return
		}
		if !warned && !errors.Is(err, ErrNotLeader) { // a leader that hands over meanwhile is no fault
			c.log.Warn("leader not ready yet", "room", "cluster", "err", err)
			warned = true
		}
		r.waitRetry()
	}
}

func (r *run) waitRetry() {
	select {
	case <-time.After(leadRetry):
	case <-r.over:
	}
}

// setReady wakes everything that waits for the leader to be ready.
func (c *Cluster) setReady(r *run) {
	c.log.Debug("leads", "room", "cluster", "term", r.raft.CurrentTerm())
	c.leader.Store(true)
	c.holds.Store(false)
	c.mu.Lock()
	close(c.ready)
	c.mu.Unlock()
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
