package system

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

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

// PD6, PD32: The prefill pool is on one node and the decode pool on another, while a third node answers. An
// engine of each pool is killed under load and starts again in its place; then each node is killed. Every
// text is that of an unbroken run.
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
	}, harness.Calm) // no rank is left out because the machine is busy
	c.Expect(harness.NodeFails, harness.PairsFail, harness.RequestsFail, harness.StreamBreaks)
	label := func(pool string) string { return ", resources: {labels: {pool: " + pool + "}}" }
	c.All[0].Want(launchedPairs(2, 3, "decide: always", label("prefill"), label("decode")))
	ready := func(restarted ...string) client.AppStatus {
		return c.WaitApp("pd", "RUNNING, all pairs have met", func(st *client.AppStatus) error {
			for _, unit := range restarted {
				if k := unitsOf(st)[unit]; k.Epoch != 2 {
					return fmt.Errorf("%s: %s at epoch %d", unit, k.Phase, k.Epoch)
				}
			}
			if st.Status != "RUNNING" {
				return fmt.Errorf("%s: %s", st.Status, st.Message)
			}
			return allMet(st)
		})
	}
	st := ready()
	for unit, k := range unitsOf(&st) {
		want := map[bool]string{true: "b", false: "c"}[strings.HasPrefix(unit, "pd.prefill/")]
		assert.Equal(t, want, k.Node, unit)
	}
	const clients = 16
	l := startPairLoad(t, known, clients, c.All[0].HTTP)
	l.more(t, 40, "remote")
	for _, pool := range []string{"prefill", "decode"} {
		unit := "pd." + pool + "/0/1"
		victim := unitsOf(&st)[unit]
		require.NotZero(t, victim.PID, "%+v", st.Units)
		require.NoError(t, syscall.Kill(victim.PID, syscall.SIGKILL))
		st = ready(unit)
		l.more(t, 40, "remote")
	}
	l.check(t, clients)
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
			assert.Regexp(t, "no_ready_rank|upstream_failed", refused)
		}
		assert.LessOrEqual(t, len(l.refused), clients)
		l.refused = nil
		l.check(t, clients)
	}
	for unit, k := range unitsOf(&st) {
		want := uint64(2)
		if strings.HasSuffix(unit, "/1") {
			want++
		}
		assert.Equal(t, want, k.Epoch, "%s: each end is one restart", unit)
	}
	c.AllQuiet()
}
