package ingress

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
)

// TestSplit: the prompt of a streamed and of a whole answer is computed by the prefill rank, the decode rank
// gets its parameters, and both ranks' accounts are settled.
func TestSplit(t *testing.T) {
	for name, far := range map[string]bool{"near": false, "far": true} {
		t.Run(name, func(t *testing.T) {
			g := newPairRig(t, options{prefills: 1, decodes: 1, far: far})
			for i, body := range []string{streamBody, chatBody} {
				a := g.post("/v1/chat/completions", body, "X-Request-Id", "mine")
				g.served(a, "remote")
				assert.Equal(t, "0/0", a.header.Get("X-Dpserve-Prefill-Rank"))
				assert.Equal(t, "0", a.header.Get("X-Dpserve-Rank"))
				require.Len(t, g.fleet.Legs(""), 2*i+2)
				for _, l := range g.fleet.Legs("")[2*i:] {
					assert.Equal(t, "mine", l.ID(), l.Side)
				}
			}
			done := g.decodes[0].lastDone(t)
			assert.Equal(t, msg.OK, done.Outcome)
			assert.False(t, done.HasCached, "the number is the prefill rank's")
			assert.Positive(t, done.PromptTokens)
			eventually(t, func() bool { return g.prefills[0].inFlight() == 0 }, "the prefill ticket is back")
			done = g.prefills[0].lastDone(t)
			assert.Equal(t, msg.OK, done.Outcome)
			assert.True(t, done.HasCached)
			assert.Positive(t, done.CachedTokens, "it has computed this prompt before")
			assert.Zero(t, g.leased(g.prefills[0]))
			g.requireMetric(`dpserve_pd_requests_total{app="demo",outcome="ok",way="remote"}`, "2")
			g.requireMetric(`dpserve_pd_decisions_total{app="demo",reason="always"}`, "2")
			g.requireMetric(`dpserve_pd_legs_total{app="demo",ending="ok",side="prefill"}`, "2")
			g.requireMetric(`dpserve_pd_legs_total{app="demo",ending="ok",side="decode"}`, "2")
			g.requireMetric(`dpserve_pd_pairs{app="demo",state="connected"}`, "1")
		})
	}
}

// TestCachedTokensOfAPrompt: what a decode rank's engine reports as cached of a prompt is of the prefill
// rank's cache if that rank has computed it, and otherwise of its own.
func TestCachedTokensOfAPrompt(t *testing.T) {
	g := newPairRig(t, options{prefills: 1, decodes: 1})
	g.d[0].Do(answers(replies(200, cachedAnswer)))
	g.served(g.post("/v1/chat/completions", chatBody), "remote")
	done := g.decodes[0].lastDone(t)
	assert.Equal(t, []any{0, false}, []any{done.CachedTokens, done.HasCached})
	g.prefills[0].say(false, true, "exit_1")
	eventually(t, func() bool {
		a := g.post("/v1/chat/completions", chatBody)
		return a.header.Get("X-Dpserve-Prefill") == "fallback"
	}, "no prefill rank computes it")
	done = g.decodes[0].lastDone(t)
	assert.Equal(t, []any{3, true}, []any{done.CachedTokens, done.HasCached})
}
