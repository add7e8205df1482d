package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/enginelog"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/state"
)

// rank is one rank of a unit on this node.
type rank struct {
	unit    *unit
	grant   state.RankGrant
	target  msg.Target
	events  *msg.EventSource // where its KV events are, if known
	facts   msg.Facts        // of the engine as last asked; used by the unit's goroutine only
	replica Replica
	client  *engine.Client
	out     [2]*lineWriter

	incarnation uint64 // of the launched engine
	base        uint64 // msg.Facts.Base

	asked atomic.Bool // the node has told the engine to end; every other exit is a failure

	mu        sync.Mutex
	proc      Process
	progress  string
	isLoading bool // the rank waits for its engine, whose log tells more than progress
	log       *enginelog.Reader
}

// openLog opens the log of the rank's engine.
func (r *rank) openLog() {
	u := r.unit
	r.log = &enginelog.Reader{}
	r.out[0], r.out[1] = u.n.logs.open(u.m.App.Name, u.m.Unit, r.grant.Rank, u.m.Epoch)
	r.out[0].start, r.out[1].start = r.log.Stream(), r.log.Stream()
}

// shareLog makes r show what the engine of other says: both are ranks of one process.
func (r *rank) shareLog(other *rank) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log = other.log
}

// drawIncarnation sets the number of the engine that a rank will launch, or of the one that it has found.
// Numbers of its records and tickets continue above the time since the machine's boot, in ns: no earlier
// DPServer of the incarnation has used so many.
func (r *rank) drawIncarnation() {
	if r.unit.found == nil {
		r.incarnation = draw(r.unit.n.cfg.Rand)
		return
	}
	e := r.unit.found.engines[r.grant.Rank]
	r.incarnation, r.base = e.Incarnations[slices.Index(e.Ranks, r.grant.Rank)], sinceBoot()
}

func (r *rank) setProc(p Process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.proc = p
}

func (r *rank) process() Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.proc
}

func (r *rank) setProgress(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.progress, r.isLoading = text, false
}

// setLoading is setProgress while the engine loads: what the engine says itself replaces text.
func (r *rank) setLoading(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.progress, r.isLoading = text, true
}

func (r *rank) view() (pid int, progress string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.proc != nil && !closed(r.proc.Exited()) {
		pid = r.proc.PID()
	}
	if r.isLoading {
		return pid, cmp.Or(r.log.Progress(), r.progress)
	}
	return pid, r.progress
}

// awaitHealth polls /health: quickly at first, because a simulated engine is up in milliseconds; a real one
// takes minutes. It gives up on a started engine that will never answer as one.
func (r *rank) awaitHealth(ctx context.Context) error {
	var s silence
	for wait := r.unit.n.timers.PollFirst; ; wait = min(2*wait, r.unit.n.timers.PollLast) {
		h, err := r.askHealth(ctx)
		if h == engine.Alive {
			return nil
		}
		r.setLoading(fmt.Sprintf("waiting for %s/health: %v", r.target.URL, err))
		if err := s.judge(ctx, r, h, err); err != nil {
			return err
		}
		if err := pause.For(ctx, wait); err != nil {
			return err
		}
	}
}

func (r *rank) askHealth(ctx context.Context) (engine.Health, error) {
	ctx, cancel := context.WithTimeout(ctx, r.healthTimeout())
	defer cancel()
	return r.client.Health(ctx)
}

func (r *rank) probe(ctx context.Context) error {
	r.setProgress("waiting for the first token")
	ctx, cancel := context.WithTimeout(ctx, r.unit.n.timers.Probe)
	defer cancel()
	if err := r.client.Probe(ctx, r.target.ModelName(r.unit.m.App.Model.ID)); err != nil {
		return fmt.Errorf("the engine is up and does not compute: %w", err)
	}
	return nil
}

// awaitAttached asks for health and a token until both succeed. It never gives up.
func (r *rank) awaitAttached(ctx context.Context) error {
	for {
		if err := r.awaitHealth(ctx); err != nil {
			return err
		}
		err := r.probe(ctx)
		if err == nil {
			return nil
		}
		r.setProgress(fmt.Sprintf("waiting for %s: %v", r.target.URL, err))
		if err := pause.For(ctx, r.healthPeriod()); err != nil {
			return err
		}
	}
}

func (r *rank) healthPeriod() time.Duration {
	if s := r.unit.m.App.HealthCheckPeriodS; s > 0 {
		return app.Seconds(s)
	}
	return r.unit.n.timers.PollLast
}

func (r *rank) healthTimeout() time.Duration {
	if s := r.unit.m.App.HealthCheckTimeoutS; s > 0 {
		return app.Seconds(s)
	}
	return r.unit.n.timers.Probe
}

// eventSource is an engine's event source in the form for a DPServer. dpserve chooses the topics: none.
func eventSource(e *engine.EventSource) *msg.EventSource {
	if e == nil {
		return nil
	}
	return &msg.EventSource{Connect: e.Connect, Bind: e.Bind, Replay: e.Replay, Host: e.Host}
}

// checkEvents compares where a launched engine publishes KV events with the sockets it was given. Events of
// another engine would credit this rank with blocks that it does not have. If the engine cannot be asked, its
// command line counts.
func (r *rank) checkEvents(ctx context.Context) error {
	if r.events == nil {
		return nil
	}
	r.setProgress("reading its event sockets back")
	sources, err := r.sources(ctx)
	if err != nil || sources == nil {
		return err
	}
	number := 0
	if r.unit.lockstep() {
		number = r.grant.Rank
	}
	return kvevents.Verify(sources, number, r.events.Bind, r.events.Replay)
}

// sources asks an engine for its event sockets; nil if it cannot be asked. An invalid answer is an error, and
// so is the end of ctx.
func (r *rank) sources(ctx context.Context) (map[int]kvevents.Source, error) {
	asking, cancel := context.WithTimeout(ctx, r.healthTimeout())
	defer cancel()
	body, err := r.client.EventSources(asking)
	if err != nil {
		if ended := context.Cause(ctx); ended != nil {
			return nil, ended // the start is over, which says nothing about the engine
		}
		var s *engine.StatusError
		if !errors.As(err, &s) || s.Status != http.StatusNotFound { // 404: this version has no such route
			r.unit.log.Warn("the engine does not tell where its KV events are",
				slog.Int("rank", r.grant.Rank), slog.String("err", err.Error()))
		}
		return nil, nil //nolint:nilnil // nothing is known
	}
	return kvevents.ParseSources(body)
}

// learn asks a ready engine for its facts. A missing fact is zero and does not keep the engine from serving.
func (r *rank) learn(ctx context.Context) error {
	r.setProgress("asking for its settings")
	limit, cancel := context.WithTimeout(ctx, r.healthTimeout())
	defer cancel()
	c, err := r.client.Cache(limit)
	if err != nil {
		r.unit.log.Debug("the engine does not tell all of its KV cache", slog.Int("rank", r.grant.Rank),
			slog.String("err", err.Error()))
	}
	models, err := r.client.Models(limit)
	if err != nil {
		r.unit.log.Debug("the engine does not tell its models", slog.Int("rank", r.grant.Rank),
			slog.String("err", err.Error()))
	}
	r.facts = msg.Facts{
		MaxModelLen: engine.MaxModelLenOf(models), Adapters: engine.AdaptersOf(r.unit.m.App, models),
		MaxOngoing: engine.MaxOngoing(r.unit.m.App), BlockSize: c.BlockSize, Blocks: c.Blocks,
		CachingOff: c.CachingOff || engine.CachingOff(r.unit.m.App),
	}
	if r.unit.attached() && r.events == nil && engine.WantsEvents(r.unit.m.App) && !c.CachingOff {
		r.facts.Events = r.discover(ctx)
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return nil
}

// discover finds the event sockets of an attached engine whose file does not name them; nil if it publishes
// none that can be followed. Routing then uses the prompts that were sent to the rank.
func (r *rank) discover(ctx context.Context) *msg.EventSource {
	sources, err := r.sources(ctx)
	if ctx.Err() != nil {
		return nil // the caller sees the end of the start
	}
	number := -1 // the only source
	if r.target.Addressing == app.AddressHeader || r.target.Addressing == app.AddressBody {
		number = r.target.Selector
	}
	host := engine.HostOf(r.target.URL)
	d, ok, discoverErr := kvevents.Discover(sources, number, host,
		kvevents.Hosts{Node: r.unit.n.cfg.Advertise})
	if err = errors.Join(err, discoverErr); err != nil {
		r.unit.log.Warn("KV events of an attached engine cannot be used", slog.Int("rank", r.grant.Rank),
			slog.String("err", err.Error()))
	}
	if err != nil || !ok {
		return nil
	}
	return &msg.EventSource{
		Connect: d.Endpoints.Connect, Bind: d.Endpoints.Bind,
		Replay: d.Endpoints.Replay, Topic: d.Topic, Host: host,
	}
}
