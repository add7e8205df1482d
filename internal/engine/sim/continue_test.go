package sim

import (
	"fmt"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// A stream that is cut anywhere goes on with exactly the text of the unbroken one: of a completion whose
// prompt is followed by the text so far, and of a chat whose last message is the text so far and is
// continued. max_tokens counts on, and the ends are equal.
func TestAContinuedRequestGoesOnWithTheUnbrokenText(t *testing.T) {
	s := start(t, fast())
	chat := func(text, more string) (path, body string) {
		messages := `{"role":"user","content":"tell me"}`
		if text != "" {
			messages += fmt.Sprintf(`,{"role":"assistant","content":%q}`, text)
			more += `,"continue_final_message":true,"add_generation_prompt":false`
		}
		return "/v1/chat/completions", fmt.Sprintf(`{"messages":[%s]%s}`, messages, more)
	}
	completion := func(text, more string) (path, body string) {
		return "/v1/completions", fmt.Sprintf(`{"prompt":%q%s}`, "the quick"+text, more)
	}
	for name, request := range map[string]func(text, more string) (path, body string){
		"chat": chat, "completion": completion,
	} {
		for _, c := range []struct {
			most, least int
			end         string
		}{{75, 0, "length"}, {2000, 0, "stop"}, {2000, 400, "stop"}} {
			limits := func(done int) string {
				least := max(0, c.least-done)
				return fmt.Sprintf(`,"max_tokens":%d,"min_tokens":%d,"seed":5`, c.most-done, least)
			}
			path, body := request("", limits(0)+`,"stream":true`)
			status, stream := ask(t, s, path, body)
			require.Equal(t, 200, status, stream)
			texts, last, _ := joinStream(t, stream)
			whole := texts[0]
			require.Equal(t, c.end, last.Choices[0].FinishReason, name)
			for tokens := 1; tokens < len(whole)/em.BytesPerToken; tokens += 5 {
				text := whole[:tokens*em.BytesPerToken]
				if !utf8.ValidString(text) {
					continue // the engine holds back what ends within a character
				}
				path, body = request(text, limits(tokens))
				rest := complete(t, s, path, body)
				assert.Equal(t, whole[len(text):], rest.Choices[0].Text+rest.Choices[0].Message.Content, name)
				assert.Equal(t, c.end, rest.Choices[0].FinishReason, name)
			}
		}
	}
}

// Without the two fields the last message is over and a new answer begins; with both set the engine refuses.
func TestAnAnswerIsContinuedOnlyIfBothFieldsSayIt(t *testing.T) {
	s := start(t, fast())
	const path = "/v1/chat/completions"
	body := func(more string) string {
		return `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"the cache"}],` +
			`"max_tokens":9` + more + "}"
	}
	fresh := complete(t, s, path, body("")).Choices[0].Message.Content
	both := body(`,"continue_final_message":true,"add_generation_prompt":false`)
	assert.NotEqual(t, fresh, complete(t, s, path, both).Choices[0].Message.Content)
	status, answer := ask(t, s, path, body(`,"continue_final_message":true`))
	assert.Equal(t, 400, status)
	assert.Contains(t, answer, "Cannot set both `continue_final_message` and `add_generation_prompt`")
}
