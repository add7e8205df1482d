// Package dpserver is the actor behind one rank: it admits requests to the rank's engine, keeps the account of them,
// publishes both as one ordered stream, and watches whether the engine lives and moves on. See DESIGN.md.
package dpserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/engine"
	"github.com/dpserve/dpserve/engine/kvevents"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// mailboxBound is how many unread bounded messages a DPServer takes (CONTRACTS section 4): more than max_ongoing of any rank,
// so that a full mailbox means a stuck actor and not a burst.
const mailboxBound = 4096

// Engine is what a DPServer asks of its engine. engine.Client implements it.
type Engine interface {
	Health(ctx context.Context) (engine.Health, error)
	Canary(ctx context.Context, model string) error
	Counters(ctx context.Context) (engine.Counters, error)
}

// Factory makes the DPServers of one node.
type Factory struct {
	System      *actor.ActorSystem
	Hub         *Hub
	Assigner    msg.Assigner
	NewEngine   func(spec *msg.ReplicaSpec) Engine
	PrefillTime func(tokens int) time.Duration     // predicted, may be nil: stretches the stall timeout
	Secret      func() []byte                      // the cluster's: keys the hashes of KV events as the ingresses key theirs; nil = none
	App         func(name string) *app.Application // its present file, for routing; nil, or a nil answer: the one the rank was started with
	Address     string                             // of the node: where engines of other machines may dial their KV events to; "" = loopback only
	Replays     *kvevents.Replays                  // of KV events, shared by the ranks of a node; nil = unbounded
	Lease       func() bool                        // whether the node may admit now, asked for every request; nil = always
	Timers      Timers
	Log         *slog.Logger

	// DialEvents and ListenEvents replace the network of KV event sockets (nodes in one process); nil = TCP.
	DialEvents   func(ctx context.Context, addr string) (net.Conn, error)
	ListenEvents func(ctx context.Context, addr string) (net.Listener, error)
}

// New starts the DPServer of one rank: it refuses everything until Ready. It listens for the KV events of spec.Events when it returns,
// so that an engine that is started then finds it. The caller owns it and ends it with Stop.
func (f *Factory) New(spec msg.ReplicaSpec) (*Server, error) {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{
		spec: spec, hub: f.Hub, assigner: f.Assigner, engine: f.NewEngine(&spec), timers: f.Timers.withDefaults(), prefill: f.PrefillTime,
		id: routing.ID(spec.Group, spec.Rank), made: time.Now(), ctx: ctx, cancel: cancel, drained: make(chan struct{}),
		net:    network{address: f.Address, dial: f.DialEvents, listen: f.ListenEvents, replays: f.Replays},
		hasher: f.hasher(), present: f.App, lease: f.Lease, vitals: vitals{life: 1, source: spec.Events},
		log: f.Log.With(slog.String("app", spec.App.Name), slog.String("unit", spec.Unit), slog.Int("rank", spec.Rank), slog.Uint64("epoch", spec.Epoch)),
	}
	box, err := inbox.Spawn(f.System, s.name(), mailboxBound, func() inbox.Receiver { return newReplica(s) })
	if err != nil {
		cancel()
		return nil, err
	}
	s.box = box
	if spec.Events != nil {
		if err := s.listen(ctx, spec.Events, s.vitals.life); err != nil {
			cancel()
			box.Halt()
			<-box.Stopped() // it has received nothing yet: its name is free for another try
			return nil, fmt.Errorf("kv events of rank %s: %w", s.id, err)
		}
	}
	s.box.Send(begin{})
	return s, nil
}

func (f *Factory) hasher() kvindex.Hasher {
	if f.Secret == nil {
		return kvindex.NewHasher(nil)
	}
	return kvindex.NewHasher(f.Secret())
}

// NewClient is the NewEngine of real engines over one transport.
func NewClient(rt http.RoundTripper) func(spec *msg.ReplicaSpec) Engine {
	return func(spec *msg.ReplicaSpec) Engine {
		addr := engine.Addressing{Mode: spec.Target.Addressing, Selector: spec.Target.Selector}
		return engine.NewClient(spec.Target.URL, addr, engine.APIKey(spec.App), rt)
	}
}

// ReplicaID is the name under which a rank is assigned: app.group.position, the position being its place in the group's grant.
func ReplicaID(appName string, group, position int) string {
	return appName + "." + strconv.Itoa(group) + "." + strconv.Itoa(position)
}

// ErrNotGranted says that the RankAssigner's answer is not what the node was told to start.
var ErrNotGranted = errors.New("the rank is not granted to this replica")

// Assign asks the RankAssigner for the rank of this replica (assign_rank of the pattern) and compares it with the grant the
// node was started with. Idempotent.
func (s *Server) Assign(ctx context.Context) error {
	r, err := s.assigner.Assign(ctx, s.spec.App.Name, s.spec.Group, ReplicaID(s.spec.App.Name, s.spec.Group, s.spec.Rank))
	if err == nil {
		err = r.Err
	}
	if err != nil {
		return fmt.Errorf("assign rank %s: %w", s.id, err)
	}
	if r.Rank != s.spec.Rank || r.Epoch != s.spec.Epoch {
		return fmt.Errorf("%w: asked for rank %d at epoch %d, got rank %d at epoch %d", ErrNotGranted, s.spec.Rank, s.spec.Epoch, r.Rank, r.Epoch)
	}
	return nil
}

func healthPeriod(a *app.Application) time.Duration {
	return orDefault(a.HealthCheckPeriodS, DefaultHealthPeriod)
}

func healthTimeout(a *app.Application) time.Duration {
	return orDefault(a.HealthCheckTimeoutS, DefaultHealthTimeout)
}

func stallTimeout(a *app.Application) time.Duration {
	return orDefault(a.Engine.StallTimeoutS, DefaultStallTimeout)
}

func orDefault(seconds float64, value time.Duration) time.Duration {
	if seconds <= 0 {
		return value
	}
	return app.Seconds(seconds)
}
