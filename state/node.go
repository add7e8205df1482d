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

// Node is one machine of the cluster. Its name is held by its UID, which is drawn with its data dir: who comes under a name with
// another UID is somebody else.
type Node struct {
	ID        string `json:"id"`
	UID       string `json:"uid"`
	Advertise string `json:"advertise"` // host or IP for engines of other nodes; "" = loopback only
	Address   string `json:"address"`   // HOST:PORT of the node port; "" = it has none
	Gossip    string `json:"gossip"`    // HOST:PORT; "" = none
	Roles     []Role `json:"roles"`
	Zone      string `json:"zone,omitempty"`
	Version   string `json:"version,omitempty"`
	Keyring   string `json:"keyring,omitempty"` // KeyringSum of the gossip keys it has taken; "" = it knows no key yet
	Key       string `json:"key,omitempty"`     // hash of its certificate's public key; "" = not known: it stands alone, or joined earlier
	Level     int    `json:"level,omitempty"`   // what its version can read of the log: Level; 0 = 1
	Offer     Offer  `json:"offer"`
	nextNode

	Lost     bool   `json:"lost,omitempty"`     // silent for its lease and 2 s: its units are released
	Reason   string `json:"reason,omitempty"`   // of Lost
	Draining bool   `json:"draining,omitempty"` // gets no new ranks, gives those it has away
	DrainBy  int64  `json:"drain_by,omitempty"` // unix ms after which running streams are cut; 0 = each app's grace
}

// Offer is what placement may use of a node.
type Offer struct {
	Slots   int               `json:"slots"`
	Devices []int             `json:"devices,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
	PortLo  int               `json:"port_lo"`
	PortHi  int               `json:"port_hi"`
}

// Token lets nodes join. Only its hash is kept.
type Token struct {
	Hash    string   `json:"hash"`
	Expires int64    `json:"expires"`           // unix ms
	Uses    int      `json:"uses"`              // nodes that may still use it
	UsedBy  []string `json:"used_by,omitempty"` // UID and hash of the public key of each, with a space between them
}

// PutNode makes a node known, or updates it: a join, a return under another address, another offer. It leaves Lost, Draining and
// DrainBy as they are, and Key where the command has none. Refused: ErrNodeTaken (another UID holds the name, or another key the
// record), ErrNodeRemoved (the UID was removed), ErrRolesFixed.
type PutNode struct {
	Node Node `json:"node"`
	// AnyRoles lets the record of a known node take other roles. Only a node whose certificate has no say may set it: one that stands
	// alone, or begins its cluster.
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

// RemoveNode forgets a node for good; its UID never comes back, and its name is free. Refused while units hold something on it
// (ErrUnitsLeft), for the last node with role control, and while maxRemoved nodes were removed within RemovedFor
// (ErrTooManyRemoved): to forget one of them would let its certificate in again.
type RemoveNode struct {
	Node string `json:"node"`
	Now  int64  `json:"now,omitempty"` // unix ms, of the proposer; 0 = an older version's: the oldest is forgotten
}

// RemovedFor is how long a removed node is remembered at least: longer than any certificate lives, so that what is forgotten has expired.
const RemovedFor = 31 * 24 * time.Hour

// UseToken spends one use of a token for a node: again for the same UID with the same key, as often as it asks. Refused:
// ErrTokenUnknown, ErrTokenUsed, ErrTokenExpired, ErrNodeTaken (the UID belongs to another key).
type UseToken struct {
	Hash string `json:"hash"`
	UID  string `json:"uid"`
	Key  string `json:"key,omitempty"` // hash of the public key that the node asks a certificate for; "" = an older version's
	Now  int64  `json:"now"`           // unix ms, of the proposer
}

// LeaseTTL is how long a renewed lease lasts, and LeaseGrace what the leader waits on top before it takes the node for lost.
const (
	LeaseTTL   = 10 * time.Second
	LeaseGrace = 2 * time.Second
)
