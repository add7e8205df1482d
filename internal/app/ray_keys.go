package app

// rayKey is one key of a map of a Ray Serve file: exactly one of to, read, unused and wrong is set.
type rayKey struct {
	name   string
	to     string                      // our key with the same meaning and value
	read   func(m *rayModel, c cursor) // reads it
	unused string                      // why it has no effect here
	wrong  string                      // why it is refused
	hint   string                      // what to write instead
}

// rayFileKeys are the keys beside `applications`.
func rayFileKeys() []rayKey {
	const node = "it is set on the node: see --http-bind of dpserve start"
	return []rayKey{
		{name: "applications", read: (*rayModel).skip},
		{name: "proxy_location", unused: "every node has an endpoint"},
		{name: "http_options", unused: node},
		{name: "grpc_options", unused: "dpserve has no gRPC endpoint"},
		{name: "controller_options", unused: "there is no controller process"},
		{name: "logging_config", unused: "logs are set on the node"},
		{name: "tracing_config", unused: "traces are set on the node"},
		{name: "target_capacity", unused: "the number of ranks is fixed"},
	}
}

// rayAppKeys are the keys of an application.
func rayAppKeys() []rayKey {
	return []rayKey{
		{name: "name", read: (*rayModel).skip},
		{name: "import_path", read: (*rayModel).skip},
		{name: "args", read: (*rayModel).skip},
		{name: "deployments", read: (*rayModel).skip},
		{name: "runtime_env", read: (*rayModel).skip},
		{name: "route_prefix", read: (*rayModel).skip},
		{name: "host", unused: "it is set on the node"},
		{name: "port", unused: "it is set on the node"},
		{name: "autoscaling_policy", unused: "the number of ranks is fixed"},
		{name: "logging_config", unused: "logs are set on the node"},
		{name: "external_scaler_enabled", unused: "the number of ranks is fixed"},
	}
}

// rayArgKeys are the keys of a builder's args beside those of its models.
func rayArgKeys() []rayKey {
	const ingress = "the endpoint of each node is the ingress, without a size of its own"
	return []rayKey{
		{name: "ingress_deployment_config", unused: ingress},
		{name: "ingress_cls_config", unused: ingress},
		{
			name: "proxy_deployment_config", wrong: "Ray Serve has no proxy_deployment_config any more",
			hint: "leave it out: " + ingress,
		},
		{
			name: "proxy_cls_config", wrong: "Ray Serve has no proxy_cls_config any more",
			hint: "leave it out: " + ingress,
		},
	}
}

// rayModelKeys are the keys of an LLMConfig.
func rayModelKeys() []rayKey {
	return []rayKey{
		{name: "model_loading_config", read: (*rayModel).readLoading},
		{name: "llm_engine", read: (*rayModel).readEngine},
		{name: "engine_kwargs", read: (*rayModel).readKwargs},
		{name: "accelerator_type", read: (*rayModel).readAccelerator},
		{name: "accelerator_config", read: (*rayModel).readAcceleratorConfig},
		{name: "placement_group_config", read: (*rayModel).readPlacement},
		{name: "lora_config", read: (*rayModel).readLora},
		{name: "deployment_config", read: (*rayModel).skip},
		{name: "runtime_env", read: (*rayModel).readEnv},
		{name: "server_cls", read: (*rayModel).readServer},
		{name: "experimental_configs", read: (*rayModel).readExperimental},
		{name: "log_engine_metrics", unused: "engines always report their metrics"},
		{name: "callback_config", unused: "dpserve runs no Python"},
		{
			name: "resources_per_bundle", wrong: "Ray Serve LLM has no resources_per_bundle any more",
			hint: "write placement_group_config: {bundle_per_worker: {GPU: 1}}",
		},
	}
}

// rayDeploymentKeys are the keys of deployment_config, and of an entry of `deployments`.
func rayDeploymentKeys() []rayKey {
	const placed = "Ray Serve LLM refuses placement groups here"
	const hint = "write placement_group_config beside deployment_config"
	const steps = "a change takes one unit at a time"
	return []rayKey{
		{name: "name", unused: "ranks have the names of their application"},
		{name: "num_replicas", read: (*rayModel).readReplicas},
		{name: "autoscaling_config", read: (*rayModel).readScaling},
		{name: "max_ongoing_requests", read: (*rayModel).readOngoing},
		{name: "max_queued_requests", read: (*rayModel).readQueued},
		{name: "health_check_period_s", to: "health_check_period_s"},
		{name: "health_check_timeout_s", to: "health_check_timeout_s"},
		{name: "graceful_shutdown_timeout_s", to: "graceful_shutdown_timeout_s"},
		{name: "graceful_shutdown_wait_loop_s", unused: "dpserve knows each open stream and does not poll"},
		{name: "max_replicas_per_node", to: "max_ranks_per_node"},
		{name: "ray_actor_options", read: (*rayModel).readActorOptions},
		{name: "request_router_config", read: (*rayModel).readRouter},
		{name: "user_config", unused: "dpserve runs no Python"},
		{name: "logging_config", unused: "logs are set on the node"},
		{name: "rolling_update_percentage", unused: steps},
		{name: "max_surge_percent", unused: steps},
		{name: "backpressure_config", unused: "a full queue answers 503 with Retry-After"},
		{name: "gang_scheduling_config", unused: "the ranks of a group start and restart as one"},
		{name: "deployment_actors", unused: "dpserve runs no Python"},
		{name: "placement_group_bundles", wrong: placed, hint: hint},
		{name: "placement_group_strategy", wrong: placed, hint: hint},
		{name: "placement_group_bundle_label_selector", wrong: placed, hint: hint},
	}
}

// rayExperimentalKeys are the known keys of experimental_configs.
func rayExperimentalKeys() []rayKey {
	const port = "dpserve takes ports from the node's --port-range"
	return []rayKey{
		{
			name: "num_router_replicas", wrong: "Ray Serve calls it num_ingress_replicas",
			hint: "leave it out: every node has an endpoint",
		},
		{name: "num_ingress_replicas", unused: "every node has an endpoint"},
		{name: "dp_size_per_node", unused: "Ray Serve ignores it too; max_ranks_per_node bounds a node"},
		{name: "stream_batching_interval_ms", unused: "tokens are passed on as they come"},
		{name: "pd_tokenize_once", unused: "the decode engine reads the prompt itself"},
		{name: "_prewarm_prefill_decode", unused: "engines shake hands at the first request"},
		{name: "NIXL_SIDE_CHANNEL_PORT_BASE", unused: port},
		{name: "MORI_HANDSHAKE_PORT_BASE", unused: port},
		{name: "MORI_NOTIFY_PORT_BASE", unused: port},
		{name: "KV_EVENTS_PORT_BASE", unused: port},
		{name: "KV_TOKEN_PORT_BASE", unused: port},
		{name: "KV_INDEXER_THREADS", unused: "the index has no threads of its own"},
	}
}

// rayRouters maps the classes of request_router_class, without their modules, to our policies.
func rayRouters() map[string]string {
	return map[string]string{
		"PowerOfTwoChoicesRequestRouter": "power-of-two", "PrefixCacheAffinityRouter": "prefix-aware",
		"ConsistentHashRouter": "session-affinity", "RoundRobinRouter": "round-robin",
		"RoundRobinRequestRouter": "round-robin", "KVAwareRouter": "kv", "KVAwareRequestRouter": "kv",
	}
}

// rayParams maps parameters of Ray's routers that have another name here.
func rayParams() map[string]string {
	return map[string]string{"eviction_interval_secs": "eviction_interval_s"}
}

// rayTransfers maps kv_connector to our transfers. Other connectors get the default.
func rayTransfers() map[string]string {
	return map[string]string{
		"NixlConnector": TransferNIXL, "NixlPushConnector": TransferNIXLPush,
		"MooncakeConnector": TransferMooncake,
	}
}

// rayAccelerators are the names that accelerator_type may have.
const rayAccelerators = `A100 A100-40G A100-80G A10G A10 AMD-Instinct-MI100 AMD-Instinct-MI210
AMD-Instinct-MI250X AMD-Instinct-MI250X-MI250 AMD-Instinct-MI300A AMD-Instinct-MI300X-HF
AMD-Instinct-MI300X-OAM AMD-Instinct-MI308X AMD-Instinct-MI325X-OAM AMD-Instinct-MI350X-OAM
AMD-Instinct-MI355X-OAM AMD-Radeon-HD-7900 AMD-Radeon-R9-200-HD-7900 Apple-Silicon Ascend910B Ascend910B4
B200 B300 FURIOSA_RNGD GB200 GB300 H100 H20 H200 Intel-GAUDI Intel-GPU-Max-1100 Intel-GPU-Max-1550 K80 L4
L40S M1 M1-Max M1-Pro M1-Ultra M2 M2-Max M2-Pro M2-Ultra M3 M3-Max M3-Pro MOBILINT_ARIES MOBILINT_REGULUS
MXC500 MXC550 P100 P4 RTX-PRO-6000 T4 TPU-V2 TPU-V3 TPU-V4 TPU-V5LITEPOD TPU-V5P TPU-V6E TPU-V7X V100
aws-neuron-core`
