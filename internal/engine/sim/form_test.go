package sim

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// namedEvents are the names of the events of a stream, repeated ones once, and the text of their deltas.
func namedEvents(t *testing.T, stream string) (names, text string) {
	t.Helper()
	var all []string
	for event := range strings.SplitSeq(strings.TrimSpace(stream), "\n\n") {
		name, data, ok := strings.Cut(strings.TrimPrefix(event, "event: "), "\ndata: ")
		require.True(t, ok, event)
		if len(all) == 0 || all[len(all)-1] != name {
			all = append(all, name)
		}
		var e struct{ Delta json.RawMessage }
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		var part struct{ Text string }
		if json.Unmarshal(e.Delta, &part.Text) != nil {
			_ = json.Unmarshal(e.Delta, &part)
		}
		text += part.Text
	}
	return strings.Join(all, " "), text
}

// One prompt has one answer, whatever the form of the request is, streamed or not.
func TestResponsesAndMessagesAnswerAsChatsDo(t *testing.T) {
	s := start(t, fast())
	chat := complete(t, s, "/v1/chat/completions",
		`{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}],`+
			`"max_tokens":40}`)
	want := chat.Choices[0].Message.Content

	body := `{"model":"sim","instructions":"be brief","max_output_tokens":40,` +
		`"input":[{"role":"user","content":[{"type":"input_text","text":"hi"}]}]`
	status, answer := ask(t, s, "/v1/responses", body+"}")
	require.Equal(t, 200, status, answer)
	var response struct {
		Status string
		Output []struct{ Content []struct{ Text string } }
		Usage  struct {
			Input  int `json:"input_tokens"`
			Output int `json:"output_tokens"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(answer), &response))
	assert.Equal(t, "incomplete", response.Status)
	assert.Equal(t, want, response.Output[0].Content[0].Text)
	assert.Equal(t, [2]int{chat.Usage.PromptTokens, 40}, [2]int{response.Usage.Input, response.Usage.Output})
	_, stream := ask(t, s, "/v1/responses", body+`,"stream":true}`)
	names, text := namedEvents(t, stream)
	assert.Equal(t, want, text)
	assert.Equal(t, "response.created response.in_progress response.output_item.added "+
		"response.content_part.added response.output_text.delta response.output_text.done "+
		"response.content_part.done response.output_item.done response.incomplete", names)

	body = `{"model":"sim","system":"be brief","max_tokens":40,"messages":[{"role":"user","content":"hi"}]`
	status, answer = ask(t, s, "/v1/messages", body+"}")
	require.Equal(t, 200, status, answer)
	var message struct {
		Content    []struct{ Text string }
		StopReason string `json:"stop_reason"`
	}
	require.NoError(t, json.Unmarshal([]byte(answer), &message))
	assert.Equal(t, want, message.Content[0].Text)
	assert.Equal(t, "max_tokens", message.StopReason)
	_, stream = ask(t, s, "/v1/messages", body+`,"stream":true}`)
	names, text = namedEvents(t, stream)
	assert.Equal(t, want, text)
	assert.Equal(t, "message_start content_block_start content_block_delta content_block_stop "+
		"message_delta message_stop", names)
	_, answer = ask(t, s, "/v1/messages/count_tokens",
		`{"model":"sim","system":"be brief","messages":[{"role":"user","content":"hi"}]}`)
	assert.JSONEq(t, string(mustMarshal(map[string]int{"input_tokens": chat.Usage.PromptTokens})), answer)

	status, answer = ask(t, s, "/v1/responses", `{"input":"hi","previous_response_id":"resp_1"}`)
	assert.Equal(t, 404, status, answer)
}

// Errors of messages have Anthropic's shape, whole and inside a stream; those of other routes have OpenAI's.
func TestErrorsOfMessages(t *testing.T) {
	s := start(t, fast())
	const body = `{"max_tokens":4,"messages":[{"role":"user","content":"hi"}]`
	for path, text := range map[string]string{
		"/v1/messages":              `{"messages":[{"role":"user","content":"hi"}]}`,
		"/v1/messages/count_tokens": `{"messages":5}`,
	} {
		status, answer := ask(t, s, path, text)
		assert.Equal(t, 400, status, path)
		assert.Regexp(t, `^{"error":{"message":".*","type":"Bad Request"},"type":"error"}$`, answer, path)
	}
	require.NoError(t, s.Fail(Fault{Mode: ModeErrorEvent, AfterTokens: 2}))
	_, stream := ask(t, s, "/v1/messages", body+`,"stream":true}`)
	assert.True(t, strings.HasSuffix(stream, "event: error\ndata: "+
		`{"error":{"message":"simulated failure","type":"InternalServerError"},"type":"error"}`+"\n\n"),
		stream)
	_, answer := ask(t, s, "/v1/chat/completions", `{"messages":5}`)
	assert.Contains(t, answer, `"code":400`)
}

// A model that pools has vectors for texts and no route that generates.
func TestAPoolingEngineServesEmbeddings(t *testing.T) {
	c := fast()
	c.Pooling = true
	s := start(t, c)
	vectors := func(more string) []any {
		status, answer := ask(t, s, "/v1/embeddings", `{"model":"sim","input":["a","b","a"]`+more+"}")
		require.Equal(t, 200, status, answer)
		var out struct {
			Data []struct{ Embedding any }
		}
		require.NoError(t, json.Unmarshal([]byte(answer), &out))
		require.Len(t, out.Data, 3)
		return []any{out.Data[0].Embedding, out.Data[1].Embedding, out.Data[2].Embedding}
	}
	plain := vectors(`,"dimensions":8`)
	assert.Len(t, plain[0], 8)
	assert.Equal(t, plain[0], plain[2])
	assert.NotEqual(t, plain[0], plain[1])
	packed, _ := vectors(`,"dimensions":8,"encoding_format":"base64"`)[0].(string)
	raw, err := base64.StdEncoding.DecodeString(packed)
	require.NoError(t, err)
	assert.Len(t, raw, 32)
	for _, path := range []string{
		"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
	} {
		status, _ := ask(t, s, path, `{"model":"sim","input":"a"}`)
		assert.Equal(t, 404, status, path)
	}
	status, answer := ask(t, s, "/v1/embeddings", `{"input":"a","dimensions":0}`)
	assert.Equal(t, 400, status, answer)
}
