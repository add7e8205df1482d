package cluster

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync/atomic"
	"time"
)

// takeOverPause is the wait before a new leader tries again to start what belongs to the leader.
const takeOverPause = 200 * time.Millisecond

// Leading starts what belongs to the leader at each election, after the barrier, and closes it when the
// leadership ends. The zero value leads nothing. Current is safe for concurrent use; Follow, Adapt and
// StandDown take turns.
type Leading[T io.Closer] struct {
	cfg  LeadingConfig[T]
	held atomic.Pointer[tenure[T]]
}

// LeadingConfig configures a Leading.
type LeadingConfig[T io.Closer] struct {
	Store Store
	// Cluster is Store on a node with role control. nil = this node never leads.
	Cluster *Cluster
	// Start starts what belongs to the leader. Store.Leader is true only after a barrier, so the state holds
	// everything that was committed before.
	Start func(ctx context.Context) (T, error)
	// Prepare waits until Current, which this node shows from now on, can answer.
	Prepare func(ctx context.Context, t T) error
	Log     *slog.Logger
}

// tenure is one election's.
type tenure[T io.Closer] struct {
	term  uint64 // raft term of the election
	parts T
}

// Open configures a Leading, before Follow, Adapt and StandDown. Current may be called before.
func (l *Leading[T]) Open(cfg LeadingConfig[T]) { l.cfg = cfg }

// Current returns what belongs to the leader, if this node leads.
func (l *Leading[T]) Current() (parts T, leads bool) {
	if t := l.held.Load(); t != nil {
		return t.parts, true
	}
	return parts, false
}

// Follow adapts to each election until ctx ends. A failure is repeated.
func (l *Leading[T]) Follow(ctx context.Context) {
	for {
		// Leadership comes before Leader, so that no change in between is missed
		changed := l.cfg.Store.Leadership()
		if err := l.Adapt(ctx); err != nil && ctx.Err() == nil {
			level := slog.LevelError
			// The term is over: another node leads by now, or this one was elected again.
			if !l.cfg.Store.Leader() || errors.Is(err, ErrNotLeader) || errors.Is(err, ErrOutcomeUnknown) {
				level = slog.LevelInfo
			}
			l.cfg.Log.Log(ctx, level, "cannot lead", slog.Any("err", err))
			select {
			case <-time.After(takeOverPause):
				continue
			case <-ctx.Done():
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// Adapt closes what belongs to an earlier election and starts what belongs to the current one. Leadership
// that was lost and won again starts new parts: another node may have led in between and given commands that
// the old ones do not know. The only voter keeps them while its disk fails: no other node can lead meanwhile,
// and the leases of healthy nodes do not need the disk.
func (l *Leading[T]) Adapt(ctx context.Context) error {
	leads := l.cfg.Store.Leader()
	over := !leads && (l.cfg.Cluster == nil || !l.cfg.Cluster.Holds())
	if t := l.held.Load(); t != nil && (over || leads && l.cfg.Cluster.Term() != t.term) {
		l.cfg.Log.Info("this node leads no more")
		if err := l.StandDown(); err != nil {
			return err
		}
	}
	if leads && l.held.Load() == nil {
		return l.takeOver(ctx)
	}
	return nil
}

func (l *Leading[T]) takeOver(ctx context.Context) error {
	term := l.cfg.Cluster.Term()
	parts, err := l.cfg.Start(ctx)
	if err != nil {
		return err
	}
	l.held.Store(&tenure[T]{term, parts})
	if err := l.cfg.Prepare(ctx, parts); err != nil {
		return err
	}
	l.cfg.Log.Info("this node leads the cluster", slog.Uint64("term", term))
	return nil
}

// StandDown closes what belongs to the leader. Idempotent.
func (l *Leading[T]) StandDown() error {
	t := l.held.Swap(nil)
	if t == nil {
		return nil
	}
	return t.parts.Close()
}
