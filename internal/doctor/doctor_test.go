package doctor

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
)

var noon = time.Date(2026, time.November, 23, 12, 0, 0, 0, time.UTC)

// soundHost returns the facts of a machine on which nothing is wrong.
func soundHost() *Facts {
	return &Facts{
		Now: noon,
		Clock: &Clock{
			Built: noon.Add(-time.Hour), Slept: 20 * time.Millisecond, Passed: 20 * time.Millisecond,
			Sync: Synced,
		},
		Ports: []Port{
			{Use: "http", Flag: "--http-bind", Network: "tcp", Address: "127.0.0.1:8000"},
			{
				Use: "admin", Flag: "--admin-bind", Network: "tcp", Address: "127.0.0.1:8265", Taken: true,
				Error: "address already in use", Owner: Owner{PID: 7, Program: "dpserve", Ours: true},
			},
			{Use: "gossip", Flag: "--gossip-port", Network: "udp", Address: "10.0.0.1:7946"},
		},
		EnginePorts: &EnginePorts{Range: Span{20000, 29999}, Ephemeral: Span{32768, 60999}},
		Files:       &Files{Limit: 65536, Of: "this shell", Streams: 16_000, Ranks: 64},
		Shared:      &SharedMemory{Path: "/dev/shm", Free: 8 * gibibyte, Size: 8 * gibibyte, Devices: 2},
		DataDir: &DataDir{
			Path: "/var/lib/dpserve", InUse: true, Synced: 2 * time.Millisecond, Free: 50 * gibibyte,
			Size: 100 * gibibyte,
		},
		Certificate: &Certificate{
			Node: "a", Ends: noon.Add(20 * 24 * time.Hour), RenewAt: noon.Add(10 * 24 * time.Hour),
		},
		Devices: &Devices{
			Tool: "nvidia-smi", Wanted: 2,
			List: []Device{
				{Index: 0, Name: "H100", Total: 80 * gibibyte, Free: 79 * gibibyte},
				{Index: 1, Name: "H100", Total: 80 * gibibyte, Free: 5 * gibibyte, Ours: true},
			},
		},
		Engines: []Engine{
			{App: "chat", Kind: "vllm", Program: "vllm", Path: "/opt/bin/vllm", Version: "0.32.1+cpu"},
			{App: "own", Kind: "sim", Program: "stub", Path: "/opt/bin/stub"},
		},
		Models: []Model{{App: "chat", Source: "q", Folder: "/models/q", Files: 2, Bytes: 3 * gibibyte}},
		Cluster: &Cluster{
			Address: "127.0.0.1:8265", Wanted: true, Node: "a", Version: "v1",
			Nodes: []client.NodeStatus{
				{Node: "a", State: "alive"}, {Node: "b", State: "alive", SkewMs: -20},
			},
			Apps:         []client.AppStatus{runningApp()},
			RouterBlocks: map[string]int{"chat": 16},
		},
	}
}

// runningApp returns an application of two ranks whose KV events are followed.
func uneven(policies ...string) client.Imbalance {
	return client.Imbalance{
		Pool: "chat", MaxMean: 1.915, Mean: 47, Ranks: []client.RankLoad{{Rank: "chat/0/1", Tokens: 90}},
		Policy: "mex", Policies: policies,
	}
}

func runningApp() client.AppStatus {
	rank := func(n int) client.UnitStatus {
		return client.UnitStatus{
			Unit: "chat/0/" + string(rune('0'+n)), Phase: "ready",
			Ranks: []client.RankStatus{
				{
					Rank: n, Phase: "ready", Requests: 50, KV: &client.KVStatus{
						BlockSize: 16, Events: &client.EventStatus{State: client.EventsLive, Batches: 9},
					},
				},
			},
		}
	}
	return client.AppStatus{
		Name: "chat", Status: client.StatusRunning, Kind: "vllm", Identity: "tokens",
		Units: []client.UnitStatus{rank(0), rank(1)},
	}
}

func TestASoundHostHasNoFault(t *testing.T) {
	var checks []string
	for _, f := range Examine(soundHost()) {
		assert.Equal(t, OK, f.Level, "%+v", f)
		assert.NotEmpty(t, f.Found, f.Check)
		assert.Empty(t, f.Hint, f.Check)
		checks = append(checks, f.Check)
	}
	assert.Equal(t, []string{
		"clock", "ports", "engine-ports", "files", "shm", "data-dir", "disk", "certificate", "leftovers",
		"devices", "engine", "engine", "model", "node", "block-size", "kv-events", "balance",
	}, checks)
}

// TestNothingToLookAt: a part that was not looked at gives no finding.
func TestNothingToLookAt(t *testing.T) {
	assert.Empty(t, Examine(&Facts{Now: noon}))
}

// CC9, HF63, HF72, KV9b, KV10b: TestFaults changes one fact of a sound host at a time.
func TestFaults(t *testing.T) {
	for name, c := range map[string]struct {
		change      func(f *Facts)
		level       Level
		check       string
		found, hint string // parts
	}{
		"a clock before the build": {
			func(f *Facts) { f.Now = noon.Add(-48 * time.Hour); f.Certificate = nil },
			Fail, "clock", "clock says 2026-11-21 12:00:00 UTC, and this dpserve was built at 2026-11-23",
			"timedatectl",
		},
		"a clock far ahead": {
			func(f *Facts) { f.Now = noon.Add(2 * lifetime); f.Certificate = nil },
			Fail, "clock", "the wall clock says 20", "chrony",
		},
		"a clock before all builds": {
			func(f *Facts) { f.Clock.Built = time.Time{}; f.Now = time.Unix(0, 0); f.Certificate = nil },
			Fail, "clock", "1970-01-01", "timedatectl",
		},
		"a monotonic clock that stands still": {
			func(f *Facts) { f.Clock.Slept = 0 }, Fail, "clock", "is stopped", "clocksource",
		},
		"a wall clock that is set": {
			func(f *Facts) { f.Clock.Passed = time.Second }, Warn, "clock", "moved by 1s in 20ms", "chrony",
		},
		"no time service": {
			func(f *Facts) { f.Clock.Sync = NotSynced }, Warn, "clock", "no time service", "timedatectl",
		},
		"a node's clock": {
			func(f *Facts) { f.Cluster.Nodes[1].SkewMs = -90_000 },
			Fail, "clock", "node b differs by -1m30s", "on b: run a time service",
		},
		"a node's clock, little": {
			func(f *Facts) {
				f.Cluster.Nodes[1].SkewMs = 2000
				f.Cluster.Nodes[1].Notes = []string{"its clock differs by 2s from the leader's"}
			},
			Warn, "clock", "node b differs by 2s", "on b:",
		},
		"a taken port": {
			func(f *Facts) {
				f.Ports[0].Error, f.Ports[0].Taken = "address already in use", true
				f.Ports[0].Owner = Owner{PID: 12, Program: "nginx"}
			},
			Fail, "ports", "http 127.0.0.1:8000 is taken by nginx (process 12)", "--http-bind",
		},
		"a port of another user": {
			func(f *Facts) {
				f.Cluster = nil
				f.Ports[2].Error, f.Ports[2].Taken = "address already in use", true
			},
			Fail, "ports", "gossip 10.0.0.1:7946/udp is taken by a process of another user", "--gossip-port",
		},
		"an address of another machine": {
			func(f *Facts) { f.Ports[2].Error = "cannot assign requested address" },
			Fail, "ports", "cannot be bound: cannot assign", "with --advertise",
		},
		"engine ports in the ephemeral range": {
			func(f *Facts) { f.EnginePorts.Range = Span{30000, 33000} },
			Fail, "engine-ports", "ports 32768-33000 of --port-range 30000-33000 are in the kernel's " +
				"ephemeral range 32768-60999",
			"ip_local_reserved_ports=32768-33000",
		},
		"a listener among the engine ports": {
			func(f *Facts) { f.EnginePorts.Listeners = []Listener{{20003, Owner{PID: 4, Program: "redis"}}} },
			Warn, "engine-ports", "20003 by redis (process 4)", "--port-range",
		},
		"few open files": {
			func(f *Facts) { f.Files.Limit = 1024 },
			Fail, "files", "this shell may open 1024 files: enough for 0 streams", "allow 33280",
		},
		"not all open files": {
			func(f *Facts) { f.Files.Limit = 20_000 },
			Warn, "files", "enough for 9360 streams and 64 ranks; a node accepts 16000", "LimitNOFILE=",
		},
		"shared memory for several devices": {
			func(f *Facts) { f.Shared.Free = 64 * mebibyte },
			Fail, "shm", "64 MiB free of 8.0 GiB; a rank with 2 devices needs 1.0 GiB", "--shm-size",
		},
		"little shared memory": {
			func(f *Facts) { f.Shared.Free, f.Shared.Devices = 64*mebibyte, 0 },
			Warn, "shm", "64 MiB free", "--shm-size",
		},
		"no shared memory": {
			func(f *Facts) { f.Shared.Error = "no such file or directory" },
			Warn, "shm", "cannot be used", "mount a tmpfs",
		},
		"a data dir that cannot be written": {
			func(f *Facts) { f.DataDir.Error = "permission denied" },
			Fail, "data-dir", "/var/lib/dpserve: permission denied", "--data-dir",
		},
		"a data dir that others may write": {
			func(f *Facts) { f.DataDir.Error, f.DataDir.Hint = "it has mode 0777", "`chmod go-w it`" },
			Fail, "data-dir", "/var/lib/dpserve: it has mode 0777", "`chmod go-w it`",
		},
		"a slow disk": {
			func(f *Facts) { f.DataDir.Synced = 80 * time.Millisecond },
			Warn, "data-dir", "a synced write took 80ms", "faster, local disk",
		},
		"a very slow disk": {
			func(f *Facts) { f.DataDir.Synced = 3 * time.Second },
			Fail, "data-dir", "a synced write took 3s", "local disk",
		},
		"a full disk": {
			func(f *Facts) { f.DataDir.Free = 10 * mebibyte },
			Fail, "disk", "10 MiB free of 100.0 GiB", "make room",
		},
		"an almost full disk": {
			func(f *Facts) { f.DataDir.Free = gibibyte }, Warn, "disk", "1.0 GiB free", "make room",
		},
		"a certificate that ended": {
			func(f *Facts) { f.Certificate.Ends = noon.Add(-72 * time.Hour); f.DataDir.InUse = false },
			Fail, "certificate", "of a ended 3 days ago", "start dpserve on this data dir",
		},
		"a certificate of the future": {
			func(f *Facts) { f.Certificate.Begins = noon.Add(30 * time.Hour) },
			Fail, "certificate", "of a is not valid before", "correct the clock",
		},
		"a certificate that ends": {
			func(f *Facts) { f.Certificate.Ends = noon.Add(30 * time.Hour) },
			Fail, "certificate", "ends in 30 hours", "log of dpserve",
		},
		"a certificate that is due": {
			func(f *Facts) { f.Certificate.RenewAt = noon.Add(-48 * time.Hour) },
			Warn, "certificate", "due for renewal", "log of dpserve",
		},
		"a certificate that cannot be read": {
			func(f *Facts) { f.Certificate.Error = "key.pem cannot be read beside cert.pem" },
			Fail, "certificate", "key.pem cannot be read", "nodes remove",
		},
		"an engine of a dead node": {
			func(f *Facts) {
				f.DataDir.InUse = false
				f.Leftovers = []Leftover{{What: "an engine", PIDs: []int{4, 5}}}
			},
			Fail, "leftovers", "an engine of a dpserve that has died (process 4, 5)", "`kill 4 5`",
		},
		"an engine of another node": {
			func(f *Facts) {
				f.Leftovers = []Leftover{{What: "a shim", PIDs: []int{4}, Path: "engines/x", Foreign: true}}
			},
			Fail, "leftovers", "a shim of another node or cluster (process 4) in /var/lib/dpserve/engines/x",
			"`kill 4` if it is not needed",
		},
		"an engine of the original of a copied data dir": {
			func(f *Facts) {
				f.Leftovers = []Leftover{{What: "a shim", PIDs: []int{4}, Path: "engines/x", Copy: true}}
			},
			Warn, "leftovers",
			"a shim (process 4) was started from another folder: /var/lib/dpserve is a copy",
			"start no dpserve on /var/lib/dpserve while the original is in use; `kill 4`",
		},
		"an engine that nothing knows": {
			func(f *Facts) {
				f.Leftovers = []Leftover{
					{What: "an engine", PIDs: []int{4, 5}, Cgroup: "/cg/dpserve-launch-x"},
				}
			},
			Warn, "leftovers", "an engine (process 4, 5) in /cg/dpserve-launch-x",
			"`echo 1 > /cg/dpserve-launch-x/cgroup.kill` ends it",
		},
		"a driver that does not answer": {
			func(f *Facts) { f.Devices.Error = "nvidia-smi: Driver/library version mismatch" },
			Fail, "devices", "nvidia-smi: Driver/library version mismatch", "restart the machine",
		},
		"a device that is gone": {
			func(f *Facts) { f.Devices.Missing = []int{7} },
			Fail, "devices", "--gpus names device 7, and nvidia-smi does not list it", "correct --gpus",
		},
		"a device with a fault": {
			func(f *Facts) { f.Devices.List[0].Fault = "GPU is lost" },
			Fail, "devices", "device 0 (H100): GPU is lost", "restart the machine",
		},
		"a tool that prints more": {
			func(f *Facts) { f.Devices.Warnings = []string{"a line that is no device"} },
			Warn, "devices", "a line that is no device", "what nvidia-smi itself prints",
		},
		"no devices": {
			func(f *Facts) { *f.Devices = Devices{Wanted: 4} },
			Fail, "devices", "no device is found, and a rank of the file uses 4", "gpus: 0",
		},
		"too few devices": {
			func(f *Facts) { f.Devices.Wanted = 4 },
			Fail, "devices", "nvidia-smi lists 2 devices, and a rank of the file uses 4",
			"tensor_parallel_size",
		},
		"a device that others use": {
			func(f *Facts) {
				f.Devices.List[0].Free = 10 * gibibyte
				f.Devices.List[0].Others = []Owner{{PID: 99, Program: "python3"}}
			},
			Fail, "devices", "device 0 (H100) has 10.0 GiB free of 80.0 GiB: python3 (process 99)", "--gpus",
		},
		"a device whose user is not seen": {
			func(f *Facts) { f.Devices.List[0].Free = 10 * gibibyte },
			Fail, "devices", "and no process is listed", "--gpus",
		},
		"an engine that is not there": {
			func(f *Facts) { f.Engines[0].Path, f.Engines[0].Error = "", "vllm is not in PATH" },
			Fail, "engine", "chat: vllm: vllm is not in PATH", "pip install vllm==0.32.0",
		},
		"a command that is not there": {
			func(f *Facts) { f.Engines[1].Error = "no such file or directory" },
			Fail, "engine", "own: /opt/bin/stub: no such file", "engine.command",
		},
		"an old engine": {
			func(f *Facts) { f.Engines[0].Version = "0.9.2" },
			Fail, "engine", "chat: /opt/bin/vllm is vllm 0.9.2; dpserve works with 0.28.0 and later",
			"pip install vllm==0.32.0",
		},
		"a new engine": {
			func(f *Facts) { f.Engines[0].Version = "0.33.0" },
			Warn, "engine", "the newest version that was tried is 0.32", "watch the first ranks",
		},
		"an engine without a version": {
			func(f *Facts) { f.Engines[0].Version, f.Engines[0].Unknown = "", "--version said nothing" },
			Warn, "engine", "its version is not known: --version said nothing", "`vllm --version`",
		},
		"a model that is not there": {
			func(f *Facts) { f.Models[0] = Model{App: "chat", Source: "/m", Error: "no such file"} },
			Fail, "model", "chat: /m: no such file", "model.source",
		},
		"a model without some files": {
			func(f *Facts) { f.Models[0].Missing = []string{"a", "b", "c", "d", "e"} },
			Fail, "model", "chat: /models/q lacks 5 files of its index: a, b, c and 2 more",
			"copy the missing",
		},
		"a model with a cut file": {
			func(f *Facts) {
				f.Models[0].Remote, f.Models[0].Damaged = true, []string{"a.safetensors is cut"}
			},
			Fail, "model", "a.safetensors is cut", "hf download q",
		},
		"a model without weights": {
			func(f *Facts) { f.Models[0].Files = 0 }, Fail, "model", "has no weights", "load_format: dummy",
		},
		"a model without a tokenizer": {
			func(f *Facts) { f.Models[0].NoTokenizer = true },
			Warn, "model", "no tokenizer", "tokenizer.json",
		},
		"a model that is downloaded": {
			func(f *Facts) { f.Models[0] = Model{App: "chat", Source: "Qwen/Q", Remote: true} },
			Warn, "model", "not in the cache: each engine downloads it", "hf download Qwen/Q",
		},
		"a model that may not be downloaded": {
			func(f *Facts) {
				f.Models[0] = Model{App: "chat", Source: "Qwen/Q", Remote: true, Offline: "HF_HUB_OFFLINE=1"}
			},
			Fail, "model", "HF_HUB_OFFLINE=1 forbids", "hf download Qwen/Q",
		},
		"no node": {
			func(f *Facts) {
				f.Cluster = &Cluster{Wanted: true, Error: "no answer from b:8265", Hint: "is dpserve up?"}
			},
			Fail, "node", "no answer from b:8265", "is dpserve up?",
		},
		"a lost node": {
			func(f *Facts) { f.Cluster.Nodes[1].State, f.Cluster.Nodes[1].Reason = "lost", "silent for 12s" },
			Fail, "node", "b is lost: silent for 12s", "`dpserve nodes remove b`",
		},
		"a silent node": {
			func(f *Facts) { f.Cluster.Nodes[1].State = "silent" },
			Warn, "node", "b is silent", "network of b",
		},
		"another version": {
			func(f *Facts) { f.Cluster.Nodes[1].Notes = []string{"it runs version v2, the leader v1"} },
			Warn, "node", "b: it runs version v2", "`dpserve nodes -o wide`",
		},
		"ranks with several block sizes": {
			func(f *Facts) { f.Cluster.Apps[0].Units[1].Ranks[0].KV.BlockSize = 64 },
			Fail, "block-size", "the ranks of chat have KV blocks of several sizes: 16 tokens (chat/0/0), " +
				"64 tokens (chat/0/1)",
			"--block-size",
		},
		"a router with another block size": {
			func(f *Facts) { f.Cluster.RouterBlocks["chat"] = 32 },
			Fail, "block-size", "chat routes by blocks of 32 tokens, its ranks have 16 tokens",
			"`dpserve router reset chat`",
		},
		"an engine with another block size than asked for": {
			func(f *Facts) {
				f.Cluster.Apps[0].Units[0].Ranks[0].KV.Note = "the engine runs without prefix caching; " +
					"the engine's kv blocks are of 768 tokens, engine.args asks for 16"
			},
			Warn, "block-size", "chat/0/0: the engine's kv blocks are of 768 tokens, engine.args asks for 16",
			"block_size",
		},
		"silent events": {
			func(f *Facts) {
				e := f.Cluster.Apps[0].Units[1].Ranks[0].KV.Events
				e.State, e.SilentFor = client.EventsSilent, 42
			},
			Fail, "kv-events", "chat/0/1: no KV event for 42 s while requests complete",
			"`dpserve logs chat/0/1`",
		},
		"events that never came": {
			func(f *Facts) {
				e := f.Cluster.Apps[0].Units[1].Ranks[0].KV.Events
				e.State, e.Batches = client.EventsWaiting, 0
			},
			Fail, "kv-events", "no KV event has come, and 50 requests have ended", "ZMQ",
		},
		"events of an attached engine that is not connected": {
			func(f *Facts) {
				f.Cluster.Apps[0].Kind = "attach"
				e := f.Cluster.Apps[0].Units[1].Ranks[0].KV.Events
				e.State, e.Batches = client.EventsConnecting, 0
			},
			Fail, "kv-events", "its event socket is not connected after 50 requests", "--kv-events-config",
		},
		"events that make no sense": {
			func(f *Facts) { f.Cluster.Apps[0].Units[1].Ranks[0].KV.Events.Dropped = 3 },
			Warn, "kv-events", "3 KV events were dropped", "`dpserve status -o json`",
		},
		"uneven load": {
			func(f *Facts) { f.Cluster.Apps[0].Imbalances = []client.Imbalance{uneven("mex", "kv")} },
			Warn, "balance", "chat: uneven load, max/mean 1.9: chat/0/1 (90 tokens); the mean of its " +
				"ranks is 47 tokens in flight; policy mex or kv would balance it",
			"write routing: {policy: mex} into the file of chat",
		},
		"uneven load under a policy that knows it": {
			func(f *Facts) { f.Cluster.Apps[0].Imbalances = []client.Imbalance{uneven()} },
			Warn, "balance", "its policy mex knows this load", "`dpserve route explain`",
		},
	} {
		t.Run(name, func(t *testing.T) {
			facts := soundHost()
			c.change(facts)
			var bad []Finding
			for _, f := range Examine(facts) {
				if f.Level != OK {
					bad = append(bad, f)
				}
			}
			require.Len(t, bad, 1, "%+v", bad)
			assert.Equal(t, c.level, bad[0].Level)
			assert.Equal(t, c.check, bad[0].Check)
			assert.Contains(t, bad[0].Found, c.found)
			assert.Contains(t, bad[0].Hint, c.hint)
		})
	}
}

// CC9: facts that look like faults and are none.
func TestWhatIsNoFault(t *testing.T) {
	for name, change := range map[string]func(f *Facts){
		"reserved ports": func(f *Facts) {
			f.EnginePorts.Range, f.EnginePorts.Reserved = Span{30000, 33000}, []Span{{32768, 33000}}
		},
		"an unknown ephemeral range": func(f *Facts) { f.EnginePorts.Ephemeral = Span{} },
		"a port of the dpserve that answers": func(f *Facts) {
			f.Ports[0].Error, f.Ports[0].Taken = "address already in use", true
		},
		"engines of the dpserve that runs": func(f *Facts) {
			f.Leftovers = []Leftover{{What: "an engine", PIDs: []int{4}}}
		},
		"a node that is named nowhere": func(f *Facts) {
			f.Cluster = &Cluster{Address: "127.0.0.1:8265", Error: "connection refused"}
		},
		"no devices and none wanted": func(f *Facts) { *f.Devices = Devices{} },
		"dummy weights":              func(f *Facts) { f.Models[0].Files, f.Models[0].Dummy = 0, true },
		"another place of a model": func(f *Facts) {
			f.Models[0] = Model{App: "chat", Source: "s3://bucket/q"}
		},
		"few requests without events": func(f *Facts) {
			r := &f.Cluster.Apps[0].Units[0].Ranks[0]
			r.Requests, r.KV.Events.State, r.KV.Events.Batches = 3, client.EventsWaiting, 0
		},
		"a version line":   func(f *Facts) { f.Engines[0].Version = "0.32.9.dev3+g12" },
		"the oldest":       func(f *Facts) { f.Engines[0].Version = "0.28.0rc1" },
		"unlimited files":  func(f *Facts) { f.Files.Limit = 1<<64 - 1 },
		"a new data dir":   func(f *Facts) { f.DataDir.Missing, f.DataDir.InUse = true, false },
		"no /dev/shm size": func(f *Facts) { f.Shared = nil },
	} {
		t.Run(name, func(t *testing.T) {
			facts := soundHost()
			change(facts)
			for _, f := range Examine(facts) {
				assert.Equal(t, OK, f.Level, "%+v", f)
			}
		})
	}
}

func TestCompareVersions(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"0.32.0", "0.32.0+cpu", 0},
		{"0.9.2", "0.28.0", -1},
		{"v1", "0.99", 1},
		{"0.28.1.dev12", "0.28.0", 1},
		{"0.28", "0.28.0", 0},
		{"", "0.0", 0},
		{"nightly", "0.28.0", -1},
		{"0.5.4.post1", "0.5.4", 0},
	} {
		assert.Equal(t, c.want, compareVersions(c.a, c.b), "%s %s", c.a, c.b)
		assert.Equal(t, -c.want, compareVersions(c.b, c.a), "%s %s", c.b, c.a)
	}
}
