package node

import (
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// Messages of the node's actor.
type (
	startRank struct {
		m     *msg.StartRank
		reply chan error // one slot
	}
	stopRank struct {
		m     *msg.StopRank
		reply chan error // one slot
	}
	closeAllUnits struct {
		grace time.Duration
		done  chan struct{} // closed when every unit was asked
	}
)

// supervisor is the node's actor. It decides which units exist; each unit runs by itself. Its only disk
// access is to record an epoch, because an acknowledged start must not be forgotten. A panic loses no unit:
// they belong to Node.
type supervisor struct {
	*Node
	epochs *epochs
}

// Receive implements inbox.Receiver.
func (s *supervisor) Receive(m any) {
	switch m := m.(type) {
	case startRank:
		m.reply <- s.start(m.m)
	case stopRank:
		m.reply <- s.stop(m.m)
	case closeAllUnits:
		defer close(m.done)
		for _, u := range s.list() {
			u.askStop(min(m.grace, app.Seconds(u.m.App.GracefulShutdownTimeout)), "node is stopping")
		}
	}
}

// start accepts a unit, unless it exists already, is older than an epoch that this node or its copy of the
// state has seen, or is not covered by the lease. An older incarnation is ended first, at once: two owners of
// a rank must never overlap.
func (s *supervisor) start(m *msg.StartRank) error {
	before := s.unit(m.Unit)
	if before != nil && before.m.Epoch == m.Epoch && s.epochs.seen[m.Unit] == m.Epoch {
		before.repeat()
		return nil
	}
	if s.closing.Load() {
		return problem.New(problem.Unavailable, "unit %s: node %s: %w", m.Unit, s.cfg.ID, msg.ErrNodeStopping)
	}
	if err := s.mayBegin(m); err != nil {
		return err
	}
	u := newUnit(s.Node, m, before)
	if before != nil {
		before.askStop(0, "a newer epoch was granted")
	}
	s.mu.Lock()
	s.units[m.Unit] = u
	s.mu.Unlock()
	s.running.Go(u.run)
	return nil
}

// mayBegin checks a start, and records its epoch if the start is allowed.
func (s *supervisor) mayBegin(m *msg.StartRank) error {
	if s.cfg.Store != nil {
		if now := s.cfg.Store.State(); superseded(now, m.Unit, m.Epoch) {
			return problem.New(problem.Conflict,
				"unit %s: %w: epoch %d was asked for, the cluster has released it (it is at %d)", m.Unit,
				ErrStaleEpoch, m.Epoch, now.LastEpoch(m.Unit))
		} else if s.epochs.isBehind(now) {
			return problem.New(problem.Unavailable,
				"unit %s: this node's copy of the state is older than before it was started", m.Unit).
				WithHint("wait until the node has the present state")
		}
	}
	if err := s.mayStart(); err != nil {
		return err
	}
	if s.cfg.Store != nil {
		s.epochs.prune(s.cfg.Store.State(),
			func(unit string) bool { return unit == m.Unit || s.unit(unit) != nil })
	}
	return s.epochs.begin(m.Unit, m.Epoch)
}

// stop asks a unit to end. A unit that is not here is reported as gone, because the controller may have
// missed its end. A unit that already ends repeats its last event, or the controller would repeat the order.
func (s *supervisor) stop(m *msg.StopRank) error {
	if err := s.epochs.admit(m.Unit, m.Epoch); err != nil {
		return err
	}
	u := s.unit(m.Unit)
	if u == nil || u.m.Epoch < m.Epoch {
		s.report(msg.UnitEvent{Unit: m.Unit, Epoch: m.Epoch, Kind: msg.UnitGone, Rank: -1, Reason: m.Reason,
			Asked: true})
	}
	if u == nil {
		return nil
	}
	ends := u.isEnding()
	if !u.askStop(m.Grace, m.Reason) || ends {
		u.repeat()
	}
	return nil
}
