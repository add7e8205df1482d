package cluster

import "time"

// Timers of a single voter without a node port. They bound how long a suspended leader still takes itself for
// one. It cannot lose an election against another node, so short timers cost nothing.
const (
	aloneHeartbeat = 200 * time.Millisecond
	aloneElection  = 200 * time.Millisecond
	aloneLease     = 100 * time.Millisecond
)

// Timers of a node with a node port. With shorter ones three voters on two busy cores change the leader
// without need.
const (
	manyHeartbeat = time.Second
	manyElection  = time.Second
	manyLease     = 500 * time.Millisecond
)

// Timers are raft's. A follower without a message of its leader for Heartbeat to twice as long starts an
// election, and repeats it after Election. A leader without answers of a majority for Lease stops leading.
type Timers struct {
	Heartbeat time.Duration
	Election  time.Duration
	Lease     time.Duration // at most Heartbeat
}

// DefaultTimers returns the timers of a node with a node port, or without.
func DefaultTimers(port bool) Timers {
	if port {
		return Timers{Heartbeat: manyHeartbeat, Election: manyElection, Lease: manyLease}
	}
	return Timers{Heartbeat: aloneHeartbeat, Election: aloneElection, Lease: aloneLease}
}
