package noderpc

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/pause"
)

const (
	publishLimit = 120 * time.Second // how long other nodes wait for a publication at most
	maxPublished = 1024              // units whose publication waits; a node starts far fewer at once
)

// publisher sends publications to the leader: each until the leader has it, its epoch is superseded, or it is
// too old to be awaited. Its goroutine runs only while a publication waits.
type publisher struct {
	client *LeaderClient
	log    *slog.Logger

	ctx    context.Context //nolint:containedctx // the life of the publisher
	stop   context.CancelFunc
	worker sync.WaitGroup

	mu      sync.Mutex
	waiting map[string]publication // by unit: the newest
	running bool
	closed  bool
}

type publication struct {
	msg.Publish
	until time.Time
}

func newPublisher(client *LeaderClient) *publisher {
	ctx, stop := context.WithCancel(context.Background())
	return &publisher{
		client: client, log: client.cfg.Log, ctx: ctx, stop: stop, waiting: map[string]publication{},
	}
}

// add adds a publication in place of an older one of the same unit. It never waits.
func (p *publisher) add(m msg.Publish) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old, ok := p.waiting[m.Unit]
	switch {
	case p.closed || ok && old.Epoch > m.Epoch:
		return
	case !ok && len(p.waiting) >= maxPublished:
		p.log.Error("rendezvous address not published: too many wait for the leader", "component", "remote",
			"unit", m.Unit, "epoch", m.Epoch)
		return
	}
	p.waiting[m.Unit] = publication{m, time.Now().Add(publishLimit)}
	if !p.running {
		p.running = true
		p.worker.Go(p.run)
	}
}

func (p *publisher) run() {
	wait := roundPauseMin
	for {
		batch := p.pending()
		if len(batch) == 0 {
			return
		}
		failed := false
		for _, m := range batch {
			failed = !p.trySend(m) || failed
		}
		if !failed {
			wait = roundPauseMin
			continue
		}
		if pause.For(p.ctx, wait) != nil {
			return
		}
		wait = min(2*wait, roundPauseMax)
	}
}

// pending drops publications that are too old or superseded and returns the rest; an empty result ends the
// worker.
func (p *publisher) pending() []publication {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []publication
	for unit, m := range p.waiting {
		if time.Now().After(m.until) || p.client.isSuperseded(m.Publish) {
			delete(p.waiting, unit)
			continue
		}
		out = append(out, m)
	}
	p.running = len(out) > 0 && !p.closed
	if p.closed {
		return nil
	}
	return out
}

// trySend sends m and says whether it needs no further attempt.
func (p *publisher) trySend(m publication) bool {
	err := p.client.publish(p.ctx, m.Publish)
	if err != nil && (mayRetryElsewhere(err) || p.ctx.Err() != nil) {
		return false
	}
	if err != nil {
		p.log.Error("rendezvous address refused", "component", "remote", "unit", m.Unit, "epoch", m.Epoch,
			"err", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiting[m.Unit] == m {
		delete(p.waiting, m.Unit)
	}
	return true
}

func (p *publisher) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.stop()
	p.worker.Wait()
}
