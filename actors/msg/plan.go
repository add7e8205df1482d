package msg

// Plan is what a deploy would do.
type Plan struct {
	Revision uint64     `json:"revision"` // of the cluster it was made for: `deploy --revision`
	Changes  bool       `json:"changes"`
	Apps     []AppPlan  `json:"apps"`
	Nodes    []NodePlan `json:"nodes"`
	Fits     bool       `json:"fits"` // there is room for all units
}

// AppPlan is one application's part.
type AppPlan struct {
	App    string     `json:"app"`
	Action string     `json:"action"` // create | replace | delete | unchanged
	Fields []string   `json:"fields,omitempty"`
	Units  []UnitPlan `json:"units,omitempty"`
}

// UnitPlan is the plan for one unit. A unit that stays as it is has Action unchanged and its present seats.
type UnitPlan struct {
	Unit   string     `json:"unit"`
	Action string     `json:"action"` // create | replace | delete | unchanged
	Seats  []SeatPlan `json:"seats,omitempty"`
	Why    string     `json:"why,omitempty"`  // the reason why it cannot be placed
	Hint   string     `json:"hint,omitempty"` // what would make room
}

// SeatPlan is one rank's place.
type SeatPlan struct {
	Rank    int    `json:"rank"`
	Node    string `json:"node"`
	Devices []int  `json:"devices,omitempty"`
}

// NodePlan is what a node has and what the plan takes of it.
type NodePlan struct {
	Node      string `json:"node"`
	Slots     int    `json:"slots"`
	SlotsFree int    `json:"slots_free"` // before
	SlotsNeed int    `json:"slots_need"` // that the plan adds
	GPUs      int    `json:"gpus"`
	GPUsFree  int    `json:"gpus_free"`
	GPUsNeed  int    `json:"gpus_need"`
	Note      string `json:"note,omitempty"` // why placement leaves it out: lost, draining, no role worker
}
