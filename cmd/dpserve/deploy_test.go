package main

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

const tiny = "applications: [{name: demo, model: {id: demo}, engine: {kind: sim}, data_parallel: " +
	"{dp_size: 2}}]\n"

func TestDeployWaitsUntilRunning(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.script = [][]client.AppStatus{
		{}, // before
		{demo(client.StatusRunning, 1, state.Ready, state.Ready)}, // the old revision does not count
		{demo(client.StatusDeploying, 2, state.Starting, state.Pending)},
		{demo(client.StatusDeploying, 2, state.Ready, state.Starting)},
		{demo(client.StatusRunning, 2, state.Ready, state.Ready)},
	}
	require.Equal(t, 0, cli.run([]string{"deploy", file(t, tiny), "-o", "json"}), cli.stderr())
	assert.Equal(t, []string{
		"dpserve: demo: restart, scale 1 -> 2 (engine.args.seed)",
		"dpserve: demo/0/0 ready", "dpserve: demo/0/1 ready",
		"dpserve: demo/0/0 starting", "dpserve: demo/0/1 pending",
		"dpserve: demo/0/0 ready", "dpserve: demo/0/1 starting",
		"dpserve: demo/0/1 ready",
	}, strings.Split(strings.TrimSpace(cli.stderr()), "\n"))
	doc := decode[statusDocument](t, cli.stdout())
	assert.Equal(t, client.StatusRunning, doc.Apps[0].Status)
	require.Len(t, cli.cluster.deployed, 1)
	assert.Equal(t, tiny, string(cli.cluster.deployed[0].Text), "the file goes as it is")
}

// A model takes minutes to load. Off a terminal a line says every 30 s what the ranks do.
func TestDeploySaysWhatSlowRanksDo(t *testing.T) {
	cli := newCLI(t)
	loads := demo(client.StatusDeploying, 2, state.Starting, state.Starting)
	for i := range loads.Units {
		loads.Units[i].Ranks[0].Progress = "loading weights 12 of 61"
	}
	ready := demo(client.StatusRunning, 2, state.Ready, state.Ready)
	cli.cluster.script = [][]client.AppStatus{{}, {loads}, {ready}}
	clock := time.Now()
	cli.now = func() time.Time { clock = clock.Add(31 * time.Second); return clock }
	require.Equal(t, 0, cli.run([]string{"deploy", file(t, tiny), "-o", "json"}), cli.stderr())
	assert.Regexp(t, `dpserve: 2 of 2 ranks still start after \d+s; demo/0/0 loading weights 12 of 61\n`,
		cli.stderr())
}

func TestDeployFailed(t *testing.T) {
	cli := newCLI(t)
	failed := demo(client.StatusDeployFailed, 2, state.Ready, state.Failed)
	u := &failed.Units[1]
	u.Attempt, u.Reason = 3, "exit status 1"
	for i := range 30 {
		u.LogTail = append(u.LogTail, "line "+string(rune('a'+i%26)))
	}
	cli.cluster.script = [][]client.AppStatus{{}, {failed}}
	assert.Equal(t, 5, cli.run([]string{"deploy", file(t, tiny)}))
	assert.Contains(t, cli.stderr(),
		"dpserve: demo cannot be rolled out: demo/0/1 failed after 3 attempts: exit status 1\n  line k\n")
	assert.Equal(t, 20, strings.Count(cli.stderr(), "\n  line "))
	assert.Contains(t, cli.stderr(), "hint: these log lines of demo/0/1 are about its failure")
	assert.Empty(t, cli.stdout())
}

// CC5: --timeout ends with 8, and the roll-out goes on.
func TestDeployTimeout(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.script = [][]client.AppStatus{{}, {demo(client.StatusDeploying, 2, state.Starting)}}
	assert.Equal(t, 8, cli.run([]string{"deploy", file(t, tiny), "--timeout", "1ms"}))
	assert.Contains(t, cli.stderr(),
		"dpserve: not RUNNING in time: demo; the rollout goes on\nhint: watch it with `dpserve status -w`\n")
}

// An application that is deleted during its rollout never becomes RUNNING, so deploy stops waiting.
func TestDeployEndsWhenTheAppIsDeleted(t *testing.T) {
	for name, last := range map[string][]client.AppStatus{
		"on its way out": {demo(client.StatusDeleting, 2, state.Killing)}, "gone": {},
	} {
		cli := newCLI(t)
		cli.cluster.script = [][]client.AppStatus{{}, {demo(client.StatusDeploying, 2, state.Starting)}, last}
		assert.Equal(t, 1, cli.run([]string{"deploy", file(t, tiny), "--timeout", "5s"}), name)
		assert.Contains(t, cli.stderr(), "dpserve: demo was deleted while it was rolled out\nhint: ", name)
	}
}

// CC5: Ctrl-C in the monitor ends with 130, and the roll-out goes on.
func TestDeployInterrupted(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.script = [][]client.AppStatus{{}, {demo(client.StatusDeploying, 2, state.Starting)}}
	cli.cluster.onApps = func(call int) {
		if call == 2 {
			cli.interrupt()
		}
	}
	assert.Equal(t, 130, cli.run([]string{"deploy", file(t, tiny)}))
	assert.Contains(t, cli.stderr(), "interrupted; the rollout goes on")
	assert.Len(t, cli.cluster.deployed, 1)
	assert.Empty(t, cli.cluster.deleted)
}

// CC5: --detach watches nothing; `status -w` sees the ranks become ready later.
func TestDeployDetach(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cli := newCLI(t)
		cli.cluster.script = [][]client.AppStatus{{}}
		assert.Equal(t, 0, cli.run([]string{"deploy", "--detach", file(t, tiny)}))
		assert.Len(t, cli.cluster.deployed, 1)
		assert.Zero(t, cli.cluster.calls, "nothing is watched")

		cli.cluster.script = [][]client.AppStatus{
			{demo(client.StatusDeploying, 1, state.Starting)}, {demo(client.StatusRunning, 1, state.Ready)},
		}
		cli.cluster.onApps = func(call int) { cli.interruptOnce(call - 2) }
		require.Zero(t, cli.run([]string{"status", "-w"}), cli.stderr())
		assert.Regexp(t, "(?s)demo/0/0 starting .*demo/0/0 ready ", cli.stdout())
	})
}

func TestDeployDryRun(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.nodes.plan = client.Plan{
		Changes: true, Fits: true,
		Apps: []client.AppPlan{{Change: created("demo")}, {Change: created("other")}},
	}
	assert.Equal(t, 0, cli.run([]string{"deploy", "--dry-run", "--prune", file(t, tiny), "-o", "name"}))
	assert.Empty(t, cli.cluster.deployed)
	assert.True(t, cli.cluster.planned[0].Prune)
	assert.Equal(t, "demo\nother\n", cli.stdout())
}

// CC3: --prune names what it deletes and wants a confirmation.
func TestDeployPrune(t *testing.T) {
	other := named("other", client.StatusRunning, 1)
	cli := newCLI(t)
	cli.cluster.script = [][]client.AppStatus{{other}}
	assert.Equal(t, 2, cli.run([]string{"deploy", "--prune", file(t, tiny)}))
	assert.Contains(t, cli.stderr(),
		"--prune deletes other: this needs a confirmation, and there is no terminal to ask on\nhint: --yes "+
			"confirms it\n")
	assert.Empty(t, cli.cluster.deployed)

	cli = newCLI(t)
	cli.cluster.script = [][]client.AppStatus{{other}}
	assert.Equal(t, 0, cli.run([]string{"deploy", "--prune", "--yes", "--detach", file(t, tiny)}))
	assert.True(t, cli.cluster.deployed[0].Prune)
}

func TestDeployBadFile(t *testing.T) {
	cli := newCLI(t)
	path := file(t, "applications:\n  - nam: demo\n    model: {id: demo}\n    engine: {kind: vlm}\n")
	assert.Equal(t, 2, cli.run([]string{"deploy", path}))
	assert.Contains(t, cli.stderr(), path+":2:5: ")
	assert.Contains(t, cli.stderr(), path+":4:20: ")
	assert.Contains(t, cli.stderr(), `did you mean "vllm"?`)
	assert.Zero(t, cli.cluster.calls, "a bad file never reaches the cluster")
}

func TestDeployVLLMOnTheSimulatedEngine(t *testing.T) {
	vllm := "applications: [{name: demo, model: {id: demo}, engine: {kind: vllm, env: {A: b}, args: " +
		"{max_num_seqs: 8, load_format: dummy}}, resources: {gpus: 1}}]\n"
	cli := newCLI(t)
	cli.cluster.script = [][]client.AppStatus{{}}
	assert.Equal(t, 0, cli.run([]string{"deploy", "--engine", "sim", "--detach", file(t, vllm)}),
		cli.stderr())
	assert.Equal(t, []string{
		"dpserve: --engine sim: demo: engine.kind: vllm → sim",
		"dpserve: --engine sim: demo: engine.env dropped",
		"dpserve: --engine sim: demo: resources.gpus: 1 → 0",
		"dpserve: --engine sim: demo: engine.args dropped: load_format",
		"dpserve: demo: restart, scale 1 -> 2 (engine.args.seed)",
		"dpserve: applied; watch it with `dpserve status -w`",
	}, strings.Split(strings.TrimSpace(cli.stderr()), "\n"))
	text := string(cli.cluster.deployed[0].Text)
	assert.Contains(t, text, "kind: sim")
	assert.Contains(t, text, "max_num_seqs: 8")
	assert.NotContains(t, text, "load_format")
	assert.NotContains(t, text, "gpus")
}

func TestStatus(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	a := demo(client.StatusUnhealthy, 7, state.Ready, state.Backoff)
	a.Units[0].Since = now.Add(-90 * time.Second)
	a.Units[0].Ranks[0].TTFTp50Ms = 12.34
	a.Units[1].Reason = "exit status 1"
	const table = `APP   STATUS     RANKS  GROUPS  MODEL  KIND  POLICY        QUEUED  MESSAGE
demo  UNHEALTHY  1/2    1       demo   sim   power-of-two  0

RANK      STATE    EPOCH  SINCE                 NODE  IN-FLIGHT  TOK/S  TTFT-P50  TTFT-P95  RESTARTS  HIT%  REASON
demo/0/1  backoff  1      -                     n1    0          0      -         -         0         -     exit status 1
demo/0/0  ready    1      2026-11-21T11:58:30Z  n1    0          0      12.3ms    -         0         -
`
	run := func(t *testing.T, args ...string) (*cli, int) {
		t.Helper()
		c := newCLI(t)
		c.now = func() time.Time { return now }
		c.cluster.script = [][]client.AppStatus{{a}}
		return c, c.run(append([]string{"status"}, args...))
	}
	t.Run("table", func(t *testing.T) {
		c, code := run(t)
		assert.Equal(t, 0, code)
		assert.Equal(t, table, c.stdout())
		assert.NotContains(t, c.stdout(), "\x1b", "a pipe gets no escape sequence")
	})
	t.Run("exit code", func(t *testing.T) {
		_, code := run(t, "demo", "--exit-code")
		assert.Equal(t, 3, code)
	})
	t.Run("unknown", func(t *testing.T) {
		c, code := run(t, "dmo")
		assert.Equal(t, 1, code)
		assert.Equal(t, "dpserve: there is no application \"dmo\"\nhint: did you mean \"demo\"?\n",
			c.stderr())
	})
	t.Run("name", func(t *testing.T) {
		c, _ := run(t, "-o", "name")
		assert.Equal(t, "demo\n", c.stdout())
	})
	t.Run("json", func(t *testing.T) {
		c, _ := run(t, "-o", "json")
		doc := decode[statusDocument](t, c.stdout())
		assert.Equal(t, a.Units[1].Reason, doc.Apps[0].Units[1].Reason)
	})
	t.Run("yaml", func(t *testing.T) {
		c, _ := run(t, "-o", "yaml")
		assert.True(t,
			strings.HasPrefix(c.stdout(), "apiVersion: dpserve/v1\napps:\n- name: demo\n"), c.stdout())
	})
	t.Run("wide", func(t *testing.T) {
		c, _ := run(t, "-o", "wide")
		assert.Contains(t, c.stdout(), "http://127.0.0.1:20000")
	})
	t.Run("colour", func(t *testing.T) {
		c := newCLI(t)
		c.io.OutTTY = true
		c.cluster.script = [][]client.AppStatus{{a}}
		require.Equal(t, 0, c.run([]string{"status"}))
		assert.Contains(t, c.stdout(), string(bad)+"UNHEALTHY"+string(resetColor))
	})
	t.Run("no colour", func(t *testing.T) {
		c := newCLI(t)
		c.io.OutTTY = true
		c.cluster.script = [][]client.AppStatus{{a}}
		require.Equal(t, 0, c.run([]string{"status", "--no-color"}))
		assert.NotContains(t, c.stdout(), "\x1b[3")
	})
}

func TestStatusWithoutCluster(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.down = refused()
	assert.Equal(t, 1, cli.run([]string{"status"}))
	assert.Equal(t, "dpserve: no answer from 127.0.0.1:8265\nhint: is dpserve running?\n", cli.stderr())
}

func TestStatusWatch(t *testing.T) {
	cli := newCLI(t)
	cli.now = func() time.Time { return time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC) }
	cli.cluster.script = [][]client.AppStatus{{demo(client.StatusRunning, 1, state.Ready)}}
	cli.cluster.onApps = cli.interruptOnce
	assert.Equal(t, 0, cli.run([]string{"status", "-w"}), "Ctrl-C is how a watch ends")
}

// Each line of a watch and of a deploy off a terminal has the whole reason.
func TestLinesRepeatTheReason(t *testing.T) {
	a := demo(client.StatusDeploying, 1, state.Pending, state.Pending)
	for i := range a.Units {
		a.Units[i].Reason = "place demo/0: 0 of 2 ranks can be placed (PACK): short of slots; need: 2 ranks"
	}
	cli := newCLI(t)
	cli.cluster.script = [][]client.AppStatus{{a}}
	cli.cluster.onApps = func(call int) { cli.interruptOnce(call - 1) }
	require.Zero(t, cli.run([]string{"status", "-w"}), cli.stderr())
	assert.Contains(t, cli.stdout(),
		"demo/0/1 pending epoch 1 0 of 2 ranks can be placed (PACK): short of slots\n")
	assert.NotContains(t, cli.stdout(), "as above")
}

func TestDelete(t *testing.T) {
	script := func() [][]client.AppStatus {
		return [][]client.AppStatus{
			{demo(client.StatusRunning, 1, state.Ready)},
			{demo(client.StatusDeleting, 1, state.Draining)},
			{},
		}
	}
	cli := newCLI(t)
	cli.cluster.script = script()
	assert.Equal(t, 2, cli.run([]string{"delete", "demo"}), "without a terminal only --yes confirms")
	assert.Empty(t, cli.cluster.deleted)

	cli = newCLI(t)
	cli.cluster.script = script()
	assert.Equal(t, 0, cli.run([]string{"delete", "demo", "--yes"}))
	assert.Equal(t, []string{"demo"}, cli.cluster.deleted)
	assert.Equal(t, "dpserve: demo/0/0 draining\ndpserve: demo is gone\n", cli.stderr())

	for answer, want := range map[string]int{"demo\n": 0, "yes\n": 2, "": 2} {
		cli = newCLI(t)
		cli.cluster.script = script()
		cli.io.InTTY, cli.io.ErrTTY = true, true
		cli.stdin.Reset(answer)
		assert.Equal(t, want, cli.run([]string{"delete", "demo"}), "answer %q", answer)
		assert.Contains(t, cli.stderr(), "delete ends 1 rank of demo; type demo to confirm: ")
	}
}

func TestLogs(t *testing.T) {
	cli := newCLI(t)
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	cli.now = func() time.Time { return now }
	assert.Equal(t, 0, cli.run([]string{"logs", "demo/0/3", "--since", "5m", "--tail", "20"}))
	assert.Equal(t,
		[]client.LogQuery{
			{App: "demo", Group: 0, Rank: 3, Since: now.Add(-5 * time.Minute), Tail: 20},
		}, cli.cluster.asked)
	assert.Equal(t, "demo/0/0 hello\n", cli.stdout())
}

func TestValidate(t *testing.T) {
	cli := newCLI(t)
	path := file(t, tiny)
	assert.Equal(t, 0, cli.run([]string{"validate", path}))
	assert.Equal(t, "dpserve: "+path+" is sound: 1 application\n", cli.stderr())
	assert.Empty(t, cli.stdout())

	cli = newCLI(t)
	cli.stdin.Reset(tiny)
	assert.Equal(t, 0, cli.run([]string{"validate", "-", "--print"}))
	assert.True(t, strings.HasPrefix(cli.stdout(), "applications:\n  - name: demo\n"), cli.stdout())

	cli = newCLI(t)
	cli.stdin.Reset(strings.Repeat("#", maxFile<<20+1))
	assert.Equal(t, 2, cli.run([]string{"validate", "-"}))
	assert.Contains(t, cli.stderr(), "stdin is larger than 1 MiB")
}
