package ingress

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
)

// RA1: the Router gets the time of each record. The work before a first token decreases from that time on,
// even if no request is routed in between, and the next prompt begins when the end of the first one is
// reported.
func TestRecordsTellTheRouterTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newKVRig(t, 2, 1, app.Routing{Policy: "lpwl", Preset: "documented", Identity: app.IdentityText})
		r := b.feed.replicas[0]
		work := func() int64 {
			loads, err := b.in.PotentialLoads("demo", nil)
			require.NoError(t, err)
			return loads[0].PrefillTokens
		}
		const tokens = 100_000 // 12 s by the law
		time.Sleep(time.Minute)
		for id := range uint64(2) {
			r.emit(&msg.Record{Kind: msg.RecAdmitted, Ingress: "other", ReqID: id + 1, Tokens: tokens})
		}
		assert.Equal(t, int64(2*tokens), work())
		time.Sleep(6 * time.Second)
		assert.InDelta(t, 1.5*tokens, float64(work()), 0.1*tokens)
		time.Sleep(time.Minute)
		assert.Equal(t, int64(tokens), work(), "the end of the first prompt is late")
		r.emit(&msg.Record{Kind: msg.RecFirstToken, Ingress: "other", ReqID: 1, Tokens: tokens})
		assert.Equal(t, int64(tokens), work())
		time.Sleep(6 * time.Second)
		assert.Less(t, work(), int64(tokens))
		assert.Positive(t, work())
	})
}

// TestRouterInfoTellsOfTheLaw: RouterInfo shows the time model that the Router has measured, and its age,
// even while the application is idle.
func TestRouterInfoTellsOfTheLaw(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newKVRig(t, 2, 1, app.Routing{
			Policy: "mex", Preset: "documented",
			Params: map[string]any{"cost_model": "dense"}, Identity: app.IdentityText,
		})
		r := b.feed.replicas[0]
		model := func() *client.CostModel {
			info, err := b.in.RouterInfo("demo")
			require.NoError(t, err)
			require.NotNil(t, info.CostModel)
			return info.CostModel
		}
		time.Sleep(time.Minute)
		assert.Equal(t, &client.CostModel{Preset: "dense", Prefill: 1, Decode: 1}, model(),
			"nothing is measured")
		const tokens = 100_000 // 12.5 s by the law
		r.emit(&msg.Record{Kind: msg.RecAdmitted, Ingress: "other", ReqID: 1, Tokens: tokens})
		time.Sleep(6250 * time.Millisecond)
		r.emit(&msg.Record{Kind: msg.RecFirstToken, Ingress: "other", ReqID: 1, Tokens: tokens})
		time.Sleep(4 * time.Second)
		m := model()
		assert.Equal(t, uint64(1), m.PrefillSamples)
		assert.InDelta(t, 0.5, m.Prefill, 0.01)
		assert.InDelta(t, 0.5, m.Error, 0.01)
		assert.InDelta(t, 4, m.AgeS, 1e-9)
		require.Len(t, m.Ranks, 1, "the other rank has shown nothing")
		assert.Equal(t, "0/0", m.Ranks[0].Worker)
		assert.InDelta(t, 1, m.Ranks[0].Slow, 1e-9, "it is the only one that is measured")
	})
	g := newRig(t, options{engines: engines(1, replies(200, wholeAnswer))})
	info, err := g.in.RouterInfo("demo")
	require.NoError(t, err)
	assert.Nil(t, info.CostModel, "round-robin predicts nothing")
}
