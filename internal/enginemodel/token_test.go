package enginemodel_test

import (
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

func TestTokensAreFourBytesLittleEndian(t *testing.T) {
	assert.Equal(t, []uint32{'h' | 'e'<<8 | 'l'<<16 | 'l'<<24, 'o'}, em.AppendTokens(nil, "hello"))
	assert.Empty(t, em.AppendTokens(nil, ""))
	assert.Equal(t, []uint32{'a', em.MarkerNUL, 'b'}, em.AppendTokens(nil, "a\x00b"))
}

func TestTextOfHalfACharacterIsAReplacement(t *testing.T) {
	ids := em.AppendTokens(nil, "xyz🚀")
	assert.Equal(t, "xyz\uFFFD", em.Text(ids[:1]))
	assert.Equal(t, "xyz🚀", em.Text(ids))
}

func TestTokenizerRoundTripsAndIsPrefixStable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := rapid.String().Draw(t, "a"), rapid.String().Draw(t, "b")
		ids := em.AppendTokens(nil, a)
		assert.Equal(t, a, em.Text(ids))
		if len(ids) > 0 {
			more := em.AppendTokens(nil, a+b)
			assert.Equal(t, ids[:len(ids)-1], more[:len(ids)-1])
		}
	})
}

func TestChatTemplateExtendsFromTurnToTurn(t *testing.T) {
	first := []em.Message{{Role: "system", Content: "be brief"}, {Role: "user", Content: "hello world"}}
	prompt := em.AppendChat(nil, first, true)
	assert.Equal(t, em.MarkerSystem, prompt[0])
	assert.Equal(t, em.MarkerAssistant, prompt[len(prompt)-1])

	gen := em.NewGenerator(em.ProseAfter(0, prompt, 0))
	answer := string(gen.Bytes(5))
	for !utf8.ValidString(answer) {
		answer = answer[:len(answer)-1]
	}
	next := append(append([]em.Message{}, first...), em.Message{Role: "assistant", Content: answer},
		em.Message{Role: "user", Content: "go on"})
	second := em.AppendChat(nil, next, true)
	whole := len(answer) / em.BytesPerToken
	assert.Equal(t, prompt, second[:len(prompt)])
	for i := range whole {
		assert.Equal(t, gen.Token(i), second[len(prompt)+i],
			"the answer's tokens come back as the next prompt's")
	}
}
