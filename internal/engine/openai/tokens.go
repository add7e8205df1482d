package openai

import (
	"bytes"
	"math"
	"sync/atomic"
)

const (
	// startBytesPerToken is the assumed length of a token in bytes before the first usage is seen.
	startBytesPerToken = 4
	// startWeight is how many requests the assumption counts as.
	startWeight = 0.25
	// estimatorHalfLife is the number of requests after which an observation counts half, once there were
	// more than that.
	estimatorHalfLife = 100
	// An observation counts as at most this many times the estimate, or as that part of it: one odd request
	// does not spoil the estimate of all others.
	maxStep = 4
	// Observations are clamped to these bounds, beyond which no text is.
	minBytesPerToken = 0.25
	maxBytesPerToken = 64
)

// estimatorWeight is the smallest weight of one observation: 1 - 2^(-1/estimatorHalfLife).
var estimatorWeight = 1 - math.Exp2(-1.0/estimatorHalfLife)

// Estimator estimates prompt tokens from bytes without a tokenizer: tokens = bytes / k, k the average of
// bytes per prompt token that engines reported. The first requests count alike, so that a tokenizer that is
// far from the assumption is known after a few of them; later it is a moving average. One per (app, route).
// The zero value is ready; safe for concurrent use.
type Estimator struct {
	// k as float32 bits, above them the number of observations, as far as it counts; 0 = not yet observed
	state atomic.Uint64
}

// Estimators are an app's estimators, by Route.
type Estimators [NumRoutes]Estimator

// K is bytes per token.
func (e *Estimator) K() float64 {
	k, _ := unpackEstimate(e.state.Load())
	return k
}

func unpackEstimate(state uint64) (k float64, seen uint32) {
	if state == 0 {
		return startBytesPerToken, 0
	}
	return float64(math.Float32frombits(uint32(state))), uint32(state >> 32)
}

// PromptTokens is the estimate for the prompt of b: its text by its bytes, and its media parts by their
// number.
func (e *Estimator) PromptTokens(b *Body) int {
	return e.Tokens(b.TextBytes) + b.MediaParts*MediaTokens
}

// ObservePrompt learns from a request whose tokens the engine counted. It ignores requests with media,
// because the share of their text in the tokens is unknown.
func (e *Estimator) ObservePrompt(b *Body, tokens int) {
	if b.MediaParts == 0 {
		e.Observe(b.TextBytes, tokens)
	}
}

// Tokens is the estimate for a prompt of n bytes, at least 1 unless n is 0.
func (e *Estimator) Tokens(n int) int { return int(math.Ceil(float64(n) / e.K())) }

// Observe learns from a request of n bytes whose tokens the engine counted. n must be counted as for Tokens.
func (e *Estimator) Observe(n, tokens int) {
	if n <= 0 || tokens <= 0 {
		return
	}
	for {
		old := e.state.Load()
		k, seen := unpackEstimate(old)
		ratio := max(float64(n)/float64(tokens), k/maxStep, minBytesPerToken)
		ratio = min(ratio, k*maxStep, maxBytesPerToken)
		weight := max(estimatorWeight, 1/(float64(seen)+1+startWeight))
		bits := math.Float32bits(float32(k + weight*(ratio-k)))
		if seen < 2*estimatorHalfLife { // the weight has long stopped to fall
			seen++
		}
		if e.state.CompareAndSwap(old, uint64(seen)<<32|uint64(bits)) {
			return
		}
	}
}

// Usage is the "usage" of an answer. Details differ by route and mode and may be absent or null: a Has flag
// tells an absent count from a 0.
type Usage struct {
	PromptTokens     int
	CompletionTokens int // 0 if absent, as in an answer without output
	TotalTokens      int

	CachedTokens int // prompt_tokens_details.cached_tokens
	HasCached    bool
}

var (
	usageKey   = []byte(`"usage"`)
	dataPrefix = []byte("data:")
)

// ParseUsage finds the top-level "usage" object of a JSON answer or of one server-sent event (with or without
// "data:"), or of the response or message in it. False if there is none, if it is null, or if it has neither
// prompt_tokens nor input_tokens. It does not check the bytes behind the object.
func ParseUsage(b []byte) (u Usage, ok bool) {
	if !bytes.Contains(b, usageKey) { // most chunks end here; inside a string its quotes would be escaped
		return Usage{}, false
	}
	s := scanner{b: bytes.TrimPrefix(b, dataPrefix)}
	i := s.space(0)
	if s.peek(i) != '{' {
		return Usage{}, false
	}
	s.members(i, 1, func(key []byte, _ bool, v Span) bool {
		raw := s.b[v.Start:v.End]
		switch string(key) {
		case "usage":
			ok = u.read(raw)
		case "response", "message": // of an event of Responses, or of Messages
			if raw[0] == '{' {
				u, ok = ParseUsage(raw)
			}
		}
		return !ok && string(key) != "usage"
	})
	if !ok {
		return Usage{}, false
	}
	return u, true
}

// read takes the counts from a usage object.
func (u *Usage) read(raw []byte) (ok bool) {
	if raw[0] != '{' {
		return false
	}
	s := scanner{b: raw}
	s.members(0, 1, func(key []byte, _ bool, v Span) bool {
		value := raw[v.Start:v.End]
		switch string(key) {
		case "prompt_tokens", "input_tokens":
			u.PromptTokens, ok = count(value)
		case "completion_tokens", "output_tokens":
			u.CompletionTokens, _ = count(value)
		case "total_tokens":
			u.TotalTokens, _ = count(value)
		case "prompt_tokens_details", "input_tokens_details":
			u.readDetails(value)
		}
		return true
	})
	return ok
}

func (u *Usage) readDetails(raw []byte) {
	if raw[0] != '{' {
		return
	}
	s := scanner{b: raw}
	s.members(0, 1, func(key []byte, _ bool, v Span) bool {
		if string(key) == "cached_tokens" {
			u.CachedTokens, u.HasCached = count(raw[v.Start:v.End])
		}
		return true
	})
}

// count reads a plain number of tokens.
func count(raw []byte) (int, bool) {
	n, ok := smallInt(raw)
	return int(n), ok
}
