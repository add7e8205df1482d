package node

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/state"
)

// Replica is one rank's DPServer as its node uses it.
type Replica interface {
	Assign(ctx context.Context) error             // assign_rank: the RankAssigner confirms the grant
	Ready(ctx context.Context, f msg.Facts) error // opens admission and begins to watch the engine
	Fence(cause string) <-chan struct{}           // stops admission at once; closed when every sink knows
	Drain(cause string)                           // stops admission, running requests continue
	Drained() <-chan struct{}                     // closed when a Drain found no request left
	Stop(ctx context.Context) error               // ends the stream and the actor
	Status() client.RankStatus                    // the rank's status
	Controlled(effect openai.Effect)              // its engine was told so by a control call
}

// Config is the configuration of a node.
type Config struct {
	ID      string
	DataDir string // epochs, engines, their logs; "" = nothing survives
	// Replace writes a file of DataDir; nil = diskfile.Replace.
	Replace    func(path string, data []byte) error
	Executable string // starts simulated engines and shims; "" = this program, as it runs
	System     *actor.ActorSystem
	NewReplica func(spec msg.ReplicaSpec) (Replica, error)
	Assigner   msg.Assigner
	Launcher   Launcher          // nil = shims, or direct children where there are none
	Shims      *ShimConfig       // nil = engines end with this process
	Transport  http.RoundTripper // for probes of starting engines; nil = a new one
	Checks
	Rand   func() uint64 // draws incarnations
	Timers Timers
	Log    *slog.Logger

	Leader      msg.Leader        // grants the lease and takes the events
	Self        func() state.Node // this node's record
	Trouble     func() string     // warning for this node's status, "" = none; may be nil
	Store       msg.Store         // shows which units are superseded
	OnLeaseLoss LeaseLoss         // "" = Serve
	Addresses
}

// Addresses are those of this machine.
type Addresses struct {
	EngineHost string // where engines listen; "" = engine.Loopback
	Advertise  string // of rank 0 of a lockstep unit for other nodes; "" = none
}

// Checks tell a node whether what a unit was granted is free. The zero value asks the machine for ports, and
// takes devices for free when the unit's processes are gone.
type Checks struct {
	BindTest func(port int) error // nil = bind the given address
	Devices  Devices              // nil = nothing to check
}

// Timers of a node. A zero field means its default. The start deadline and the drain time are the
// application's.
type Timers struct {
	StartupTimeout time.Duration // overrides startup_timeout_s of every app; 0 = the app's own
	Probe          time.Duration // deadline of the probe before ready
	Adopt          time.Duration // for an engine of an earlier process that was ready to answer again
	PollFirst      time.Duration // first pause between two /health probes of a starting engine; doubles
	PollLast       time.Duration // longest such pause
	KillGrace      time.Duration // from SIGTERM to SIGKILL, in addition to the rest of the drain
	VerifyPoll     time.Duration // longest pause between two checks of a dead engine's group and ports
	VerifyNamed    time.Duration // after this the unit's reason names what still holds them
	DeviceWait     time.Duration // longest wait for the memory of devices after an engine's end
	Rendezvous     time.Duration // how long ranks of a lockstep unit wait for rank 0's address
	ReplicaStop    time.Duration // deadline of stopping one DPServer
	LeaseTTL       time.Duration // before the leader has said how long a lease lasts
	LeaseRenew     time.Duration // between two renewals, and between two rendezvous announcements
}

// Defaults. The start deadline has its default in package app.
const (
	DefaultStartupTimeout = 600 * time.Second
	DefaultProbe          = 10 * time.Second
	DefaultAdopt          = 30 * time.Second
	DefaultPollFirst      = 10 * time.Millisecond
	DefaultPollLast       = 200 * time.Millisecond
	DefaultKillGrace      = 5 * time.Second
	DefaultVerifyPoll     = 200 * time.Millisecond
	DefaultVerifyNamed    = 10 * time.Second
	DefaultDeviceWait     = 30 * time.Second
	DefaultRendezvous     = 120 * time.Second
	DefaultReplicaStop    = 5 * time.Second
	DefaultLeaseTTL       = state.LeaseTTL
	DefaultLeaseRenew     = 2 * time.Second
)

func (t Timers) withDefaults() Timers {
	t.Probe = cmp.Or(t.Probe, DefaultProbe)
	t.Adopt = cmp.Or(t.Adopt, DefaultAdopt)
	t.PollFirst = cmp.Or(t.PollFirst, DefaultPollFirst)
	t.PollLast = cmp.Or(t.PollLast, DefaultPollLast)
	t.KillGrace = cmp.Or(t.KillGrace, DefaultKillGrace)
	t.VerifyPoll = cmp.Or(t.VerifyPoll, DefaultVerifyPoll)
	t.VerifyNamed = cmp.Or(t.VerifyNamed, DefaultVerifyNamed)
	t.DeviceWait = cmp.Or(t.DeviceWait, DefaultDeviceWait)
	t.Rendezvous = cmp.Or(t.Rendezvous, DefaultRendezvous)
	t.ReplicaStop = cmp.Or(t.ReplicaStop, DefaultReplicaStop)
	t.LeaseTTL = cmp.Or(t.LeaseTTL, DefaultLeaseTTL)
	t.LeaseRenew = cmp.Or(t.LeaseRenew, DefaultLeaseRenew)
	return t
}
