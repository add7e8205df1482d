package node

import (
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

// Timers of a node. A zero field means its default. The start deadline and the drain time are the
// application's.
type Timers struct {
	StartupTimeout time.Duration // overrides startup_timeout_s of every app; 0 = the app's own
	Canary         time.Duration // deadline of the canary before ready
	PollFirst      time.Duration // first pause between two /health probes of a starting engine; doubles
	PollLast       time.Duration // longest such pause
	KillGrace      time.Duration // from SIGTERM to SIGKILL, in addition to the rest of the drain
	VerifyPoll     time.Duration // longest pause between two checks of a dead engine's group and ports
	VerifyNamed    time.Duration // after this the unit's reason names what still holds them
	Rendezvous     time.Duration // how long ranks of a lockstep unit wait for rank 0's address
	ReplicaStop    time.Duration // deadline of stopping one DPServer
	LeaseTTL       time.Duration // before the leader has said how long a lease lasts
	LeaseRenew     time.Duration // between two renewals, and between two rendezvous announcements
}

// Defaults. The start deadline has its default in package app.
const (
	DefaultStartupTimeout = 600 * time.Second
	DefaultCanary         = 10 * time.Second
	DefaultPollFirst      = 10 * time.Millisecond
	DefaultPollLast       = 200 * time.Millisecond
	DefaultKillGrace      = 5 * time.Second
	DefaultVerifyPoll     = 200 * time.Millisecond
	DefaultVerifyNamed    = 10 * time.Second
	DefaultRendezvous     = 120 * time.Second
	DefaultReplicaStop    = 5 * time.Second
	DefaultLeaseTTL       = state.LeaseTTL
	DefaultLeaseRenew     = 2 * time.Second
)

func (t Timers) withDefaults() Timers {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&t.Canary, DefaultCanary},
		{&t.PollFirst, DefaultPollFirst},
		{&t.PollLast, DefaultPollLast},
		{&t.KillGrace, DefaultKillGrace},
		{&t.VerifyPoll, DefaultVerifyPoll},
		{&t.VerifyNamed, DefaultVerifyNamed},
		{&t.Rendezvous, DefaultRendezvous},
		{&t.ReplicaStop, DefaultReplicaStop},
		{&t.LeaseTTL, DefaultLeaseTTL},
		{&t.LeaseRenew, DefaultLeaseRenew},
	} {
		if *d.field <= 0 {
			*d.field = d.value
		}
	}
	return t
}
