package vllm

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// attached is an app.yaml over engines that already run.
func attached(name, routing string, ranks []*rank) string {
	var b strings.Builder
	fmt.Fprintf(&b, `applications:
  - name: %s
    model: {id: %s}
    engine:
      kind: attach
      family: vllm
      ranks:
`, name, model)
	for _, r := range ranks {
		fmt.Fprintf(&b, "        - {url: %q, kv_events: {bind: %q, replay: %q}}\n", "http://"+r.addr,
			r.events, r.replay)
	}
	fmt.Fprintf(&b, "    routing: {%s}\n", routing)
	return b.String()
}

// The policies that are compared.
var policies = []struct {
	name, routing string
	events        bool // it reads the index
	exact         bool // its predictions are in the engine's own tokens
}{
	{"scoring-locality", "policy: scoring, params: {profile: locality}, identity: tokens", true, true},
	{"kv", "policy: kv, identity: tokens", true, true},
	{"lmetric-1", "policy: lmetric-1, identity: tokens", true, true},
	{"lmetric-1-text", "policy: lmetric-1, identity: text", true, false},
	{"round-robin", "policy: round-robin", false, false},
}

// emptied drops what the engines have cached and makes them say so: they tell it with their next step.
func emptied(ctx context.Context, t *testing.T, ranks []*rank) {
	t.Helper()
	for _, r := range ranks {
		require.NoError(t, r.resetCache(ctx))
		_, err := complete(ctx, r.addr, randomIDs(newFamilies(1).rng, blockSize), 1, "")
		require.NoError(t, err)
	}
}

// deploy puts an application over the ranks and waits until it serves and, if it has to, follows every rank's
// events.
func deploy(t *testing.T, dp *harness.Real, name, routing string, ranks []*rank, events bool) {
	t.Helper()
	dp.Deploy(attached(name, routing, ranks))
	dp.WaitStatus(name, "RUNNING")
	for i := range ranks {
		if events {
			dp.Eventually(func() error { return live(dp, name, i) }, "events of "+name)
		}
	}
}

// kvOf is what a rank's status says of its cache.
func kvOf(dp *harness.Real, app string, n int) client.KVStatus {
	k, _ := dp.Rank(app, 0, n)
	if k.KV == nil {
		return client.KVStatus{}
	}
	return *k.KV
}

// live says why a rank's events are not followed.
func live(dp *harness.Real, app string, n int) error {
	if kv := kvOf(dp, app, n); kv.Events == nil || kv.Events.State != "live" {
		return fmt.Errorf("rank %d: %+v %+v", n, kv, kv.Events)
	}
	return nil
}

// testRouting: what dpserve expects to be cached at the rank it picks is what that rank then reports; and
// picking by it makes the engines find more in their caches than taking turns does, on the very same load.
func testRouting(t *testing.T, ranks []*rank) {
	dp := harness.Start(t)
	t.Logf("%-18s %8s %9s %8s %10s %10s %9s  %s", "policy", "requests", "exact", "prompt", "predicted",
		"reported", "cached", "requests of ranks")
	shares := map[string]float64{}
	for _, p := range policies {
		emptied(t.Context(), t, ranks)
		deploy(t, dp, p.name, p.routing, ranks, p.events)
		l := runSessions(t.Context(), dp.HTTP, 42, sessions)
		require.NoError(t, l.err)
		dp.Quiet()
		y := &l.tally
		exact, predicted := "-", "-"
		if p.events {
			predicted = fmt.Sprint(y.predicted)
		}
		if p.exact {
			exact = fmt.Sprintf("%.1f %%", 100*y.share())
			assert.GreaterOrEqual(t, y.share(), goodShare, "%s: %v", p.name, y)
		}
		shares[p.name] = y.cachedShare()
		t.Logf("%-18s %8d %9s %8d %10s %10d %7.1f %%  %d + %d", p.name, y.requests, exact, y.prompt,
			predicted, y.cached, 100*y.cachedShare(), l.ranks["0/0"], l.ranks["0/1"])
		dp.Delete(p.name)
	}
	for name, share := range shares {
		if name != "round-robin" {
			assert.Greater(t, share, shares["round-robin"], "%s raises the cached share", name)
		}
	}
	assert.Greater(t, shares["scoring-locality"], shares["round-robin"]+0.05, "clearly so")
}

// testRestartUnderDpserve (KV4, KV5): under an application a rank that drops its cache or crashes loses its
// blocks in dpserve's picture, the other rank keeps its own, and predictions are right again.
func testRestartUnderDpserve(t *testing.T, ranks []*rank) {
	const app = "again"
	dp := harness.Start(t)
	emptied(t.Context(), t, ranks)
	deploy(t, dp, app, policies[0].routing, ranks, true)
	step := func(what string, seed uint64) {
		l := runSessions(t.Context(), dp.HTTP, seed, sessions/2)
		require.NoError(t, l.err)
		dp.Quiet()
		t.Logf("%-34s %v", what, &l.tally)
		assert.GreaterOrEqual(t, l.tally.share(), goodShare, what)
	}
	step("under way:", 1)

	kept := settled(dp, app, 0)
	require.Positive(t, settled(dp, app, 1))
	require.NoError(t, ranks[1].resetCache(t.Context()))
	_, err := complete(t.Context(), ranks[1].addr, randomIDs(newFamilies(1).rng, blockSize), 1, "")
	require.NoError(t, err)
	dp.Eventually(func() error { return holds(dp, app, 1, 1) }, "rank 1 is cleared")
	assert.Equal(t, kept, settled(dp, app, 0), "rank 0 keeps its blocks")
	step("after /reset_prefix_cache, rank 1:", 2)

	kept = settled(dp, app, 0)
	ranks[1].crash()
	dp.Eventually(func() error { return ready(dp, app, 1) }, "rank 1 is missed")
	began := time.Now()
	ranks[1].start()
	ranks[1].ready()
	dp.Eventually(func() error { return ready(dp, app, 2) }, "rank 1 is back")
	t.Logf("rank 1 is in routing %s after its start", time.Since(began).Round(time.Second))
	dp.Eventually(func() error { return holds(dp, app, 1, 0) }, "rank 1 begins at 0")
	assert.Equal(t, kept, settled(dp, app, 0), "rank 0 keeps its blocks")
	t.Logf("blocks: rank 0 %d before and after, rank 1 0", kept)
	dp.Eventually(func() error { return live(dp, app, 1) }, "events of the new engine")
	step("after a crash of rank 1:", 3)
	dp.Delete(app)
}

// settled waits until nothing but events speaks for a rank's blocks, and counts them.
func settled(dp *harness.Real, app string, n int) int {
	dp.Eventually(func() error {
		if kv := kvOf(dp, app, n); kv.Sent > 0 {
			return fmt.Errorf("%d blocks by the rank's own record", kv.Sent)
		}
		return nil
	}, "the record of what was sent ends")
	return kvOf(dp, app, n).Blocks
}

func holds(dp *harness.Real, app string, n, want int) error {
	if kv := kvOf(dp, app, n); kv.Blocks != want {
		return fmt.Errorf("rank %d holds %d blocks, wanted %d", n, kv.Blocks, want)
	}
	return nil
}

func ready(dp *harness.Real, app string, want int) error {
	if st := dp.App(app); st.Ready != want {
		return fmt.Errorf("%d ranks are ready, wanted %d", st.Ready, want)
	}
	return nil
}
