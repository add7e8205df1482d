package system

import (
	"fmt"
	"net/http"
	"net/url"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// launchedPairs is an app.yaml of launched simulated engines in two pools.
func launchedPairs(prefills, decodes int, disaggregation, prefillMore, decodeMore string) string {
	return fmt.Sprintf(`applications:
  - name: pd
    model: {id: pd}
    engine: {kind: sim, args: {sim_step_ms: 2, max_model_len: 32768}}
    prefill: {data_parallel: {dp_size: %d}%s}
    decode: {data_parallel: {dp_size: %d}%s}
    disaggregation: {%s}
    graceful_shutdown_timeout_s: 2
`, prefills, prefillMore, decodes, decodeMore, disaggregation)
}

// PD7 and PD9 with an engine per process: short prompts stay, long ones name both ranks; then no prefill rank
// is alive.
func TestPD7RanksInTheHeaders(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Deploy(launchedPairs(2, 4, "decide: isl", "", ""))
	r.WaitStatus("pd", "RUNNING")
	waitMet(r)
	short, long := knownTexts(t, 4, 100, 8), knownTexts(t, 4, 20_000, 8)
	for _, body := range short.bodies {
		s := askAt(http.DefaultClient, r.HTTP, body)
		short.right(t, body, s)
		assert.Equal(t, "local", s.Way)
		assert.Empty(t, s.Prefill)
	}
	st := r.App("pd")
	for unit, k := range poolRanks(&st, "prefill") {
		assert.Zero(t, k.InFlight, unit)
	}
	for _, body := range long.bodies {
		s := askAt(http.DefaultClient, r.HTTP, body)
		long.right(t, body, s)
		assert.Equal(t, "remote", s.Way)
		assert.Regexp(t, `^0/[01]$`, s.Prefill)
		assert.Regexp(t, `^0/[0-3]$`, s.Rank)
	}
	r.Quiet()
	for way, n := range map[string]int{"local": 4, "remote": 4} {
		got := pairMetric(t, r, "dpserve_pd_requests_total", `way="`+way+`"`, `outcome="ok"`)
		assert.InDelta(t, n, got, 0, way)
	}
	st = r.App("pd")
	require.NotNil(t, st.PD)
	assert.EqualValues(t, 4, st.PD.Remote)
	assert.EqualValues(t, 4, st.PD.Local)
	assert.Len(t, st.Pools, 2)
}

// PD6: a launched engine of either pool is killed under 64 streams, and starts again in its place. What the
// slowest client waited for its first token is printed, without the kill and with it.
func TestPD6KilledUnderLoad(t *testing.T) {
	t.Parallel()
	known := knownTexts(t, 24, 300, 30)
	r := harness.Start(t)
	r.Expect(harness.PairsFail, harness.StreamBreaks)
	r.Deploy(launchedPairs(2, 3, "decide: always", "", ""))
	r.WaitStatus("pd", "RUNNING")
	st := waitMet(r)
	const clients = 64
	l := startPairLoad(t, known, clients, r.HTTP)
	l.more(t, 2*clients, "remote")
	t.Logf("slowest first token: %s", l.takeSlowest())
	for _, pool := range []string{"prefill", "decode"} {
		unit := "pd." + pool + "/0/1"
		victim := poolRanks(&st, pool)[unit]
		require.NotZero(t, victim.PID, "%+v", st.Units)
		require.NoError(t, syscall.Kill(victim.PID, syscall.SIGKILL))
		r.Eventually(func() error {
			st = r.App("pd")
			if k := poolRanks(&st, pool)[unit]; k.Phase != "ready" || k.Epoch != victim.Epoch+1 {
				return fmt.Errorf("%s at epoch %d", k.Phase, k.Epoch)
			}
			return allMet(&st)
		}, unit+" serves again")
		l.more(t, 2*clients, "remote")
		slowest := l.takeSlowest()
		t.Logf("slowest first token while a %s engine was killed: %s", pool, slowest)
		assert.LessOrEqual(t, slowest, 5*time.Second, "nobody waits for what is dead")
	}
	l.check(t, clients)
	for unit, k := range poolRanks(&st, "prefill") {
		want := uint64(1)
		if unit == "pd.prefill/0/1" {
			want++
		}
		assert.Equal(t, want, k.Epoch, "%s: a crash is one restart", unit)
	}
	r.Quiet()
}

// PD6: engines that somebody else runs are restarted at the same address under load, a prefill engine first,
// then a decode engine.
func TestPD6SameAddress(t *testing.T) {
	t.Parallel()
	known := knownTexts(t, 24, 300, 30)
	var addrs []string
	for range 4 {
		addrs = append(addrs, ports.TakeAddr(t))
	}
	engines := []*harness.Real{
		handPair(t, "prefill", addrs[0]), handPair(t, "prefill", addrs[1]),
		handPair(t, "decode", addrs[2]), handPair(t, "decode", addrs[3]),
	}
	r := harness.Start(t)
	r.Expect(harness.PairsFail, harness.EngineReplaced, harness.StreamBreaks)
	r.Deploy(handPairs(addrs[:2], addrs[2:], "decide: always"))
	r.WaitStatus("pd", "RUNNING")
	waitMet(r)
	const clients = 16
	l := startPairLoad(t, known, clients, r.HTTP)
	for _, i := range []int{0, 2} {
		side := map[int]string{0: "prefill", 2: "decode"}[i]
		l.more(t, 40, "remote")
		st := r.App("pd")
		r.Eventually(func() error { // a rank is ready a moment before its account is there
			st = r.App("pd")
			return harness.Accounted(&st)
		}, "accounts of all ranks")
		before := incarnationsOf(&st)
		engines[i].Signal(syscall.SIGKILL)
		<-engines[i].Exited()
		handPair(t, side, addrs[i])
		r.Eventually(func() error {
			st = r.App("pd")
			if n := differ(before, incarnationsOf(&st)); n != 1 || st.Ready != st.Desired {
				return fmt.Errorf("%d ranks have another incarnation, %d of %d are ready", n, st.Ready,
					st.Desired)
			}
			return allMet(&st)
		}, side+" engine is back")
		l.more(t, 40, "remote")
		r.Eventually(func() error {
			st = r.App("pd")
			if after := incarnationsOf(&st); differ(before, after) != 1 {
				return fmt.Errorf("%v, then %v", before, after)
			}
			return nil
		}, "one restart of one engine")
	}
	l.check(t, clients)
	r.Quiet()
}

func incarnationsOf(st *client.AppStatus) map[string]string {
	out := map[string]string{}
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			out[u.Unit] = k.Phase + " " + k.Incarnation
		}
	}
	return out
}

func differ(a, b map[string]string) (n int) {
	for unit := range a {
		if a[unit] != b[unit] {
			n++
		}
	}
	return n
}

// PD11: decode engines serve alone; a prefill rank is added at run time and removed again, under load.
func TestPD11PrefillRankAtRunTime(t *testing.T) {
	t.Parallel()
	known := knownTexts(t, 12, 300, 20)
	p, d1, d2 := ports.TakeAddr(t), ports.TakeAddr(t), ports.TakeAddr(t)
	handPair(t, "decode", d1)
	handPair(t, "decode", d2)
	handPair(t, "prefill", p)
	r := harness.Start(t)
	r.Deploy(handPairs(nil, []string{d1, d2}, "decide: always"))
	st := r.WaitStatus("pd", "RUNNING")
	require.NotNil(t, st.PD)
	assert.Contains(t, st.PD.Pairs, "off")
	l := startPairLoad(t, known, 8, r.HTTP)
	l.more(t, 20, "")
	assert.Zero(t, l.count("remote"))
	before := incarnationsOf(&st)
	for range 2 {
		code, body := r.Do(http.MethodPost, "/api/v1/apps/pd/ranks",
			fmt.Sprintf(`{"url": "http://%s", "role": "prefill"}`, p))
		require.Equal(t, http.StatusAccepted, code, body)
		st = waitMet(r)
		assert.Equal(t, "on", st.PD.Pairs)
		assert.Equal(t, 2, st.PD.All)
		l.more(t, 20, "remote")
		code, body = r.Do(http.MethodDelete, "/api/v1/apps/pd/ranks?url="+url.QueryEscape("http://"+p), "")
		require.Equal(t, http.StatusAccepted, code, body)
		r.Eventually(func() error {
			st = r.App("pd")
			if st.PD == nil || st.PD.All != 0 || len(poolRanks(&st, "prefill")) > 0 {
				return fmt.Errorf("%s: %+v", st.Status, st.PD)
			}
			return nil
		}, "the prefill rank is gone")
		assert.Contains(t, st.PD.Pairs, "off")
		l.more(t, 20, "")
	}
	l.check(t, 0)
	assert.Equal(t, before, incarnationsOf(&st), "no decode rank was touched")
	r.Quiet()
}

// The prefill pool is on one node and the decode pool on another; each is killed in turn under load, while a
// third node answers. Every text is that of an unbroken run.
func TestPairsOverTwoNodes(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts nodes more than once")
	}
	known := knownTexts(t, 24, 300, 30)
	c := harness.StartMembers(t, [][]string{
		{"--roles", "control,ingress"},
		{"--roles", "worker,ingress", "--labels", "pool=prefill"},
		{"--roles", "worker,ingress", "--labels", "pool=decode"},
	})
	c.Expect(harness.NodeFails, harness.PairsFail, harness.RequestsFail)
	label := func(pool string) string { return ", resources: {labels: {pool: " + pool + "}}" }
	c.All[0].Want(launchedPairs(2, 2, "decide: always", label("prefill"), label("decode")))
	ready := func() client.AppStatus {
		return c.WaitApp("pd", "RUNNING, all pairs have met", func(st *client.AppStatus) error {
			if st.Status != "RUNNING" {
				return fmt.Errorf("%s: %s", st.Status, st.Message)
			}
			return allMet(st)
		})
	}
	st := ready()
	for pool, node := range map[string]string{"prefill": "b", "decode": "c"} {
		for unit, k := range poolRanks(&st, pool) {
			assert.Equal(t, node, k.Node, unit)
		}
	}
	const clients = 16
	for _, name := range []string{"b", "c"} {
		l := startPairLoad(t, known, clients, c.All[0].HTTP)
		l.more(t, 40, "remote")
		victim := c.By(name)
		victim.Kill()
		if name == "b" {
			l.more(t, 40, "fallback") // the decode ranks go on alone
		}
		victim.Start()
		c.Settled()
		st = ready()
		l.more(t, 40, "remote")
		if name == "b" {
			l.check(t, 0)
			continue
		}
		// a request that has tried every decode rank is not kept waiting; the others wait for their return
		l.end()
		for _, refused := range l.refused {
			assert.Contains(t, refused, "no_ready_rank")
		}
		assert.LessOrEqual(t, len(l.refused), clients)
		l.refused = nil
		l.check(t, clients)
	}
	for _, pool := range []string{"prefill", "decode"} {
		for unit, k := range poolRanks(&st, pool) {
			assert.EqualValues(t, 2, k.Epoch, unit)
		}
	}
	c.AllQuiet()
}
