package cluster

import (
	"context"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
)

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
