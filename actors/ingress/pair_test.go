package ingress

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
)

// TestSplit: the prompt of a streamed and of a whole answer is computed by the prefill rank, its parameters
// reach the decode rank byte for byte, and both ranks' accounts are settled.
func TestSplit(t *testing.T) {
	for name, far := range map[string]bool{"near": false, "far": true} {
		t.Run(name, func(t *testing.T) {
			g := newPairRig(t, options{prefills: 1, decodes: 1, far: far})
			for i, body := range []string{streamBody, chatBody} {
				a := g.post("/v1/chat/completions", body, "X-Request-Id", "mine")
				g.served(a, "remote")
				assert.Equal(t, "0/0", a.header.Get("X-Dpserve-Prefill-Rank"))
				assert.Equal(t, "0", a.header.Get("X-Dpserve-Rank"))
				require.Len(t, g.p[0].taken(), i+1)
				require.Len(t, g.d[0].taken(), i+1)
				p, d := g.p[0].taken()[i], g.d[0].taken()[i]
				assert.InDelta(t, 1, p.body["max_tokens"], 0)
				assert.Equal(t, false, p.body["stream"])
				assert.Equal(t, p.body["messages"], d.body["messages"])
				assert.Equal(t, "mine", p.header.Get("X-Request-Id"))
				assert.Equal(t, "mine", d.header.Get("X-Request-Id"))
				assert.Contains(t, d.raw, `"odd":{"a":[1,"x",null]}`)
				assert.Equal(t, true, d.params["do_remote_prefill"])
			}
			done := g.decodes[0].lastDone(t)
			assert.Equal(t, msg.OK, done.Outcome)
			assert.False(t, done.HasCached, "the number is the prefill rank's")
			assert.Positive(t, done.PromptTokens)
			eventually(t, func() bool { return g.prefills[0].inFlight() == 0 }, "the prefill ticket is back")
			done = g.prefills[0].lastDone(t)
			assert.Equal(t, msg.OK, done.Outcome)
			assert.True(t, done.HasCached)
			assert.Equal(t, 2, done.CachedTokens)
			assert.Zero(t, g.leased(g.prefills[0]))
			g.requireMetric(`dpserve_pd_requests_total{app="demo",outcome="ok",way="remote"}`, "2")
			g.requireMetric(`dpserve_pd_decisions_total{app="demo",reason="always"}`, "2")
			g.requireMetric(`dpserve_pd_legs_total{app="demo",ending="ok",side="prefill"}`, "2")
			g.requireMetric(`dpserve_pd_legs_total{app="demo",ending="ok",side="decode"}`, "2")
			g.requireMetric(`dpserve_pd_pairs{app="demo",state="connected"}`, "1")
		})
	}
}

// TestHeldAddressing: an engine that hosts several ranks is told which one a leg is for.
func TestHeldAddressing(t *testing.T) {
	for mode, far := range map[string]bool{"header": false, "body": true} {
		t.Run(mode, func(t *testing.T) {
			g := newPairRig(t, options{
				prefills: 1, decodes: 1, far: far, address: msg.Target{Addressing: mode, Selector: 6},
			})
			g.served(g.post("/v1/chat/completions", streamBody), "remote")
			for _, c := range append(g.p[0].taken(), g.d[0].taken()...) {
				if mode == "header" {
					assert.Equal(t, "6", c.header.Get("X-Data-Parallel-Rank"))
					assert.NotContains(t, c.raw, "routed_dp_rank")
				} else {
					assert.InDelta(t, 6, c.body["routed_dp_rank"], 0)
				}
			}
		})
	}
}
