package openai

import (
	"math"
	"sync/atomic"
)

const (
	// startBytesPerToken is what a token is taken to be before the first usage is seen, in bytes.
	startBytesPerToken = 4
	// estimatorHalfLife is after how many requests an observation counts half.
	estimatorHalfLife = 100
	// One observation beyond these is cut to them: what no text has would spoil the estimate for a hundred
	// requests.
	minBytesPerToken = 0.25
	maxBytesPerToken = 64
)

// estimatorWeight is the weight of one observation: 1 - 2^(-1/estimatorHalfLife).
var estimatorWeight = 1 - math.Exp2(-1.0/estimatorHalfLife)

// Estimator guesses prompt tokens from bytes where no tokenizer was asked: tokens = bytes / k, k the moving
// average of bytes per prompt token that engines reported. One per (app, route). The zero value is ready;
// safe for concurrent use.
type Estimator struct{ bits atomic.Uint64 } // k as float64 bits; 0 = not yet observed

// Estimators are an app's estimators, by Route.
type Estimators [NumRoutes]Estimator

// K is bytes per token.
func (e *Estimator) K() float64 {
	if bits := e.bits.Load(); bits != 0 {
		return math.Float64frombits(bits)
	}
	return startBytesPerToken
}

// PromptTokens is the estimate for the prompt of b: its text by its bytes, and its media parts by their
// number.
func (e *Estimator) PromptTokens(b *Body) int {
	return e.Tokens(b.TextBytes) + b.MediaParts*MediaTokens
}

// ObservePrompt learns from a request that the engine counted as tokens. One with media teaches nothing: how
// many of its tokens are the text's is not known.
func (e *Estimator) ObservePrompt(b *Body, tokens int) {
	if b.MediaParts == 0 {
		e.Observe(b.TextBytes, tokens)
	}
}

// Tokens is the estimate for a prompt of n bytes, at least 1 unless n is 0.
func (e *Estimator) Tokens(n int) int { return int(math.Ceil(float64(n) / e.K())) }

// Observe learns from a request of n bytes that the engine counted as tokens. Give it the bytes that Tokens
// was given.
func (e *Estimator) Observe(n, tokens int) {
	if n <= 0 || tokens <= 0 {
		return
	}
	ratio := min(max(float64(n)/float64(tokens), minBytesPerToken), maxBytesPerToken)
	for {
		old := e.bits.Load()
		k := float64(startBytesPerToken)
		if old != 0 {
			k = math.Float64frombits(old)
		}
		if e.bits.CompareAndSwap(old, math.Float64bits(k+estimatorWeight*(ratio-k))) {
			return
		}
	}
}
