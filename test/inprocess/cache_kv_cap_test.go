package inprocess

import (
	"fmt"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/actors/ingress"
)

// soak is how long KV11 goes on, and what it gives the index.
type soak struct {
	cap      int // bytes
	requests int // at 10 a second
	blocks   int // of each engine
}

// soakSize is short in `go test`; DPSERVE_ACCEPTANCE=1 makes it half an hour of fake time and the cap the
// row's: seven minutes, 4 GB.
func soakSize() soak {
	if os.Getenv("DPSERVE_ACCEPTANCE") != "" {
		return soak{cap: 256 << 20, requests: 30 * 60 * 10, blocks: 1 << 19}
	}
	return soak{cap: 2 << 20, requests: 40, blocks: 1 << 14}
}

// KV11: eight engines, prompts of 20k tokens, ten a second: the index stays within its cap and counts what it
// gives up.
func TestKV11IndexWithinItsCap(t *testing.T) {
	if testing.Short() {
		t.Skip("tens of thousands of batches")
	}
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const ranks, tokens = 8, 20_000
		size := soakSize()
		r := newKVRig(t)
		r.Deploy(simApp("a", ranks, "independent",
			fmt.Sprintf("sim_step_ms: 800, max_num_batched_tokens: 32768, max_model_len: 32768, "+
				"num_gpu_blocks_override: %d", size.blocks), kvLocality))
		r.WaitStatus("a", "RUNNING")
		in := r.join("small", func(c *ingress.Config) { c.Limits.IndexBytes = size.cap })
		soon(t, joinLimit, "it knows its ranks", func() error {
			if !in.Ready() {
				return fmt.Errorf("no rank is ready")
			}
			return nil
		})
		var answered atomic.Int64
		var wg sync.WaitGroup
		most := 0
		for i := range size.requests {
			wg.Go(func() {
				if out := r.complete(kvAsk{addr: in.addr, app: "a", ids: kvDoc(i,
					tokens)}); out.status == http.StatusOK {
					answered.Add(1)
				}
			})
			time.Sleep(100 * time.Millisecond)
			most = max(most, in.Index("a").Bytes)
		}
		wg.Wait()
		ix, own := in.Index("a"), r.settledIndex("a")
		assert.EqualValues(t, size.requests, answered.Load())
		assert.LessOrEqual(t, most, size.cap+size.cap/10)
		assert.Equal(t, size.cap, ix.Cap)
		assert.Positive(t, ix.Evicted, "what it gave up is counted")
		assert.Less(t, ix.Blocks, own.blocks, "it is too small for what the engines hold")
		out := r.must(kvAsk{addr: in.addr, app: "a", ids: kvDoc(size.requests-1, tokens)})
		assert.Equal(t, tokens-tokens%blockTokens-boundary(tokens), out.cached, "the newest are still found")
		r.idle()
		t.Logf("KV11: %d requests of %d tokens: index at most %.2f MiB of %.2f, %d blocks, %d given up; "+
			"the engines hold %d",
			answered.Load(), tokens, mib(most), mib(size.cap), ix.Blocks, ix.Evicted, own.blocks)
	})
}

// boundary is a block that a prompt of whole blocks computes again for its last token.
func boundary(tokens int) int {
	if tokens%blockTokens == 0 {
		return blockTokens
	}
	return 0
}

func mib(n int) float64 { return float64(n) / (1 << 20) }

// engines is what all engines of an application hold together.
type engines struct{ blocks int }

func (r *kvRig) settledIndex(app string) engines {
	r.t.Helper()
	var out engines
	st, _ := r.App(app)
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			n, _ := r.held(k.URL)
			out.blocks += n
		}
	}
	return out
}
