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

// LG1: The lockcost model gives what was published of groups of DeepSeek-V3, and each rank's prompt costs the
// group more than what it adds to its own rank.
func TestDeepSeekReproducesThePublishedSteps(t *testing.T) {
	for _, c := range []struct {
		name              string
		ranks             int
		decodes, kv       int // of each rank
		prompts, tokens   int // ranks that compute prompts too, and of how many tokens
		leastMS, mostMS   float64
		leastOwn, mostOwn float64 // of them the slowest rank's own
	}{
		{"a decode step of 8 ranks", 8, 25, 25 * 1100, 0, 0, 32, 37, 6, 8},
		{"one prompt of 1,024 tokens beside it", 8, 25, 25 * 1100, 1, 1024, 85, 100, 45, 52},
		{"one for each rank", 8, 25, 25 * 1100, 8, 1024, 115, 135, 45, 52},
		{"a decode step of 16 ranks, 64 conversations each", 16, 64, 64 * 13_000, 0, 0, 53, 60, 28, 32},
	} {
		rank, shared := steptime.DeepSeek(c.ranks)
		slowest, fullest := 0.0, 0
		all := 0
		for i := range c.ranks {
			prompt := 0
			if i < c.prompts {
				prompt = c.tokens
			}
			n := c.decodes + prompt
			slowest = max(slowest, rank.Step(n, c.decodes, c.kv, steptime.Pairs(prompt, 0)))
			fullest, all = max(fullest, n), all+n
		}
		step := slowest + shared.Step(fullest, all)
		assert.True(t, c.leastMS <= step && step <= c.mostMS, "%s: %.1f ms", c.name, step)
		assert.True(t, c.leastOwn <= slowest && slowest <= c.mostOwn, "%s: %.1f ms", c.name, slowest)
	}
	rank, _ := steptime.DeepSeek(8)
	assert.InDelta(t, rank.PromptTokenMS*1000+rank.PairMS*(500_000+1000*4000), rank.Prefill(1000, 4000), 1e-9)
	assert.Zero(t, steptime.Shared{}.Step(100, 800))
}
