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
func (u *unit) checkEvents(ctx context.Context, r *rank) error {
	if r.events == nil {
		return nil
	}
	r.setProgress("reading its event sockets back")
	sources, err := u.sources(ctx, r)
	if err != nil || sources == nil {
		return err
	}
	number := 0
	if u.lockstep() {
		number = r.grant.Rank
	}
	return kvevents.Verify(sources, number, r.events.Bind, r.events.Replay)
}

// sources asks an engine for its event sockets; nil if it cannot be asked. An invalid answer is an error, and
// so is the end of ctx.
func (u *unit) sources(ctx context.Context, r *rank) (map[int]kvevents.Source, error) {
	asking, cancel := context.WithTimeout(ctx, u.healthTimeout())
	defer cancel()
	body, err := r.client.EventSources(asking)
	if err != nil {
		if ended := context.Cause(ctx); ended != nil {
			return nil, ended // the start is over, which says nothing about the engine
		}
		var s *engine.StatusError
		if !errors.As(err, &s) || s.Status != http.StatusNotFound { // 404: this version has no such route
			u.log.Warn("the engine does not tell where its KV events are", slog.Int("rank", r.grant.Rank),
				slog.String("err", err.Error()))
		}
		return nil, nil //nolint:nilnil // nothing is known
	}
	return kvevents.ParseSources(body)
}

// agree compares the settings that the ranks of a coupled unit report. Engines with different settings start
// and answer /health, and fail only later, in collective operations.
func (u *unit) agree(ctx context.Context) error {
	settings := make([]engine.Settings, len(u.ranks))
	err := u.forEach(ctx, func(ctx context.Context, r *rank) error {
		r.setProgress("reading its settings back")
		ctx, cancel := context.WithTimeout(ctx, u.healthTimeout())
		defer cancel()
		s, err := r.client.ReadBack(ctx)
		settings[u.index(r)] = s
		return err
	})
	if err != nil {
		return err
	}
	for i, s := range settings {
		if s != settings[0] {
			return &startError{
				u.ranks[i].grant.Rank,
				fmt.Errorf("%w: rank %d has %+v, rank %d has %+v", errMismatch, u.ranks[0].grant.Rank,
					settings[0], u.ranks[i].grant.Rank, s),
			}
		}
	}
	return nil
}

// errMismatch means that coupled ranks run with different settings.
var errMismatch = errors.New("ranks of one group disagree on their settings")

func (u *unit) index(r *rank) int {
	for i := range u.ranks {
		if u.ranks[i] == r {
			return i
		}
	}
	return -1
}

// learn asks a ready engine for its facts. A missing fact is zero and does not keep the engine from serving.
func (u *unit) learn(ctx context.Context, r *rank) error {
	r.setProgress("asking for its settings")
	limit, cancel := context.WithTimeout(ctx, u.healthTimeout())
	defer cancel()
	c, err := r.client.Cache(limit)
	if err != nil {
		u.log.Debug("the engine does not tell all of its KV cache", slog.Int("rank", r.grant.Rank),
			slog.String("err", err.Error()))
	}
	length, err := r.client.MaxModelLen(limit)
	if err != nil {
		u.log.Debug("the engine does not tell its max_model_len", slog.Int("rank", r.grant.Rank),
			slog.String("err", err.Error()))
	}
	r.facts = msg.Facts{
		MaxModelLen: length, MaxOngoing: engine.MaxOngoing(u.m.App), BlockSize: c.BlockSize,
		Blocks: c.Blocks, CachingOff: c.CachingOff || engine.CachingOff(u.m.App),
	}
	if u.attached() && r.events == nil && engine.WantsEvents(u.m.App) && !c.CachingOff {
		r.facts.Events = u.discover(ctx, r)
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return nil
}

// discover finds the event sockets of an attached engine whose file does not name them; nil if it publishes
// none that can be followed. Routing then uses the prompts that were sent to the rank.
func (u *unit) discover(ctx context.Context, r *rank) *msg.EventSource {
	sources, err := u.sources(ctx, r)
	if ctx.Err() != nil {
		return nil // the caller sees the end of the start
	}
	number := -1 // the only source
	if r.target.Addressing == app.AddressHeader || r.target.Addressing == app.AddressBody {
		number = r.target.Selector
	}
	host := engine.HostOf(r.target.URL)
	d, ok, discoverErr := kvevents.Discover(sources, number, host, kvevents.Hosts{Node: u.n.cfg.Advertise})
	if err = errors.Join(err, discoverErr); err != nil {
		u.log.Warn("KV events of an attached engine cannot be used", slog.Int("rank", r.grant.Rank),
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
