package msg

import "time"

// AppStatus is an application as status and the admin API show it.
type AppStatus struct {
	Name     string       `json:"name"`
	Status   string       `json:"status"` // DEPLOYING, RUNNING, UNHEALTHY, DEPLOY_FAILED, DELETING
	Message  string       `json:"message,omitempty"`
	Revision uint64       `json:"revision"`
	Model    string       `json:"model"`
	Kind     string       `json:"kind"`
	Coupling string       `json:"coupling"`
	Policy   string       `json:"policy"`
	DPSize   int          `json:"dp_size"`
	Groups   int          `json:"groups"`
	Desired  int          `json:"desired"` // ranks
	Ready    int          `json:"ready"`   // ranks
	Queued   int          `json:"queued"`  // requests in this node's FIFO
	Units    []UnitStatus `json:"units"`
}

// UnitStatus is one unit of an application.
type UnitStatus struct {
	Unit     string       `json:"unit"`
	Group    int          `json:"group"`
	Phase    string       `json:"phase"`
	Epoch    uint64       `json:"epoch"`
	Attempt  int          `json:"attempt"`
	Restarts int          `json:"restarts"`
	Since    time.Time    `json:"since"` // of the phase
	Reason   string       `json:"reason,omitempty"`
	LogTail  []string     `json:"log_tail,omitempty"`
	Ranks    []RankStatus `json:"ranks"`
}

// RankStatus is one rank. The account is the replica's own.
type RankStatus struct {
	Group       int     `json:"group"`
	Rank        int     `json:"rank"`
	Node        string  `json:"node"`
	Devices     []int   `json:"devices,omitempty"`
	Phase       string  `json:"phase"`
	Epoch       uint64  `json:"epoch"`
	Incarnation string  `json:"incarnation,omitempty"` // 16 hex digits
	PID         int     `json:"pid,omitempty"`
	URL         string  `json:"url,omitempty"`
	MaxOngoing  int     `json:"max_ongoing,omitempty"`
	InFlight    int     `json:"in_flight"`
	Requests    uint64  `json:"requests"`           // ended tickets
	Tokens      uint64  `json:"tokens"`             // generated
	TokensPerS  float64 `json:"tokens_per_s"`       // over the last 10 s
	TTFTp50Ms   float64 `json:"ttft_p50_ms"`        // over the last 512 requests
	TTFTp95Ms   float64 `json:"ttft_p95_ms"`        //
	Progress    string  `json:"progress,omitempty"` // while starting: what it waits for
}
