// Package app is the schema of app.yaml: types, parsing, validation that reports all faults at once,
// defaults, printing, and the differences of two revisions. It is pure: no IO, no clock, no actors.
package app

import (
	"reflect"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/routing"
)

// Kind names the engine family that serves an application.
type Kind string

// The engine kinds.
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

// The structs below are the schema of the file. The json tag names a key (and the field of the stored form).
// The other tags say what decode.go accepts:
//
//	is:      the wanted value in the words of a fault, or the name of a format of keys.go; "-" is no key
//	words:   the words that the value may be, or the name of a list of keys.go
//	later:   words, or (of the field _) keys, that are known and not supported yet
//	default: the value of a key that is not written
//	unset:   what is taken instead if there is no fixed default; only documentation
//	need:    the key is required; this is the hint if it is missing
//
// The comment of each field is its text in docs/app-yaml.md and docs/app.schema.json, which are generated.

// Application is one entry of `applications:` with every default filled in. An entry with prefill and decode
// ranks is two of them, its pools: they have one name and differ in Pool. The cluster stores it as JSON, and
// all packages read it. The zero value is not valid.
type Application struct {
	// DNS label, unique; names the application in commands, metrics and headers
	Name string `json:"name" is:"label" need:"name the application, for example demo"`
	// path before `/v1/…`; where applications share it, the `model` field of a request picks one
	RoutePrefix string `json:"route_prefix" is:"path" default:"/"`
	// name that clients send and what engines load
	Model Model `json:"model" need:"write model: {id: NAME}"`
	// how the engine of a rank is started, or (kind attach) where it runs
	Engine Engine `json:"engine" need:"write engine: {kind: sim}"`
	// shape of a group
	DataParallel DataParallel `json:"data_parallel"`
	// ranks in all; must be a multiple of `dp_size`
	NumReplicas int `json:"num_replicas" is:"an integer from 1 to 65536" unset:"dp_size × num_groups"`
	// whole groups, each of `dp_size` ranks
	NumGroups int `json:"num_groups" is:"an integer from 1 to 65536" unset:"num_replicas / dp_size, else 1"`
	// what one rank takes of its node
	Resources Resources `json:"resources"`
	// how ranks are spread over nodes. Left out: `SPREAD`; `PACK` for lockstep groups, and for ranks with a
	// share of a device
	PlacementGroupStrategy string `json:"placement_group_strategy" words:"strategy" unset:"by coupling"`
	// upper bound of a group's ranks on one node
	MaxRanksPerNode int `json:"max_ranks_per_node,omitempty" is:"an integer from 1 to 1024"`
	// policy that picks the rank of a request
	Routing Routing `json:"routing"`
	// requests in hand per rank; the others wait. Left out: what the engine reports, else 256. A request
	// with `n` or a list of prompts counts as n × prompts, at most as the whole rank; more than 1,024 are
	// refused with 400
	MaxOngoingRequests int `json:"max_ongoing_requests,omitempty" is:"an integer from 1 to 1000000"`
	QueueBounds
	// longest times of the phases of a request
	Timeouts Timeouts `json:"timeouts"`
	// other ranks for a request whose rank fails, before its first byte and after it
	Retries Retries `json:"retries"`
	// seconds between two calls of each rank's `/health`
	HealthCheckPeriodS float64 `json:"health_check_period_s" is:"seconds" default:"1"`
	// longest answer of `/health`; the second late one in a row counts
	HealthCheckTimeoutS float64 `json:"health_check_timeout_s" is:"seconds" default:"5"`
	// drain of running streams; 0 cuts them. 10 under `up`
	GracefulShutdownTimeout float64 `json:"graceful_shutdown_timeout_s" is:"seconds or 0" default:"1800"`
	// how a change of the file goes to the ranks that run
	Rollout Rollout `json:"rollout"`
	// how prefill and decode ranks work together
	Disaggregation *Disaggregation `json:"disaggregation,omitempty" unset:"no prefill ranks"`
	// which pool of the application this is: PoolPrefill or PoolDecode; "" if the application has one pool
	Pool string `json:"pool,omitempty" is:"-"`
}

// QueueBounds are the bounds of an application's queue.
type QueueBounds struct {
	// requests that wait at one ingress when all ranks are full; then 503. `-1` (no bound) is refused
	MaxQueuedRequests int `json:"max_queued_requests" is:"an integer from 0 to 1000000" default:"10000"`
	// estimated prompt tokens of the requests that wait at one ingress; then 503. Left out: one token per 8
	// bytes of the ingress's memory for bodies, 67,108,864 without a memory limit
	MaxQueuedTokens int `json:"max_queued_tokens,omitempty" is:"an integer from 1 to 1000000000"`
}

// Model is the name that clients send and the model that engines load.
type Model struct {
	// what clients send as `model`; unique in the cluster, aliases too
	ID string `json:"id" is:"served" need:"it is what clients send as \"model\""`
	// what the engine loads: a repository or a path. attach: the name under which the engines serve the
	// model, see `engine.ranks[].model`
	Source string `json:"source" unset:"= id"`
	// further names
	Aliases []string `json:"aliases,omitempty" is:"served"`
	// LoRA adapters, served as `MODEL:ADAPTER` and `ADAPTER`
	Adapters []Adapter `json:"adapters,omitempty"`
}

// Adapter is a LoRA adapter served beside its base model.
type Adapter struct {
	// name of the adapter
	ID string `json:"id" is:"served" need:"it is what clients send as \"model\""`
	// what the engine loads
	Source string `json:"source" need:"it is what the engine loads"`
}

// Engine says how the engine of a rank is started, or (kind attach) where it runs.
type Engine struct {
	// `sim` (built in, needs no device), `vllm` and `sglang` (started by dpserve), `attach` (engines that
	// someone else runs)
	Kind Kind `json:"kind" words:"kind" need:"write kind: sim for the simulated engine"`
	// attach: `openai` assumes nothing but the API. Written out, it also takes a stream for whole that ends
	// cleanly without a `finish_reason` for every choice, as engines do that ignore `n` or never send one
	Family string `json:"family,omitempty" words:"vllm | sglang | openai" unset:"probed"`
	// argv of the program, not for attach. Left out: `vllm serve` or `python3 -m sglang.launch_server`
	Command []string `json:"command,omitempty" is:"word" unset:"by kind"`
	// flags, passed on: snake or kebab case, `true` = bare flag, `false` = `--no-flag` (sglang: left out),
	// maps and lists = JSON (sglang: lists = several words). Flags that dpserve owns (ports, host,
	// data-parallel-*) are faults that name the right key
	Args Args `json:"args,omitempty"`
	// environment variables. Engines of kind vllm and sglang also have those of their node's dpserve, except
	// `DPSERVE_*`, devices, ranks and API keys
	Env map[string]string `json:"env,omitempty" is:"variable"`
	// `auto`: engines publish what enters and leaves their prefix cache if the policy reads the KV index and
	// the engine caches prefixes. `off`: they are started without, attached ones are not listened to, and
	// routing goes by what dpserve sent where. A change that turns events on or off restarts the engines
	KVEvents string `json:"kv_events" words:"auto | off" default:"auto"`
	// from start to ready
	StartupTimeoutS float64 `json:"startup_timeout_s" is:"seconds" default:"600"`
	// no progress with work in flight: then a one-token probe of 10 s decides. A process that stands still
	// for less than this time and those 10 s keeps its streams
	StallTimeoutS float64 `json:"stall_timeout_s" is:"seconds" default:"20"`
	// attach: environment variable of the node's dpserve with the engines' API key. dpserve's own requests
	// bring it, and those of clients, in place of their own. The key itself never stands in this file
	APIKeyEnv string `json:"api_key_env,omitempty" is:"variable"`
	// attach: file on the node with the engines' API key, instead of `api_key_env`; read again when it
	// changes
	APIKeyFile string `json:"api_key_file,omitempty" is:"file"`
	// attach: whom the node trusts as an engine over https
	TLS *EngineTLS `json:"tls,omitempty" unset:"the machine's CAs"`
	// attach: the running engines
	Ranks []AttachRank `json:"ranks,omitempty" unset:"required for attach, or services"`
	// attach: DNS names of engines that come and go: each address of such a name is a rank
	Services []AttachService `json:"services,omitempty"`
}

// EngineTLS says whom a node trusts as an engine over https.
type EngineTLS struct {
	// file on the node with the CA's certificates (PEM)
	CA string `json:"ca,omitempty" is:"file" unset:"the machine's CAs"`
	// `true`: any certificate will do. Who is between the node and the engine can read and change everything
	InsecureSkipVerify bool `json:"insecure_skip_verify,omitempty" is:"true or false"`
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
	// scheme, host and port, and the path that the engine's routes begin with, without `/v1`
	URL string `json:"url" need:"write url: \"http://HOST:PORT\""`
	// `header` (X-data-parallel-rank) or `body` (field routed_dp_rank): one URL for several ranks
	Addressing string `json:"addressing,omitempty" words:"url | header | body" default:"url"`
	// number that is sent to the engine with addressing header or body, from 0
	Selector int `json:"selector,omitempty" is:"an integer from 0 to 4095" unset:"required for header, body"`
	// the name under which the engine serves the model. Where it is not what clients send as `model` (id or
	// alias), dpserve writes it into their requests, and theirs into the answers
	Model string `json:"model,omitempty" is:"served" unset:"model.source"`
	// group the rank belongs to
	Group int `json:"group,omitempty" is:"an integer from 0 to 65535" unset:"0"`
	// its number; written where a removed rank has left a hole. Only for independent ranks
	Number *int `json:"rank,omitempty" is:"an integer from 0 to 4095" unset:"its place in its group"`
	// what the rank does. `prefill` and `decode` ranks are a pool each; a `both` rank stands in the decode
	// pool
	Role string `json:"role,omitempty" words:"both | prefill | decode" default:"both"`
	// of prefill ranks: what the transfer must know of the engine
	PD *AttachPD `json:"pd,omitempty" unset:"by transfer"`
	// id of the dpserve node that talks to it
	Node string `json:"node,omitempty" is:"node" unset:"any"`
	// the engine registers itself (`POST …/ranks`) again within this time, or the rank leaves
	TTLS float64 `json:"ttl_s,omitempty" is:"seconds" unset:"it stays"`
	// where its KV events are, for policies that read the KV index. Loopback or the host of `url` only;
	// every rank has its own. Left out, the engine is asked (`/kv_event_sources`, vLLM from 0.32 on); one
	// that cannot tell has none
	KVEvents *KVSocket `json:"kv_events,omitempty" unset:"asked of the engine"`
	// the service that has brought the rank, "" if it is listed
	Service string `json:"service,omitempty" is:"-"`
}

// AttachService is a DNS name of engines that come and go, such as a headless service of Kubernetes. Every
// address of the name is a rank of the application; the leader adds and removes these ranks.
type AttachService struct {
	// `dns://HOST:PORT`, or `dns+https://HOST:PORT` for engines over https, and the path that the engines'
	// routes begin with. Of a host with IPv4 and IPv6 addresses, the IPv4 addresses count
	URL string `json:"url" need:"write url: \"dns://HOST:PORT\""`
	// the name under which the engines serve the model, as in `ranks`
	Model string `json:"model,omitempty" is:"served" unset:"model.source"`
	// what the ranks do, as in `ranks`
	Role string `json:"role,omitempty" words:"both | prefill | decode" default:"both"`
	// id of the dpserve node that talks to the engines
	Node string `json:"node,omitempty" is:"node" unset:"any"`
}

// KVSocket says where the KV events of an attached engine are: exactly one of Connect and Bind is set.
type KVSocket struct {
	// socket that the engine binds, `tcp://HOST:PORT`
	Connect string `json:"connect,omitempty"`
	// socket that dpserve binds because the engine dials, `tcp://127.0.0.1:PORT` or `tcp://*:PORT`
	Bind string `json:"bind,omitempty"`
	// socket of the engine that repeats lost events
	Replay string `json:"replay,omitempty"`
}

// DataParallel is the shape of a group.
type DataParallel struct {
	// ranks of a group
	DPSize int `json:"dp_size" is:"an integer from 1 to 4096" unset:"1; attach: number of ranks"`
	// `independent`: every rank is a whole server, restarted alone. `lockstep`: ranks meet on every step; the
	// first dead one takes its group out of routing, and the group restarts as one. Required for vllm with
	// dp_size above 1; sglang with DP attention is lockstep
	Coupling Coupling `json:"coupling" words:"independent | lockstep" unset:"independent"`
}

// Resources are what one rank needs. GPUsSet distinguishes a written `gpus: 0` (a CPU engine) from an omitted
// one.
type Resources struct {
	// devices: a whole number, or the share of one device, such as 0.25, with at most four digits behind the
	// point: any ranks whose shares add up to 1 or less fit on one device. A sim rank takes devices only if
	// this is written; an attached rank takes nothing
	GPUs    float64 `json:"gpus" is:"devices from 0 to 1024" unset:"what the engine's arguments use"`
	GPUsSet bool    `json:"gpus_set,omitempty" is:"-"`
	// processors. Placement does not count them yet
	CPUs float64 `json:"cpus,omitempty" is:"cpus from 0 to 65536"`
	// memory in GiB. Placement does not count it yet
	MemoryGiB float64 `json:"memory_gib,omitempty" is:"GiB from 0 to 1048576"`
	// labels that the node must have (`--labels`)
	Labels map[string]string `json:"labels,omitempty" is:"node label"`
}

// Routing selects the policy. routing.New checks Params.
type Routing struct {
	// [routing](routing.md) says which suits which traffic. Left out: `mex`; `cohorts` for lockstep groups
	Policy string `json:"policy" words:"policy" later:"group-balance group-least-kv" unset:"by coupling"`
	// parameters of the policy: documented or tuned ones
	Preset string `json:"preset" words:"documented | tuned" default:"documented"`
	// the policy's own knobs, [listed with each policy](routing-reference.md); unknown ones are faults, and
	// so are values that make no sense
	Params map[string]any `json:"params,omitempty"`
	// how a prompt becomes blocks: `text`: by the bytes of the request, no extra call. `tokens`: by the
	// engine's own tokens, asked for over its tokenize route and remembered; needed to compare prompts with
	// KV events. A request that brings token ids is recognised by them whatever is set
	Identity string `json:"identity" words:"text | tokens" later:"learned" default:"text"`
	// under every policy: a rank whose KV cache is fuller gets nothing new; if that is all of them, 503
	BusyThreshold *float64 `json:"busy_threshold,omitempty" is:"a share from 0 to 1"`

	_ struct{} `later:"slo"`
}

// NewPolicy makes the policy. The parameters of an application that was parsed are valid.
func (r *Routing) NewPolicy() (routing.Policy, error) {
	return routing.New(r.Policy, r.Preset, r.Params)
}

// Timeouts bound each phase of a request, in seconds.
type Timeouts struct {
	// longest wait in the queue; then 503 `queue_timeout`, or `no_ready_rank` if no rank is ready
	QueueS float64 `json:"queue_s" is:"seconds" default:"60"`
	// from dispatch to the first token; then another rank, or 504 `first_token_timeout`
	FirstTokenS float64 `json:"first_token_s" is:"seconds" default:"300"`
	// silence of a rank with open answers before its engine is probed, if shorter than
	// `engine.stall_timeout_s`. An answer is cut when the engine fails its probe; one that alone is silent,
	// while the engine works, after `first_token_s`. Answers that are not streamed get this time for each
	// token
	BetweenTokensS float64 `json:"between_tokens_s" is:"seconds" default:"30"`
	// longest silence of a streamed answer, 1 or more: before its first token the client gets 200 and a
	// comment each time, so that no proxy takes the connection for dead; a later failure is an error event.
	// 0: a client hears nothing before the first token
	KeepaliveS float64 `json:"keepalive_s" is:"seconds or 0" default:"15"`
}

// Retries say when another rank gets a request.
type Retries struct {
	// ranks tried per request, all before its first byte
	Attempts int `json:"attempts" is:"an integer from 1 to 16" default:"3"`
	// whether a stream whose rank dies, or is taken away, goes on from another rank: chat and completions of
	// one text. Never for `engine.family: openai`, and only if the engine goes on with a last message of the
	// assistant; [operations](operations.md#streams-that-go-on) says what is not continued
	ContinueStreams bool `json:"continue_streams" is:"true or false" default:"true"`
}

// Rollout says how a new revision replaces the ranks that run.
type Rollout struct {
	// how long a unit of a new revision must be ready before the next one is replaced. A unit that ends
	// before that halts the roll-out. 0: the next one is replaced at once, and only a unit that does not
	// start halts it
	MinReadyS float64 `json:"min_ready_s" is:"seconds or 0" default:"10"`
	// after a roll-out was halted. `rollback`: the last revision whose roll-out ended well is deployed again.
	// `halt`: the units that were not replaced go on with what they run
	OnFailure string `json:"on_failure" words:"rollback | halt" default:"rollback"`
}

// Words of `rollout.on_failure:`.
const (
	OnFailureRollback = "rollback"
	OnFailureHalt     = "halt"
)

// scaling is autoscaling_config, which must describe a fixed size.
type scaling struct {
	// fewest ranks
	Minimum int `json:"min_replicas" is:"an integer from 1 to 65536"`
	// most ranks
	Maximum int `json:"max_replicas" is:"an integer from 1 to 65536"`
	// ranks at the start
	Initial int `json:"initial_replicas" is:"an integer from 1 to 65536"`
}

// Seconds converts a number of seconds of the file into a duration.
func Seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// Unit is started, fenced and restarted as one: a group if lockstep, a rank if independent.
type Unit struct {
	ID    string // PoolName/group or PoolName/group/rank
	App   string
	Pool  string
	Group int
	Ranks []int // rank numbers inside the group, ascending
}

// Units lists the wanted units of a, in order of group and rank.
func (a *Application) Units() []Unit {
	var out []Unit
	for g := range a.NumGroups {
		u := Unit{ID: a.PoolName() + "/" + strconv.Itoa(g), App: a.Name, Pool: a.Pool, Group: g}
		if ranks := a.RankNumbers(g); a.DataParallel.Coupling == Lockstep {
			u.Ranks = ranks
			out = append(out, u)
		} else {
			for _, r := range ranks {
				one := u
				one.ID, one.Ranks = u.ID+"/"+strconv.Itoa(r), []int{r}
				out = append(out, one)
			}
		}
	}
	return out
}

// PoolName names the pool to people: its units, its Router and its metrics.
func (a *Application) PoolName() string { return PoolName(a.Name, a.Pool) }

// OtherPool returns the name of the other pool of the application, "" if it has one pool.
func (a *Application) OtherPool() string {
	switch a.Pool {
	case PoolPrefill:
		return PoolName(a.Name, PoolDecode)
	case PoolDecode:
		return PoolName(a.Name, PoolPrefill)
	default:
		return ""
	}
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

	RoleBoth    = "both" // the rank does prefill and decode
	RolePrefill = "prefill"
	RoleDecode  = "decode"

	KVEventsAuto = "auto"
	KVEventsOff  = "off"

	IdentityText   = "text"
	IdentityTokens = "tokens"

	StrategyPack         = "PACK"
	StrategyStrictPack   = "STRICT_PACK"
	StrategySpread       = "SPREAD"
	StrategyStrictSpread = "STRICT_SPREAD"
)

// DefaultPolicy returns the routing policy of an application whose file names none.
func DefaultPolicy(c Coupling) string { return routing.DefaultName(c == Lockstep) }

// DefaultStrategy returns the placement strategy of an application whose file names none. Independent ranks
// are spread, so that the death of one node takes few of them. The ranks of a lockstep group end together
// wherever they are, and talk on every step, so they are packed. Ranks with a share of a device are packed to
// fill devices.
func DefaultStrategy(a *Application) string {
	if a.DataParallel.Coupling == Lockstep || a.Resources.Share() > 0 {
		return StrategyPack
	}
	return StrategySpread
}

// Default returns an application with every default that does not depend on other keys. Name, model, engine
// kind and routing policy are empty and sizes are 0, because the file decides them.
func Default() Application {
	var a Application
	setDefaults(reflect.ValueOf(&a).Elem())
	return a
}

// The pools of an application with prefill and decode ranks.
const (
	PoolPrefill = "prefill"
	PoolDecode  = "decode"
)

// Words of `disaggregation:`.
const (
	TransferNIXL     = "nixl"
	TransferNIXLPush = "nixl-push"
	TransferMooncake = "mooncake"
	TransferSGLang   = "sglang"
	TransferSim      = "sim"

	DecideISL    = "isl"
	DecideAlways = "always"

	FallbackLocal = "local"
	FallbackFail  = "fail"

	ColocatePrefer = "prefer"
	ColocateNo     = "no"
)

// Disaggregation says how the two pools of an application work together. Both pools have it.
type Disaggregation struct {
	// how KV blocks go from a prefill rank to a decode rank: `nixl` (the decode engine reads them),
	// `nixl-push` (the prefill engine writes them), `mooncake`, `sglang`, `sim` (simulated engines). Both
	// pools restart when it changes
	Transfer string `json:"transfer" words:"nixl | nixl-push | mooncake | sglang | sim" unset:"by kind"`
	// when a prefill rank computes the prompt: `isl` (by the length of the prompt and what the decode rank
	// holds of it), `prefill-load` (as isl, and only while prefill ranks have room), `uncached>=N` (from N
	// tokens that the decode rank does not hold), `always`, `mex` (by the predicted time of both ways)
	Decide string `json:"decide" default:"isl"`
	// what a request gets when no prefill rank can take its prompt: `local`: its decode rank computes the
	// prompt. `fail`: 503
	Fallback string `json:"fallback" words:"local | fail" default:"local"`
	// ranks of both pools on one node: `prefer`: a pool's ranks go where those of the other pool are, if
	// there is room. `no`: never
	Colocate string `json:"colocate,omitempty" words:"prefer | no" unset:"no effect"`
}

// AttachPD is what a transfer must know of an attached prefill engine before a request. `nixl` needs none of
// it: the engine's answers say it.
type AttachPD struct {
	// `nixl-push`: the `engine_id` of the engine's `--kv-transfer-config`; each engine has its own
	EngineID string `json:"engine_id,omitempty"`
	// `nixl-push`: `HOST:PORT` of the engine's side channel
	SideChannel string `json:"side_channel,omitempty" is:"address"`
	// `nixl-push`: the engine's tensor parallel size
	TPSize int `json:"tp_size,omitempty" is:"an integer from 1 to 1024"`
	// `mooncake`, `sglang`: the engine's bootstrap server, `http://HOST:PORT`
	Bootstrap string `json:"bootstrap,omitempty"`
}

// PoolName returns the name of a pool of an application, and the application's own name if pool is "". Names
// of applications have no dot, so they differ from all names of pools.
func PoolName(app, pool string) string {
	if pool == "" {
		return app
	}
	return app + "." + pool
}

// ByName groups pools by their applications, in the order of the first ones.
func ByName(pools []*Application) [][]*Application {
	var out [][]*Application
	at := map[string]int{}
	for _, a := range pools {
		i, ok := at[a.Name]
		if !ok {
			i, at[a.Name] = len(out), len(out)
			out = append(out, nil)
		}
		out[i] = append(out[i], a)
	}
	return out
}
