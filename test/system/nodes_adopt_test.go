package system

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
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

// EN2, MB11: dpserve of a worker is killed under 64 streams per node. Its engines live on, and its next
// process adopts them.
func TestMB11EnginesAreAdoptedAfterACrash(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(3), harness.MemberSlots(4), harness.Calm)
	c.Expect(harness.NodeFails, harness.EngineFails, harness.StreamBreaks)
	a, b, w := c.All[0], c.All[1], c.All[2]
	a.Want(spread("wide", 6))
	st := c.Running("wide")
	before := seats(&st)
	gone := on(before, w.Name)
	require.NotEmpty(t, gone)
	engines := w.Children()
	require.Len(t, engines, len(gone))
	load := harness.StartStreams(t, "wide", 64, 40, harness.HungAfter, a.HTTP, b.HTTP)
	load.Reaches(128)
	crashed := time.Now()
	w.Crash()
	for _, pid := range engines {
		assert.True(t, harness.Alive(pid), "an engine outlives its node's process")
	}
	began := time.Now()
	w.Start()
	routesTo(c, a, "wide", gone)
	routesTo(c, b, "wide", gone)
	back := time.Since(began)
	unchanged(c, "wide", before)
	t.Logf("NUMBER ranks of a crashed node back in routing: %s after its start", back)
	load.Reaches(128)
	y := load.End()
	assert.Zero(t, y.Hung, "%v", y)
	onlyOf(t, load.Answers(crashed.Add(-harness.HungAfter)), gone)
	cut := map[string]int{} // by client
	for _, bad := range load.Answers(time.Time{}) {
		if !bad.OK() {
			cut[bad.Client]++
			assert.Equal(t, 1, cut[bad.Client], "a client is cut at most once: %v", &bad)
		}
	}
	assert.ElementsMatch(t, engines, w.Children(), "the same engines, and no other")
}

// EN2, HF70, HF75: SIGUSR2 replaces the process by another binary at its own path, under the same process id.
// Streams of other nodes are not cut, and no node warns.
func TestEN2RestartWithAnotherBinary(t *testing.T) {
	t.Parallel()
	old, next := harness.Binary(t), harness.NextBinary(t)
	c := harness.StartMembers(t, harness.Each(3), harness.MemberSlots(4), harness.Calm)
	c.Expect(harness.NodeFails) // w ends once, before the restart
	a, b, w := c.All[0], c.All[1], c.All[2]
	program := filepath.Join(t.TempDir(), "dpserve")
	copyFile(t, old, program)
	w.Term()
	w.Use(program)
	w.Start()
	c.Settled()
	a.Want(spread("wide", 6))
	st := c.Running("wide")
	before := seats(&st)
	moved := on(before, w.Name)
	require.NotEmpty(t, moved)
	load := harness.StartStreams(t, "wide", 64, 40, harness.HungAfter, a.HTTP, b.HTTP)
	load.Reaches(128)

	require.NoError(t, os.Rename(program, program+".old")) // kept aside, as many people do
	copyFile(t, next, program)
	var was, is client.Process
	require.NoError(t, w.Get("/api/v1/restart", &was))
	said := map[*harness.Member]int{a: len(a.Output()), b: len(b.Output()), w: len(w.Output())}
	w.Signal(syscall.SIGUSR2)
	began := time.Now()
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
	routesTo(c, a, "wide", moved)
	routesTo(c, b, "wide", moved)
	t.Logf("NUMBER ranks back in routing %s after SIGUSR2", time.Since(began))
	unchanged(c, "wide", before)
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
	require.NoError(t, os.WriteFile(to+".new", b, 0o755))
	require.NoError(t, os.Rename(to+".new", to))
}

// EN2: a node that is not started again: its engines end at --orphan-timeout, and its ranks start elsewhere.
func TestEN2OrphansEnd(t *testing.T) {
	t.Parallel()
	const orphans = 3 * time.Second
	c := harness.StartMembers(t, harness.Each(3, "--orphan-timeout", orphans.String()),
		harness.MemberSlots(6))
	c.Expect(harness.NodeFails, harness.EngineFails, harness.StreamBreaks)
	a, w := c.All[0], c.All[2]
	a.Want(spread("wide", 6))
	c.Running("wide")
	engines := w.Children()
	require.NotEmpty(t, engines)
	crashed := time.Now()
	w.Crash()
	var first, last time.Duration // ends of engines
	var wg sync.WaitGroup
	wg.Go(func() {
		for len(harness.Living(engines)) == len(engines) && time.Since(crashed) < harness.Patience {
			time.Sleep(10 * time.Millisecond)
		}
		first = time.Since(crashed)
		for len(harness.Living(engines)) > 0 && time.Since(crashed) < harness.Patience {
			time.Sleep(10 * time.Millisecond)
		}
		last = time.Since(crashed)
	})
	movedFrom(c, "wide", w.Name)
	wg.Wait()
	assert.GreaterOrEqual(t, first, orphans, "no engine ends with its node")
	t.Logf("engines ended %s to %s after their node", first, last)
	w.Start()
	c.Settled()
	c.Running("wide")
}

// EN2: a cluster of one node has its own leader: the state comes from its disk. Then dpserve restart.
func TestEN2ANodeAlone(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(1))
	c.Expect(harness.NodeFails, harness.EngineFails, harness.StreamBreaks)
	w := c.All[0]
	w.Want(simApp("pair", 2, "lockstep", "") + "    route_prefix: /pair\n")
	w.Want(simApp("solo", 2, "independent", ""))
	pair, solo := c.Running("pair"), c.Running("solo")
	engines := w.Children()
	require.Len(t, engines, 4)
	for range 2 {
		w.Crash()
		w.Start()
		unchanged(c, "pair", seats(&pair))
		unchanged(c, "solo", seats(&solo))
	}
	out := harness.Run(t, "restart", "--addr", w.Admin)
	assert.Zero(t, out.ExitCode(), out.Output())
	assert.Contains(t, out.Output(), "runs dpserve")
	unchanged(c, "pair", seats(&pair))
	unchanged(c, "solo", seats(&solo))
	got := w.Children()
	slices.Sort(got)
	slices.Sort(engines)
	assert.Equal(t, engines, got)
	y := harness.StartLoad(t, "solo", 4, 5, w.HTTP)
	y.Reaches(20)
	sum := y.End()
	assert.Zero(t, sum.Refused+sum.Broken+sum.Cut+sum.Hung, "%v", sum)
}
