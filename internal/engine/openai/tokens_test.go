package openai

import (
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// RP33: the assumption of four bytes counts as a quarter of one. Later the estimate follows a change within
// some hundred requests.
func TestEstimatorLearnsFromItsFirstRequests(t *testing.T) {
	var e Estimator
	assert.InDelta(t, 4, e.K(), 0)
	assert.Equal(t, 25, e.Tokens(100))
	assert.Equal(t, 1, e.Tokens(1))
	assert.Equal(t, 0, e.Tokens(0))
	observe := func(requests, bytes int) {
		for range requests {
			e.Observe(bytes, 100)
		}
	}
	observe(1, 100)
	assert.InDelta(t, 1.6, e.K(), 1e-6)
	observe(23, 100)
	assert.InDelta(t, (1+24)/24.25, e.K(), 1e-5, "24 requests of one byte per token")
	observe(1000, 100)
	assert.InDelta(t, 1, e.K(), 0.01)
	observe(estimatorHalfLife, 300)
	assert.InDelta(t, 2, e.K(), 0.01, "half of the way")
	for _, nothing := range [][2]int{{0, 5}, {5, 0}, {-1, -1}} {
		was := e.K()
		e.Observe(nothing[0], nothing[1])
		assert.InDelta(t, was, e.K(), 0)
	}
}

// TestAnEstimateTakesMediaByNumber: text by its bytes, media by their number, and what has both teaches
// nothing.
func TestAnEstimateTakesMediaByNumber(t *testing.T) {
	var e Estimator
	text := scan(t, Chat, `{"messages":[{"role":"user","content":"hello"}]}`)
	assert.Equal(t, e.Tokens(text.PromptBytes), e.PromptTokens(text))
	with := scan(t, Chat, `{"messages":[{"role":"user","content":[{"type":"image_url",`+
		`"image_url":{"url":"`+strings.Repeat("A", 1<<20)+`"}}]}]}`)
	assert.Equal(t, e.Tokens(with.TextBytes)+MediaTokens, e.PromptTokens(with))
	assert.Less(t, e.PromptTokens(with), MediaTokens+100)
	e.ObservePrompt(with, 3)
	assert.InDelta(t, 4, e.K(), 0)
	e.ObservePrompt(text, text.TextBytes)
	assert.Less(t, e.K(), 4.0)
}

// RP33: whatever one request reports, it counts as at most four times the estimate or a quarter of it, and no
// estimate leaves the bounds.
func TestEstimatorCutsOutliers(t *testing.T) {
	for name, odd := range map[string]struct {
		bytes, tokens int
		want          float64
	}{
		"many bytes": {1 << 30, 1, 16}, "many tokens": {1, 1 << 30, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var first, later Estimator
			first.Observe(odd.bytes, odd.tokens)
			assert.InDelta(t, (1+odd.want)/1.25, first.K(), 1e-5)
			for range 99 {
				later.Observe(400, 100)
			}
			later.Observe(odd.bytes, odd.tokens)
			assert.InDelta(t, 4+(odd.want-4)/100.25, later.K(), 1e-5)
			for range 10_000 {
				later.Observe(odd.bytes, odd.tokens)
			}
			assert.LessOrEqual(t, later.K(), float64(maxBytesPerToken))
			assert.GreaterOrEqual(t, later.K(), minBytesPerToken)
		})
	}
}

func TestEstimatorIsSafeForConcurrentUse(t *testing.T) {
	var all Estimators
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				all[Chat].Observe(600, 100)
				all[Chat].Tokens(7)
			}
		})
	}
	wg.Wait()
	assert.InDelta(t, 6, all[Chat].K(), 1e-3)
	assert.InDelta(t, 4, all[Completions].K(), 0)
	assert.Zero(t, testing.AllocsPerRun(100, func() { all[Chat].Observe(5, 1) }))
}

func TestParseUsageOfCapturedAnswers(t *testing.T) {
	want := map[string]Usage{
		"cmpl.json": {PromptTokens: 4, CompletionTokens: 6, TotalTokens: 10, HasCached: true},
		"chat.json": {
			PromptTokens: 12, CompletionTokens: 6, TotalTokens: 18, HasCached: true,
		},
		"cmpl_stream.event": {PromptTokens: 4, CompletionTokens: 6, TotalTokens: 10, HasCached: true},
		"chat_stream.event": {
			PromptTokens: 12, CompletionTokens: 6, TotalTokens: 18, HasCached: true,
		},
		"cmpl_continuous.event": {PromptTokens: 4, CompletionTokens: 1, TotalTokens: 5},
	}
	for file, usage := range want {
		b, err := os.ReadFile("testdata/usage/" + file)
		require.NoError(t, err)
		got, ok := ParseUsage(b)
		assert.True(t, ok, file)
		assert.Equal(t, usage, got, file)
		assert.Zero(t, testing.AllocsPerRun(100, func() { ParseUsage(b) }), file)
	}
}

func TestParseUsage(t *testing.T) {
	tests := []struct {
		name, in string
		want     Usage
		ok       bool
	}{
		{"none", `{"id":"x"}`, Usage{}, false},
		{"null", `{"usage":null}`, Usage{}, false},
		{
			"a value called usage", `{"model":"usage","text":"\"usage\":{\"prompt_tokens\":9}"}`,
			Usage{},
			false,
		},
		{
			"deeper down is not it", `{"a":{"usage":{"prompt_tokens":9}},"usage":{"prompt_tokens":3}}`,
			Usage{PromptTokens: 3},
			true,
		},
		{"only deeper down", `{"a":{"usage":{"prompt_tokens":9}}}`, Usage{}, false},
		{"no prompt tokens", `{"usage":{"completion_tokens":3}}`, Usage{}, false},
		{
			"null details", `{"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}`,
			Usage{PromptTokens: 3},
			true,
		},
		{
			"null cached", `{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":null}}}`,
			Usage{PromptTokens: 3},
			true,
		},
		{
			"cached", `{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}`,
			Usage{PromptTokens: 3, CachedTokens: 2, HasCached: true},
			true,
		},
		{"not a count", `{"usage":{"prompt_tokens":"3"}}`, Usage{}, false},
		{"beyond reason", `{"usage":{"prompt_tokens":99999999999999999999}}`, Usage{}, false},
		{"cut behind it", `{"usage":{"prompt_tokens":3},"x":[`, Usage{PromptTokens: 3}, true},
		{"cut in it", `{"usage":{"prompt_tokens":3`, Usage{}, false},
		{"data without space", "data:{\"usage\":{\"prompt_tokens\":3}}\n\n", Usage{PromptTokens: 3}, true},
		{"done", "data: [DONE] \"usage\"\n\n", Usage{}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := ParseUsage([]byte(tt.in))
			assert.Equal(t, tt.ok, ok)
			assert.Equal(t, tt.want, got)
		})
	}
}
