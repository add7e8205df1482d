// Package clients tests the built binary with clients that others have written. It is apart from test/system
// because those take long to compile.
package clients

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

func TestMain(m *testing.M) {
	code := m.Run()
	harness.RemoveBinary()
	os.Exit(code)
}

const twoApps = `applications:
  - name: one
    model: {id: model-one, aliases: [uno]}
    engine: {kind: sim, args: {sim_step_ms: 1}}
    data_parallel: {dp_size: 2}
  - name: two
    model: {id: model-two}
    engine: {kind: sim, args: {sim_step_ms: 1, max_model_len: 256}}
    data_parallel: {dp_size: 2, coupling: lockstep}
`

// CC10: the official OpenAI client drives chat, completions, streams, usage and errors against the real
// binary with two applications.
func TestOpenAIClient(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Deploy(twoApps)
	r.WaitStatus("one", "RUNNING")
	r.WaitStatus("two", "RUNNING")
	client := openai.NewClient(option.WithBaseURL("http://"+r.HTTP+"/v1"), option.WithAPIKey("none"),
		option.WithMaxRetries(0))
	ctx := t.Context()

	t.Run("models", func(t *testing.T) {
		page, err := client.Models.List(ctx)
		require.NoError(t, err)
		var ids []string
		for _, m := range page.Data {
			ids = append(ids, m.ID)
		}
		assert.ElementsMatch(t, []string{"model-one", "uno", "model-two"}, ids)
	})
	t.Run("chat", func(t *testing.T) {
		for _, model := range []string{"model-one", "uno", "model-two"} {
			var raw *http.Response
			out, err := client.Chat.Completions.New(ctx, openai.ChatCompletionNewParams{
				Model: model, Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hello")},
				MaxTokens: openai.Int(7),
			}, option.WithResponseInto(&raw))
			require.NoError(t, err, model)
			require.Len(t, out.Choices, 1)
			assert.NotEmpty(t, out.Choices[0].Message.Content)
			assert.Equal(t, "length", out.Choices[0].FinishReason)
			assert.EqualValues(t, 7, out.Usage.CompletionTokens)
			assert.Equal(t, out.Usage.PromptTokens+7, out.Usage.TotalTokens)
			assert.NotEmpty(t, raw.Header.Get("x-request-id"))
			assert.Equal(t, map[bool]string{true: "two", false: "one"}[model == "model-two"],
				raw.Header.Get("x-dpserve-app"))
		}
	})
	t.Run("chat stream with usage", func(t *testing.T) {
		s := client.Chat.Completions.NewStreaming(ctx, openai.ChatCompletionNewParams{
			Model: "model-one", MaxTokens: openai.Int(9),
			Messages:      []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hello")},
			StreamOptions: openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)},
		})
		var acc openai.ChatCompletionAccumulator
		for s.Next() {
			require.True(t, acc.AddChunk(s.Current()))
		}
		require.NoError(t, s.Err())
		assert.NotEmpty(t, acc.Choices[0].Message.Content)
		assert.Equal(t, "length", acc.Choices[0].FinishReason)
		assert.EqualValues(t, 9, acc.Usage.CompletionTokens)
	})
	t.Run("completions, all prompt forms", func(t *testing.T) {
		for name, prompt := range map[string]openai.CompletionNewParamsPromptUnion{
			"string":       {OfString: openai.String("once upon")},
			"strings":      {OfArrayOfStrings: []string{"once", "twice"}},
			"tokens":       {OfArrayOfTokens: []int64{1, 2, 3, 4}},
			"token arrays": {OfArrayOfTokenArrays: [][]int64{{1, 2}, {3, 4}}},
		} {
			out, err := client.Completions.New(ctx, openai.CompletionNewParams{
				Model:  "model-one",
				Prompt: prompt, MaxTokens: openai.Int(4),
			})
			require.NoError(t, err, name)
			want := 1
			if name == "strings" || name == "token arrays" {
				want = 2
			}
			assert.Len(t, out.Choices, want, name)
			assert.EqualValues(t, 4*want, out.Usage.CompletionTokens, name)
		}
	})
	t.Run("completion stream", func(t *testing.T) {
		s := client.Completions.NewStreaming(ctx, openai.CompletionNewParams{
			Model: "model-two", Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("x")},
			MaxTokens: openai.Int(5),
		})
		finish := ""
		for s.Next() {
			for _, c := range s.Current().Choices {
				finish += string(c.FinishReason)
			}
		}
		require.NoError(t, s.Err())
		assert.Equal(t, "length", finish)
	})
	t.Run("tools and JSON", func(t *testing.T) { testAgent(t, client) })
	t.Run("errors", func(t *testing.T) {
		var e *openai.Error
		_, err := client.Chat.Completions.New(ctx, openai.ChatCompletionNewParams{
			Model:    "nope",
			Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("x")},
		})
		require.True(t, errors.As(err, &e), "%v", err) //nolint:testifylint // the target is used below
		assert.Equal(t, http.StatusNotFound, e.StatusCode)
		assert.Equal(t, "model_not_found", e.Code)
		for _, m := range []string{"model-one", "model-two", "uno"} {
			assert.Contains(t, e.Message, m, "the models there are")
		}
		_, err = client.Chat.Completions.New(ctx, openai.ChatCompletionNewParams{
			Model: "model-two", MaxTokens: openai.Int(5),
			Messages: []openai.ChatCompletionMessageParamUnion{
				openai.UserMessage(strings.Repeat("too long ", 1000)),
			},
		})
		require.True(t, errors.As(err, &e), "%v", err) //nolint:testifylint // the target is used below
		assert.Equal(t, http.StatusBadRequest, e.StatusCode, "the engine's own 400 passes")
		s := client.Chat.Completions.NewStreaming(ctx, openai.ChatCompletionNewParams{
			Model: "model-one", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("x")},
			Temperature: openai.Float(-3),
		})
		for s.Next() { //nolint:revive // only the error counts
		}
		require.True(t, errors.As(s.Err(), &e), s.Err()) //nolint:testifylint // the target is used below
		assert.Equal(t, http.StatusBadRequest, e.StatusCode)
	})
	r.Quiet()
}

// testAgent is the loop of an agent framework: a tool is called, the tool answers, the model answers; then
// an answer that is JSON of a schema. Streaming and not.
func testAgent(t *testing.T, client openai.Client) {
	schema := map[string]any{
		"type": "object", "properties": map[string]any{"city": map[string]any{"type": "string"}},
		"required": []string{"city"}, "additionalProperties": false,
	}
	hasCity := func(text string) {
		var v struct{ City *string }
		require.NoError(t, json.Unmarshal([]byte(text), &v), text)
		assert.NotNil(t, v.City, text)
	}
	params := openai.ChatCompletionNewParams{
		Model: "model-one", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("rain?")},
		Tools: []openai.ChatCompletionToolUnionParam{
			openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{
				Name: "weather", Parameters: schema,
			}),
		},
	}
	stream := client.Chat.Completions.NewStreaming(t.Context(), params)
	var whole openai.ChatCompletionAccumulator
	for stream.Next() {
		require.True(t, whole.AddChunk(stream.Current()))
	}
	require.NoError(t, stream.Err())
	out, err := client.Chat.Completions.New(t.Context(), params)
	require.NoError(t, err)
	for _, choice := range []openai.ChatCompletionChoice{out.Choices[0], whole.Choices[0]} {
		assert.Equal(t, "tool_calls", choice.FinishReason)
		require.Len(t, choice.Message.ToolCalls, 1)
		assert.Equal(t, "weather", choice.Message.ToolCalls[0].Function.Name)
		hasCity(choice.Message.ToolCalls[0].Function.Arguments)
	}

	message := out.Choices[0].Message
	params.Messages = append(params.Messages, message.ToParam(),
		openai.ToolMessage("yes", message.ToolCalls[0].ID))
	out, err = client.Chat.Completions.New(t.Context(), params)
	require.NoError(t, err)
	assert.Equal(t, "stop", out.Choices[0].FinishReason)
	assert.Empty(t, out.Choices[0].Message.ToolCalls)
	assert.NotEmpty(t, out.Choices[0].Message.Content)

	params.Tools = nil
	params.ResponseFormat.OfJSONSchema = &openai.ResponseFormatJSONSchemaParam{
		JSONSchema: openai.ResponseFormatJSONSchemaJSONSchemaParam{
			Name: "place", Strict: openai.Bool(true), Schema: schema,
		},
	}
	out, err = client.Chat.Completions.New(t.Context(), params)
	require.NoError(t, err)
	hasCity(out.Choices[0].Message.Content)
}
