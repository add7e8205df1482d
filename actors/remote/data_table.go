package remote

import (
	"log/slog"
	"net/url"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// rankKey names a rank of a node. A unit's name contains the application's.
type rankKey struct {
	unit string
	rank routing.RankID
}

// dataTarget is one incarnation of a rank of this node. It is immutable.
type dataTarget struct {
	app         string
	epoch       uint64
	incarnation uint64
	mailbox     msg.Mailbox
	target      msg.Target
	urls        [openai.NumRoutes]*url.URL
}

// dataTable is a msg.Sink that keeps the ranks of its node. Safe for concurrent use.
type dataTable struct {
	log *slog.Logger

	mu    sync.RWMutex
	ranks map[rankKey]*dataTarget
}

var _ msg.Sink = (*dataTable)(nil)

func newDataTable(log *slog.Logger) *dataTable {
	return &dataTable{log: log, ranks: map[rankKey]*dataTarget{}}
}

// find returns the incarnation of a rank that runs now; nil if there is none.
func (t *dataTable) find(app, unit string, rank routing.RankID) *dataTarget {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if r := t.ranks[rankKey{unit, rank}]; r != nil && r.app == app {
		return r
	}
	return nil
}

// Deliver implements msg.Sink.
func (t *dataTable) Deliver(rec *msg.Record) {
	switch rec.Kind {
	case msg.RecSnapshot:
		t.addRank(rec)
	case msg.RecGone:
		t.removeRank(rec)
	default:
	}
}

func (t *dataTable) addRank(rec *msg.Record) {
	key := rankKey{rec.Unit, rec.Rank}
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.ranks[key]
	if old != nil && (old.epoch > rec.Epoch || old.epoch == rec.Epoch && old.incarnation == rec.Incarnation) {
		return // of an older epoch, or known
	}
	fresh, err := newDataTarget(rec)
	if err != nil {
		t.log.Error("rank cannot be served to other nodes", slog.String("app", rec.App),
			slog.String("unit", rec.Unit), slog.Any("err", err))
		return
	}
	t.ranks[key] = fresh
}

func (t *dataTable) removeRank(rec *msg.Record) {
	key := rankKey{rec.Unit, rec.Rank}
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.ranks[key]; r != nil && r.epoch == rec.Epoch && r.incarnation == rec.Incarnation {
		delete(t.ranks, key)
	}
}

func newDataTarget(rec *msg.Record) (*dataTarget, error) {
	s := rec.Snapshot
	r := &dataTarget{app: rec.App, epoch: rec.Epoch, incarnation: rec.Incarnation, mailbox: s.Mailbox,
		target: s.Target}
	base, err := url.Parse(s.Target.URL)
	if err != nil {
		return nil, err
	}
	for route := range r.urls {
		u := *base
		u.Path = openai.Route(route).Path()
		r.urls[route] = &u
	}
	return r, nil
}
