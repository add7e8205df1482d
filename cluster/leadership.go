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

// Leader says whether this node leads and has applied all that was committed before it did.
func (c *Cluster) Leader() bool { return c.leader.Load() }

// LeaderNode is the UID of the node that leads as far as this node knows; it may have been elected a moment ago and not be ready.
func (c *Cluster) LeaderNode() (uid string, known bool) {
	r := c.run.Load().raft
	_, id := r.LeaderWithID()
	if string(id) == c.ident.UID && r.State() != raft.Leader {
		return "", false // raft was told to stop, and has not come to it: its disk hangs
	}
	return string(id), id != ""
}

// Leadership is closed at the next change of who leads, or of whether this node leads and is ready. Take it before Leader,
// LeaderNode and Term, or a change in between goes unseen. A leadership that was lost and won again shows as a higher Term.
func (c *Cluster) Leadership() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.turn
}

// Term is raft's term: it grows with every election.
func (c *Cluster) Term() uint64 { return c.run.Load().raft.CurrentTerm() }

// Barrier waits until everything committed so far is applied here. Only the leader can say so: ErrNotLeader elsewhere.
func (c *Cluster) Barrier(ctx context.Context) error { return c.submit(ctx, c.barrier).err }

func (c *Cluster) wakeLeadership() {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.turn)
	c.turn = make(chan struct{})
}

// watch follows the leadership of one run to its end. It is the only writer of leader and ready.
func (c *Cluster) watch(r *run) {
	defer c.follow()
	for {
		select {
		case won := <-r.lead:
			c.follow()
			if won {
				c.takeOver(r)
			}
		case <-r.seen:
			c.wakeLeadership()
		case <-r.over:
			return
		}
	}
}

// follow takes readiness back.
func (c *Cluster) follow() {
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

// takeOver makes a fresh leader ready: all that was committed before is applied first, then the cluster gets its name.
func (c *Cluster) takeOver(r *run) {
	warned := false
	for r.raft.State() == raft.Leader && c.ended() == nil {
		err := c.lead()
		if err == nil {
			c.setReady(r)
			return
		}
		if problem.CodeOf(err) == problem.Conflict {
			c.log.Error("cluster cannot start", "room", "cluster", "err", err)
			c.end(err)
			return
		}
		if !warned && !errors.Is(err, ErrNotLeader) { // that it hands over meanwhile is no fault
			c.log.Warn("leader not ready yet", "room", "cluster", "err", err)
			warned = true
		}
		r.pause()
	}
}

func (r *run) pause() {
	select {
	case <-time.After(leadRetry):
	case <-r.over:
	}
}

// setReady lets everybody who waits go on.
func (c *Cluster) setReady(r *run) {
	c.log.Debug("leads", "room", "cluster", "term", r.raft.CurrentTerm())
	c.leader.Store(true)
	c.holds.Store(false)
	c.mu.Lock()
	close(c.ready)
	c.mu.Unlock()
	c.wakeLeadership()
}

// lead applies the past (a new leader's state is old until a Barrier, TRAPS 10) and gives the cluster what it lacks: its name,
// its secret, and its authority where nodes may join.
func (c *Cluster) lead() error {
	ctx, cancel := context.WithTimeout(context.Background(), proposeTimeout)
	defer cancel()
	if err := c.Barrier(ctx); err != nil {
		return err
	}
	switch st := c.State(); {
	case st.Cluster != "" && st.Cluster != c.ident.Cluster:
		return problem.New(problem.Conflict, "the log in the data dir is of cluster %s, its %s says %s", c.State().Cluster, identityFile, c.ident.Cluster).
			WithHint("two data dirs were mixed; restore one from a backup or choose an empty --data-dir")
	case st.Cluster != "" && len(st.Secret) > 0 && (c.cfg.Secrets == nil || len(st.Secrets.Authority) > 0):
		return nil
	}
	_, err := c.ProposeHere(ctx, c.founding())
	return err
}

// founding is the first command of a cluster; an older one keeps what it has.
func (c *Cluster) founding() state.Command {
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
