package app

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
		Engine: Engine{KVEvents: KVEventsAuto, StartupTimeoutS: DefaultStartupTimeoutS,
			StallTimeoutS: DefaultStallTimeoutS},
		PlacementGroupStrategy: StrategyPack,
		Routing:                Routing{Preset: PresetDocumented, Identity: IdentityText},
		MaxQueuedRequests:      DefaultMaxQueuedRequests,
		Timeouts: Timeouts{QueueS: DefaultQueueS, FirstTokenS: DefaultFirstTokenS,
			BetweenTokensS: DefaultBetweenTokensS},
		Retries:                 Retries{Attempts: DefaultAttempts},
		HealthCheckPeriodS:      DefaultHealthCheckPeriodS,
		HealthCheckTimeoutS:     DefaultHealthCheckTimeoutS,
		GracefulShutdownTimeout: DefaultGracefulShutdownS,
	}
}
