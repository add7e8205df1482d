package state

import "time"

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
	// Keyring is the KeyringSum of the gossip keys that the node has installed; "" = it has no key yet.
	Keyring string `json:"keyring,omitempty"`
	// Key is the hash of the public key of its certificate; "" = not known: the node stands alone, or joined
	// under an older version.
	Key       string    `json:"key,omitempty"`
	Level     int       `json:"level,omitempty"` // what its version can read of the log: Level; 0 = 1
	Resources Resources `json:"offer"`
	nextNode

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
}

// Token lets nodes join. The state keeps only its hash.
type Token struct {
	Hash    string `json:"hash"`
	Expires int64  `json:"expires"` // unix ms
	Uses    int    `json:"uses"`    // nodes that may still use it
	// UID and hash of the public key of each, with a space between them
	UsedBy []string `json:"used_by,omitempty"`
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
	Now  int64  `json:"now,omitempty"` // unix ms, of the proposer; 0 = an older version's command
}

// RemovedFor is how long the state remembers a removed node at least. It is longer than any certificate
// lives.
const RemovedFor = 31 * 24 * time.Hour

// UseToken spends one use of a token for a node. The same UID with the same key may repeat it. Refusals:
// ErrTokenUnknown, ErrTokenUsed, ErrTokenExpired, ErrNodeTaken (the UID belongs to another key).
type UseToken struct {
	Hash string `json:"hash"`
	UID  string `json:"uid"`
	// hash of the public key that the node asks a certificate for; "" = an older version's
	Key string `json:"key,omitempty"`
	Now int64  `json:"now"` // unix ms, of the proposer
}

// LeaseTTL is how long a renewed lease lasts. The leader waits LeaseGrace longer before it takes the node for
// lost.
const (
	LeaseTTL   = 10 * time.Second
	LeaseGrace = 2 * time.Second
)
