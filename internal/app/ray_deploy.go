package app

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// readDeployment reads deployment_config with what `deployments` has instead.
func (m *rayModel) readDeployment() {
	config := m.c.sub("deployment_config")
	if config.n == nil {
		config.n = &node{place: m.c.n.place, shape: mapShape, size: 1}
	}
	name := strings.NewReplacer("/", "--", ".", "_").Replace(m.id())
	for _, kind := range []string{"LLMServer:", "DPServer:", "Prefill:", "Decode:"} {
		over := m.over[kind+name]
		if over == nil || m.side != "" && !strings.EqualFold(kind, m.side+":") {
			continue
		}
		over.used = true
		whole := *config.n
		whole.entries = slices.DeleteFunc(slices.Clone(whole.entries), func(e entry) bool {
			return over.c.n.get(e.key) != nil
		})
		config.n = &whole
		m.f.readKeys(m, over.c, append([]rayKey{{name: "name", read: (*rayModel).skip}},
			rayDeploymentKeys()...), true)
	}
	if config.sub("num_replicas").n != nil && config.sub("autoscaling_config").n != nil &&
		config.sub("num_replicas").n.text != "auto" {
		config.sub("num_replicas").refuse(Fault{
			Message: "num_replicas and autoscaling_config exclude each other",
			Hint:    "write num_replicas alone",
		})
		return
	}
	m.f.readKeys(m, config, rayDeploymentKeys(), true)
}

func (m *rayModel) readReplicas(c cursor) {
	if c.n.text == "auto" {
		m.replicas = 1
		m.note(c, "read as num_replicas: 1, because the number of ranks is fixed", "write a number")
		return
	}
	n, ok := c.n.whole()
	if !ok || n < 1 || n > MaxRanks {
		c.refuseValue("an integer from 1 to "+strconv.Itoa(MaxRanks), "")
		return
	}
	m.replicas, m.sizeAt = int(n), c
}

// readScaling reads a range as a fixed size. Ray Serve starts independent replicas with the smallest number,
// and so does dpserve. A range of groups is refused: each of them takes many devices.
func (m *rayModel) readScaling(c cursor) {
	if !c.isMap(nil) {
		return
	}
	size := func(key string, otherwise int64) int64 {
		if n := c.sub(key).n; n != nil && n.shape != nullShape {
			v, _ := n.whole() // 0 if it is no integer
			return v
		}
		return otherwise
	}
	least, most := size("min_replicas", 1), size("max_replicas", 1)
	switch first := size("initial_replicas", least); {
	case first < 1 || most < least || most > MaxRanks:
		c.refuse(Fault{Found: "a range without a size", Wanted: "min_replicas and max_replicas from 1"})
	case least != most && m.dpSize > 1:
		c.refuse(Fault{
			Message: "the number of groups is fixed",
			Found:   "min_replicas " + strconv.Itoa(int(least)) + ", max_replicas " + strconv.Itoa(int(most)),
			Wanted:  "min_replicas = max_replicas", Hint: "write num_replicas, the number of groups, instead",
		})
	default:
		m.replicas = int(first)
		if least != most {
			m.note(c,
				"read as num_replicas: "+strconv.Itoa(m.replicas)+", because the number of ranks is fixed",
				"write num_replicas instead")
		}
	}
}

func (m *rayModel) readOngoing(c cursor) {
	if n, ok := c.n.whole(); ok && n > 1_000_000 {
		m.unused(c, "it is no bound; left out, the engine's own number holds")
		return
	}
	m.set(c, m.own("max_ongoing_requests")...)
}

func (m *rayModel) readQueued(c cursor) {
	if c.n.text == "-1" {
		m.unused(c, "a queue has a bound; 10,000 without this key")
		return
	}
	m.setShared(c, "max_queued_requests")
}

func (m *rayModel) readActorOptions(c cursor) {
	m.f.readKeys(m, c, []rayKey{
		{name: "num_gpus", read: func(m *rayModel, c cursor) { m.set(c, m.own("resources", "gpus")...) }},
		{name: "num_cpus", read: func(m *rayModel, c cursor) { m.set(c, m.own("resources", "cpus")...) }},
		{name: "memory", read: func(m *rayModel, c cursor) {
			if bytes, ok := c.n.real(); ok {
				m.number(c, bytes/(1<<30), m.own("resources", "memory_gib")...)
			}
		}},
		{name: "accelerator_type", read: (*rayModel).readAccelerator},
		{name: "runtime_env", read: (*rayModel).readEnv},
		{name: "resources", unused: "write resources.labels for nodes of one kind"},
		{name: "label_selector", unused: "write resources.labels"},
		{name: "fallback_strategy", unused: "write resources.labels"},
	}, false)
}

func (m *rayModel) number(from cursor, v float64, keys ...string) {
	text, s := strconv.FormatFloat(v, 'f', -1, 64), floatShape
	if v == math.Trunc(v) {
		s = intShape
	}
	m.put(from, text, s, keys...)
}

func (m *rayModel) readAccelerator(c cursor) {
	names := strings.Fields(rayAccelerators)
	if !slices.Contains(names, c.n.text) {
		c.refuse(Fault{
			Message: "Ray Serve has no accelerator type " + c.n.describe(), Hint: didYouMean(c.n.text, names),
		})
		return
	}
	name := c.n.text
	if name == "A10" {
		name = "A10G"
	}
	m.note(c, "goes to nodes that were started with --labels accelerator="+name, "")
	m.put(c, name, textShape, m.own("resources", "labels", "accelerator")...)
}

func (m *rayModel) readAcceleratorConfig(c cursor) {
	switch kind := c.sub("kind"); {
	case kind.n == nil || kind.n.text == "gpu":
	case kind.n.text == "cpu":
		m.put(kind, "0", intShape, m.own("resources", "gpus")...)
	default:
		kind.refuseValue("cpu | gpu", "dpserve gives ranks no other devices")
	}
}

// readPlacement adds up what the bundles of a rank take.
func (m *rayModel) readPlacement(c cursor) {
	if !c.isMap(nil) {
		return
	}
	each, bundles := c.sub("bundle_per_worker"), c.sub("bundles")
	if each.n != nil && bundles.n != nil {
		each.refuse(Fault{
			Message: "bundle_per_worker and bundles exclude each other", Hint: "leave one of them out",
		})
		return
	}
	var gpus, cpus float64
	add := func(bundle cursor, times float64) {
		if !bundle.isMap(nil) {
			return
		}
		for _, e := range bundle.n.entries {
			v, ok := e.value.real()
			switch item := bundle.key(e); {
			case !ok || v < 0:
				item.refuseValue("a number", "")
			case e.key == "GPU":
				gpus += v * times
			case e.key == "CPU":
				cpus += v * times
			default:
				m.unused(item, "write resources.labels for nodes of one kind")
			}
		}
	}
	switch {
	case each.n != nil:
		kwargs := m.c.sub("engine_kwargs").n
		times := 1.0
		for _, key := range []string{"tensor_parallel_size", "pipeline_parallel_size"} {
			if n := kwargs.sub(key); n != nil {
				v, _ := n.real()
				times *= max(1, v)
			}
		}
		add(each, times)
	case bundles.n != nil:
		each = bundles
		bundles.each(maxListItems, func(item cursor) { add(item, 1) })
	}
	if each.n != nil {
		m.number(each, gpus, m.own("resources", "gpus")...)
		if cpus > 0 {
			m.number(each, cpus, m.own("resources", "cpus")...)
		}
	}
	if strategy := c.sub("strategy"); strategy.n != nil {
		m.unused(strategy, "the devices of a rank are on one node; placement_group_strategy places ranks")
	}
	for _, e := range c.n.entries {
		if !slices.Contains([]string{"bundle_per_worker", "bundles", "strategy"}, e.key) {
			m.f.d.fault(e.place, join(c.path, e.key), Fault{
				Message: "Ray Serve has no key " + strconv.Quote(e.key) + " here",
				Hint:    "write bundle_per_worker, bundles or strategy",
			})
		}
	}
}

func (m *rayModel) readLora(c cursor) {
	m.f.readKeys(m, c, []rayKey{
		{name: "dynamic_lora_loading_path", read: func(m *rayModel, c cursor) {
			m.note(c, "adapters are not looked for: dpserve serves those that the file names",
				"write model: {adapters: [{id: NAME, source: FOLDER}]}")
		}},
		{name: "max_num_adapters_per_replica", unused: "engine_kwargs.max_loras bounds them"},
		{name: "download_timeout_s", unused: "dpserve downloads no adapters"},
		{name: "max_download_tries", unused: "dpserve downloads no adapters"},
	}, true)
}

func (m *rayModel) readEnv(c cursor) {
	if !c.isMap(nil) {
		return
	}
	for _, e := range c.n.entries {
		item := c.key(e)
		if e.key != "env_vars" {
			m.unused(item, "dpserve installs nothing: the engine's machine has what it needs")
			continue
		}
		if !item.isMap(nil) {
			continue
		}
		for _, v := range item.n.entries {
			name := item.key(v)
			switch instead := ownedEnv(v.key); {
			case instead != "":
				m.unused(name, instead)
			case m.app.get("engine").sub("env").sub(v.key) == nil:
				m.set(name, m.own("engine", "env", v.key)...)
			}
		}
	}
}

func (m *rayModel) readServer(c cursor) {
	switch class := c.n.text[strings.LastIndexAny(c.n.text, ":.")+1:]; class {
	case "LLMServer", "DPServer", "PDDecodeServer", "PDPrefillServer",
		"DPPDDecodeServer", "DPPDPrefillServer":
	default:
		c.refuse(Fault{
			Message: "dpserve runs no Python: found server_cls " + c.n.describe(),
			Wanted:  "LLMServer | DPServer",
			Hint:    "leave it out",
		})
	}
}

func (m *rayModel) readExperimental(c cursor) { m.f.readKeys(m, c, rayExperimentalKeys(), false) }

func (m *rayModel) readRouter(c cursor) {
	const waits = "a request waits in the queue of its ingress until a rank has room"
	m.f.readKeys(m, c, []rayKey{
		{name: "request_router_class", read: func(m *rayModel, c cursor) {
			class := c.n.text[strings.LastIndexAny(c.n.text, ":.")+1:]
			policy := rayRouters()[class]
			if policy == "" {
				c.refuse(Fault{
					Message: "dpserve runs no Python: found router " + c.n.describe(),
					Hint:    "leave it out for the default, or write routing.policy",
				})
				return
			}
			m.put(c, policy, textShape, m.own("routing", "policy")...)
		}},
		{name: "request_router_kwargs", read: func(m *rayModel, c cursor) {
			if !c.isMap(nil) {
				return
			}
			for _, e := range c.n.entries {
				name := e.key
				if ours := rayParams()[name]; ours != "" {
					name = ours
				}
				m.set(c.key(e), m.own("routing", "params", name)...)
			}
		}},
		{name: "request_routing_stats_period_s", unused: "ranks report their load as it changes"},
		{name: "request_routing_stats_timeout_s", unused: "ranks report their load as it changes"},
		{name: "initial_backoff_s", unused: waits},
		{name: "backoff_multiplier", unused: waits},
		{name: "max_backoff_s", unused: waits},
	}, false)
}
