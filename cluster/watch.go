package cluster

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// leadRetry is the pause before a failed step of becoming ready is tried again.
const leadRetry = 100 * time.Millisecond

// watch follows leadership until Close. It is the only writer of leader and ready.
func (c *Cluster) watch(lead <-chan bool) {
	for {
		select {
		case won := <-lead:
			c.follow()
			if won {
				c.takeOver()
			}
		case <-c.done:
			return
		}
	}
}

// follow takes readiness back.
func (c *Cluster) follow() {
	c.leader.Store(false)
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.ready:
		c.ready = make(chan struct{})
	default:
	}
}

// takeOver makes a fresh leader ready: all that was committed before is applied first, then the cluster gets its name.
func (c *Cluster) takeOver() {
	for c.raft.State() == raft.Leader && c.ended() == nil {
		err := c.lead()
		if err == nil {
			c.setReady()
			return
		}
		if problem.CodeOf(err) == problem.Conflict {
			c.log.Error("cluster cannot start", "room", "cluster", "err", err)
			c.end(err)
			return
		}
		c.log.Warn("leader not ready yet", "room", "cluster", "err", err)
		c.pause()
	}
}

func (c *Cluster) pause() {
	select {
	case <-time.After(leadRetry):
	case <-c.done:
	}
}

// setReady lets everybody who waits go on.
func (c *Cluster) setReady() {
	c.leader.Store(true)
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.ready)
}

// lead applies the past (a new leader's state is old until a Barrier, TRAPS 10) and names the cluster.
func (c *Cluster) lead() error {
	ctx, cancel := context.WithTimeout(context.Background(), proposeTimeout)
	defer cancel()
	if a := c.submit(ctx, c.barrier); a.err != nil {
		return a.err
	}
	switch st := c.State(); {
	case st.Cluster == c.ident.Cluster && len(st.Secret) > 0:
		return nil
	case st.Cluster == "" || st.Cluster == c.ident.Cluster: // new, or of a version without a secret
		_, err := c.Propose(ctx, state.Command{Init: &state.Init{Cluster: c.ident.Cluster, Secret: newSecret()}})
		return err
	default:
		return problem.New(problem.Conflict, "the log in the data dir is of cluster %s, its %s says %s", c.State().Cluster, identityFile, c.ident.Cluster).
			WithHint("two data dirs were mixed; restore one from a backup or choose an empty --data-dir")
	}
}

// secretBytes is the length of a cluster's secret.
const secretBytes = 32

func newSecret() []byte {
	b := make([]byte, secretBytes)
	_, _ = rand.Read(b) // never fails since Go 1.24
	return b
}
