// Package steptime predicts how long one engine step takes. It is pure arithmetic: the simulated engine, the
// simulator and the routing policies all read the same model, so none of them can be right in its own way.
package steptime

import "math"

// Coefficients of a rank's cost model, all in milliseconds:
//
//	t = max(WeightMS, TokenMS*tokens) + FixedMS + DecodeMS*decodes + ContextMS*kv + PairMS*pairs
//	    + PromptMS + PromptTokenMS*prompt, if the step has prompt tokens
//
// The zero value predicts 0 for every step. A rank of a lockstep group takes Shared's time on top of it.
type Coefficients struct {
	WeightMS  float64 `json:"weight_ms"`  // reading all weights once: the floor of a step, whatever its batch
	TokenMS   float64 `json:"token_ms"`   // compute per token of the step, prefill and decode alike
	FixedMS   float64 `json:"fixed_ms"`   // launch, CPU work and communication of a step
	DecodeMS  float64 `json:"decode_ms"`  // attention, per decoding request
	ContextMS float64 `json:"context_ms"` // attention, per token of the decoding requests' context
	PairMS    float64 `json:"pair_ms"`    // prefill attention, per pair of (new token, token it attends to)

	PromptMS      float64 `json:"prompt_ms,omitempty"`       // of a step with prompt tokens
	PromptTokenMS float64 `json:"prompt_token_ms,omitempty"` // per prompt token, beside TokenMS
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

// MoE is Qwen3-30B-A3B in bf16 on one H200 by the same calculation: a step reads the weights of all 30.5e9
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
	ms := math.Max(c.WeightMS, c.TokenMS*float64(tokens)) +
		c.FixedMS + c.DecodeMS*float64(decodes) + c.ContextMS*float64(kv) + c.PairMS*pairs
	if prompt := tokens - decodes; prompt > 0 {
		ms += c.PromptMS + c.PromptTokenMS*float64(prompt)
	}
	return ms
}

// Prefill is the predicted time in milliseconds of tokens new tokens behind cached ones that are in the KV
// cache, in steps that are full and compute nothing else.
func (c Coefficients) Prefill(tokens, cached int) float64 {
	return c.perPromptToken()*float64(tokens) + c.PairMS*Pairs(tokens, cached)
}

func (c Coefficients) perPromptToken() float64 { return c.TokenMS + c.PromptTokenMS }

// Stretch is the factor by which a prefill in steps of chunk tokens takes longer beside decodes whose
// contexts sum up to kv tokens: every step of it has their share, and the step's own fixed cost, in it.
func (c Coefficients) Stretch(decodes int, kv int64, chunk int) float64 {
	beside := c.FixedMS + c.DecodeMS*float64(decodes) + c.ContextMS*float64(kv)
	return 1 + beside/(c.perPromptToken()*float64(chunk))
}

// Pairs is the number of attention pairs of one prefill chunk: chunk new tokens behind context tokens that
// are in the KV cache.
func Pairs(chunk, context int) float64 {
	c := float64(chunk)
	return c*c/2 + c*float64(context)
}

// Shared is the cost model of what all ranks of a lockstep group do together in a step, in milliseconds: the
// all-to-all, which takes as long as the rank with the most tokens, and the experts, which compute the tokens
// of all ranks:
//
//	t = FixedMS + exchange(fullest) + max(ExpertsLeastMS, ExpertsMS + ExpertsTokenMS*all)
//
// The exchange of a few tokens has a low latency and a high cost per token, that of many tokens the reverse;
// the engine uses the faster one. The zero value predicts 0.
type Shared struct {
	FixedMS float64

	FewMS, FewTokenMS   float64 // the exchange of a few tokens
	ManyMS, ManyTokenMS float64 // the exchange of many tokens

	ExpertsLeastMS, ExpertsMS, ExpertsTokenMS float64
}

// Step is what is added to the time of the slowest rank. fullest is the number of tokens of the rank that has
// the most in this step, all the number of the whole group's.
func (s Shared) Step(fullest, all int) float64 {
	few := s.FewMS + s.FewTokenMS*float64(fullest)
	many := s.ManyMS + s.ManyTokenMS*float64(fullest)
	return s.FixedMS + min(few, many) + math.Max(s.ExpertsLeastMS, s.ExpertsMS+s.ExpertsTokenMS*float64(all))
}

// DeepSeek is a lockstep group of DeepSeek-V3 in fp8 on H200: what one rank takes (61 layers of attention)
// and what the ranks share (58 layers of experts). The per-layer figures are fits to measured kernel tables
// (mean error 8 % in decode steps). Groups of up to 8 ranks are inside one machine. The cost of the experts
// per token is measured on 32 ranks and scaled, and the exchange of many tokens between machines is assumed.
func DeepSeek(ranks int) (Coefficients, Shared) {
	const attention, experts = 61, 58
	rank := Coefficients{
		FixedMS:       attention * 0.0944,
		DecodeMS:      attention * 3.04e-4,
		ContextMS:     attention * 4.62e-7,
		PromptMS:      attention * 0.128,
		PromptTokenMS: attention * 5.17e-4,
		PairMS:        attention * 9.2e-8,
	}
	shared := Shared{
		FixedMS: 2,
		FewMS:   experts * 0.060, FewTokenMS: experts * 0.0020,
		ManyMS: experts * 0.20, ManyTokenMS: experts * 5e-4,
		ExpertsLeastMS: experts * 3.2 / float64(max(ranks, 1)),
		ExpertsMS:      experts * 0.15,
		ExpertsTokenMS: experts * 7.6e-4 / float64(max(ranks, 1)),
	}
	if ranks <= 8 {
		shared.FewMS, shared.FewTokenMS = experts*0.025, experts*0.0013
		shared.ManyMS, shared.ManyTokenMS = experts*0.12, experts*2.2e-4
	}
	return rank, shared
}
