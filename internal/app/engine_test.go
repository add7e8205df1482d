package app

import (
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// with is a file of one application with the given engine and further keys.
func with(engine string, more ...string) string {
	return "applications:\n  - name: demo\n    model: {id: demo}\n    engine: {" + engine + "}\n    " +
		strings.Join(more, "\n    ") + "\n"
}

func TestCoupling(t *testing.T) {
	t.Parallel()
	const dp4 = "data_parallel: {dp_size: 4}"
	for _, c := range []struct {
		text  string
		want  Coupling
		fault string
	}{
		{text: with("kind: sim", dp4), want: Independent},
		{text: with("kind: sim", "data_parallel: {coupling: lockstep}"), want: Lockstep},
		{text: with("kind: vllm"), want: Independent},
		{text: with("kind: vllm", "data_parallel: {dp_size: 4, coupling: lockstep}"), want: Lockstep},
		{
			text: with("kind: vllm", dp4),
			fault: "coupling is required for kind vllm when dp_size is above 1: " +
				"wanted independent | lockstep",
		},
		{
			text:  with("kind: vllm", "data_parallel: {dp_size: 4, coupling: tight}"),
			fault: `found "tight", wanted independent | lockstep`,
		},
		{text: with("kind: sglang", dp4), want: Independent},
		{text: with("kind: sglang, args: {tp_size: 8, enable_dp_attention: true}", dp4), want: Lockstep},
		{text: with("kind: sglang, args: {tp: 8, enable-dp-attention: true}", dp4), want: Lockstep},
		{text: with("kind: sglang, args: {tp_size: 8, enable_dp_attention: false}", dp4), want: Independent},
		{
			text:  with("kind: sglang", "data_parallel: {dp_size: 4, coupling: lockstep}"),
			fault: "go together: found lockstep, wanted independent",
		},
		{
			text: with(
				"kind: sglang, args: {tp_size: 8, enable_dp_attention: true}",
				"data_parallel: {coupling: independent}",
			),
			fault: "go together: found independent, wanted lockstep",
		},
		{
			text:  with("kind: sglang, args: {tp_size: 6, enable_dp_attention: true}", dp4),
			fault: "with DP attention dp_size divides tp_size: found dp_size 4, tp_size 6",
		},
		{
			text:  with("kind: sglang, args: {tp_size: 2, enable_dp_attention: true}", dp4),
			fault: "found dp_size 4, tp_size 2",
		},
	} {
		if c.fault == "" {
			assert.Equal(t, c.want, parsed(t, c.text).Applications[0].DataParallel.Coupling, c.text)
			continue
		}
		lines := faultsOf(t, c.text)
		require.Len(t, lines, 1, c.text)
		assert.Contains(t, lines[0], c.fault)
	}
}

// HF76, HF77: the table of devices of a rank: by kind of engine, by its parallel sizes, and as the file says.
func TestDevicesOfARank(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text string
		gpus float64
		set  bool
		warn string
	}{
		{text: with("kind: sim"), gpus: 0},
		{text: with("kind: sim", "resources: {gpus: 2}"), gpus: 2, set: true},
		{text: with("kind: vllm"), gpus: 1},
		{text: with("kind: vllm, args: {tensor_parallel_size: 4, pipeline-parallel-size: 2}"), gpus: 8},
		{text: with("kind: vllm, args: {tensor_parallel_size: '4'}"), gpus: 4},
		{text: with("kind: vllm", "resources: {gpus: 0}"), gpus: 0, set: true},
		{
			text: with("kind: vllm, args: {tensor_parallel_size: 4}", "resources: {gpus: 2}"),
			gpus: 2,
			set:  true,
			warn: "use 4 devices per rank, the file gives 2",
		},
		{
			text: with(
				"kind: sglang, args: {tp_size: 8, enable_dp_attention: true}",
				"data_parallel: {dp_size: 8}",
			),
			gpus: 1,
		},
		{text: with("kind: sglang, args: {tp_size: 8, pp_size: 2}"), gpus: 16},
		{text: with("kind: sim", "resources: {gpus: 2.0}"), gpus: 2, set: true},
		{text: with("kind: vllm", "resources: {gpus: 0.25}"), gpus: 0.25, set: true},
		{
			text: with("kind: vllm, args: {tensor_parallel_size: 2}", "resources: {gpus: 0.5}"),
			gpus: 0.5, set: true, warn: "use 2 devices per rank, the file gives 0.5",
		},
		{
			text: with("kind: vllm, args: {gpu_memory_utilization: 0.25}", "resources: {gpus: 0.25}"),
			gpus: 0.25, set: true,
		},
		{
			text: with("kind: vllm, args: {gpu-memory-utilization: 0.9}", "resources: {gpus: 0.25}"),
			gpus: 0.25, set: true,
			warn: "4 ranks fit on one device, and each takes 0.9 of its memory; hint: leave it out to take " +
				"nine tenths of the share, or write at most 0.25",
		},
		{
			text: with("kind: sglang, args: {mem_fraction_static: '0.4'}", "resources: {gpus: 0.3333}"),
			gpus: 0.3333, set: true, warn: "3 ranks fit on one device, and each takes 0.4 of its memory",
		},
	} {
		f, warnings, err := Parse(Default(), "app.yaml", []byte(c.text))
		require.NoError(t, err, c.text)
		assert.InDelta(t, c.gpus, f.Applications[0].Resources.GPUs, 0, c.text)
		assert.Equal(t, c.set, f.Applications[0].Resources.GPUsSet, c.text)
		require.Len(t, warnings, boolToInt(c.warn != ""), c.text)
		if c.warn != "" {
			assert.Contains(t, warnings[0].String(), c.warn)
		}
	}
	lines := faultsOf(t, with("kind: vllm, args: {tensor_parallel_size: 0}"))
	require.Len(t, lines, 1)
	assert.Contains(t, lines[0], "tensor and pipeline parallel sizes count devices")
}

// HF76: which numbers of devices are a share, and which are refused with the rule.
func TestSharesOfDevices(t *testing.T) {
	t.Parallel()
	for gpus, parts := range map[string]int{
		"0.25": 2500, "0.3333": 3333, "0.1": 1000, ".5": 5000, "1e-4": 1, "0.9999": 9999,
		"0": 0, "1": 0, "7": 0,
	} {
		r := parsed(t, with("kind: vllm", "resources: {gpus: "+gpus+"}")).Applications[0].Resources
		assert.Equal(t, parts, r.Share(), gpus)
		assert.Equal(t, int(math.Ceil(r.GPUs)), r.Devices(), gpus)
	}
	lockstep := "data_parallel: {dp_size: 2, coupling: lockstep}"
	for text, want := range map[string]string{
		with("kind: vllm", "resources: {gpus: 1.5}"): "resources.gpus: a rank has whole devices, or a " +
			"share of one: found 1.5, wanted a whole number, or a number below 1; hint: write 1 or 2",
		with("kind: sim", "resources: {gpus: 0.33334}"): "resources.gpus: a share has at most 4 digits " +
			"behind the point: found 0.33334, wanted 0.3333; hint: write 0.3333",
		with("kind: sim", "resources: {gpus: 0.00001}"): "hint: write 0.0001",
		with("kind: sim", "resources: {gpus: -0.5}"):    "found -0.5, wanted devices from 0 to 1024",
		with("kind: sim", "resources: {gpus: half}"):    "wanted devices from 0 to 1024",
		with("kind: vllm", "resources: {gpus: 0.5}", lockstep): "the ranks of a lockstep group cannot " +
			"share devices: NCCL refuses two ranks on one",
	} {
		lines := faultsOf(t, text)
		require.Len(t, lines, 1, text)
		assert.Contains(t, lines[0], want)
	}
	assert.Equal(t, 5000, parsed(t, with("kind: sim", "resources: {gpus: 0.5}", lockstep)).
		Applications[0].Resources.Share(), "the simulated engine has no NCCL")
}

// HF77: engines that share a device are limited to nine tenths of their share, unless the file says something
// else.
func TestMemoryOfAShare(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		with("kind: vllm", "resources: {gpus: 0.25}"):     "gpu-memory-utilization 0.225",
		with("kind: sglang", "resources: {gpus: 0.3333}"): "mem-fraction-static 0.29997",
		with("kind: vllm", "resources: {gpus: 1}"):        " ",
		with("kind: vllm"):                           " ",
		with("kind: sim", "resources: {gpus: 0.25}"): " ",
		with("kind: vllm, args: {gpu_memory_utilization: 0.2}", "resources: {gpus: 0.25}"): " ",
	} {
		flag, value := MemoryOfShare(parsed(t, text).Applications[0])
		assert.Equal(t, want, flag+" "+value, text)
	}
}

func TestOwnedFlags(t *testing.T) {
	t.Parallel()
	for flag, hint := range map[string]string{
		"port: 1":                         "--port-range",
		"host: 0.0.0.0":                   "127.0.0.1",
		"served_model_name: x":            "model.id",
		"model: x":                        "model.source",
		"lora_modules: [x]":               "model.adapters",
		"data_parallel_size: 2":           "data_parallel.dp_size",
		"data-parallel-rank: 1":           "data_parallel.dp_size",
		"data_parallel_hybrid_lb: true":   "data_parallel.coupling",
		"dp_size: 2":                      "data_parallel.dp_size",
		"kv_events_config: {}":            "engine.kv_events",
		"kv_events_config.topic: x":       "engine.kv_events",
		"shutdown_timeout: 3":             "graceful_shutdown_timeout_s",
		"enable_prompt_tokens_details: y": "always set",
		"sim_watch_stdin: true":           "always set",
		"disaggregation_mode: prefill":    "prefill: and decode:",
		"nnodes: 2":                       "placement_group_strategy",
	} {
		lines := faultsOf(t, with("kind: vllm, args: {"+flag+"}"))
		require.Len(t, lines, 1, flag)
		assert.Contains(t, lines[0], "dpserve writes the flag --")
		assert.Contains(t, lines[0], hint, flag)
	}
}

func TestArgumentFaults(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"max_num_seqs: 1, max-num-seqs: 2": `flag "--max-num-seqs" is taken by`,
		"--max-num-seqs: 1":                "without dashes in front",
		"a b: 1":                           "the name of a flag",
		"x: null":                          "found nothing, wanted a value",
		"x: .nan":                          "wanted a finite number",
		"x: [99999999999999999999]":        "wanted an integer of 64 bits; hint: put it in quotes",
		`x: "\0"`:                          "a NUL character",
		"kv_transfer_config: {kv_role: kv_producer}":                         "write prefill: and decode:",
		"kv_transfer_config.kv_role: kv_producer":                            "write prefill: and decode:",
		`kv_transfer_config: '{"kv_connector":"N","kv_role":"kv_consumer"}'`: "write prefill: and decode:",
	} {
		lines := faultsOf(t, with("kind: vllm, args: {"+args+"}"))
		require.Len(t, lines, 1, args)
		assert.Contains(t, lines[0], want)
	}
	assert.Empty(
		t,
		faultsOf(t, with("kind: vllm, args: {kv_transfer_config: {kv_connector: L, kv_role: kv_both}}")),
	)
	for env, want := range map[string]string{
		"CUDA_VISIBLE_DEVICES: 0": "resources.gpus", "VLLM_DP_RANK: 1": "data_parallel.dp_size",
		"A-B: c": "environment variable", "A: [1]": "wanted text",
	} {
		lines := faultsOf(t, with("kind: vllm, env: {"+env+"}"))
		require.Len(t, lines, 1, env)
		assert.Contains(t, lines[0], want)
	}
}

// TestFlagsOfRealEngines: what the engine would refuse, or what would set its devices and ports behind
// dpserve's back, is said when the file is read.
func TestFlagsOfRealEngines(t *testing.T) {
	t.Parallel()
	for engine, want := range map[string]string{
		"kind: sglang, args: {nccl_port: 1}":                    "--port-range",
		"kind: sglang, args: {base_gpu_id: 4}":                  "write resources.gpus",
		"kind: sglang, args: {grpc_mode: true}":                 "over HTTP",
		"kind: vllm, args: {uds: /tmp/x}":                       "over HTTP",
		"kind: vllm, args: {grpc: true}":                        "over HTTP",
		"kind: vllm, args: {device_ids: 0}":                     "write resources.gpus",
		"kind: sglang, args: {load_balance_method: x}":          "write routing.policy",
		"kind: sglang, args: {attn_dp_size: 2}":                 "write data_parallel.dp_size",
		"kind: vllm, args: {ssl_certfile: x}":                   "--tls-cert",
		"kind: sglang, args: {enable_metrics: false}":           "it is always set",
		"kind: sglang, args: {tp: 2, tp_size: 2}":               "--tp-size sets the same as applications[0]",
		"kind: vllm, args: {enable_x: true, no_enable_x: true}": "--no-enable-x sets the same as",
		"kind: vllm, env: {VLLM_HOST_IP: 10.0.0.1}":             "--advertise",
		"kind: vllm, env: {VLLM_PORT: 1}":                       "--port-range",
		"kind: vllm, env: {HIP_VISIBLE_DEVICES: 0}":             "resources.gpus",
		"kind: sglang, env: {SGLANG_TIMEOUT_KEEP_ALIVE: 5}":     "idle connections",
	} {
		lines := faultsOf(t, with(engine))
		require.Len(t, lines, 1, engine)
		assert.Contains(t, lines[0], want)
	}
	for engine, want := range map[string]string{
		"kind: vllm, args: {tp: 2}":                     "did you mean tensor_parallel_size?",
		"kind: vllm, args: {enable_dp_attention: true}": "did you mean data_parallel.coupling: lockstep?",
		"kind: sglang, args: {max_num_seqs: 8}":         "did you mean max_running_requests?",
	} {
		_, warnings, err := Parse(Default(), "app.yaml", []byte(with(engine)))
		require.NoError(t, err, engine)
		require.Len(t, warnings, 1, engine)
		assert.Contains(t, warnings[0].String(), want)
	}
}

func TestArgsGet(t *testing.T) {
	t.Parallel()
	v, ok := Args{{"enable_y", false}}.Get("enable-y")
	assert.True(t, ok)
	assert.Equal(t, false, v)
}

// attach is a file of one attach application with the given ranks.
func attach(ranks string, more ...string) string {
	return with("kind: attach, ranks: ["+ranks+"]", more...)
}

func TestAttachSizes(t *testing.T) {
	t.Parallel()
	const two = `{url: "http://a:1"}, {url: "http://b:1"}`
	const groups = `{url: "http://a:1", group: 1}, {url: "http://b:1", group: 0}, ` +
		`{url: "http://c:1", group: 1}, {url: "http://d:1", group: 0}`
	for _, c := range []struct {
		text       string
		dp, groups int
		fault      string
	}{
		{text: attach(two), dp: 2, groups: 1},
		{
			text:   attach(two, "num_replicas: 2", "num_groups: 1", "data_parallel: {dp_size: 2}"),
			dp:     2,
			groups: 1,
		},
		{text: attach(groups), dp: 2, groups: 2},
		{text: attach(two, "data_parallel: {dp_size: 4}"), fault: "found 4, wanted 2"},
		{
			text:  attach(two, "num_groups: 2"),
			fault: "num_groups is the number of groups that the ranks name: found 2, wanted 1",
		},
		{text: attach(two, "num_replicas: 4"), fault: ruleSize + ": found 4, wanted 2 × 1 = 2"},
		{
			text:  attach(two + `, {url: "http://c:1", group: 1}`),
			fault: "all groups have the same number of ranks: found group 1 with 1, wanted 2",
		},
		{
			text:  attach(`{url: "http://c:1", group: 1}, {url: "http://d:1", group: 1}`),
			fault: "all groups have the same number of ranks",
		},
		{text: attach(`{url: "http://c:1", group: 9}`), fault: "group numbers from 0 without gaps"},
		{text: attach(``), fault: "found an empty list, wanted at least one rank"},
		{text: with("kind: attach"), fault: "the key ranks is missing or empty"},
	} {
		if c.fault == "" {
			a := parsed(t, c.text).Applications[0]
			assert.Equal(
				t,
				[]int{c.dp, c.groups, c.dp * c.groups},
				[]int{a.DataParallel.DPSize, a.NumGroups, a.NumReplicas},
				c.text,
			)
			continue
		}
		lines := faultsOf(t, c.text)
		require.Len(t, lines, 1, c.text)
		assert.Contains(t, lines[0], c.fault)
	}
	a := parsed(t, attach(groups)).Applications[0]
	assert.Equal(t, "http://b:1", a.Engine.Rank(0, 0).URL)
	assert.Equal(t, "http://c:1", a.Engine.Rank(1, 1).URL)
	assert.Nil(t, a.Engine.Rank(1, 2))
	assert.Equal(t, AddressURL, a.Engine.Rank(0, 0).Addressing)
}

// keyed is a file with an engine.
func keyed(engine string) string {
	return "applications: [{name: demo, model: {id: demo}, engine: {" + engine + "}}]"
}

func TestAttachFaults(t *testing.T) {
	t.Parallel()
	const one = "kind: attach, ranks: [{url: 'http://a:1'}], "
	for _, c := range [][2]string{
		{attach(`{url: "127.0.0.1:8000"}`), "wanted http://HOST:PORT"},
		{attach(`{url: "localhost"}`), "write http:// in front"},
		{attach(`{url: "ftp://a:1"}`), "wanted http://HOST:PORT"},
		{attach(`{url: "http://"}`), "wanted http://HOST:PORT"},
		{attach(`{url: "http://a:0"}`), "ports go from 1 to 65535"},
		{attach(`{url: "http://a:"}`), "ports go from 1 to 65535"},
		{attach(`{url: "http://a:1/v1"}`), "leave /v1 out"},
		{attach(`{url: "http://a:1/openai/v1"}`), "leave /v1 out"},
		{attach(`{url: "http://a:1/a/../b"}`), "the path has letters"},
		{attach(`{url: "http://a:1/a%2Fb"}`), "the path has letters"},
		{keyed(one + "api_key_env: two words"), "the name of an environment variable"},
		{keyed(one + "api_key_file: key"), "the absolute path of a file"},
		{keyed(one + "api_key_env: A, api_key_file: /b"), "from api_key_env already"},
		{keyed(one + "tls: {insecure_skip_verify: 1}"), "wanted true or false"},
		{keyed("kind: sim, api_key_env: A"), "api_key_env belongs to kind attach"},
		{attach(`{url: "http://a:1?x=1"}`), "leave everything from ? or # on out"},
		{attach(`{url: "http://a:1#"}`), "leave everything from ? or # on out"},
		{attach(`{url: "http://me:secret@a:1"}`), "found a URL with credentials"},
		{attach(`{group: 0}`), "the key url is missing"},
		{attach(`{url: "http://a:1", selector: 1}`), "selector is sent only with"},
		{attach(`{url: "http://a:1", addressing: header}`), "the key selector is missing"},
		{attach(`{url: "http://a:1", addressing: heder, selector: 0}`), `did you mean "header"?`},
		{attach(`{url: "http://a:1"}, {url: "http://a:1/"}`), `engine "http://a:1" is taken by`},
		{
			attach(`{url: "http://a:1"}, {url: "http://a:1", addressing: body, selector: 0}`),
			"as a whole and by selector",
		},
		{
			attach(`{url: "http://a:1", addressing: body, selector: 0}, {url: "http://a:1"}`),
			"as a whole and by selector",
		},
		{attach(`{url: "http://a:1", kv_events: {}}`), "exactly one of connect and bind"},
		{
			attach(`{url: "http://a:1", kv_events: {connect: "tcp://a:1", bind: "tcp://a:2"}}`),
			"exactly one of connect and bind",
		},
		{attach(`{url: "http://a:1", kv_events: {connect: "tcp://*:1"}}`), "wanted tcp://HOST:PORT"},
		{attach(`{url: "http://a:1", kv_events: {connect: "a:1"}}`), "wanted tcp://HOST:PORT"},
		{attach(`{url: "http://a:1", kv_events: {connect: "tcp://0.0.0.0:1"}}`), "name the engine's host"},
		{
			attach(`{url: "http://a:1", kv_events: {connect: "tcp://b:1"}}`),
			"the engine is at a, its event socket at b",
		},
		{
			attach(`{url: "http://a:1", kv_events: {connect: "tcp://a:1", replay: "tcp://10.0.0.1:2"}}`),
			"its event socket at 10.0.0.1",
		},
		{attach(`{url: "http://a:1", kv_events: {bind: "tcp://0.0.0.0:1"}}`), "listen on every interface"},
		{attach(`{url: "http://a:1", kv_events: {bind: "tcp://[::]:1"}}`), "listen on every interface"},
		{attach(`{url: "http://a:1", kv_events: {bind: "tcp://a:0"}}`), "wanted tcp://HOST:PORT"},
		{
			attach(`{url: "http://a:1", kv_events: {connect: "tcp://a:5"}}, ` +
				`{url: "http://a:2", kv_events: {connect: "tcp://a:5"}}`),
			`event socket "tcp://a:5" is taken by`,
		},
		{attach(`{url: "http://a:1", node: "a b"}`), "the id of a dpserve node"},
		{attach(`{url: "http://a:1", role: prefil}`), `did you mean "prefill"?`},
		{attach(`{url: "http://a:1"}`, "resources: {gpus: 1}"), "an attached rank takes nothing"},
		{
			with(`kind: attach, ranks: [{url: "http://a:1"}], command: [x]`),
			"command is for engines that dpserve starts",
		},
		{
			with(`kind: attach, ranks: [{url: "http://a:1"}], args: {x: 1}`),
			"args is for engines that dpserve starts",
		},
		{
			with(`kind: attach, family: vllm, ranks: [{url: "http://a:1", addressing: body, selector: 0}]`),
			"vllm reads the rank from the header only",
		},
		{
			with(`kind: attach, family: openai, ranks: ` +
				`[{url: "http://a:1", addressing: header, selector: 0}]`),
			"family openai has no way to name a rank",
		},
		{with(`kind: sim, family: vllm`), "family belongs to kind attach"},
	} {
		text, want := c[0], c[1]
		lines := faultsOf(t, text)
		require.Len(t, lines, 1, "%s\n%s", text, strings.Join(lines, "\n"))
		assert.Contains(t, lines[0], want, text)
		assert.NotContains(t, lines[0], "secret")
	}
	assert.Empty(t, faultsOf(t, attach(`{url: "https://[::1]:443/", kv_events: {bind: "tcp://*:5557"}}`)))
	assert.Empty(
		t,
		faultsOf(
			t,
			attach(
				`{url: "http://Host:1", kv_events: {connect: "tcp://host:5557", replay: `+
					`"tcp://localhost:5558"}}`,
			),
		),
	)
	assert.Empty(
		t,
		faultsOf(
			t,
			attach(
				`{url: "http://a:1", addressing: header, selector: 0}, {url: "http://a:1", `+
					`addressing: header, selector: 1}`,
			),
		),
	)
}

// TestTheLaterSocketOfARankIsTheFault: a file with one event socket twice has the same fault each time.
func TestTheLaterSocketOfARankIsTheFault(t *testing.T) {
	t.Parallel()
	text := attach(`{url: "http://a:1", kv_events: {connect: "tcp://a:5", replay: "tcp://a:5"}}`)
	for range 20 {
		lines := faultsOf(t, text)
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], `replay: event socket "tcp://a:5" is taken by `+
			`applications[0].engine.ranks[0].kv_events.connect`)
	}
}

func TestSharedEngineIsAWarning(t *testing.T) {
	t.Parallel()
	_, warnings, err := Parse(Default(), "app.yaml", []byte(`
applications:
  - {name: a, model: {id: a}, engine: {kind: attach, ranks: [{url: "http://x:1"}]}}
  - {name: b, model: {id: b}, engine: {kind: attach, ranks: [{url: "http://x:1"}]}}
`))
	require.NoError(t, err)
	require.Len(t, warnings, 1)
	assert.Contains(t, warnings[0].String(), "attached by applications[0] too")
}
