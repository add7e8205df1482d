package enginemodel_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

func TestGeneratorIsAFunctionOfSeedPromptAndChoice(t *testing.T) {
	prompt := em.AppendTokens(nil, "the quick brown fox")
	text := func(seed uint64, p []uint32, choice int) string {
		return string(em.NewGenerator(em.ProseAfter(seed, p, choice)).Bytes(64))
	}
	first := text(1, prompt, 0)
	assert.Equal(t, first, text(1, prompt, 0))
	assert.NotEqual(t, text(1, prompt, 0), text(2, prompt, 0))
	assert.NotEqual(t, text(1, prompt, 0), text(1, prompt, 1))
	assert.NotEqual(t, text(1, prompt, 0), text(1, prompt[1:], 0))

	whole := em.NewGenerator(em.ProseAfter(7, prompt, 0))
	piecewise := em.NewGenerator(em.ProseAfter(7, prompt, 0))
	for i := range 300 {
		assert.Equal(t, whole.Token(i), piecewise.Token(i))
		assert.Len(t, piecewise.Bytes(i+1), em.BytesPerToken*(i+1))
	}
	assert.True(t, utf8.ValidString(strings.ToValidUTF8(string(whole.Bytes(300)), "")))
	assert.NotContains(t, string(whole.Bytes(300)), "\x00")
}

// A prompt that is followed by the first part of its answer is answered by the other part, and ends where the
// whole answer would have ended.
func TestAnAnswerGoesOnFromAnyPlace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prompt := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{
			"", "the quick", "the ", "the que", "the rank of a cache. ", "one\n", strings.Repeat("x", 9999),
		})).Draw(t, "prompt")
		seed := rapid.Uint64().Draw(t, "seed")
		isChat := rapid.Bool().Draw(t, "as a chat")
		after := func(text string) em.Prose {
			if isChat {
				return em.ProseAfter(seed, em.AppendTokens([]uint32{em.MarkerAssistant}, text), 0)
			}
			return em.ProseAfter(seed, em.AppendTokens(nil, prompt+text), 0)
		}
		whole := after("")
		n := whole.Left()
		assert.Less(t, n, em.BytesPerToken*(em.AnswerMin+em.AnswerSpan-1))
		text := string(em.NewGenerator(whole).Bytes(n/em.BytesPerToken + 1))[:n]
		at := rapid.IntRange(0, n).Draw(t, "at")
		rest := after(text[:at])
		assert.Equal(t, n-at, rest.Left())
		assert.Equal(t, text[at:],
			string(em.NewGenerator(rest).Bytes(rest.Left()/em.BytesPerToken + 1))[:rest.Left()])
	})
}

func TestAnswersEndInTheirWindow(t *testing.T) {
	for seed := range uint64(2000) {
		n := em.ProseAfter(seed, []uint32{em.MarkerAssistant}, 0).Left()/em.BytesPerToken + 1
		assert.GreaterOrEqual(t, n, em.AnswerMin)
		assert.Less(t, n, em.AnswerMin+em.AnswerSpan)
	}
}
