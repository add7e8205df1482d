package system

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/parallel"
)

// unchanged waits until every rank is as before: same node, epoch, incarnation and process.
func unchanged(c *harness.Members, app string, before map[string]client.RankStatus) {
	c.T.Helper()
	c.WaitApp(app, "as before", func(st *client.AppStatus) error {
		for seat, k := range seats(st) {
			if was := before[seat]; k.Phase != "ready" || k.Node != was.Node || k.Epoch != was.Epoch ||
				k.Incarnation != was.Incarnation || k.PID != was.PID {
				return fmt.Errorf("rank %s: %+v, was %+v", seat, k, was)
			}
		}
		for _, u := range st.Units {
			if u.Restarts > 0 {
				return fmt.Errorf("%s was restarted %d times", u.Unit, u.Restarts)
			}
		}
		return harness.Accounted(st)
	})
}

// routesTo waits until an ingress counts ranks as usable.
func routesTo(c *harness.Members, at *harness.Member, app string, ranks []string) {
	c.T.Helper()
	c.Eventually("in routing at "+at.Name, func() error {
		route, err := at.Route(app)
		if err != nil {
			return err
		}
		for _, r := range ranks {
			if how := route[r]; how == "" || how == "not-ready" || how == "silent" {
				return fmt.Errorf("rank %s: %q", r, how)
			}
		}
		return nil
	})
}

// onlyOf: what went wrong since a moment was under way at ranks of one node.
func onlyOf(t *testing.T, answers []harness.Answer, ranks []string) {
	t.Helper()
	for i := range answers {
		if a := &answers[i]; !a.OK() {
			assert.Contains(t, ranks, a.Rank, "%v", a)
		}
	}
}

// EN2, HF70, HF75, MB11: engines outlive the processes of their node, under 64 streams per node. dpserve of a
// worker is killed, and its next process adopts them. Then SIGUSR2 replaces the process by another binary at
// its own path, under the same process id, and no node warns. Last, another node is killed and not started
// again: its engines end at --orphan-timeout, and its ranks start elsewhere.
func TestEN2EnginesOutliveTheirNode(t *testing.T) {
	t.Parallel()
	const orphans = 3 * time.Second
	c := harness.StartMembers(t, [][]string{{}, {"--orphan-timeout", orphans.String()}, {}},
		harness.MemberSlots(4), harness.Calm)
	c.Expect(harness.NodeFails, harness.EngineFails, harness.StreamBreaks)
	a, b, w := c.All[0], c.All[1], c.All[2]
	program := filepath.Join(t.TempDir(), "dpserve")
	copyFile(t, harness.Binary(t), program)
	w.Term()
	w.Use(program)
	w.Start()
	c.Settled()
	a.Want(spread("wide", 6))
	st := c.Running("wide")
	before := seats(&st)
	own := on(before, w.Name)
	require.NotEmpty(t, own)
	engines := w.Children()
	require.Len(t, engines, len(own))
	adopted := func() {
		t.Helper()
		routesTo(c, a, "wide", own)
		routesTo(c, b, "wide", own)
		unchanged(c, "wide", before)
		assert.ElementsMatch(t, engines, w.Children(), "the same engines, and no other")
	}

	load := harness.StartStreams(t, "wide", 64, 40, harness.HungAfter, a.HTTP, b.HTTP)
	load.Reaches(128)
	crashed := time.Now()
	w.Crash()
	for _, pid := range engines {
		assert.True(t, harness.Alive(pid), "an engine outlives its node's process")
	}
	w.Start()
	adopted()
	load.Reaches(128)
	y := load.End()
	assert.Zero(t, y.Hung, "%v", y)
	onlyOf(t, load.Answers(crashed.Add(-harness.HungAfter)), own)

	restartsWithAnotherBinary(t, c, w, program, adopted)

	engines = b.Children()
	require.NotEmpty(t, engines)
	crashed = time.Now()
	b.Crash()
	c.Eventually("the first orphan ends", func() error {
		if len(harness.Living(engines)) == len(engines) {
			return errNotYet
		}
		return nil
	})
	assert.GreaterOrEqual(t, time.Since(crashed), orphans, "no engine ends with its node")
	movedFrom(c, "wide", b.Name)
	dead(c, "the engines of a node that is not started again", engines)
	b.Start()
	c.Settled()
	c.Running("wide")
}

// restartsWithAnotherBinary puts the next version at the path of a node's program, and asks the node to
// restart under load. Streams are not cut, and no node warns.
func restartsWithAnotherBinary(t *testing.T, c *harness.Members, w *harness.Member, program string,
	adopted func(),
) {
	t.Helper()
	a, b := c.All[0], c.All[1]
	next := harness.NextBinary(t)
	load := harness.StartStreams(t, "wide", 64, 40, harness.HungAfter, a.HTTP, b.HTTP)
	load.Reaches(128)
	require.NoError(t, os.Rename(program, program+".old")) // kept aside, as many people do
	copyFile(t, next, program)
	var was, is client.Process
	require.NoError(t, w.Get("/api/v1/restart", &was))
	said := map[*harness.Member]int{a: len(a.Output()), b: len(b.Output()), w: len(w.Output())}
	w.Signal(syscall.SIGUSR2)
	c.Eventually("another process", func() error {
		if err := w.Get("/api/v1/restart", &is); err != nil || is.Process == was.Process {
			return fmt.Errorf("%+v, %w", is, err)
		}
		return nil
	})
	assert.True(t, w.Runs(), "the same process id")
	running, err := os.Stat("/proc/" + strconv.Itoa(w.PID) + "/exe")
	require.NoError(t, err)
	wanted, err := os.Stat(program)
	require.NoError(t, err)
	assert.True(t, os.SameFile(running, wanted), "the binary of today")
	adopted()
	load.Reaches(128)
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "streams end within the wait of a restart: %v", y)
	busy := &harness.Expected{} // a busy machine may elect another leader at any time
	busy.Expect(harness.Fault{
		{Msg: "the node's lease cannot be renewed", Why: "the leader is late, or new"},
		{
			Msg:  "a node's (stream is silent, its ranks are used last|ranks are out)",
			With: "nothing is heard", Why: "the readers get no processor",
		},
	})
	for m, before := range said {
		busy.Check(t, m.Name, m.Output()[before:])
	}
	for _, m := range []*harness.Member{a, b} {
		since := m.Output()[said[m]:]
		assert.Regexp(t, `level=INFO msg="a node restarts, its engines go on".* peer=`+w.Name, since)
		assert.Regexp(t, `level=INFO msg="a node has restarted".* peer=`+w.Name, since)
	}
}

// copyFile replaces a file as an upgrade does: under another name first.
func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, parallel.WriteProgram(to+".new", b))
	require.NoError(t, os.Rename(to+".new", to))
}

// EN2, EN3, HF62, HF71: a cluster of one node has its own leader: the state comes from its disk. Its next
// processes take over all engines, one with several ranks among them. Then dpserve restart. Shims are
// killed, of a node that runs and of one that does not: each ends its engine alone, which starts again in a
// shim of the binary that the node runs, whatever is at its path meanwhile.
func TestEN2ANodeAlone(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(1))
	c.Expect(harness.NodeFails, harness.EngineFails, harness.StreamBreaks, shimsFail)
	w, dir := c.All[0], t.TempDir()
	program := filepath.Join(t.TempDir(), "dpserve")
	copyFile(t, harness.Binary(t), program)
	w.Term()
	w.Use(program)
	w.Start()
	w.Want(simApp("pair", 2, "lockstep", "") + "    route_prefix: /pair\n")
	w.Want(simApp("solo", 2, "independent", "") + "    route_prefix: /solo\n")
	w.Want(stubApp(t, "moe", "sglang", dir, "tp_size: 4, enable_dp_attention: true", "A: b",
		"data_parallel: {dp_size: 4}\n    resources: {gpus: 0}"))
	before := map[string]client.AppStatus{}
	for _, app := range []string{"pair", "solo", "moe"} {
		before[app] = c.Running(app)
	}
	engines := w.Children()
	asBefore := func() {
		t.Helper()
		for app, st := range before {
			unchanged(c, app, seats(&st))
		}
		assert.ElementsMatch(t, engines, w.Children())
	}
	for range 2 {
		w.Crash()
		w.Start()
		asBefore()
	}
	out := harness.Run(t, "restart", "--addr", w.Admin)
	assert.Zero(t, out.ExitCode(), out.Output())
	assert.Contains(t, out.Output(), "runs dpserve")
	asBefore()
	assert.Len(t, stubStarts(t, dir), 1, "one process for four ranks, started once")
	for range 8 {
		chats(t, w.Real, "moe")
	}
	answersAt(t, "solo", w.HTTP+"/solo")

	require.NoError(t, os.Rename(program, program+".old"))
	copyFile(t, harness.StubEngine(t), program)
	solo := before["solo"]
	after := restartedOnce(c, "solo", "0/1", seats(&solo), func(l launched) { l.kill(c) })
	started := launchOf(t, filepath.Join(w.Dir, "engines"), after["0/1"].PID)
	for _, pid := range []int{started.state.Shim, started.state.PID} {
		assert.True(t, sameImage(t, w.PID, pid), "process %d runs what the node runs", pid)
	}
	require.NoError(t, os.Rename(program+".old", program))
	restartedOnce(c, "solo", "0/0", after, func(l launched) {
		w.Crash()
		l.kill(c)
		w.Start()
	})
	answersAt(t, "solo", w.HTTP+"/solo")
}
