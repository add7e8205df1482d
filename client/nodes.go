package client

import "time"

// NodeStatus is a node as `dpserve nodes` shows it.
type NodeStatus struct {
	Node       string    `json:"node"`
	State      string    `json:"state"` // alive | silent | lost | draining | drained | unknown
	Reason     string    `json:"reason,omitempty"`
	Roles      []string  `json:"roles"`
	Address    string    `json:"address,omitempty"`
	Zone       string    `json:"zone,omitempty"`
	Version    string    `json:"version,omitempty"`
	Leader     bool      `json:"leader,omitempty"`
	Voter      bool      `json:"voter,omitempty"`
	SlotsUsed  int       `json:"slots_used"`
	Slots      int       `json:"slots"`
	GPUsUsed   int       `json:"gpus_used"`
	GPUs       int       `json:"gpus"`
	Ranks      int       `json:"ranks"`
	Groups     []string  `json:"groups,omitempty"` // app/group that have a rank there
	InFlight   int       `json:"in_flight"`
	SkewMs     int64     `json:"clock_skew_ms"`
	LeaseLeftS float64   `json:"lease_left_s"`
	LastSeen   time.Time `json:"last_seen,omitzero"`
	// leader | gossip | itself (the asked node, while no node leads)
	SeenBy string   `json:"seen_by,omitempty"`
	Notes  []string `json:"notes,omitempty"` // for people: clock skew, version skew
}

// DefaultTokenTTL is how long a join token is valid if nothing else is asked for.
const DefaultTokenTTL = time.Hour

// TokenRequest describes a join token.
type TokenRequest struct {
	TTL  time.Duration
	Uses int // nodes
}

// Token lets nodes join.
type Token struct {
	Token   string    `json:"token"`
	Address string    `json:"address"` // HOST:PORT of a node port to join at
	Uses    int       `json:"uses"`
	Expires time.Time `json:"expires"`
}

// KeyRotation is the progress of a change of the gossip key.
type KeyRotation struct {
	Done    bool     `json:"done"`
	Waiting []string `json:"waiting,omitempty"` // nodes that have not completed the present step
}

// BuildInfo describes the node that answers: its build, its name, and where it serves.
type BuildInfo struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	Date    string `json:"date,omitempty"` // of the commit, RFC 3339
	Go      string `json:"go,omitempty"`
	Node    string `json:"node,omitempty"` // that sent the answer
	// URL of the node's OpenAI endpoint, without /v1; empty without role ingress
	Endpoint string `json:"endpoint,omitempty"`
}
