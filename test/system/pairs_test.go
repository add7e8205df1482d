package system

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
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

// PD32: The prefill pool is on one node and the decode pool on another; each is killed in turn under load,
// while a third node answers. Every text is that of an unbroken run.
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
