package inprocess

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// kvApp is a simulated application under policy kv.
func kvApp(name string, ranks int) string {
	return simApp(name, ranks, "independent", "sim_step_ms: 10",
		"routing: {policy: kv, params: {overlap_score_weight: 32}}")
}

func idsOf(n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = uint32(0x61616161 + i%5) // "aaaa" and its neighbours
	}
	return ids
}

// The router as a service, through the public client: generate warms a rank, best_worker knows it, a
// reservation counts there and expires, replay tells what was decided.
func TestRouterService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Deploy(kvApp("chat", 4))
		c.WaitStatus("chat", "RUNNING")
		r, ctx, ids := c.Router("chat"), t.Context(), idsOf(160)

		var got []uint32
		worker := ""
		for p, err := range r.Generate(ctx, client.GenerateRequest{
			TokenIDs: ids,
			Sampling: map[string]any{"max_tokens": 8}, RequestID: "first",
		}) {
			require.NoError(t, err)
			got = append(got, p.TokenIDs...)
			worker += p.Worker
		}
		assert.Len(t, got, 8)
		time.Sleep(time.Second) // the record of what was sent has reached the ingress

		w, err := r.BestWorker(ctx, client.BestWorkerRequest{TokenIDs: ids})
		require.NoError(t, err)
		assert.Equal(t, []any{worker, 9}, []any{w.Worker, w.OverlapBlocks},
			"all blocks but the one with the last token")
		x, err := r.Explain(ctx, client.Query{TokenIDs: ids})
		require.NoError(t, err)
		assert.Equal(t, []any{worker, "lowest_score", "kv"}, []any{x.Pick, x.Reason, x.Policy})
		x, err = r.Explain(ctx, client.Query{Replay: "first"})
		require.NoError(t, err)
		assert.Equal(t, []any{worker, 0, worker}, []any{x.Replay.Pick, x.Replay.HitTokens, x.Pick})

		blocks := 0
		for run, err := range r.DumpEvents(ctx) {
			require.NoError(t, err)
			assert.Equal(t, worker, run.Worker)
			blocks += len(run.Blocks)
		}
		assert.GreaterOrEqual(t, blocks, 10)

		w, err = r.BestWorker(ctx, client.BestWorkerRequest{TokenIDs: ids, RequestID: "mine"})
		require.NoError(t, err)
		assert.InDelta(t, 300, w.ExpiresS, 0)
		synctest.Wait() // what a rank shows is a copy, made behind its answer
		assert.Equal(t, 1, c.Rank("chat", w.Group, w.DPRank).InFlight)
		loads, err := r.PotentialLoads(ctx, nil)
		require.NoError(t, err)
		assert.Positive(t, loads[w.DPRank].PrefillTokens)
		require.NoError(t, r.MarkPrefillComplete(ctx, "mine"))
		time.Sleep(299 * time.Second)
		assert.Equal(t, 1, c.Rank("chat", w.Group, w.DPRank).InFlight, "it is kept")
		time.Sleep(2 * time.Second)
		assert.Zero(t, c.Rank("chat", w.Group, w.DPRank).InFlight, "it has expired")
		assert.Equal(t, "not_found", client.CodeOf(r.Free(ctx, "mine")))
		c.Quiet()
	})
}

// KV15 in one process: 64 streams run while the Router is reset; none is touched, the Router is exact again
// within 2 s, and the events hold one line per reset.
func TestKV15RouterResetUnder64Streams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Deploy(kvApp("chat", 4))
		c.WaitStatus("chat", "RUNNING")
		r := c.Router("chat")
		var streams sync.WaitGroup
		var mu sync.Mutex
		var broken []string
		for range 64 {
			streams.Go(func() {
				if s := c.StreamChat(t.Context(), "chat", 400); !s.OK() || s.Finish != "length" {
					mu.Lock()
					defer mu.Unlock()
					broken = append(broken, fmt.Sprint(s))
				}
			})
		}
		c.Until("64 streams", func() error { return inFlight(c, 64) })
		n, err := r.Reset(t.Context())
		require.NoError(t, err)
		assert.Equal(t, 4, n)
		time.Sleep(2 * time.Second)
		require.NoError(t, inFlight(c, 64), "they go on")
		x, err := r.Explain(t.Context(), client.Query{TokenIDs: []uint32{1}})
		require.NoError(t, err)
		sum := 0
		for _, row := range x.Ranks {
			sum += row.InFlight
		}
		assert.Equal(t, 64, sum, "the Router counts what the ranks count")
		streams.Wait()
		assert.Empty(t, broken)
		resets := 0
		for _, e := range c.Events("chat") {
			if strings.Contains(fmt.Sprint(e), "router-reset") {
				resets++
			}
		}
		assert.Equal(t, 1, resets)
		c.Quiet()
	})
}

func inFlight(c *harness.Cluster, want int) error {
	n := 0
	st, _ := c.App("chat")
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			n += k.InFlight
		}
	}
	if n != want {
		return errors.New(fmt.Sprint(n, " in flight"))
	}
	return nil
}
