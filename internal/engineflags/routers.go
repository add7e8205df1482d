package engineflags

import (
	"strings"
	"sync"
)

// RouterFlag is a flag of a router that is not dpserve, with what says the same here. Exactly one of Key,
// Flag, LeftOut and Instead is set.
type RouterFlag struct {
	Peer   string // the program that has the flag
	Name   string // in kebab case, without dashes
	Switch bool   // no value follows

	Key     string // key of an application in app.yaml
	Flag    string // flag of `dpserve serve` and `dpserve up`
	LeftOut string // why dpserve can leave the flag out and go on
	Instead string // what to write instead; dpserve refuses the flag

	// what a switch with a Key stands for, and the form of a value for Flag; "": true, and the value as it is
	Value string
}

// The routers whose flags dpserve reads. The router of the vLLM project has the flags of SGLang's.
const (
	SGLangRouter = "SGLang's router"
	Dynamo       = "Dynamo"
	Furiosa      = "Furiosa-LLM"
)

const (
	noDiscovery = "dpserve does not ask Kubernetes for pods: make a headless service of them, whose " +
		"addresses it follows with `dpserve up --attach dns://NAME.NAMESPACE.svc:PORT`"
	noRateLimit = "dpserve has no limit of tokens per second; max_queued_requests, max_queued_tokens and " +
		"max_ongoing_requests of an app.yaml bound what it takes on"
	keysInFile  = "write a line NAME KEY into a file, and name the file with --api-keys"
	ownRetries  = "dpserve asks another rank at once, within its retry budget; see retries in an app.yaml"
	ownBreaker  = "dpserve takes a rank that fails out of routing, asks it again, and takes it back"
	ownTimeouts = "dpserve bounds each phase of a request, not all of it; see timeouts in an app.yaml"
	ownModels   = "the engines of --attach say what they serve: leave it out; `dpserve serve MODEL` starts " +
		"engines"
	ownLimits = "dpserve bounds the requests of each rank (max_ongoing_requests) and of the queue " +
		"(max_queued_requests)"
)

// routerFlags are the flags of other routers. Flags of one meaning, or with one answer, share a row.
// Each flag of SGLang's router has a second name, --router-NAME, in the program that starts the engines too.
//
//nolint:gochecknoglobals // a constant table
var routerFlags = []RouterFlag{
	{Peer: SGLangRouter, Name: "policy", Key: "routing.policy"},
	{Peer: SGLangRouter, Name: "worker-urls", Flag: "attach"},
	{Peer: SGLangRouter, Name: "prefill-policy", Key: "prefill.routing.policy"},
	{Peer: SGLangRouter, Name: "decode-policy", Key: "decode.routing.policy"},
	{Peer: SGLangRouter, Name: "pd-disaggregation", Switch: true, LeftOut: "--prefill says the same"},
	{Peer: SGLangRouter, Name: "cache-threshold", Key: "routing.params.cache_threshold"},
	{Peer: SGLangRouter, Name: "balance-abs-threshold", Key: "routing.params.balance_abs_threshold"},
	{Peer: SGLangRouter, Name: "balance-rel-threshold", Key: "routing.params.balance_rel_threshold"},
	{
		Peer: SGLangRouter, Name: "eviction-interval eviction-interval-secs",
		Key: "routing.params.eviction_interval_s",
	},
	{Peer: SGLangRouter, Name: "max-tree-size", Key: "routing.params.max_tree_size"},
	{Peer: SGLangRouter, Name: "max-worker-retries", Key: "routing.params.max_worker_retries"},
	{Peer: SGLangRouter, Name: "max-total-retries", Key: "routing.params.max_total_retries"},
	{Peer: SGLangRouter, Name: "retry-max-retries", Key: "retries.attempts"},
	{Peer: SGLangRouter, Name: "disable-retries", Switch: true, Key: "retries.attempts", Value: "1"},
	{
		Peer: SGLangRouter, LeftOut: ownRetries,
		Name: "retry-initial-backoff-ms retry-max-backoff-ms retry-backoff-multiplier retry-jitter-factor",
	},
	{
		Peer: SGLangRouter, LeftOut: ownBreaker,
		Name: "cb-failure-threshold cb-success-threshold cb-timeout-duration-secs cb-window-duration-secs " +
			"health-failure-threshold health-success-threshold health-check-endpoint",
	},
	{Peer: SGLangRouter, Name: "health-check-interval-secs", Key: "health_check_period_s"},
	{Peer: SGLangRouter, Name: "health-check-timeout-secs", Key: "health_check_timeout_s"},
	{Peer: SGLangRouter, Name: "queue-size", Key: "max_queued_requests"},
	{Peer: SGLangRouter, Name: "queue-timeout-secs", Key: "timeouts.queue_s"},
	{Peer: SGLangRouter, Name: "request-timeout-secs", LeftOut: ownTimeouts},
	{Peer: SGLangRouter, Name: "max-concurrent-requests", LeftOut: ownLimits},
	{Peer: SGLangRouter, Name: "rate-limit-tokens-per-second", Instead: noRateLimit},
	{Peer: SGLangRouter, Name: "max-payload-size", Instead: "write --max-body MIB"},
	{Peer: SGLangRouter, Name: "prometheus-port", Flag: "metrics-bind", Value: "127.0.0.1:%s"},
	{Peer: SGLangRouter, Name: "prometheus-host", Instead: "write --metrics-bind HOST:PORT"},
	{Peer: SGLangRouter, Name: "api-key", Instead: keysInFile},
	{Peer: SGLangRouter, Name: "tls-cert-path", Flag: "tls-cert"},
	{Peer: SGLangRouter, Name: "tls-key-path", Flag: "tls-key"},
	{Peer: SGLangRouter, Name: "service-discovery", Switch: true, Instead: noDiscovery},
	{
		Peer: SGLangRouter, Instead: noDiscovery,
		Name: "selector prefill-selector decode-selector service-discovery-port service-discovery-namespace",
	},
	{Peer: SGLangRouter, Name: "dp-aware", Switch: true, LeftOut: "dpserve finds the ranks behind a URL"},
	{
		Peer: SGLangRouter, Name: "worker-startup-check-interval",
		LeftOut: "dpserve asks an engine that does not answer yet every second",
	},
	{Peer: SGLangRouter, Name: "worker-startup-timeout-secs", Flag: "attach-wait", Value: "%ss"},
	{Peer: SGLangRouter, Name: "model-path tokenizer-path", Instead: ownModels},

	{Peer: Dynamo, Name: "router-mode", Key: "routing.policy"},
	{Peer: Dynamo, Name: "kv-overlap-score-weight", Key: "routing.params.overlap_score_weight"},
	{Peer: Dynamo, Name: "router-temperature", Key: "routing.params.router_temperature"},
	{Peer: Dynamo, Name: "no-kv-events", Switch: true, Key: "routing.params.no_kv_events"},
	{
		Peer: Dynamo, Name: "no-track-active-blocks", Switch: true,
		Key: "routing.params.no_track_active_blocks",
	},
	{Peer: Dynamo, Name: "busy-threshold active-decode-blocks-threshold", Key: "routing.busy_threshold"},
	{
		Peer: Dynamo, Name: "router-replica-sync", Switch: true,
		LeftOut: "the nodes of a cluster always tell each other what they route",
	},
	{
		Peer: Dynamo, Name: "router-reset-states", Switch: true,
		LeftOut: "this node begins without routing state; `dpserve router reset APP` clears it later",
	},
	{Peer: Dynamo, Name: "router-snapshot-threshold", LeftOut: "there is no message broker to tidy up"},
	{Peer: Dynamo, Name: "router-ttl", LeftOut: "without KV events a block counts as cached for 120 s"},
	{Peer: Dynamo, Name: "kv-cache-block-size", LeftOut: "the engines say what their block size is"},
	{Peer: Dynamo, Name: "namespace", LeftOut: "an application of dpserve has a name, and no namespace"},
	{Peer: Dynamo, Name: "http-host", Flag: "host"},
	{Peer: Dynamo, Name: "http-port", Flag: "port"},

	{Peer: Furiosa, Name: "data-parallel-routing-policy", Key: "routing.policy"},
	{Peer: Furiosa, Name: "data-parallel-scoring-profile", Key: "routing.params.profile"},
}

// RouterFlags lists the flags of other routers, a name each.
var RouterFlags = sync.OnceValue(func() []RouterFlag {
	var out []RouterFlag
	for _, row := range routerFlags {
		for _, name := range strings.Fields(row.Name) {
			row.Name = name
			out = append(out, row)
			if row.Peer == SGLangRouter {
				row.Name = "router-" + name
				out = append(out, row)
			}
		}
	}
	return out
})

// Policy returns the routing policy that a parameter of the peer belongs to.
func (r *RouterFlag) Policy() string {
	return map[string]string{SGLangRouter: "cache-aware", Dynamo: "kv", Furiosa: "scoring"}[r.Peer]
}

// PolicyName returns how dpserve calls a routing policy that other routers know under another name.
func PolicyName(name string) string {
	name = strings.ReplaceAll(name, "_", "-")
	switch name {
	case "consistent-hash", "consistent-hashing", "manual":
		return "session-affinity"
	case "prefix-hash":
		return "prefix-aware"
	}
	return name
}
