package ingress

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
)

// The Router hears when a record came: the work in front of a first token goes down from that instant on, though no request has
// asked for a rank in between, and the next prompt's turn begins when the first one's end is told.
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
