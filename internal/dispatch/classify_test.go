package dispatch

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestClassify: every status has its cause, and an engine that is full is known in every dialect.
func TestClassify(t *testing.T) {
	for status := 300; status < 600; status++ {
		want := Passed
		switch {
		case status < 400:
			want = Redirected
		case status == 408:
			want = Timeout
		case status == 429:
			want = Busy
		case status == 501, status == 505:
		case status >= 500:
			want = EngineError
		}
		assert.Equal(t, want, Classify(Answer{Status: status, Text: "no"}), status)
	}
	for _, status := range []int{401, 403, 404, 405} {
		assert.Equal(t, RankError, Classify(Answer{Status: status, IsRanks: true}), status)
	}
	assert.Equal(t, Passed, Classify(Answer{Status: 400, IsRanks: true}))
	for text, want := range map[string]Cause{
		"The request queue is full.":                                   Busy, // SGLang
		"The engine is currently busy and cannot accept new requests.": Busy, // vLLM
		"Model is overloaded":                                          Busy, // TGI
		"The model is currently scaling. Please try again later.":      Busy,
		"Too many requests":                                            Busy,
		"inside":                                                       EngineError,
		"":                                                             EngineError,
	} {
		assert.Equal(t, want, Classify(Answer{Status: 503, Text: text}), text)
		assert.Equal(t, EngineError, Classify(Answer{Status: 500, Text: text}), text)
	}
	assert.Equal(t, Busy, Classify(Answer{Status: 503, Type: busyType}))
	assert.Equal(t, Busy, Classify(Answer{Status: 503, Text: "no upstream", IsBare: true}))
	assert.Equal(t, EngineDead, Classify(Answer{Status: 500, IsDead: true}))
	assert.Equal(t, EngineDead, Classify(Answer{Status: 503, Type: busyType, IsDead: true}))
}
