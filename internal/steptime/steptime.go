// Package steptime predicts how long one engine step takes. It is pure arithmetic: the simulated engine, the
// simulator and the routing policies all read the same law, so none of them can be right in its own way.
package steptime

import "math"

// Coefficients of a dense replica's step law, all in milliseconds:
//
//	t = max(WeightMS, TokenMS*tokens) + FixedMS + DecodeMS*decodes + ContextMS*kv + PairMS*pairs
//
// The zero value predicts 0 for every step.
type Coefficients struct {
	WeightMS  float64 `json:"weight_ms"`  // reading all weights once: the floor of a step, whatever its batch
	TokenMS   float64 `json:"token_ms"`   // compute per token of the step, prefill and decode alike
	FixedMS   float64 `json:"fixed_ms"`   // launch, CPU work and communication of a step
	DecodeMS  float64 `json:"decode_ms"`  // attention, per decoding request
	ContextMS float64 `json:"context_ms"` // attention, per token of the decoding requests' context
	PairMS    float64 `json:"pair_ms"`    // prefill attention, per pair of (new token, token it attends to)
}

// referenceLayers is the number of layers of the reference model, Qwen3-32B.
const referenceLayers = 64

// Reference is Qwen3-32B in bf16 with tensor parallelism 2 on H200: per-layer attention figures are fits to
// measured kernel tables (mean error 4 to 8 %), the token cost is 2*32e9 FLOP over 2 x 650 TFLOPS, the 3 ms
// of fixed cost beside attention are assumed.
func Reference() Coefficients {
	return Coefficients{
		WeightMS:  8.0,
		TokenMS:   0.047,
		FixedMS:   referenceLayers*0.0113 + 3.0,
		DecodeMS:  referenceLayers * 9.5e-5,
		ContextMS: referenceLayers * 4.62e-7,
		PairMS:    referenceLayers * 2.4e-8,
	}
}

// MoE is Qwen3-30B-A3B in bf16 on one H200 by the same reckoning: a step reads the weights of all 30.5e9
// parameters (61 GB at 4.8 TB/s) and computes with 3.3e9 of them (2*3.3e9 FLOP over 650 TFLOPS), 48 layers of
// 32 heads over 4 KV heads. A batch of few tokens reads fewer experts than that; the floor is that of a busy
// rank.
func MoE() Coefficients {
	const layers = 48
	return Coefficients{
		WeightMS:  12.7,
		TokenMS:   0.0102,
		FixedMS:   layers*0.0113 + 3.0,
		DecodeMS:  layers * 9.5e-5,
		ContextMS: layers * 4.62e-7,
		PairMS:    layers * 2.4e-8,
	}
}

// Step is the predicted duration in milliseconds of a step that computes tokens tokens in all, of which
// decodes are one-token decodes whose contexts sum up to kv tokens, and whose prefill chunks have pairs
// attention pairs (see Pairs).
func (c Coefficients) Step(tokens, decodes, kv int, pairs float64) float64 {
	return math.Max(c.WeightMS, c.TokenMS*float64(tokens)) +
		c.FixedMS + c.DecodeMS*float64(decodes) + c.ContextMS*float64(kv) + c.PairMS*pairs
}

// Prefill is the predicted time in milliseconds of tokens new tokens behind cached ones that are in the KV
// cache, in steps that are full and compute nothing else.
func (c Coefficients) Prefill(tokens, cached int) float64 {
	return c.TokenMS*float64(tokens) + c.PairMS*Pairs(tokens, cached)
}

// Stretch is the factor by which a prefill in steps of chunk tokens takes longer beside decodes whose
// contexts sum up to kv tokens: every step of it has their share, and the step's own fixed cost, in it.
func (c Coefficients) Stretch(decodes int, kv int64, chunk int) float64 {
	return 1 + (c.FixedMS+c.DecodeMS*float64(decodes)+c.ContextMS*float64(kv))/(c.TokenMS*float64(chunk))
}

// Pairs is the number of attention pairs of one prefill chunk: chunk new tokens behind context tokens that
// are in the KV cache.
func Pairs(chunk, context int) float64 {
	c := float64(chunk)
	return c*c/2 + c*float64(context)
}
