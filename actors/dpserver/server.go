// Package dpserver is the actor behind one rank: it admits requests to the rank's engine, keeps the account
// of them, publishes both as one ordered stream, and watches whether the engine lives and moves on. See
// DESIGN.md.
package dpserver

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// mailboxBound is how many unread bounded messages a DPServer holds. It is above max_ongoing of any rank, so
// that a full mailbox means an actor that does not run, and not a burst of requests.
const mailboxBound = 4096

// Engine is the part of an engine client that a DPServer uses. engine.Client implements it.
type Engine interface {
	Health(ctx context.Context) (engine.Health, error)
	Probe(ctx context.Context, model string) error
	Counters(ctx context.Context) (engine.Counters, error)
	Models(ctx context.Context) ([]engine.Model, error)
}

// Factory makes the DPServers of one node.
type Factory struct {
	System    *actor.ActorSystem
	Hub       *msg.Hub
	Assigner  msg.Assigner
	NewEngine func(spec *msg.ReplicaSpec) Engine
	// predicted; may be nil. It stretches the stall timeout.
	PrefillTime func(tokens int) time.Duration
	// of the cluster: it keys the hashes of KV events, as it keys those of the ingresses; nil: none
	Secret func() []byte
	// the current file of an application, for routing; nil, or a nil answer: the file that the rank was
	// started with
	App func(name string) *app.Application
	// of the node: engines on other machines may dial their KV events to it; "": loopback only
	Address string
	Replays *kvevents.Replays // of KV events, shared by the ranks of a node; nil: unbounded
	Lease   func() bool       // whether the node may admit now; called for every request; nil: always
	Timers  Timers
	Log     *slog.Logger

	// DialEvents and ListenEvents replace the network of KV event sockets (nodes in one process); nil = TCP.
	DialEvents   func(ctx context.Context, addr string) (net.Conn, error)
	ListenEvents func(ctx context.Context, addr string) (net.Listener, error)
}

// New starts the DPServer of one rank, which refuses every request until Ready. When it returns, the rank
// listens for the KV events of spec.Events, so that an engine that is started next can connect. The caller
// ends it with Stop.
func (f *Factory) New(spec msg.ReplicaSpec) (*Server, error) {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{
		node: f, timers: f.Timers.withDefaults(),
		log: f.Log.With(slog.String("app", spec.App.PoolName()), slog.String("unit", spec.Unit),
			slog.Int("rank", spec.Rank), slog.Uint64("epoch", spec.Epoch)),
		spec: spec, engine: f.NewEngine(&spec), id: routing.ID(spec.Group, spec.Rank), hasher: f.hasher(),
		createdAt: time.Now(), ctx: ctx, cancel: cancel, drained: make(chan struct{}),
		state: actorState{
			subscriptionID: firstSubscription, eventSource: spec.Events,
			facts: msg.Facts{Adapters: engine.AdaptersOf(spec.App, nil)}, // until its engine is known
		},
	}
	s.orphans.post = func(m any) { s.box.Send(m) }
	s.stream.identity = msg.Record{App: spec.App.PoolName(), Unit: spec.Unit, Rank: s.id, Epoch: spec.Epoch}
	var err error
	s.box, err = inbox.Spawn(f.System, s.name(), mailboxBound, func() inbox.Receiver { return newReplica(s) })
	if err != nil {
		cancel()
		return nil, err
	}
	s.recorder.box, err = spawnRecorder(s, f.System)
	if err != nil {
		cancel()
		s.box.Halt()
		return nil, err
	}
	if spec.Events != nil {
		if err := s.replaceSubscription(ctx, spec.Events, s.state.subscriptionID); err != nil {
			cancel()
			s.box.Halt()
			s.recorder.box.Halt()
			<-s.box.Stopped() // nothing is left of it, so the names are free for another try
			<-s.recorder.box.Stopped()
			return nil, fmt.Errorf("kv events of rank %s: %w", s.id, err)
		}
	}
	s.box.Send(registerRequest{})
	return s, nil
}

func (f *Factory) hasher() kvindex.Hasher {
	if f.Secret == nil {
		return kvindex.NewHasher(nil)
	}
	return kvindex.NewHasher(f.Secret())
}

// NewClient returns the NewEngine of real engines over one transport.
func NewClient(rt http.RoundTripper) func(spec *msg.ReplicaSpec) Engine {
	return func(spec *msg.ReplicaSpec) Engine {
		addr := engine.Addressing{Mode: spec.Target.Addressing, Selector: spec.Target.Selector}
		return engine.NewClient(spec.Target.URL, addr, spec.Target.Access, rt)
	}
}

// standard has the settings of an application that leaves them out. A deployed one has them all.
var standard = app.Default()

func healthPeriod(a *app.Application) time.Duration {
	return secondsOf(a.HealthCheckPeriodS, standard.HealthCheckPeriodS)
}

func healthTimeout(a *app.Application) time.Duration {
	return secondsOf(a.HealthCheckTimeoutS, standard.HealthCheckTimeoutS)
}

func stallTimeout(a *app.Application) time.Duration {
	return secondsOf(a.Engine.StallTimeoutS, standard.Engine.StallTimeoutS)
}

func betweenTokens(a *app.Application) time.Duration {
	return secondsOf(a.Timeouts.BetweenTokensS, standard.Timeouts.BetweenTokensS)
}

func secondsOf(value, otherwise float64) time.Duration {
	if value <= 0 {
		value = otherwise
	}
	return app.Seconds(value)
}

// Timers are the times of a DPServer; the zero value of a field means its default. The period of the health
// probe and the stall timeout are settings of the application.
type Timers struct {
	Probe time.Duration // deadline of a probe
	// from the end of an admission's context to the end of its ticket, if no Done came
	TicketLapse     time.Duration
	EjectionBackoff time.Duration // before the first probe of an ejected rank; each later wait doubles
	EjectionCeiling time.Duration // the longest such wait
	CounterLimit    time.Duration // deadline of one read of /metrics
	Scrape          time.Duration // between two reads, while something needs their values
	// events count as silent when requests have ended for that long without an event
	Silence time.Duration
}

// Counts of the ejection and of the stall check.
const (
	ejectAfter     = 5  // failures in a row that eject a rank
	ejectionWindow = 20 // last answers, of which more than half eject a rank if they failed
	fenceAfter     = 3  // failed probes in a row that fence an owned engine
	stallFactor    = 3  // the stall timeout is at least this times the predicted time of the open prefill
)

func (t Timers) withDefaults() Timers {
	for _, timer := range []struct {
		of       *time.Duration
		standard time.Duration
	}{
		{&t.Probe, 10 * time.Second},
		{&t.TicketLapse, 5 * time.Second},
		{&t.EjectionBackoff, time.Second},
		{&t.EjectionCeiling, 64 * time.Second},
		{&t.CounterLimit, 500 * time.Millisecond},
		{&t.Scrape, time.Second},
		{&t.Silence, 30 * time.Second},
	} {
		if *timer.of <= 0 {
			*timer.of = timer.standard
		}
	}
	return t
}

// Server is what a node holds of one DPServer. It outlives a panic of the actor inside it.
type Server struct {
	node      *Factory // what its node gives each of its DPServers
	timers    Timers
	log       *slog.Logger
	spec      msg.ReplicaSpec
	id        routing.RankID
	engine    Engine
	hasher    kvindex.Hasher
	box       *inbox.Inbox // of the replica
	createdAt time.Time    // the origin of the rank's clock

	// the life of the actor's own checks; Stop cancels it
	ctx    context.Context //nolint:containedctx // the life of the actor's own checks, cancelled by Stop
	cancel context.CancelFunc
	checks sync.WaitGroup

	drained   chan struct{}
	drainOnce sync.Once

	state         actorState // only the actor's goroutine reads and writes it
	stats         stats
	orphans       orphans
	subscriptions subscriptions
	stream        stream
	recorder      recorderHandle
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
	return fmt.Sprintf("dpserver/%s/%s/%d", s.spec.App.PoolName(), s.id, s.spec.Epoch)
}

var _ msg.Source = (*Server)(nil)

// List implements msg.Source: the actor sends its snapshot soon after.
func (s *Server) List(sub *msg.Subscription) { s.box.Send(subscribeRequest{sub}) }

// Forget implements msg.Source.
func (s *Server) Forget(sub *msg.Subscription) { s.box.Send(unsubscribeRequest{sub}) }

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

// Controlled says what a control call did to the rank's engine.
func (s *Server) Controlled(effect openai.Effect) { s.box.Send(controlledRequest{effect}) }

// Drained is closed when a Drain found the rank without requests, or the rank has ended.
func (s *Server) Drained() <-chan struct{} { return s.drained }

// Status is the rank's account. The node fills in the phase, its name and the process.
func (s *Server) Status() client.RankStatus {
	st := s.stats.status(time.Now())
	st.Group, st.Rank, st.Epoch, st.Node, st.URL, st.Devices = s.spec.Group, s.spec.Rank, s.spec.Epoch,
		s.spec.Node, s.spec.Target.URL, s.spec.Devices
	return st
}

// Stop ends the stream (RecGone), the checks, the subscription and the actors, and waits for them. It is
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
	s.checks.Wait() // every check ends when s.ctx does
	return nil
}

// runCheck runs work beside the actor, until the Server stops or the limit is over. Work posts its result to
// the actor.
func (s *Server) runCheck(limit time.Duration, work func(ctx context.Context)) {
	s.checks.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, limit)
		defer cancel()
		work(ctx)
	})
}

// readCounters reads the engine's counters.
func (s *Server) readCounters(ctx context.Context, round uint64) counterRead {
	ctx, cancel := context.WithTimeout(ctx, s.timers.CounterLimit)
	defer cancel()
	c, err := s.engine.Counters(ctx)
	return counterRead{round, c, err}
}

// stopTimer stops a timer that may not have been set yet.
func stopTimer(t *time.Timer) {
	if t != nil {
		t.Stop()
	}
}

// sendAfter posts m after d. A stopped inbox drops it.
func (s *Server) sendAfter(d time.Duration, m any) *time.Timer {
	return time.AfterFunc(d, func() { s.box.Send(m) })
}

// sendOnBeat posts m at the last multiple of d/beats that is at most d away. So the timers of many ranks end
// at the same times, and a node whose engines are idle wakes up less often.
func (s *Server) sendOnBeat(d time.Duration, m any) *time.Timer {
	return s.sendAfter(d-time.Duration(time.Now().UnixNano())%max(d/beats, 1), m)
}

const beats = 4 // timers end at multiples of a quarter of their period

// currentApplication is the current file of the rank's application, for routing only: the engine runs with
// the file that it was started with.
func (s *Server) currentApplication() *app.Application {
	if s.node.App != nil {
		if a := s.node.App(s.spec.App.PoolName()); a != nil {
			return a
		}
	}
	return s.spec.App
}

// toRankTime converts an instant to the rank's own clock. The result is never 0, because a record with 0 has
// no time.
func (s *Server) toRankTime(t time.Time) time.Duration { return max(t.Sub(s.createdAt), 0) + 1 }

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
	r, err := s.node.Assigner.Assign(ctx, s.spec.App.PoolName(), s.spec.Group,
		msg.ReplicaID(s.spec.App.PoolName(), s.spec.Group, s.spec.Rank))
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
