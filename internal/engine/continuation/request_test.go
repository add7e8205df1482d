package continuation

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// TestAppendRequest: the body that asks for the rest of an answer.
func TestAppendRequest(t *testing.T) {
	for _, c := range []struct {
		route      openai.Route
		body, want string
		err        error
	}{
		{
			openai.Chat, `{"model":"m","messages":[{"role":"user","content":"a"}], "max_tokens":10,"seed":3}`,
			`{"model":"m","messages":[{"role":"user","content":"a"},` +
				`{"role":"assistant","content":"x\"\ny"}], ` +
				`"max_tokens":7,"seed":3,"continue_final_message":true,"add_generation_prompt":false}`, nil,
		},
		{
			openai.Chat, `{"add_generation_prompt":true,"min_tokens":2,"continue_final_message":false,` +
				`"messages":[{}] ,"max_completion_tokens":"4"}`,
			`{"add_generation_prompt":false,"min_tokens":0,"continue_final_message":true,` +
				`"messages":[{},{"role":"assistant","content":"x\"\ny"}] ,"max_completion_tokens":1}`, nil,
		},
		{
			openai.Completions, `{"prompt":"a\u0041","max_tokens":null,"max_tok\u0065ns2":1}`,
			`{"prompt":"a\u0041x\"\ny","max_tokens":null,"max_tok\u0065ns2":1,"max_tokens":13}`, nil,
		},
		{
			openai.Completions, `{"prompt": [ "a" ],"max_tokens":4}`,
			`{"prompt": [ "ax\"\ny" ],"max_tokens":1}`, nil,
		},
		{openai.Chat, `{"messages":[{}],"max_tokens":3}`, "", errNoTokensLeft},
		{openai.Chat, `{"messages":[]}`, "", errNoPlace},
		{openai.Chat, `{"messages":"a"}`, "", errNoPlace},
		{openai.Completions, `{"prompt":["a","b"],"max_tokens":9}`, "", errNoPlace},
		{openai.Completions, `{"prompt":7,"max_tokens":9}`, "", errNoPlace},
		{openai.Completions, `{"max_tokens":9}`, "", errNoPlace},
	} {
		got, err := AppendRequest(nil, []byte(c.body), c.route, []byte("x\"\ny"), 3)
		require.ErrorIs(t, err, c.err, c.body)
		assert.Equal(t, c.want, string(got))
	}
}

// FuzzAppendRequest: the body for the rest of an answer is one that Scan accepts, with the text at the end
// of its prompt, and with nothing else changed but the members that have to be.
func FuzzAppendRequest(f *testing.F) {
	f.Add(true, []byte(`{"messages":[{"role":"user","content":"a"}],"max_tokens":10,"stop":"b"}`),
		"text\n", 3)
	f.Add(false, []byte(`{"prompt":["a\ud83d\ude00"],"min_tokens":7,"max_tokens":99}`), "\"\\", 0)
	f.Fuzz(func(t *testing.T, isChat bool, body []byte, text string, tokens int) {
		route := openai.Completions
		if isChat {
			route = openai.Chat
		}
		var b openai.Body
		if b.Scan(route, body) != nil || b.WhyPinned() != "" || tokens < 0 || tokens > maxTokens {
			return
		}
		got, err := AppendRequest([]byte("before"), body, route, []byte(text), tokens)
		if err != nil {
			return
		}
		got = bytes.TrimPrefix(got, []byte("before"))
		require.NoError(t, b.Scan(route, got), string(got))
		var was, is map[string]any
		if json.Unmarshal(body, &was) != nil {
			return
		}
		require.NoError(t, json.Unmarshal(got, &is))
		text = strings.ToValidUTF8(text, "\ufffd")
		if isChat {
			list, _ := is["messages"].([]any)
			last := map[string]any{"role": "assistant", "content": text}
			if strings.ContainsRune(text, '\ufffd') {
				delete(last, "content")
				delete(list[len(list)-1].(map[string]any), "content")
			}
			assert.Equal(t, last, list[len(list)-1])
			assert.Equal(t, was["messages"], list[:len(list)-1])
			assert.Equal(t, true, is["continue_final_message"])
			assert.Equal(t, false, is["add_generation_prompt"])
		} else if s, ok := is["prompt"].(string); ok && !strings.ContainsRune(text, '\ufffd') {
			assert.Equal(t, fmt.Sprint(was["prompt"], text), s)
		}
		for _, name := range []string{
			"messages", "prompt", "max_tokens", "max_completion_tokens", "min_tokens",
			"continue_final_message", "add_generation_prompt",
		} {
			delete(was, name)
			delete(is, name)
		}
		assert.Equal(t, was, is)
	})
}

func TestStops(t *testing.T) {
	text := func(body string) string { return string(bytes.Join(Stops([]byte(body)), []byte("|"))) }
	assert.Equal(t, "a\n", text(`{"stop":"a\n"}`))
	assert.Equal(t, "a|b", text(`{"stop":["a",7,"b"]}`))
	assert.Empty(t, text(`{"stop":null,"model":"stop"}`))
}
