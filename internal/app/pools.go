package app

import "strings"

// The pools of an application with prefill and decode ranks. Behind the parser each pool is an Application of
// its own, with the name PoolName(app, pool). Names of users' applications are DNS labels without a dot, so
// the names do not collide.
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

// PoolName returns the name of a pool of an application, and the application's own name if pool is "".
func PoolName(app, pool string) string {
	if pool == "" {
		return app
	}
	return app + "." + pool
}

// SplitPool returns the application and the pool of a name; pool is "" if the name is not that of a pool.
func SplitPool(name string) (app, pool string) {
	app, pool, _ = strings.Cut(name, ".")
	if pool != PoolPrefill && pool != PoolDecode {
		return name, ""
	}
	return app, pool
}
