package steptime_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/steptime"
)

func TestReferenceReproducesThePublishedNumbers(t *testing.T) {
	ref := steptime.Reference()
	assert.InDelta(t, 3.72, ref.FixedMS, 0.005)
	assert.InDelta(t, 0.0061, ref.DecodeMS, 0.0001)
	assert.InDelta(t, 2.96e-5, ref.ContextMS, 0.01e-5)
	assert.InDelta(t, 1.54e-6, ref.PairMS, 0.01e-6)

	for _, c := range []struct {
		name                string
		tokens, decodes, kv int
		pairs               float64
		wantMS              float64
	}{
		{"an empty step still reads the weights", 0, 0, 0, 0, 11.72},
		{"one decode", 1, 1, 1000, 0, 11.76},
		{"a full prefill step", 8192, 0, 0, steptime.Pairs(8192, 0), 440},
		{"64 decodes at 4k context", 64, 64, 64 * 4096, 0, 19.9},
	} {
		t.Run(c.name, func(t *testing.T) {
			assert.InEpsilon(t, c.wantMS, ref.Step(c.tokens, c.decodes, c.kv, c.pairs), 0.005)
		})
	}
}

func TestPairs(t *testing.T) {
	assert.Zero(t, steptime.Pairs(0, 5000))
	assert.InDelta(t, 8192.0*8192/2, steptime.Pairs(8192, 0), 0)
	assert.InDelta(t, 100.0*100/2+100*900, steptime.Pairs(100, 900), 0)
}

func TestMoreWorkNeverTakesLess(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ref := steptime.Reference()
		tokens := rapid.IntRange(0, 16384).Draw(t, "tokens")
		decodes := rapid.IntRange(0, 512).Draw(t, "decodes")
		kv := rapid.IntRange(0, 1<<22).Draw(t, "kv")
		pairs := rapid.Float64Range(0, 1e9).Draw(t, "pairs")
		base := ref.Step(tokens, decodes, kv, pairs)
		more := func(name string) int { return rapid.IntRange(0, 4096).Draw(t, name) }
		assert.GreaterOrEqual(t, ref.Step(tokens+more("dTokens"), decodes, kv, pairs), base)
		assert.GreaterOrEqual(t, ref.Step(tokens, decodes+more("dDecodes"), kv, pairs), base)
		assert.GreaterOrEqual(t, ref.Step(tokens, decodes, kv+more("dKV"), pairs), base)
		assert.GreaterOrEqual(t, ref.Step(tokens, decodes, kv, pairs+float64(more("dPairs"))), base)
	})
}

// Chunking a prefill never changes the pairs it costs: the law must not reward or punish a chunk size by
// itself.
func TestChunksHaveThePairsOfTheWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		whole := rapid.IntRange(1, 20000).Draw(t, "prompt")
		var sum float64
		for done := 0; done < whole; {
			chunk := rapid.IntRange(1, whole-done).Draw(t, "chunk")
			sum += steptime.Pairs(chunk, done)
			done += chunk
		}
		assert.InEpsilon(t, steptime.Pairs(whole, 0), sum, 1e-9)
	})
}

// A prefill alone is what its full steps take, but for their fixed cost; Stretch adds that and the decodes
// beside it.
func TestPrefillIsTheSumOfItsSteps(t *testing.T) {
	const chunk, steps, decodes, kv = 8192, 4, 20, 100_000
	ref := steptime.Reference()
	sum := 0.0
	for i := range steps {
		sum += ref.Step(chunk, decodes, kv, steptime.Pairs(chunk, i*chunk))
	}
	prefill := ref.Prefill(steps*chunk, 0)
	pairs := ref.PairMS * steptime.Pairs(steps*chunk, 0)
	assert.InEpsilon(t, sum, (prefill-pairs)*ref.Stretch(decodes, kv, chunk)+pairs, 1e-9)
	assert.InEpsilon(t, ref.Prefill(1000, 5000), ref.Prefill(1000, 0)+ref.PairMS*1000*5000, 1e-9)
	assert.Greater(t, ref.Stretch(decodes, kv, chunk), ref.Stretch(0, 0, chunk))
}
