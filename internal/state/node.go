package state

import (
	"maps"
	"slices"
	"time"
)

// Role is what a node does for its cluster.
type Role string

// The roles. A node has one or more.
const (
	RoleControl Role = "control" // takes part in consensus
	RoleWorker  Role = "worker"  // runs ranks
	RoleIngress Role = "ingress" // answers clients
)

// Node is one machine of the cluster. A data dir gets its UID when it is made, so a machine with the same
// name and another UID is a different node.
type Node struct {
	ID        string `json:"id"`
	UID       string `json:"uid"`
	Advertise string `json:"advertise"` // host or IP for engines of other nodes; "" = loopback only
	Address   string `json:"address"`   // HOST:PORT of the node port; "" = it has none
	Gossip    string `json:"gossip"`    // HOST:PORT; "" = none
	Roles     []Role `json:"roles"`
	Zone      string `json:"zone,omitempty"`
	Version   string `json:"version,omitempty"`
	// GossipSum is the GossipKeySum of the key that the node has taken; "" = it has none yet.
	GossipSum string `json:"gossip_sum,omitempty"`
	// Key is the hash of the public key of its certificate; "" = it stands alone.
	Key       string    `json:"key,omitempty"`
	Level     int       `json:"level,omitempty"` // what its version can read of the log: Level; 0 = 1
	Resources Resources `json:"offer"`

	Lost     bool   `json:"lost,omitempty"`     // silent for its lease and 2 s: its units are released
	Reason   string `json:"reason,omitempty"`   // of Lost
	Draining bool   `json:"draining,omitempty"` // gets no new ranks, gives those it has away
	// unix ms after which running streams are cut; 0 = each app's grace
	DrainBy int64 `json:"drain_by,omitempty"`
}

// Resources is what placement may use of a node.
type Resources struct {
	Slots   int               `json:"slots"`
	Devices []int             `json:"devices,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
	PortLo  int               `json:"port_lo"`
	PortHi  int               `json:"port_hi"`
	// Taken are ports of the range that other programs hold: no unit gets them.
	Taken []PortRange `json:"taken,omitempty"`
	// Near are sets of devices that are close to each other, the closest first; placement.Node says more.
	Near [][]int `json:"near,omitempty"`
	// Models say what the devices are, for people. Devices that were only declared are in none.
	Models []DeviceModel `json:"models,omitempty"`
}

// PortRange is a range of ports, both ends included.
type PortRange struct {
	Lo int `json:"lo"`
	Hi int `json:"hi"`
}

// MaxTakenRanges bounds the ranges of taken ports in a node's record.
const MaxTakenRanges = 64

// JoinPorts puts ports, in ascending order, into at most MaxTakenRanges ranges. Free ports between two taken
// ones count as taken where the list would be longer otherwise.
func JoinPorts(ports []int) []PortRange {
	for gap := 1; ; gap *= 2 {
		var out []PortRange
		for _, p := range ports {
			if last := len(out) - 1; last >= 0 && p-out[last].Hi <= gap {
				out[last].Hi = p
			} else {
				out = append(out, PortRange{p, p})
			}
		}
		if len(out) <= MaxTakenRanges {
			return out
		}
	}
}

// HasTaken reports whether other programs hold ports of the block.
func (r *Resources) HasTaken(b Block) bool {
	for _, t := range r.Taken {
		if t.Lo < b.Base+b.Size && b.Base <= t.Hi {
			return true
		}
	}
	return false
}

// DeviceModel is one model of device, and which devices of the node are of it.
type DeviceModel struct {
	Kind      string `json:"kind"` // nvidia | amd
	Name      string `json:"name"`
	MemoryMiB int64  `json:"memory_mib,omitempty"` // of each; 0 = not known
	Driver    string `json:"driver,omitempty"`     // its version
	Devices   []int  `json:"devices"`
}

// PutNode records a node or updates its record: after a join, a new address, or a change of its resources.
// Lost, Draining and DrainBy stay, and Key if the command has none. Refusals: ErrNodeTaken (another UID holds
// the name, or the record has another key), ErrNodeRemoved (the UID was removed), ErrRolesFixed.
type PutNode struct {
	Node Node `json:"node"`
	// AnyRoles lets a known node change its roles. Only a node whose certificate does not fix its roles may
	// set it: one that stands alone, or one that begins its cluster.
	AnyRoles bool `json:"any_roles,omitempty"`
}

// NodeRef names a node for NodeLost and NodeBack.
type NodeRef struct {
	Node   string `json:"node"`
	UID    string `json:"uid"`
	Reason string `json:"reason,omitempty"`
}

// DrainNode begins a node's drain, or ends it (Undo).
type DrainNode struct {
	Node string `json:"node"`
	By   int64  `json:"by,omitempty"` // unix ms; 0 = each app's grace
	Undo bool   `json:"undo,omitempty"`
}

// RemoveNode forgets a node for good: its UID never comes back, its name is free. Apply refuses it while
// units hold something on the node (ErrUnitsLeft), for the last node with role control, and while maxRemoved
// nodes were removed within RemovedFor (ErrTooManyRemoved), because forgetting one of them would make its
// certificate valid again.
type RemoveNode struct {
	Node string `json:"node"`
	Now  int64  `json:"now,omitempty"` // unix ms, of the proposer
}

// RemovedFor is how long the state remembers a removed node at least. It is longer than any certificate
// lives.
const RemovedFor = 31 * 24 * time.Hour

// LeaseTTL is how long a renewed lease lasts. The leader waits LeaseGrace longer before it takes the node for
// lost.
const (
	LeaseTTL   = 10 * time.Second
	LeaseGrace = 2 * time.Second
)

// Leases is the leader's table of the last renewal of each node. It lives in the leader's memory only. A new
// leader begins with an empty table and tracks every node, which gives each node one whole TTL. Leases is not
// safe for concurrent use.
type Leases struct {
	ttl, grace  time.Duration
	lastRenewal map[string]time.Time // by node id
	kept        map[string]time.Time // by node id: until then the node's silence is expected
}

// NewLeases makes an empty table. ttl is how long a renewal lasts, grace is added before a node is overdue;
// zero means LeaseTTL and LeaseGrace.
func NewLeases(ttl, grace time.Duration) *Leases {
	return &Leases{
		ttl: orDefault(ttl, LeaseTTL), grace: orDefault(grace, LeaseGrace),
		lastRenewal: map[string]time.Time{}, kept: map[string]time.Time{},
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

// Keep says that the node's process is replaced and its silence is expected until then: it is not overdue
// before. A zero time ends that.
func (l *Leases) Keep(node string, until time.Time) {
	if until.IsZero() {
		delete(l.kept, node)
		return
	}
	l.kept[node] = until
}

// IsKept reports whether the node's silence is expected.
func (l *Leases) IsKept(node string, now time.Time) bool { return now.Before(l.kept[node]) }

// Forget drops a node that was removed, or whose loss is in the state.
func (l *Leases) Forget(node string) {
	delete(l.lastRenewal, node)
	delete(l.kept, node)
}

// Overdue returns the sorted nodes that were silent for TTL and grace, or longer than they were kept. They
// stay overdue until Seen or Forget.
func (l *Leases) Overdue(now time.Time) []string {
	var out []string
	for _, n := range slices.Sorted(maps.Keys(l.lastRenewal)) {
		if !now.Before(l.overdueAt(n)) {
			out = append(out, n)
		}
	}
	return out
}

// overdueAt is when a node becomes overdue if it stays silent.
func (l *Leases) overdueAt(node string) time.Time {
	at := l.lastRenewal[node].Add(l.ttl + l.grace)
	if kept := l.kept[node]; kept.After(at) {
		return kept
	}
	return at
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
	for n := range l.lastRenewal {
		if t := l.overdueAt(n); due.IsZero() || t.Before(due) {
			due = t
		}
	}
	return due
}
