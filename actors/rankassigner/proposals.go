package rankassigner

import (
	"context"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Bounds of the commands under way. Raft batches concurrent commands, so more concurrency gains nothing.
const (
	maxProposals = 16
	maxWaiting   = 4096 // enough for one Release per rank of a large application
)

// proposal asks for one command to go through consensus.
type proposal struct {
	ctx     context.Context //nolint:containedctx // the message's ctx is its cancellation
	command state.Command
	reply   chan proposed // one slot
}

// proposed is the result of a proposal.
type proposed struct {
	result state.Result
	err    error
}

// proposalDone brings the result back into the actor.
type proposalDone struct {
	*proposal
	proposed
}

// proposals runs Propose outside of Receive, which must not block: in a bounded number of goroutines, in
// order of arrival. Only the actor calls its methods.
type proposals struct {
	ctx      context.Context //nolint:containedctx // ends the goroutines at Close
	proposer msg.Proposer
	limit    time.Duration
	post     func(any)
	running  int
	waiting  []*proposal
	workers  sync.WaitGroup
}

func newProposals(ctx context.Context, p msg.Proposer, limit time.Duration, post func(any)) *proposals {
	return &proposals{ctx: ctx, proposer: p, limit: limit, post: post}
}

func (p *proposals) begin(m *proposal) {
	switch {
	case m.ctx.Err() != nil:
	case p.running < maxProposals:
		p.run(m)
	case len(p.waiting) < maxWaiting:
		p.waiting = append(p.waiting, m)
	default:
		m.reply <- proposed{err: problem.New(problem.Overloaded, "propose %s: %w", m.command.Kind(),
			ErrTooMany).WithHint("try again in a second")}
	}
}

func (p *proposals) run(m *proposal) {
	p.running++
	p.workers.Go(func() {
		ctx, cancel := context.WithTimeout(m.ctx, p.limit)
		defer cancel()
		defer context.AfterFunc(p.ctx, cancel)()
		r, err := p.proposer.Propose(ctx, m.command)
		p.post(&proposalDone{m, proposed{r, err}})
	})
}

func (p *proposals) end(c *proposalDone) {
	p.running--
	c.reply <- c.proposed
	for len(p.waiting) > 0 && p.running < maxProposals {
		next := p.waiting[0]
		p.waiting = p.waiting[1:]
		p.begin(next)
	}
}

func (p *proposals) wait() { p.workers.Wait() }
