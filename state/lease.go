package state

import (
	"maps"
	"slices"
	"time"
)

// Leases is the leader's table of who was heard of when. It lives in the leader's memory only: a new leader begins with an empty
// one and tracks every node, which gives each one whole TTL. It is not safe for concurrent use.
type Leases struct {
	ttl, grace time.Duration
	heard      map[string]time.Time // by node id
}

// NewLeases makes an empty table. ttl is how long a renewal lasts, grace what is waited on top; zero means LeaseTTL and LeaseGrace.
func NewLeases(ttl, grace time.Duration) *Leases {
	return &Leases{ttl: orDefault(ttl, LeaseTTL), grace: orDefault(grace, LeaseGrace), heard: map[string]time.Time{}}
}

// Seen notes a renewal. One that is older than the last changes nothing.
func (l *Leases) Seen(node string, now time.Time) {
	if last, known := l.heard[node]; !known || now.After(last) {
		l.heard[node] = now
	}
}

// Track makes a node known as if it had renewed now; one that is known keeps what it has.
func (l *Leases) Track(node string, now time.Time) {
	if _, known := l.heard[node]; !known {
		l.heard[node] = now
	}
}

// Forget drops a node: it was removed, or its loss is in the state.
func (l *Leases) Forget(node string) { delete(l.heard, node) }

// Overdue are the nodes, in order, that were silent for TTL and grace. They stay overdue until they are seen or forgotten.
func (l *Leases) Overdue(now time.Time) []string {
	var out []string
	for _, n := range slices.Sorted(maps.Keys(l.heard)) {
		if now.Sub(l.heard[n]) >= l.ttl+l.grace {
			out = append(out, n)
		}
	}
	return out
}

// Left is how long the node's lease still lasts, without the grace; 0 if it is over or the node is not known.
func (l *Leases) Left(node string, now time.Time) time.Duration {
	last, known := l.heard[node]
	if !known {
		return 0
	}
	return max(0, l.ttl-now.Sub(last))
}

// Due is when the next node is overdue if it stays silent, in the past if one is; zero = no node is known.
func (l *Leases) Due() time.Time {
	var due time.Time
	for _, last := range l.heard {
		if t := last.Add(l.ttl + l.grace); due.IsZero() || t.Before(due) {
			due = t
		}
	}
	return due
}
