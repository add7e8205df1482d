package app

import "strings"

// flagKVTransfer is the flag whose kv_role decides whether an engine does only prefill or only decode.
const flagKVTransfer = "kv-transfer-config"

// ownedFlag says what to write instead of a flag that dpserve sets; "" if the user may set it. flag is in
// kebab case without leading dashes.
func ownedFlag(flag string) string {
	const (
		rank = "dpserve hands out ranks and addresses; write data_parallel.dp_size and " +
			"data_parallel.coupling"
		size   = "write data_parallel.dp_size"
		names  = "write model.id and model.aliases"
		source = "write model.source"
		lora   = "write model.adapters"
		pd     = "disaggregated prefill and decode come with a later version"
		spread = "dpserve places the ranks; write resources and placement_group_strategy"
		always = "it is always set; leave it out"
	)
	flag, _, _ = strings.Cut(flag, ".") // one key of a flag that takes JSON
	switch flag {
	case "host":
		return "dpserve binds engines to 127.0.0.1; where clients connect is set on the node (--http-bind)"
	case "port":
		return "dpserve takes ports from the node's --port-range"
	case "served-model-name":
		return names
	case "model", "model-path":
		return source
	case "lora-modules", "lora-paths":
		return lora
	case "data-parallel-size", "dp-size", "dp":
		return size
	case "dpn", "dpl", "dpa", "dpp", "dpe", "dph", "dpm", "dpb", "dpr":
		return rank
	case "nnodes", "node-rank", "dist-init-addr", "master-addr", "master-port", "headless":
		return spread
	case "kv-events-config":
		return "write engine.kv_events: auto | off"
	case "disaggregation-mode", "disaggregation-bootstrap-port":
		return pd
	case "shutdown-timeout":
		return "write graceful_shutdown_timeout_s"
	case "enable-prompt-tokens-details", "sim-watch-stdin":
		return always
	}
	if strings.HasPrefix(flag, "data-parallel-") {
		return rank
	}
	return ""
}

// ownedEnv is ownedFlag for environment variables.
func ownedEnv(name string) string {
	switch name {
	case "CUDA_VISIBLE_DEVICES":
		return "write resources.gpus; dpserve picks the devices"
	case "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT":
		return "write data_parallel.dp_size; dpserve hands out the ranks"
	case "VLLM_HTTP_TIMEOUT_KEEP_ALIVE":
		return "leave it out; it must outlive dpserve's idle connections"
	}
	return ""
}
