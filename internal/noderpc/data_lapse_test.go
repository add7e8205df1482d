package noderpc

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/asynkron/protoactor-go/actor"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/dpserver"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
)

// healthyEngine is an engine without faults.
type healthyEngine struct{}

func (healthyEngine) Health(context.Context) (engine.Health, error) { return engine.Alive, nil }
func (healthyEngine) Canary(context.Context, string) error          { return nil }
func (healthyEngine) Counters(context.Context) (engine.Counters, error) {
	return engine.Counters{}, nil
}

// replicaEvents ignores the events.
type replicaEvents struct{}

func (replicaEvents) ReplicaEvent(msg.ReplicaEvent) {}

// TestDataIngressKilled: a ticket whose ingress dies lapses, and the engine's connection is closed at once.
func TestDataIngressKilled(t *testing.T) {
	answers, came, left := lateEngine()
	log := slog.New(slog.DiscardHandler)
	system := actor.NewActorSystem(actor.WithLoggerFactory(func(*actor.ActorSystem) *slog.Logger {
		return log
	}))
	defer system.Shutdown()
	f := &dpserver.Factory{
		System: system, Hub: dpserver.NewHub(), Log: log,
		Timers:    dpserver.Timers{TicketLapse: 30 * time.Millisecond},
		NewEngine: func(*msg.ReplicaSpec) dpserver.Engine { return healthyEngine{} },
	}
	g := newDataRig(t, dataOptions{engine: answers, config: func(c *DataConfig) { c.Feed = f.Hub }})
	a := &app.Application{Name: "demo", Engine: app.Engine{Kind: app.KindSim}}
	rank, err := f.New(msg.ReplicaSpec{
		App: a, Unit: "demo/0", Rank: 1, Epoch: 3, Node: dataTestNode,
		Target: g.target, Watcher: replicaEvents{},
	})
	require.NoError(t, err)
	defer func() { require.NoError(t, rank.Stop(context.Background())) }()
	require.NoError(t, rank.Ready(t.Context(), msg.Facts{Incarnation: 9, MaxOngoing: 2}))
	id := newDispatch().Rank.ID
	dataEventually(t, func() bool { return g.server.table.find("demo", "demo/0", id) != nil },
		"the rank is known")

	resp, rep, err := g.client.Ask(t.Context(), g.dispatch())
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	assert.EqualValues(t, 9, rep.Ticket.Incarnation)
	assert.NotZero(t, rep.Ticket.Seq)
	<-came
	dataEventually(t, func() bool { return rank.Status().InFlight == 1 }, "the ticket counts")
	stale := g.dispatch()
	stale.Admit.Epoch = 2
	assert.Equal(t, msg.StaleEpoch, g.send(stale).reply.Refusal)
	hung := g.dispatch()
	hung.Header = map[string][]string{"X-Mute": {"1"}}
	go func() { _ = g.send(hung) }()
	<-came
	assert.Equal(t, msg.Full, g.send(g.dispatch()).reply.Refusal)
	require.NoError(t, g.http.Close()) // what a killed ingress looks like from here
	<-left
	<-left
	dataEventually(t, func() bool { return rank.Status().InFlight == 0 }, "both tickets have lapsed")
}
