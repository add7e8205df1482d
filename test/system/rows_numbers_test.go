package system

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// The numbers of a cluster that users feel, with every timer as it is for users. They are printed; a test
// fails only beyond slack times a goal, for machines are shared and noisy, and what within adds.

// What a router says of a rank that gets requests: any time, or when nothing else is left too.
var (
	anyTime  = []string{"ok"}
	ifForced = []string{"ok", "silent"}
)

// outAfter is how long after a moment each node's router had no rank of a set in one of these words, by its
// own state. It asks every node for itself. slowest is the longest that one of them took for an answer
// meanwhile, which is a few milliseconds where the nodes get the processor.
func outAfter(c *harness.Members, since time.Time, app string, ranks, usable []string,
	at ...*harness.Member,
) (out map[string]time.Duration, slowest time.Duration) {
	c.T.Helper()
	var mu sync.Mutex
	out = map[string]time.Duration{}
	var wg sync.WaitGroup
	for _, m := range at {
		wg.Go(func() {
			for time.Since(since) < harness.Patience {
				asked := time.Now()
				route, err := m.Route(app)
				isOut := err == nil && !slices.ContainsFunc(ranks,
					func(r string) bool { return slices.Contains(usable, route[r]) })
				mu.Lock()
				slowest = max(slowest, time.Since(asked))
				if isOut {
					out[m.Name] = time.Since(since)
				}
				mu.Unlock()
				if isOut {
					return
				}
				time.Sleep(2 * time.Millisecond)
			}
		})
	}
	wg.Wait()
	if len(out) != len(at) {
		c.T.Fatalf("ranks %v of %s are still in routing somewhere: out at %v", ranks, app, out)
	}
	return out, slowest
}

// within checks every duration against a goal. The news passes two nodes, and each of them is given the time
// that the slowest answer of a node took meanwhile: milliseconds, unless the nodes get little processor.
func within(t *testing.T, what string, goal time.Duration, all map[string]time.Duration,
	slowest time.Duration,
) {
	t.Helper()
	for where, d := range all {
		assert.LessOrEqual(t, d, slack*goal+2*slowest, "%s at %s", what, where)
		all[where] = d.Round(time.Millisecond)
	}
	t.Logf("NUMBER %s: %v (goal %s)", what, all, goal)
	if slowest > 0 {
		t.Logf("meanwhile the slowest answer of a node took %s", slowest.Round(time.Millisecond))
	}
}

// The leader, which hosts no ranks, is killed under load.
func TestNumbersLeaderKilled(t *testing.T) {
	t.Parallel()
	control, worker := []string{"--roles", "control"}, []string{"--roles", "worker,ingress"}
	c := harness.StartMembers(t, [][]string{control, control, control, worker, worker}, harness.RealTimers)
	c.Expect(harness.NodeFails)
	w1, w2 := c.By("d"), c.By("e")
	w1.Want(spread("wide", 8))
	st := c.Running("wide")
	before := seats(&st)
	load := harness.StartLoad(t, "wide", 4, 40, w1.HTTP, w2.HTTP)
	load.Reaches(20)
	leader := c.Leader()
	leader.Kill()
	killed := leader.CrashedAt
	took := map[string]time.Duration{}
	c.Eventually("a deploy is accepted", func() error {
		if code, text := deploys(w2, "next"); code != http.StatusAccepted {
			return fmt.Errorf("%d %s", code, text)
		}
		return nil
	})
	took["deploy accepted"] = time.Since(killed)
	c.WaitApp("next", "granted", func(st *client.AppStatus) error {
		if len(st.Units) != 1 || st.Units[0].Epoch == 0 {
			return errStatus(st)
		}
		return nil
	})
	took["rank granted"] = time.Since(killed)
	within(t, "leader killed", 3*time.Second, took, 0)
	c.Running("next")
	t.Logf("NUMBER leader killed: the new rank serves after %s", time.Since(killed).Round(time.Millisecond))
	load.Reaches(20)
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "what clients saw: %v", y)
	st = c.Running("wide")
	assert.Equal(t, before, seats(&st), "0 engine restarts")
	t.Logf("NUMBER leader killed: %d answers, no error, no engine restart", y.OK)
}

// A worker is killed under 64 streams, and its kernel says so; then one is stopped, and nothing says so.
func TestNumbersNodeLost(t *testing.T) {
	t.Parallel()
	worker := []string{"--roles", "worker"}
	c := harness.StartMembers(t, [][]string{
		{"--roles", "control,ingress"},
		{"--roles", "ingress"},
		worker,
		worker, worker,
	}, harness.RealTimers)
	c.Expect(harness.NodeFails, harness.StreamBreaks)
	a, b := c.All[0], c.All[1]
	a.Want(strings.Replace(spread("wide", 6), "sim_step_ms: 10", "sim_step_ms: 20", 1))
	st := c.Running("wide")
	load := harness.StartStreams(t, "wide", 32, 50, harness.HungAfter, a.HTTP, b.HTTP)
	load.Reaches(32)
	killed := c.All[2]
	gone := on(seats(&st), killed.Name)
	require.NotEmpty(t, gone)
	killed.Kill()
	began := killed.CrashedAt
	out, slowest := outAfter(c, began, "wide", gone, ifForced, a, b)
	within(t, "node killed under 64 streams, out of routing", time.Second, out, slowest)
	load.Reaches(64)

	silent := c.All[3]
	gone = on(seats(&st), silent.Name)
	require.NotEmpty(t, gone)
	began = time.Now()
	silent.Freeze()
	out, slowest = outAfter(c, began, "wide", gone, anyTime, a, b)
	within(t, "node silent under 64 streams, picked last", time.Second, out, slowest)
	out, slowest = outAfter(c, began, "wide", gone, ifForced, a, b)
	within(t, "node silent under 64 streams, out of routing", 3*time.Second, out, slowest)
	load.Reaches(64)
	silent.Thaw()
	y := load.End()
	assert.Zero(t, y.Refused+y.Cut+y.Hung, "what clients saw: %v", y)
	t.Logf("NUMBER nodes lost under 64 streams: %d answers, %d errors before the first byte, "+
		"%d error events after it, %d cut without one", y.OK, y.Refused, y.Broken, y.Cut)
}

// One rank of a lockstep group of 16 over two nodes is killed; a third node has no ranks and is an ingress
// too.
func TestNumbersLockstepRankKilled(t *testing.T) {
	t.Parallel()
	both := []string{"--slots", "8"}
	c := harness.StartMembers(t, [][]string{both, both, {"--roles", "ingress"}}, harness.RealTimers)
	c.Expect(harness.EngineFails, harness.StreamBreaks)
	began := time.Now()
	c.All[0].Want(simApp("big", 16, "lockstep", "sim_step_ms: 10"))
	st := c.Running("big")
	start := time.Since(began)
	require.Len(t, st.Units, 1)
	was := st.Units[0]
	load := harness.StartStreams(t, "big", 8, 50, harness.HungAfter, others(c, nil)...)
	load.Reaches(24)
	all := make([]string, 0, len(was.Ranks))
	pid := 0
	for i := range was.Ranks {
		all = append(all, fmt.Sprintf("0/%d", was.Ranks[i].Rank))
		if was.Ranks[i].Rank == 5 {
			pid = was.Ranks[i].PID
		}
	}
	require.NotZero(t, pid)
	killed := time.Now()
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	out, slowest := outAfter(c, killed, "big", all, ifForced, c.All...)
	within(t, "1 of 16 ranks over 2 nodes killed, group fenced", 250*time.Millisecond, out, slowest)
	c.WaitApp("big", "ready anew", func(st *client.AppStatus) error {
		if u := st.Units[0]; u.Phase != "ready" || u.Epoch != was.Epoch+1 || st.Ready != 16 {
			return errStatus(st)
		}
		return nil
	})
	ready := time.Since(killed)
	from := time.Now()
	load.Reaches(24)
	assert.LessOrEqual(t, ready, slack*5*time.Second+start)
	t.Logf("NUMBER 1 of 16 ranks over 2 nodes killed, group ready again: %s "+
		"(goal 5s and the engines' own start; the first deploy took %s)",
		ready.Round(time.Millisecond), start.Round(time.Millisecond))
	first := time.Duration(0)
	for _, a := range load.Answers(killed) {
		if end := a.Began.Add(a.First); a.OK() && (first == 0 || end.Sub(killed) < first) {
			first = end.Sub(killed)
		}
	}
	y := load.End()
	t.Logf("NUMBER 1 of 16 ranks over 2 nodes killed, next first token: %s after it; %d answers since, "+
		"%d errors before the first byte, %d error events after it",
		first.Round(time.Millisecond), load.Since(from).OK, y.Refused, y.Broken)
	assert.Zero(t, y.Refused+y.Cut+y.Hung, "what clients saw: %v", y)
	c.AllQuiet()
}
