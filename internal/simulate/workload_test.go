package simulate

import (
	"math"
	"math/rand/v2"

	"github.com/dpserve/dpserve/routing"
)

// Lengths generates n requests that share nothing, rate per second on the whole, at random instants, or all
// at 0 with a rate of 0. next draws a prompt and an answer, in tokens.
func Lengths(n int, rate float64, seed uint64, next func(*rand.Rand) (prompt, output int)) []Request {
	rnd := rand.New(rand.NewPCG(seed, 6))
	out := make([]Request, n)
	at := make([]float64, n)
	for i, sum := 0, 0.0; i < n; i++ {
		sum += rnd.ExpFloat64()
		at[i] = sum
		out[i].Prompt, out[i].Output = next(rnd)
	}
	for i := range out {
		if rate > 0 {
			out[i].At = seconds(at[i] / at[n-1] * float64(n) / rate)
		}
	}
	return out
}

// Mixed draws prompts of 200 to 2,000 tokens, every tenth of 16,384, and answers of 20 + Exp(230).
func Mixed(rnd *rand.Rand) (prompt, output int) {
	prompt = int(200 * math.Pow(10, rnd.Float64()))
	if rnd.IntN(10) == 0 {
		prompt = 16_384
	}
	return prompt, 20 + int(230*rnd.ExpFloat64())
}

// Short draws prompts about as short as those of the Azure conversations: half have less than 1,000 tokens,
// none has 8,192; and answers of 20 + Exp(200).
func Short(rnd *rand.Rand) (prompt, output int) {
	return int(min(900*math.Exp(.8*rnd.NormFloat64()), 8000)) + 1, 20 + int(200*rnd.ExpFloat64())
}

// Chat draws the lengths of Chats.
func Chat(rnd *rand.Rand) (prompt, output int) {
	return chatPrompt(rnd), 20 + int(320*rnd.ExpFloat64())
}

// Equal draws 1,024 tokens, and answers of exactly mean tokens or, if they vary, lognormal ones.
func Equal(mean int, vary bool) func(*rand.Rand) (prompt, output int) {
	return func(rnd *rand.Rand) (prompt, output int) {
		if !vary {
			return 1024, mean
		}
		const sigma = .8
		return 1024, 1 + int(float64(mean)*math.Exp(sigma*rnd.NormFloat64()-sigma*sigma/2))
	}
}

// Good is the share of the requests that meet goals.
func (r *GroupResult) Good(goals routing.Goals) float64 {
	n := 0
	for _, e := range r.ended {
		if goals.Met(e.ttft, e.tpot) {
			n++
		}
	}
	return float64(n) / float64(max(r.Offered, 1))
}
