package dpserver

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// Server is the outside of one DPServer: what its node holds. It outlives a panic of the actor inside.
type Server struct {
	spec     msg.ReplicaSpec
	id       routing.RankID
	hub      *Hub
	assigner msg.Assigner
	engine   Engine
	timers   Timers
	prefill  func(tokens int) time.Duration
	hasher   kvindex.Hasher
	present  func(name string) *app.Application // nil: spec.App
	lease    func() bool                        // nil: always
	net      network
	log      *slog.Logger
	box      *inbox.Inbox
	made     time.Time // the origin of the rank's clock

	ctx    context.Context //nolint:containedctx // the life of the actor's own probes, cancelled by Stop
	cancel context.CancelFunc
	probes sync.WaitGroup

	drained   chan struct{}
	drainOnce sync.Once

	vitals    vitals // only the actor's goroutine touches it
	stats     stats
	orphans   orphans
	listening listening
}

// vitals survive a panic of the actor: the new one goes on with them, with an empty account.
type vitals struct {
	began       bool
	phase       phase
	incarnation uint64
	facts       msg.Facts // of the incarnation, and what its engine said of itself since
	seq         uint64    // number of the last record of this incarnation
	lastTicket  uint64
	rounds      uint64 // of the keeper, so that results of one that is gone are known

	source   *msg.EventSource // of the engine's KV events; nil: it publishes none
	life     uint64           // of the subscription to them: events of an older one are dropped
	restarts uint64           // of the engine, as the subscription counted them and we have heard
}

// name is the actor's name; the epoch keeps a successor apart from a predecessor that is still being stopped.
func (s *Server) name() string {
	return fmt.Sprintf("dpserver/%s/%s/%d", s.spec.App.Name, s.id, s.spec.Epoch)
}

// Mailbox is where ingresses post to.
func (s *Server) Mailbox() msg.Mailbox { return s.box }

// Ready opens admission for a new incarnation of the engine and begins to watch it.
// It returns when the actor has taken it, so that what comes after it finds the rank open.
func (s *Server) Ready(ctx context.Context, f msg.Facts) error {
	taken := make(chan struct{})
	s.box.Send(ready{facts: f, taken: taken})
	select {
	case <-taken:
		return nil
	case <-s.box.Stopped():
		return inbox.ErrStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Fence stops admission at once. The channel is closed when every sink has heard of it; it may never be if the actor stops.
func (s *Server) Fence(cause string) <-chan struct{} {
	heard := make(chan struct{})
	s.box.Send(fence{cause: cause, heard: heard})
	return heard
}

// Drain stops admission and lets running requests go on; Drained tells when none is left.
func (s *Server) Drain(cause string) { s.box.Send(msg.Drain{Cause: cause}) }

// Drained is closed once a Drain found the rank without requests, or the rank is gone.
func (s *Server) Drained() <-chan struct{} { return s.drained }

func (s *Server) setDrained() { s.drainOnce.Do(func() { close(s.drained) }) }

// Status is the rank's account. Phase, node and process are the node's to fill in.
func (s *Server) Status() msg.RankStatus {
	st := s.stats.status(time.Now())
	st.Group, st.Rank, st.Epoch, st.Node, st.URL, st.Devices = s.spec.Group, s.spec.Rank, s.spec.Epoch, s.spec.Node, s.spec.Target.URL, s.spec.Devices
	return st
}

// Stop ends the stream (RecGone), the probes, the subscription and the actor, and waits for them. Idempotent.
func (s *Server) Stop(ctx context.Context) error {
	s.cancel()
	s.listening.close()
	s.box.Send(gone{})
	select {
	case <-s.box.Stopped():
	case <-ctx.Done():
		return fmt.Errorf("stop rank %s: %w", s.id, context.Cause(ctx))
	}
	s.probes.Wait() // every probe ends with s.ctx
	return nil
}

// probe runs work beside the actor, under the server's life and a deadline. Work posts its result back.
func (s *Server) probe(limit time.Duration, work func(ctx context.Context)) {
	s.probes.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, limit)
		defer cancel()
		work(ctx)
	})
}

// after posts m in d, unless the server was stopped by then (a stopped inbox drops it).
func (s *Server) after(d time.Duration, m any) *time.Timer {
	return time.AfterFunc(d, func() { s.box.Send(m) })
}

// application is the present file of the rank's application, as far as routing goes; the engine runs by the one it was started with.
func (s *Server) application() *app.Application {
	if s.present != nil {
		if a := s.present(s.spec.App.Name); a != nil {
			return a
		}
	}
	return s.spec.App
}

// toRankTime converts an instant to the rank's own clock. The result is never 0: in a record that would mean that no time is told.
func (s *Server) toRankTime(t time.Time) time.Duration { return max(t.Sub(s.made), 0) + 1 }

// tell reports to the node.
func (s *Server) tell(kind msg.ReplicaEventKind, cause string) {
	s.spec.Watcher.ReplicaEvent(msg.ReplicaEvent{
		Unit: s.spec.Unit, Epoch: s.spec.Epoch, Rank: s.spec.Rank, Incarnation: s.vitals.incarnation, Kind: kind, Cause: cause,
	})
}
