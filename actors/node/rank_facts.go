package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
)

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
	length, err := r.client.MaxModelLen(limit)
	if err != nil {
		r.unit.log.Debug("the engine does not tell its max_model_len", slog.Int("rank", r.grant.Rank),
			slog.String("err", err.Error()))
	}
	r.facts = msg.Facts{
		MaxModelLen: length, MaxOngoing: engine.MaxOngoing(r.unit.m.App), BlockSize: c.BlockSize,
		Blocks: c.Blocks, CachingOff: c.CachingOff || engine.CachingOff(r.unit.m.App),
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
			slog.String("err", fmt.Sprint(err)))
	}
	if err != nil || !ok {
		return nil
	}
	return &msg.EventSource{
		Connect: d.Endpoints.Connect, Bind: d.Endpoints.Bind,
		Replay: d.Endpoints.Replay, Topic: d.Topic, Host: host,
	}
}
