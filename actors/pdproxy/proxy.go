// Package pdproxy has the actor of an application with two pools: a prefill rank computes a prompt, and a
// decode rank takes the KV blocks over and answers. A Flight is one such request on its way; package dispatch
// decides what happens to it.
//
// What happens to a request is decided by its dispatch.Plan. A Flight is a Plan behind a mutex: the handler
// of the request picks, reserves and sends in order (Next), any goroutine tells it events (Tell), and cancels
// and releases happen at once on the teller. Whoever holds a lock that these take tells by Later. No request
// costs a hop to the actor.
//
// The Proxy is the actor of one application on one ingress. A pair takes requests only after a prompt of one
// block went through it since either side's start; eight such prompts at once, one per decode rank; a pair
// that fails is tried again after 1, 2, 4 … 60 s. A prefill rank whose blocks were not read holds their
// tokens until the end of the lease. An alarm resets the prefix cache of a decode rank, where its engine
// allows that.
package pdproxy

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing"
)

// Backend is what a Proxy needs of its ingress. All methods are safe for concurrent use; only Prewarm and
// ResetCache may block.
type Backend interface {
	// Ranks appends the incarnations of a side that serve now.
	Ranks(dst []routing.RankRef, s dispatch.Side) []routing.RankRef
	// UpdateTable changes the table of pairs and leases that the pair decisions read.
	UpdateTable(change func(t *routing.PairTable))
	// CannotPair is why two ranks can never be a pair: their engines differ; nil if they can.
	CannotPair(prefill, decode routing.RankRef) error
	// Prewarm sends a prompt of one block through a pair, apart from all requests.
	Prewarm(ctx context.Context, prefill, decode routing.RankRef) error
	// ResetCache drops the prefix cache of a decode rank's engine. ErrNoReset: the engine does not allow it.
	ResetCache(ctx context.Context, decode routing.RankRef) error
	// SetPairs is told how many pairs have met, of how many, whenever that changes. why says what keeps the
	// others; "" = nothing is known.
	SetPairs(met, all int, why string)
	// CountAlarm counts an alarm.
	CountAlarm()
}

// ErrNoReset is returned by Backend.ResetCache if an engine has no such command, or does not allow it.
var ErrNoReset = errors.New("the engine does not allow a reset of its prefix cache")

// Bounds of a Proxy.
const (
	proxyBound     = 1024             // messages in its inbox
	prewarmsAtOnce = 8                // prewarm legs; one at a time per decode rank
	prewarmLimit   = 60 * time.Second // of one: the first handshake of two engines may take half a minute
	firstBackoff   = time.Second      // after a prewarm that failed, then twice as long each time …
	maxBackoff     = time.Minute      // … up to this
	resetLimit     = 10 * time.Second // of a reset of a prefix cache
	resetPause     = time.Second      // between two attempts of a reset
)

// Proxy is the actor of one application with a prefill and a decode pool on one ingress. It owns what its
// requests share: the clock that notices when the process stood still, the ticks of requests whose time is
// over, the prewarming of pairs, the leases and the alarms. Requests do not pass through it: each has a
// Flight of its own.
type Proxy struct {
	clock   *Clock
	backend Backend
	log     *slog.Logger
	flights flights
	box     *inbox.Inbox
	ctx     context.Context //nolint:containedctx // the life of prewarm legs and resets, cancelled by Close
	cancel  context.CancelFunc
	work    sync.WaitGroup // prewarm legs and resets
}

// Messages of a Proxy to itself.
type (
	tickMessage  struct{}
	closeMessage struct{}
	// prewarmed is the end of a prewarm leg
	prewarmed struct {
		pair warmKey
		err  error
	}
	// wasReset is the end of a reset of a prefix cache
	wasReset struct {
		decode routing.RankRef
		err    error
	}
	// pairFailed: see PairFailed
	pairFailed warmKey
	// alarmMessage: the cache of decode may hold wrong blocks; or, without decode, those of all decode ranks
	// that prefill has served
	alarmMessage struct{ prefill, decode routing.RankRef }
	// leaseMessage: prefill holds tokens until then, though its ticket is back
	leaseMessage struct {
		prefill routing.RankRef
		tokens  int
		until   time.Duration
	}
)

// NewProxy starts the actor. name is that of the application; it must be unique in the system.
func NewProxy(system *actor.ActorSystem, name string, b Backend, log *slog.Logger) (*Proxy, error) {
	return newProxy(system, name, b, log, NewClock())
}

func newProxy(system *actor.ActorSystem, name string, b Backend, log *slog.Logger, c *Clock) (*Proxy, error) {
	p := &Proxy{clock: c, backend: b, log: log}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	state := newProxyState(p) // it outlives a panic of the actor
	box, err := inbox.Spawn(system, "pdproxy/"+name, proxyBound, func() inbox.Receiver { return state })
	if err != nil {
		p.cancel()
		return nil, err
	}
	p.box = box
	box.Send(tickMessage{})
	return p, nil
}

// Alarm reports that the prefix cache of a decode rank may hold wrong blocks.
func (p *Proxy) Alarm(decode routing.RankRef) { p.box.Send(alarmMessage{decode: decode}) }

// PrefillAlarm reports that an engine was told of blocks that it had already given to another prompt: the
// caches of the decode ranks that it served may hold wrong blocks.
func (p *Proxy) PrefillAlarm(prefill routing.RankRef) { p.box.Send(alarmMessage{prefill: prefill}) }

// Hold keeps tokens counted on a prefill rank until an instant of the Proxy's clock.
func (p *Proxy) Hold(prefill routing.RankRef, tokens int, until time.Duration) {
	p.box.Send(leaseMessage{prefill, tokens, until})
}

// PairFailed reports that the pair table has ended a pair, because its prompts failed in a row.
func (p *Proxy) PairFailed(prefill, decode routing.RankRef) { p.box.Send(pairFailed{prefill, decode}) }

// Now is the Proxy's clock.
func (p *Proxy) Now() dispatch.Instant { return p.clock.Now() }

// Close ends the actor when no flight is left, and waits for it. No flight may begin any more.
func (p *Proxy) Close() {
	p.cancel()
	p.box.Send(closeMessage{})
	<-p.box.Stopped()
	p.work.Wait()
}

// flights are the flights under way.
type flights struct {
	mu   sync.Mutex
	set  map[*Flight]struct{}
	list []*Flight // reused by all
}

func (l *flights) add(f *Flight) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.set == nil {
		l.set = map[*Flight]struct{}{}
	}
	l.set[f] = struct{}{}
}

// remove may be called twice.
func (l *flights) remove(f *Flight) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.set, f)
}

// all lists the flights. Only the actor calls it, and the list is valid until it does so again.
func (l *flights) all() []*Flight {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.list)
	l.list = slices.AppendSeq(l.list[:0], maps.Keys(l.set))
	return l.list
}

// prewarm runs a prewarm leg beside the actor.
func (p *Proxy) prewarm(key warmKey) {
	p.work.Go(func() {
		ctx, cancel := context.WithTimeout(p.ctx, prewarmLimit)
		defer cancel()
		p.box.Send(prewarmed{key, p.backend.Prewarm(ctx, key.prefill, key.decode)})
	})
}

// reset resets the prefix cache of a decode rank beside the actor. An engine may refuse for a moment.
func (p *Proxy) reset(decode routing.RankRef) {
	p.work.Go(func() {
		ctx, cancel := context.WithTimeout(p.ctx, resetLimit)
		defer cancel()
		again := time.NewTicker(resetPause)
		defer again.Stop()
		for {
			err := p.backend.ResetCache(ctx, decode)
			if err == nil || errors.Is(err, ErrNoReset) {
				p.box.Send(wasReset{decode, err})
				return
			}
			select {
			case <-again.C:
			case <-ctx.Done():
				p.box.Send(wasReset{decode, err})
				return
			}
		}
	})
}

// Clock gives the instants of all flights of a Proxy. It goes on while the process is stopped or the machine
// sleeps, and notices that the process stood still. Safe for concurrent use.
type Clock struct {
	now func() time.Duration

	mu    sync.Mutex
	watch dispatch.Watch
}

// NewClock makes a clock that starts now. It is Go's clock, which tests may fake, and the time that the
// machine has slept.
func NewClock() *Clock {
	start, slept := time.Now(), asleep()
	return &Clock{now: func() time.Duration { return time.Since(start) + asleep() - slept }}
}

// Now is the present instant.
func (c *Clock) Now() dispatch.Instant {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.watch.At(c.now())
}
