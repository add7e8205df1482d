package cluster

import (
	"context"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
)

// confirmLimit is how long a round of Confirm may take: a renewal of a lease waits no longer for it.
const confirmLimit = time.Second

// Confirm asks a majority whether this node still leads: one that was frozen takes itself for the leader until it has heard of the
// others. Only answers to what is sent after the call count, and those of voters: raft's own VerifyLeader also counts an answer that
// has been in a socket buffer since before a freeze, and those of standbys, and nobody answers it once raft has been told to stop.
// ErrNotLeader: this node does not lead, or no majority says so. A node that Holds has nobody to ask.
func (c *Cluster) Confirm(ctx context.Context) error {
	if c.Holds() {
		return nil
	}
	if !c.Leader() {
		return errUnconfirmed()
	}
	q := c.confirms.join(c.askVoters)
	select {
	case <-q.done:
		return q.err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.done:
		return c.ended()
	}
}

// confirms lets all who ask while a round is under way share the next one.
type confirms struct {
	mu    sync.Mutex
	busy  bool
	next  *round // not begun; nil = nobody waits
	loops sync.WaitGroup
}

// round is one question to the voters.
type round struct {
	done chan struct{} // closed when err is set
	err  error
}

// join gives a round that begins after the call.
func (c *confirms) join(ask func() error) *round {
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

func (c *confirms) run(ask func() error) {
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

// askVoters sends a heartbeat of this term to every other voter, and waits until it makes a majority with those that have taken it.
func (c *Cluster) askVoters() error {
	r := c.run.Load().raft
	term := r.CurrentTerm() // before State: who leads now leads in this term or a later one
	if r.State() != raft.Leader {
		return errUnconfirmed()
	}
	voters, taken := 0, 0
	var others []raft.ServerID
	for _, s := range r.GetConfiguration().Configuration().Servers {
		switch {
		case s.Suffrage != raft.Voter:
			continue
		case string(s.ID) == c.ident.UID:
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
		c.confirms.loops.Go(func() { answers <- c.net.confirm(ctx, id, term) })
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
	return problem.New(problem.Unavailable, "confirm the leadership: %w", ErrNotLeader).WithHint("wait for the election and try again")
}
