// Package app is the schema of app.yaml: types, parsing, validation that reports all faults at once,
// defaults, printing, and the differences of two revisions. It is pure: no IO, no clock, no actors.
package app

import (
	"strconv"
	"time"
)

// Kind names the engine family that serves an application.
type Kind string

// The engine kinds. VLLM and SGLang parse and validate; a later version deploys them.
const (
	KindSim    Kind = "sim"
	KindVLLM   Kind = "vllm"
	KindSGLang Kind = "sglang"
	KindAttach Kind = "attach"
)

// Coupling says whether the ranks of a group fail together.
type Coupling string

// Independent ranks are complete servers. Lockstep ranks run collectives in every step and fail as one unit.
const (
	Independent Coupling = "independent"
	Lockstep    Coupling = "lockstep"
)

// Application is one entry of `applications:` with every default filled in. The cluster stores it as JSON,
// and all packages read it. The zero value is not valid.
type Application struct {
	Name         string       `json:"name"`
	RoutePrefix  string       `json:"route_prefix"`
	Model        Model        `json:"model"`
	Engine       Engine       `json:"engine"`
	DataParallel DataParallel `json:"data_parallel"`
	NumReplicas  int          `json:"num_replicas"` // ranks = dp_size × num_groups
	NumGroups    int          `json:"num_groups"`
	Resources    Resources    `json:"resources"`
	// PACK | STRICT_PACK | SPREAD | STRICT_SPREAD
	PlacementGroupStrategy string  `json:"placement_group_strategy"`
	MaxRanksPerNode        int     `json:"max_ranks_per_node,omitempty"`
	Routing                Routing `json:"routing"`
	// per rank; 0 = what the engine reports, else 256
	MaxOngoingRequests int `json:"max_ongoing_requests,omitempty"`
	// per app and ingress
	MaxQueuedRequests       int      `json:"max_queued_requests"`
	Timeouts                Timeouts `json:"timeouts"`
	Retries                 Retries  `json:"retries"`
	HealthCheckPeriodS      float64  `json:"health_check_period_s"`
	HealthCheckTimeoutS     float64  `json:"health_check_timeout_s"`
	GracefulShutdownTimeout float64  `json:"graceful_shutdown_timeout_s"` // seconds; 0 = cut
}

// Model is the name that clients send and the model that engines load.
type Model struct {
	ID       string    `json:"id"`
	Source   string    `json:"source"`
	Aliases  []string  `json:"aliases,omitempty"`
	Adapters []Adapter `json:"adapters,omitempty"`
}

// Adapter is a LoRA adapter served beside its base model.
type Adapter struct {
	ID     string `json:"id"`
	Source string `json:"source"`
}

// Engine says how the engine of a rank is started, or (kind attach) where it runs.
type Engine struct {
	Kind Kind `json:"kind"`
	// attach: vllm | sglang | openai; empty = probed
	Family          string            `json:"family,omitempty"`
	Command         []string          `json:"command,omitempty"` // empty = default of the kind
	Args            Args              `json:"args,omitempty"`
	Env             map[string]string `json:"env,omitempty"`
	KVEvents        string            `json:"kv_events"` // auto | off
	StartupTimeoutS float64           `json:"startup_timeout_s"`
	StallTimeoutS   float64           `json:"stall_timeout_s"`
	Ranks           []AttachRank      `json:"ranks,omitempty"`
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
	URL        string    `json:"url"`
	Addressing string    `json:"addressing,omitempty"` // url (default) | header | body
	Selector   int       `json:"selector,omitempty"`
	Group      int       `json:"group,omitempty"`
	Number     *int      `json:"rank,omitempty"` // nil = its position among the ranks of its group
	Role       string    `json:"role,omitempty"` // both (default); a later version adds prefill and decode
	Node       string    `json:"node,omitempty"`
	KVEvents   *KVSocket `json:"kv_events,omitempty"`
}

// KVSocket says where the KV events of an attached engine are: exactly one of Connect and Bind is set.
type KVSocket struct {
	Connect string `json:"connect,omitempty"`
	Bind    string `json:"bind,omitempty"`
	Replay  string `json:"replay,omitempty"`
}

// DataParallel is the shape of a group.
type DataParallel struct {
	DPSize   int      `json:"dp_size"`
	Coupling Coupling `json:"coupling"`
}

// Resources are what one rank needs. GPUsSet distinguishes a written `gpus: 0` (a CPU engine) from an omitted
// one.
type Resources struct {
	GPUs      int               `json:"gpus"`
	GPUsSet   bool              `json:"gpus_set,omitempty"`
	CPUs      float64           `json:"cpus,omitempty"`
	MemoryGiB float64           `json:"memory_gib,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"`
}

// Routing selects the policy. routing.New checks Params.
type Routing struct {
	Policy        string         `json:"policy"`
	Preset        string         `json:"preset"` // documented | tuned
	Params        map[string]any `json:"params,omitempty"`
	Identity      string         `json:"identity"`
	BusyThreshold *float64       `json:"busy_threshold,omitempty"`
}

// Timeouts bound each phase of a request, in seconds.
type Timeouts struct {
	QueueS         float64 `json:"queue_s"`
	FirstTokenS    float64 `json:"first_token_s"`
	BetweenTokensS float64 `json:"between_tokens_s"`
}

// Retries bound the attempts of a request before its first byte.
type Retries struct {
	Attempts int `json:"attempts"`
}

// Runs reports whether this version starts or attaches engines of the kind. The other kinds only parse and
// validate.
func (k Kind) Runs() bool { return k == KindSim || k == KindAttach }

// Seconds converts a number of seconds of the file into a duration.
func Seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// Unit is started, fenced and restarted as one: a group if lockstep, a rank if independent.
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

// Words of the file.
const (
	FamilyVLLM   = "vllm"
	FamilySGLang = "sglang"
	FamilyOpenAI = "openai" // only the OpenAI API is assumed

	AddressURL    = "url"    // the rank is the complete server behind its URL
	AddressHeader = "header" // X-data-parallel-rank
	AddressBody   = "body"   // field routed_dp_rank of the body

	RoleBoth = "both" // the rank does prefill and decode

	KVEventsAuto = "auto"
	KVEventsOff  = "off"

	PresetDocumented = "documented"
	PresetTuned      = "tuned"

	IdentityText   = "text"
	IdentityTokens = "tokens"

	StrategyPack         = "PACK"
	StrategyStrictPack   = "STRICT_PACK"
	StrategySpread       = "SPREAD"
	StrategyStrictSpread = "STRICT_SPREAD"
)

// Defaults of an application. They are filled in here, because an Application is stored complete. Times are
// seconds.
const (
	DefaultRoutePrefix         = "/"
	DefaultDPSize              = 1
	DefaultStartupTimeoutS     = 600
	DefaultStallTimeoutS       = 20
	DefaultMaxQueuedRequests   = 1000
	DefaultQueueS              = 60
	DefaultFirstTokenS         = 300
	DefaultBetweenTokensS      = 30
	DefaultAttempts            = 3
	DefaultHealthCheckPeriodS  = 1
	DefaultHealthCheckTimeoutS = 5
	DefaultGracefulShutdownS   = 1800
)

// DefaultPolicy returns the routing policy of an application whose file names none. Independent ranks get
// mex, which charges a request for the delay that it causes to all requests on its rank. Lockstep ranks get
// lmetric-1: each of their steps lasts as long as that of the slowest rank, so a request's cost is not
// limited to its own rank.
func DefaultPolicy(c Coupling) string {
	if c == Lockstep {
		return "lmetric-1"
	}
	return "mex"
}

// Default returns an application with every default that does not depend on other keys. Name, model, engine
// kind and routing policy are empty and sizes are 0, because the file decides them.
func Default() Application {
	return Application{
		RoutePrefix: DefaultRoutePrefix,
		Engine: Engine{
			KVEvents: KVEventsAuto, StartupTimeoutS: DefaultStartupTimeoutS,
			StallTimeoutS: DefaultStallTimeoutS,
		},
		PlacementGroupStrategy: StrategyPack,
		Routing:                Routing{Preset: PresetDocumented, Identity: IdentityText},
		MaxQueuedRequests:      DefaultMaxQueuedRequests,
		Timeouts: Timeouts{
			QueueS: DefaultQueueS, FirstTokenS: DefaultFirstTokenS,
			BetweenTokensS: DefaultBetweenTokensS,
		},
		Retries:                 Retries{Attempts: DefaultAttempts},
		HealthCheckPeriodS:      DefaultHealthCheckPeriodS,
		HealthCheckTimeoutS:     DefaultHealthCheckTimeoutS,
		GracefulShutdownTimeout: DefaultGracefulShutdownS,
	}
}
