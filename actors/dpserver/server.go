package dpserver

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// Server is what a node holds of one DPServer. It outlives a panic of the actor inside it.
type Server struct {
	nodeParts
	spec      msg.ReplicaSpec
	id        routing.RankID
	engine    Engine
	hasher    kvindex.Hasher
	box       *inbox.Inbox // of the replica
	createdAt time.Time    // the origin of the rank's clock

	// the life of the actor's own probes; Stop cancels it
	ctx    context.Context //nolint:containedctx // the life of the actor's own probes, cancelled by Stop
	cancel context.CancelFunc
	probes sync.WaitGroup

	drained   chan struct{}
	drainOnce sync.Once

	state         actorState // only the actor's goroutine reads and writes it
	stats         stats
	orphans       orphans
	subscriptions subscriptions
	stream        stream
	recorder      recorderHandle
}

// nodeParts are what a node gives each of its DPServers.
type nodeParts struct {
	hub         *Hub
	assigner    msg.Assigner
	timers      Timers
	prefillTime func(tokens int) time.Duration
	currentApp  func(name string) *app.Application // nil: spec.App
	lease       func() bool                        // nil: the node may always admit
	net         eventNetwork
	log         *slog.Logger
}

// actorState survives a panic of the actor: the new actor continues with it and with an empty account.
type actorState struct {
	isRegistered bool // the Hub knows the rank
	phase        phase
	incarnation  uint64
	facts        msg.Facts // of the incarnation, updated with the engine's own reports
	lastTicket   uint64
	lastRound    uint64 // of the health monitor: it identifies late results of an earlier monitor

	eventSource    *msg.EventSource // of the engine's KV events; nil: the engine publishes none
	subscriptionID uint64           // of the current subscription to KV events: older events are dropped
	knownRestarts  uint64           // engine restarts that the subscription counted and the actor has handled
}

// name is the actor's name. It contains the epoch, because a predecessor may still be stopping.
func (s *Server) name() string {
	return fmt.Sprintf("dpserver/%s/%s/%d", s.spec.App.Name, s.id, s.spec.Epoch)
}

// Mailbox is where ingresses post to.
func (s *Server) Mailbox() msg.Mailbox { return s.box }

// Ready opens admission for a new incarnation of the engine and starts to monitor it. It returns when the
// actor has applied it, so that later messages find the rank open.
func (s *Server) Ready(ctx context.Context, f msg.Facts) error {
	taken := make(chan struct{})
	s.box.Send(readyRequest{facts: f, done: taken})
	select {
	case <-taken:
		return nil
	case <-s.box.Stopped():
		return inbox.ErrStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Fence stops admission at once. The channel is closed when every sink has the record. It may never be closed
// if the actor stops.
func (s *Server) Fence(cause string) <-chan struct{} {
	heard := make(chan struct{})
	s.box.Send(fenceRequest{cause: cause, done: heard})
	return heard
}

// Drain stops admission and lets running requests finish. Drained says when none is left.
func (s *Server) Drain(cause string) { s.box.Send(drainRequest{cause}) }

// Drained is closed when a Drain found the rank without requests, or the rank has ended.
func (s *Server) Drained() <-chan struct{} { return s.drained }

func (s *Server) closeDrained() { s.drainOnce.Do(func() { close(s.drained) }) }

// Status is the rank's account. The node fills in the phase, its name and the process.
func (s *Server) Status() client.RankStatus {
	st := s.stats.status(time.Now())
	st.Group, st.Rank, st.Epoch, st.Node, st.URL, st.Devices = s.spec.Group, s.spec.Rank, s.spec.Epoch,
		s.spec.Node, s.spec.Target.URL, s.spec.Devices
	return st
}

// Stop ends the stream (RecGone), the probes, the subscription and the actors, and waits for them. It is
// idempotent.
func (s *Server) Stop(ctx context.Context) error {
	s.cancel()
	s.subscriptions.close()
	s.box.Send(stopRequest{})
	s.recorder.box.Send(recorderStop{})
	for _, box := range []*inbox.Inbox{s.box, s.recorder.box} {
		select {
		case <-box.Stopped():
		case <-ctx.Done():
			return fmt.Errorf("stop rank %s: %w", s.id, context.Cause(ctx))
		}
	}
	s.probes.Wait() // every probe ends when s.ctx does
	return nil
}

// runProbe runs work beside the actor, until the Server stops or the limit is over. Work posts its result to
// the actor.
func (s *Server) runProbe(limit time.Duration, work func(ctx context.Context)) {
	s.probes.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, limit)
		defer cancel()
		work(ctx)
	})
}

// sendAfter posts m after d. A stopped inbox drops it.
func (s *Server) sendAfter(d time.Duration, m any) *time.Timer {
	return time.AfterFunc(d, func() { s.box.Send(m) })
}

// currentApplication is the current file of the rank's application, for routing only: the engine runs with
// the file that it was started with.
func (s *Server) currentApplication() *app.Application {
	if s.currentApp != nil {
		if a := s.currentApp(s.spec.App.Name); a != nil {
			return a
		}
	}
	return s.spec.App
}

// toRankTime converts an instant to the rank's own clock. The result is never 0, because a record with 0 has
// no time.
func (s *Server) toRankTime(t time.Time) time.Duration { return max(t.Sub(s.createdAt), 0) + 1 }

// reportToNode reports to the node.
func (s *Server) reportToNode(kind msg.ReplicaEventKind, cause string) {
	s.spec.Watcher.ReplicaEvent(msg.ReplicaEvent{
		Unit: s.spec.Unit, Epoch: s.spec.Epoch, Rank: s.spec.Rank, Incarnation: s.state.incarnation,
		Kind: kind, Cause: cause,
	})
}

// errNotGranted says that the RankAssigner's answer differs from the grant that the node was started with.
var errNotGranted = errors.New("the rank is not granted to this replica")

// Assign asks the RankAssigner for the rank of this replica and compares it with the grant that the node was
// started with. It is idempotent.
func (s *Server) Assign(ctx context.Context) error {
	r, err := s.assigner.Assign(ctx, s.spec.App.Name, s.spec.Group,
		msg.ReplicaID(s.spec.App.Name, s.spec.Group, s.spec.Rank))
	if err == nil {
		err = r.Err
	}
	if err != nil {
		return fmt.Errorf("assign rank %s: %w", s.id, err)
	}
	if r.Rank != s.spec.Rank || r.Epoch != s.spec.Epoch {
		return fmt.Errorf("%w: asked for rank %d at epoch %d, got rank %d at epoch %d", errNotGranted,
			s.spec.Rank, s.spec.Epoch, r.Rank, r.Epoch)
	}
	return nil
}

// drawIncarnation draws the random number of one engine process. 0 means no process.
func drawIncarnation() uint64 {
	var b [8]byte
	for {
		_, _ = rand.Read(b[:]) // never fails since Go 1.24
		if v := binary.LittleEndian.Uint64(b[:]); v != 0 {
			return v
		}
	}
}

func formatIncarnation(v uint64) string { return fmt.Sprintf("%016x", v) }
