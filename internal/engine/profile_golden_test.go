package engine_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
)

// nodeEnvironment is what the launches of the golden files inherit from.
func nodeEnvironment() []string {
	return []string{
		"PATH=/usr/bin", "HOME=/home/ml", "HF_TOKEN=hf_secret", "LD_LIBRARY_PATH=/opt/cuda/lib64",
		"NCCL_SOCKET_IFNAME=ib0", "VLLM_LOGGING_LEVEL=DEBUG", "DPSERVE_TOKEN=secret",
		"CUDA_VISIBLE_DEVICES=7", "VLLM_DP_RANK=3", "VLLM_API_KEY=other", "RANK=5",
		"VLLM_PORT=tcp://10.0.0.9:8000",
		"NOTIFY_SOCKET=/run/systemd/notify", "https_proxy=http://proxy:3128", "no_proxy=.internal",
	}
}

// launched is an application of a real engine kind.
func launched(kind app.Kind, coupling app.Coupling, dpSize int, args ...app.Arg) *app.Application {
	return &app.Application{
		Name:  "demo",
		Model: app.Model{ID: "m", Source: "org/model", Aliases: []string{"alias"}},
		Engine: app.Engine{
			Kind: kind, Args: args, Env: map[string]string{"VLLM_LOGGING_LEVEL": "INFO"},
		},
		DataParallel:            app.DataParallel{DPSize: dpSize, Coupling: coupling},
		Routing:                 app.Routing{Policy: "kv"},
		GracefulShutdownTimeout: 30,
	}
}

func inPool(a *app.Application, pool, transfer string) *app.Application {
	a.Name, a.Pool = "demo", pool
	a.Disaggregation = &app.Disaggregation{Transfer: transfer}
	return a
}

func loaded(a *app.Application) *app.Application {
	a.Model.Adapters = []app.Adapter{{ID: "fr", Source: "/models/fr"}}
	return a
}

func withShare(a *app.Application, gpus float64) *app.Application {
	a.Resources.GPUs = gpus
	return a
}

func arg(name string, value any) app.Arg { return app.Arg{Name: name, Value: value} }

// goldenLaunches are the specs whose launches testdata/launch pins, by file name.
func goldenLaunches() map[string]engine.Spec {
	seats := []engine.Seat{{Rank: 0, Devices: []int{0}}, {Rank: 1, Devices: []int{1}}}
	far := []engine.Seat{{Rank: 2, Devices: []int{0}}, {Rank: 3, Devices: []int{1}}}
	whole := []engine.Seat{seats[0], seats[1], {Rank: 2, Devices: []int{2}}, {Rank: 3, Devices: []int{3}}}
	attention := []app.Arg{arg("tp_size", int64(4)), arg("enable_dp_attention", true)}
	const base, meeting = 20016, 20016 + 5*4
	const sglangMeeting = 20016 + 4*4 + 1
	return map[string]engine.Spec{
		"vllm-dense": {
			App: launched(app.KindVLLM, app.Independent, 4, arg("tensor_parallel_size", int64(2)),
				arg("gpu-memory-utilization", 0.9), arg("enable_prefix_caching", true),
				arg("hf_overrides", map[string]any{"a": int64(1)})),
			Rank: 1, Base: base, Devices: []int{2, 3},
		},
		"vllm-share": {
			App: withShare(launched(app.KindVLLM, app.Independent, 4), 0.25), Rank: 1, Base: base,
			Devices: []int{2},
		},
		"vllm-dense-cpu-adapters": {
			App: loaded(launched(app.KindVLLM, app.Independent, 1)), Base: base, Host: "127.0.0.2",
		},
		"vllm-lockstep-first": {
			App:  launched(app.KindVLLM, app.Lockstep, 4, arg("enable_expert_parallel", true)),
			Rank: 0, Base: base, Devices: []int{0}, Local: seats, Nodes: 2, NodeRank: 0,
			Advertise: "10.0.0.1", Rank0Addr: "10.0.0.1", Rank0Port: meeting, GroupKey: "k",
		},
		"vllm-lockstep-second": {
			App:  launched(app.KindVLLM, app.Lockstep, 4, arg("enable_expert_parallel", true)),
			Rank: 3, Base: 21008, Devices: []int{1}, Local: far, Nodes: 2, NodeRank: 1,
			Advertise: "10.0.0.2", Rank0Addr: "10.0.0.1", Rank0Port: meeting, GroupKey: "k",
		},
		"vllm-prefill-nixl": {
			App:  inPool(launched(app.KindVLLM, app.Independent, 2), app.PoolPrefill, app.TransferNIXL),
			Rank: 1, Base: base, Devices: []int{1}, Advertise: "10.0.0.1",
		},
		"vllm-decode-mooncake": {
			App:  inPool(launched(app.KindVLLM, app.Independent, 2), app.PoolDecode, app.TransferMooncake),
			Base: base, Devices: []int{0}, Advertise: "10.0.0.1",
		},
		"sglang-attention": {
			App:  launched(app.KindSGLang, app.Lockstep, 4, attention...),
			Rank: 1, Base: base, Devices: []int{1}, Local: whole,
			Rank0Addr: "127.0.0.1", Rank0Port: sglangMeeting,
		},
		"sglang-attention-first": {
			App:  launched(app.KindSGLang, app.Lockstep, 4, attention...),
			Rank: 1, Base: base, Devices: []int{1}, Local: seats, Nodes: 2, NodeRank: 0,
			Advertise: "10.0.0.1", Rank0Addr: "10.0.0.1", Rank0Port: sglangMeeting,
		},
		"sglang-attention-second": {
			App:  launched(app.KindSGLang, app.Lockstep, 4, attention...),
			Rank: 2, Base: 21008, Devices: []int{0}, Local: far, Nodes: 2, NodeRank: 1,
			Advertise: "10.0.0.2", Rank0Addr: "10.0.0.1", Rank0Port: sglangMeeting,
		},
		"sglang-independent": {
			App: loaded(launched(app.KindSGLang, app.Independent, 2, arg("tp", int64(2)),
				arg("cuda_graph_bs", []any{int64(1), int64(8)}), arg("enable_metrics", true),
				arg("disable_radix_cache", false))),
			Rank: 1, Base: base, Devices: []int{2, 3},
		},
		"sglang-share": {
			App: withShare(launched(app.KindSGLang, app.Independent, 2), 0.5), Rank: 1, Base: base,
			Devices: []int{3},
		},
		"sglang-prefill": {
			App: inPool(launched(app.KindSGLang, app.Lockstep, 4, attention...), app.PoolPrefill,
				app.TransferSGLang),
			Rank: 2, Base: base, Devices: []int{2}, Local: whole, Advertise: "10.0.0.1",
			Rank0Addr: "10.0.0.1", Rank0Port: sglangMeeting,
		},
	}
}

// describe is the text of a launch in a golden file.
func describe(s *engine.Spec, l *engine.Launch) string {
	var b strings.Builder
	b.WriteString("argv\n")
	for _, word := range l.Argv {
		fmt.Fprintf(&b, "  %s\n", word)
	}
	b.WriteString("environment\n")
	for _, kv := range l.Env {
		fmt.Fprintf(&b, "  %s\n", kv)
	}
	fmt.Fprintf(&b, "url %s, by %s %d, ranks of the process %v\n", l.URL, l.Addressing, l.Selector, l.Ranks)
	fmt.Fprintf(&b, "events %+v\nbinds\n", *l.Events)
	for _, at := range s.Binds() {
		fmt.Fprintf(&b, "  %s:%d\n", at.Host, at.Port)
	}
	return b.String()
}

// HF77: TestLaunches pins argv, environment, address and ports of each profile.
func TestLaunches(t *testing.T) {
	for name, s := range goldenLaunches() {
		l, err := engine.Render(&s, nodeEnvironment())
		require.NoError(t, err, name)
		got, path := describe(&s, &l), filepath.Join("testdata", "launch", name+".txt")
		if os.Getenv("DPSERVE_UPDATE") != "" {
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
			require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
		}
		want, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Equal(t, string(want), got, "%s: look at the difference, then run with DPSERVE_UPDATE=1", name)
	}
}
