package inprocess

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// seamLimit is the longest gap in a stream that goes on from another rank, beyond the prefill of its prompt
// and its text.
const seamLimit = 150 * time.Millisecond

// greedy sends the streams of n clients at once, every second one a chat, and returns them in order.
// meanwhile runs beside them.
func greedy(t *testing.T, p *harness.Peer, app string, n, tokens int, meanwhile func()) []*harness.Stream {
	t.Helper()
	var wg sync.WaitGroup
	out := make([]*harness.Stream, n)
	for i := range n {
		path, prompt := "/v1/completions", fmt.Sprintf(`"prompt":"client %d asks"`, i)
		if i%2 == 0 {
			path = "/v1/chat/completions"
			prompt = fmt.Sprintf(`"messages":[{"role":"user","content":"client %d asks"}]`, i)
		}
		body := fmt.Sprintf(`{"model":%q,%s,"max_tokens":%d,"temperature":0,"stream":true,`+
			`"ignore_eos":true,"stream_options":{"include_usage":true}}`, app, prompt, tokens)
		wg.Go(func() {
			resp, err := p.Post(t.Context(), path, body)
			if !assert.NoError(t, err) { //nolint:testifylint // not the goroutine of the test
				return
			}
			out[i] = harness.ReadStream(resp)
		})
	}
	if meanwhile != nil {
		meanwhile()
	}
	wg.Wait()
	return out
}

// sameStreams asserts that streams are those of an unbroken run, that they went on from another rank n times,
// and that none waited for longer than limit. It returns the longest gap of each, in ascending order.
func sameStreams(
	t *testing.T, c *harness.Cluster, unbroken, got []*harness.Stream, n int, limit time.Duration,
) (gaps []time.Duration) {
	t.Helper()
	for i, s := range got {
		require.True(t, s.OK(), "client %d: %s", i, s)
		assert.Equal(t, unbroken[i].Text, s.Text, "client %d", i)
		assert.Equal(t, unbroken[i].Finish, s.Finish, "client %d", i)
		assert.Equal(t, unbroken[i].Usage, s.Usage, "client %d", i)
		gaps = append(gaps, s.Gap)
	}
	slices.Sort(gaps)
	assert.LessOrEqual(t, gaps[len(gaps)-1], limit)
	assert.Len(t, c.Journal.Find("a stream broke and goes on from another rank"), n)
	return gaps
}

// FS5: one of 4 ranks is killed under 64 greedy streams: no client sees an error, and each has the text, the
// tokens, the id, the one finish_reason and the usage of an unbroken run. The longest gap of a stream that
// goes on is 150 ms.
func TestFS5StreamsOutliveTheirRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const clients, tokens, victim = 64, 120, 2
		c := harness.New(t)
		c.Expect(harness.EngineFails)
		c.Deploy(simApp("a", 4, "independent", "sim_step_ms: 10"))
		c.WaitStatus("a", "RUNNING")
		unbroken := greedy(t, c.Peer(0), "a", clients, tokens, nil)
		broken := 0
		got := greedy(t, c.Peer(0), "a", clients, tokens, func() {
			time.Sleep(500 * time.Millisecond)
			broken = c.Rank("a", 0, victim).InFlight
			require.True(t, c.Kill("a", 0, victim))
		})
		require.GreaterOrEqual(t, broken, clients/8)
		gaps := sameStreams(t, c, unbroken, got, broken, seamLimit)
		t.Logf("%d streams broke; the longest gaps are p50 %s, most %s", broken, gaps[clients-broken/2-1],
			gaps[clients-1])
	})
}

// FS5: the only rank is killed under its streams: they wait for its next start, and go on.
func TestStreamsOutliveTheOnlyRank(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const clients, tokens = 8, 120
		c := harness.New(t)
		c.Expect(harness.EngineFails)
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 10, sim_startup_s: 5"))
		c.WaitStatus("a", "RUNNING")
		unbroken := greedy(t, c.Peer(0), "a", clients, tokens, nil)
		got := greedy(t, c.Peer(0), "a", clients, tokens, func() {
			time.Sleep(500 * time.Millisecond)
			require.True(t, c.Kill("a", 0, 0))
		})
		sameStreams(t, c, unbroken, got, clients, 8*time.Second)
	})
}

// FS5: streams that are longer than the grace of a drain, or of a rolling update, move to other ranks. No
// client sees it.
func TestStreamsMoveWhenTheirRankIsTaken(t *testing.T) {
	t.Parallel()
	for name, take := range map[string]func(t *testing.T, c *harness.Cluster){
		"drain": func(t *testing.T, c *harness.Cluster) { drained(t, c, c.Peer(1).ID) },
		"roll": func(t *testing.T, c *harness.Cluster) {
			c.Deploy(movable("sim_step_ms: 10, max_num_seqs: 200"))
			c.WaitUnit("a/0/0", "ready", 2)
			c.WaitUnit("a/0/1", "ready", 2)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const clients, tokens = 8, 300
				c := harness.New(t, harness.Nodes(2), harness.Slots(2))
				c.Deploy(movable("sim_step_ms: 10"))
				c.WaitStatus("a", "RUNNING")
				c.Until("the ingress knows both ranks", func() error { return allReady(c, "a", 2) })
				unbroken := greedy(t, c.Peer(0), "a", clients, tokens, nil)
				got := greedy(t, c.Peer(0), "a", clients, tokens, func() {
					time.Sleep(500 * time.Millisecond)
					take(t, c)
				})
				moves := c.Journal.Find("a stream broke", `"cause":"drained"`)
				assert.GreaterOrEqual(t, len(moves), clients/2)
				sameStreams(t, c, unbroken, got, len(moves), seamLimit)
			})
		})
	}
}

// movable is an application of two ranks on two nodes, whose grace is shorter than the streams of its test.
func movable(args string) string {
	return simApp("a", 2, "independent", args, "graceful_shutdown_timeout_s: 1",
		"placement_group_strategy: SPREAD", "routing: {policy: round-robin}")
}

// FS5: a decode rank of a pair dies, or one that has computed its prompts itself: its streams go on.
func TestStreamsOfPairsGoOn(t *testing.T) {
	t.Parallel()
	for _, decide := range []string{"always", "isl"} {
		t.Run(decide, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const clients, tokens = 16, 120
				c := simPair(t, simPools(2, 2, "sim_step_ms: 10", "decide: "+decide), 4)
				c.Expect(harness.PairsFail)
				unbroken := greedy(t, c.Peer(0), "pd", clients, tokens, nil)
				broken := 0
				got := greedy(t, c.Peer(0), "pd", clients, tokens, func() {
					time.Sleep(500 * time.Millisecond)
					victim := c.Unit("pd.decode/0/1").Ranks[0]
					broken = victim.InFlight
					c.Engines.At(victim.URL).Kill()
				})
				require.GreaterOrEqual(t, broken, clients/4)
				sameStreams(t, c, unbroken, got, broken, seamLimit)
			})
		})
	}
}

// FS5: a node that is told to end lets its clients' streams end within the grace, also those of ranks on
// other nodes.
func TestAnIngressThatEndsWaitsForItsStreams(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const clients, tokens = 8, 600
		c := harness.New(t, harness.Nodes(2))
		c.Expect(harness.NodeFails)
		ends := c.Peer(1)
		drained(t, c, ends.ID) // it gets no rank, and answers clients
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 10"))
		c.WaitStatus("a", "RUNNING")
		for _, s := range greedy(t, ends, "a", clients, tokens, func() {
			time.Sleep(500 * time.Millisecond)
			ends.Close()
		}) {
			assert.True(t, s.OK(), s)
		}
	})
}
