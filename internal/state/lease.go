package state

import (
	"maps"
	"slices"
	"time"
)

// Leases is the leader's table of the last renewal of each node. It lives in the leader's memory only. A new
// leader begins with an empty table and tracks every node, which gives each node one whole TTL. Leases is not
// safe for concurrent use.
type Leases struct {
	ttl, grace  time.Duration
	lastRenewal map[string]time.Time // by node id
}

// NewLeases makes an empty table. ttl is how long a renewal lasts, grace is added before a node is overdue;
// zero means LeaseTTL and LeaseGrace.
func NewLeases(ttl, grace time.Duration) *Leases {
	return &Leases{
		ttl: orDefault(ttl, LeaseTTL), grace: orDefault(grace, LeaseGrace),
		lastRenewal: map[string]time.Time{},
	}
}

// Seen records a renewal. A renewal older than the last one changes nothing.
func (l *Leases) Seen(node string, now time.Time) {
	if last, known := l.lastRenewal[node]; !known || now.After(last) {
		l.lastRenewal[node] = now
	}
}

// Track adds a node as if it had renewed now. It changes nothing for a node in the table.
func (l *Leases) Track(node string, now time.Time) {
	if _, known := l.lastRenewal[node]; !known {
		l.lastRenewal[node] = now
	}
}

// Forget drops a node that was removed, or whose loss is in the state.
func (l *Leases) Forget(node string) { delete(l.lastRenewal, node) }

// Overdue returns the sorted nodes that were silent for TTL and grace. They stay overdue until Seen or
// Forget.
func (l *Leases) Overdue(now time.Time) []string {
	var out []string
	for _, n := range slices.Sorted(maps.Keys(l.lastRenewal)) {
		if now.Sub(l.lastRenewal[n]) >= l.ttl+l.grace {
			out = append(out, n)
		}
	}
	return out
}

// Left returns how long the node's lease still lasts, without the grace; 0 if it is over or the node is
// unknown.
func (l *Leases) Left(node string, now time.Time) time.Duration {
	last, known := l.lastRenewal[node]
	if !known {
		return 0
	}
	return max(0, l.ttl-now.Sub(last))
}

// Due returns when the next node becomes overdue if it stays silent. The time is in the past if a node is
// overdue already, and zero if the table is empty.
func (l *Leases) Due() time.Time {
	var due time.Time
	for _, last := range l.lastRenewal {
		if t := last.Add(l.ttl + l.grace); due.IsZero() || t.Before(due) {
			due = t
		}
	}
	return due
}
