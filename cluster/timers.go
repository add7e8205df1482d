package cluster

import "time"

// Timers of a single voter without a node port (CONTRACTS 7). They bound how long a leader that stalls keeps believing; there
// is nobody to lose an election against, so short ones cost nothing.
const (
	aloneHeartbeat = 200 * time.Millisecond
	aloneElection  = 200 * time.Millisecond
	aloneLease     = 100 * time.Millisecond
)

// Timers of a node with a node port: three voters on two busy cores flap below (TRAPS 22).
const (
	manyHeartbeat = time.Second
	manyElection  = time.Second
	manyLease     = 500 * time.Millisecond
)

// Timers are raft's. A follower that has not heard of its leader for Heartbeat to twice as long asks for votes and asks again
// after Election; a leader that has not heard of a majority for Lease stops being one.
type Timers struct {
	Heartbeat time.Duration
	Election  time.Duration
	Lease     time.Duration // at most Heartbeat
}

// DefaultTimers are those of a node with a node port, or without.
func DefaultTimers(port bool) Timers {
	if port {
		return Timers{Heartbeat: manyHeartbeat, Election: manyElection, Lease: manyLease}
	}
	return Timers{Heartbeat: aloneHeartbeat, Election: aloneElection, Lease: aloneLease}
}
