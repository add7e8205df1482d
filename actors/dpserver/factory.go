// Package dpserver is the actor behind one rank: it admits requests to the rank's engine, keeps the account
// of them, publishes both as one ordered stream, and watches whether the engine lives and moves on. See
// DESIGN.md.
package dpserver

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
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
	Canary(ctx context.Context, model string) error
	Counters(ctx context.Context) (engine.Counters, error)
}

// Factory makes the DPServers of one node.
type Factory struct {
	System    *actor.ActorSystem
	Hub       *Hub
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
		nodeParts: nodeParts{
			hub: f.Hub, assigner: f.Assigner, timers: f.Timers.withDefaults(), prefillTime: f.PrefillTime,
			currentApp: f.App, lease: f.Lease,
			net: eventNetwork{
				address: f.Address, dial: f.DialEvents, listen: f.ListenEvents, replays: f.Replays,
			},
			log: f.Log.With(slog.String("app", spec.App.Name), slog.String("unit", spec.Unit),
				slog.Int("rank", spec.Rank), slog.Uint64("epoch", spec.Epoch)),
		},
		spec: spec, engine: f.NewEngine(&spec), id: routing.ID(spec.Group, spec.Rank), hasher: f.hasher(),
		createdAt: time.Now(), ctx: ctx, cancel: cancel, drained: make(chan struct{}),
		state: actorState{subscriptionID: firstSubscription, eventSource: spec.Events},
	}
	s.orphans.post = func(m any) { s.box.Send(m) }
	s.stream.identity = msg.Record{App: spec.App.Name, Unit: spec.Unit, Rank: s.id, Epoch: spec.Epoch}
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
		return engine.NewClient(spec.Target.URL, addr, engine.APIKey(spec.App), rt)
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

func secondsOf(value, otherwise float64) time.Duration {
	if value <= 0 {
		value = otherwise
	}
	return app.Seconds(value)
}

// Timers are the times of a DPServer; the zero value of a field means its default. The period of the health
// probe and the stall timeout are settings of the application.
type Timers struct {
	Canary time.Duration // deadline of a canary
	// from the end of an admission's context to the end of its ticket, if no Done came
	TicketLapse  time.Duration
	BusyHold     time.Duration // how long an engine_busy answer keeps a rank full at most
	TripBackoff  time.Duration // before the first canary of a tripped rank; each later wait doubles
	TripCeiling  time.Duration // the longest such wait
	CounterLimit time.Duration // deadline of one read of /metrics
	Scrape       time.Duration // between two reads, while something needs their values
	// events count as silent when requests have ended for that long without an event
	Silence time.Duration
}

// Defaults of Timers.
const (
	defaultCanary       = 10 * time.Second
	defaultTicketLapse  = 5 * time.Second
	defaultBusyHold     = time.Second
	defaultTripBackoff  = time.Second
	defaultTripCeiling  = 64 * time.Second
	defaultCounterLimit = 500 * time.Millisecond
	defaultScrape       = time.Second
	defaultSilence      = 30 * time.Second
)

// Counts of the trip and of the stall check.
const (
	tripAfter   = 5 // failures in a row that stop admission
	fenceAfter  = 3 // failed canaries in a row that fence an owned engine
	stallFactor = 3 // the stall timeout is at least this times the predicted time of the open prefill
)

func (t Timers) withDefaults() Timers {
	setDefault(&t.Canary, defaultCanary)
	setDefault(&t.TicketLapse, defaultTicketLapse)
	setDefault(&t.BusyHold, defaultBusyHold)
	setDefault(&t.TripBackoff, defaultTripBackoff)
	setDefault(&t.TripCeiling, defaultTripCeiling)
	setDefault(&t.CounterLimit, defaultCounterLimit)
	setDefault(&t.Scrape, defaultScrape)
	setDefault(&t.Silence, defaultSilence)
	return t
}

func setDefault(d *time.Duration, value time.Duration) {
	if *d <= 0 {
		*d = value
	}
}
