// Package app is the schema of app.yaml: types, parsing, validation with all faults at once, defaults,
// printing and the diff of two revisions. It is pure: no IO, no clock, no actors.
package app

import (
	"strconv"
	"time"
)

// Kind names the engine family that serves an application.
type Kind string

// The engine kinds. VLLM and SGLang parse and validate; deploying them comes with a later version.
const (
	KindSim    Kind = "sim"
	KindVLLM   Kind = "vllm"
	KindSGLang Kind = "sglang"
	KindAttach Kind = "attach"
)

// Coupling says whether the ranks of a group fail together.
type Coupling string

// Independent ranks are whole servers; lockstep ranks meet in collectives on every step and are one failure unit.
const (
	Independent Coupling = "independent"
	Lockstep    Coupling = "lockstep"
)

// Application is one entry of `applications:` with every default filled in. It is what the cluster stores (as JSON)
// and what every room reads; the zero value is not valid.
type Application struct {
	Name                    string       `json:"name" yaml:"name"`
	RoutePrefix             string       `json:"route_prefix" yaml:"route_prefix"`
	Model                   Model        `json:"model" yaml:"model"`
	Engine                  Engine       `json:"engine" yaml:"engine"`
	DataParallel            DataParallel `json:"data_parallel" yaml:"data_parallel"`
	NumReplicas             int          `json:"num_replicas" yaml:"num_replicas"` // ranks = dp_size × num_groups
	NumGroups               int          `json:"num_groups" yaml:"num_groups"`
	Resources               Resources    `json:"resources" yaml:"resources"`
	PlacementGroupStrategy  string       `json:"placement_group_strategy" yaml:"placement_group_strategy"` // PACK | STRICT_PACK | SPREAD | STRICT_SPREAD
	MaxRanksPerNode         int          `json:"max_ranks_per_node,omitempty" yaml:"max_ranks_per_node,omitempty"`
	Routing                 Routing      `json:"routing" yaml:"routing"`
	MaxOngoingRequests      int          `json:"max_ongoing_requests,omitempty" yaml:"max_ongoing_requests,omitempty"` // per rank; 0 = what the engine reports, else 256
	MaxQueuedRequests       int          `json:"max_queued_requests" yaml:"max_queued_requests"`                       // per app and ingress
	Timeouts                Timeouts     `json:"timeouts" yaml:"timeouts"`
	Retries                 Retries      `json:"retries" yaml:"retries"`
	HealthCheckPeriodS      float64      `json:"health_check_period_s" yaml:"health_check_period_s"`
	HealthCheckTimeoutS     float64      `json:"health_check_timeout_s" yaml:"health_check_timeout_s"`
	GracefulShutdownTimeout float64      `json:"graceful_shutdown_timeout_s" yaml:"graceful_shutdown_timeout_s"` // seconds; 0 = cut
}

// Model is what clients name and what engines load.
type Model struct {
	ID       string    `json:"id" yaml:"id"`
	Source   string    `json:"source" yaml:"source"`
	Aliases  []string  `json:"aliases,omitempty" yaml:"aliases,omitempty"`
	Adapters []Adapter `json:"adapters,omitempty" yaml:"adapters,omitempty"`
}

// Adapter is a LoRA adapter served beside its base model.
type Adapter struct {
	ID     string `json:"id" yaml:"id"`
	Source string `json:"source" yaml:"source"`
}

// Engine says how one rank's engine is started, or (kind attach) where it runs.
type Engine struct {
	Kind            Kind              `json:"kind" yaml:"kind"`
	Family          string            `json:"family,omitempty" yaml:"family,omitempty"`   // attach: vllm | sglang | openai; empty = probed
	Command         []string          `json:"command,omitempty" yaml:"command,omitempty"` // empty = default of the kind
	Args            Args              `json:"args,omitempty" yaml:"args,omitempty"`
	Env             map[string]string `json:"env,omitempty" yaml:"env,omitempty"`
	KVEvents        string            `json:"kv_events" yaml:"kv_events"` // auto | off
	StartupTimeoutS float64           `json:"startup_timeout_s" yaml:"startup_timeout_s"`
	StallTimeoutS   float64           `json:"stall_timeout_s" yaml:"stall_timeout_s"`
	Ranks           []AttachRank      `json:"ranks,omitempty" yaml:"ranks,omitempty"`
}

// Arg is one engine argument; Value is string, bool, int64, float64, []any or map[string]any.
type Arg struct {
	Name  string `json:"name"`
	Value any    `json:"value"`
}

// Args are engine arguments in file order.
type Args []Arg

// AttachRank is one running engine of kind attach.
type AttachRank struct {
	URL        string    `json:"url" yaml:"url"`
	Addressing string    `json:"addressing,omitempty" yaml:"addressing,omitempty"` // url (default) | header | body
	Selector   int       `json:"selector,omitempty" yaml:"selector,omitempty"`
	Group      int       `json:"group,omitempty" yaml:"group,omitempty"`
	Number     *int      `json:"rank,omitempty" yaml:"rank,omitempty"` // nil = its place among the ranks of its group
	Role       string    `json:"role,omitempty" yaml:"role,omitempty"` // both (default); prefill and decode come with pd
	Node       string    `json:"node,omitempty" yaml:"node,omitempty"`
	KVEvents   *KVSocket `json:"kv_events,omitempty" yaml:"kv_events,omitempty"`
}

// KVSocket declares where an attached engine's KV events are found: exactly one of Connect and Bind.
type KVSocket struct {
	Connect string `json:"connect,omitempty" yaml:"connect,omitempty"`
	Bind    string `json:"bind,omitempty" yaml:"bind,omitempty"`
	Replay  string `json:"replay,omitempty" yaml:"replay,omitempty"`
}

// DataParallel is the shape of a group.
type DataParallel struct {
	DPSize   int      `json:"dp_size" yaml:"dp_size"`
	Coupling Coupling `json:"coupling" yaml:"coupling"`
}

// Resources are what one rank takes. GPUsSet tells a written `gpus: 0` (a CPU engine) from an omitted one.
type Resources struct {
	GPUs      int               `json:"gpus" yaml:"gpus"`
	GPUsSet   bool              `json:"gpus_set,omitempty" yaml:"-"`
	CPUs      float64           `json:"cpus,omitempty" yaml:"cpus,omitempty"`
	MemoryGiB float64           `json:"memory_gib,omitempty" yaml:"memory_gib,omitempty"`
	Labels    map[string]string `json:"labels,omitempty" yaml:"labels,omitempty"`
}

// Routing picks the policy. Params are checked by the policy itself (routing.New).
type Routing struct {
	Policy        string         `json:"policy" yaml:"policy"`
	Preset        string         `json:"preset" yaml:"preset"` // documented | tuned
	Params        map[string]any `json:"params,omitempty" yaml:"params,omitempty"`
	Identity      string         `json:"identity" yaml:"identity"`
	BusyThreshold *float64       `json:"busy_threshold,omitempty" yaml:"busy_threshold,omitempty"`
}

// Timeouts bound each phase of a request, in seconds.
type Timeouts struct {
	QueueS         float64 `json:"queue_s" yaml:"queue_s"`
	FirstTokenS    float64 `json:"first_token_s" yaml:"first_token_s"`
	BetweenTokensS float64 `json:"between_tokens_s" yaml:"between_tokens_s"`
}

// Retries bound the attempts of a request before its first byte.
type Retries struct {
	Attempts int `json:"attempts" yaml:"attempts"`
}

// Runs says whether this version starts or attaches engines of the kind. The others parse and validate only.
func (k Kind) Runs() bool { return k == KindSim || k == KindAttach }

// Seconds turns a number of seconds from the file into a duration.
func Seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// Unit is what is started, fenced and restarted as one: a group if lockstep, a rank if independent.
type Unit struct {
	ID    string // app/group or app/group/rank
	App   string
	Group int
	Ranks []int // rank numbers inside the group, ascending
}

// Units lists the wanted units of a, in order of group and rank.
func (a *Application) Units() []Unit {
	var out []Unit
	for g := range a.NumGroups {
		group, ranks := a.Name+"/"+strconv.Itoa(g), a.RankNumbers(g)
		if a.DataParallel.Coupling == Lockstep {
			out = append(out, Unit{ID: group, App: a.Name, Group: g, Ranks: ranks})
			continue
		}
		for _, r := range ranks {
			out = append(out, Unit{ID: group + "/" + strconv.Itoa(r), App: a.Name, Group: g, Ranks: []int{r}})
		}
	}
	return out
}

// ServedNames lists every name a client may send as "model": id, aliases, then adapters in both spellings.
func (m *Model) ServedNames() []string {
	names := append([]string{m.ID}, m.Aliases...)
	for _, a := range m.Adapters {
		names = append(names, m.ID+":"+a.ID, a.ID)
	}
	return names
}
