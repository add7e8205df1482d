package sim

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// weather is the schema of the arguments of a tool, as the agent frameworks write them.
const weather = `{"type":"object","properties":{"city":{"type":"string","description":"where"},
	"days":{"type":"integer","minimum":1,"maximum":7},"unit":{"enum":["C","F"]}},
	"required":["city","days","unit"],"additionalProperties":false}`

const (
	weatherTool = `{"type":"function","function":{"name":"get_weather","description":"now","parameters":` +
		weather + `}}`
	clockTool = `{"type":"function","function":{"name":"get_time"}}`
	// has a schema that the engine does not understand
	oddTool = `{"type":"function","function":{"name":"odd","parameters":{"propertyNames":{}}}}`
)

// toolID are the ids of calls.
var toolID = regexp.MustCompile(`chatcmpl-tool-[0-9a-f]{16}`)

// chatAnswer is what a client sees of an answer, or of an event.
type chatAnswer struct {
	Choices []struct {
		Index          int
		Message, Delta *struct {
			Role    string
			Content *string
			Calls   []struct {
				ID, Type string
				Index    int
				Function struct{ Name, Arguments string }
			} `json:"tool_calls"`
		}
		FinishReason string `json:"finish_reason"`
	}
	Usage *struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
		Details          struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

// chat asks one question, with more members of the body.
func chat(t testing.TB, s *Server, more string) chatAnswer {
	t.Helper()
	status, body := ask(t, s, "/v1/chat/completions", chatOf(more))
	require.Equal(t, 200, status, body)
	var out chatAnswer
	require.NoError(t, json.Unmarshal([]byte(body), &out), body)
	return out
}

func chatOf(more string) string {
	return `{"messages":[{"role":"user","content":"How is the weather?"}],` + more + `}`
}

// follows checks a value with a library that knows JSON Schema.
func follows(t testing.TB, schema, value string) {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	require.NoError(t, err)
	c := jsonschema.NewCompiler()
	require.NoError(t, c.AddResource("mem:///s", doc))
	by, err := c.Compile("mem:///s")
	require.NoError(t, err)
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(value))
	require.NoError(t, err, value)
	assert.NoError(t, by.Validate(v), value)
}

// TestToolsAreCalled: with tools the answer is a call with arguments of the tool's schema, as vLLM forms it.
func TestToolsAreCalled(t *testing.T) {
	s := start(t, fast())
	for _, c := range []struct {
		choice, finish string
		content        *string
	}{
		{"", "tool_calls", nil},
		{`,"tool_choice":null`, "tool_calls", nil},
		{`,"tool_choice":"auto"`, "tool_calls", nil},
		{`,"tool_choice":"required"`, "tool_calls", new(string)},
		{`,"tool_choice":{"type":"function","function":{"name":"get_weather"}}`, "stop", new(string)},
	} {
		out := chat(t, s, `"tools":[`+weatherTool+`]`+c.choice).Choices[0]
		assert.Equal(t, c.finish, out.FinishReason, c.choice)
		assert.Equal(t, c.content, out.Message.Content, c.choice)
		require.Len(t, out.Message.Calls, 1, c.choice)
		call := out.Message.Calls[0]
		assert.Regexp(t, `^chatcmpl-tool-[0-9a-f]{16}$`, call.ID)
		assert.Equal(t, "function", call.Type)
		assert.Equal(t, "get_weather", call.Function.Name)
		follows(t, weather, call.Function.Arguments)
	}
	out := chat(t, s, `"tools":[`+weatherTool+`],"tool_choice":"none"`).Choices[0]
	assert.Empty(t, out.Message.Calls)
	assert.NotEmpty(t, out.Message.Content)
}

// TestToolOfTheQuestion: the tool that the question names is called; one whose schema is not understood is
// left out.
func TestToolOfTheQuestion(t *testing.T) {
	s := start(t, fast())
	for seed := range 10 {
		more := fmt.Sprintf(`"parallel_tool_calls":false,"seed":%d,"tools":[%s,%s,%s]`, seed, oddTool,
			weatherTool, clockTool)
		body := strings.Replace(chatOf(more), "How", "Call get_time. How", 1)
		_, text := ask(t, s, "/v1/chat/completions", body)
		assert.Contains(t, text, `"function":{"name":"get_time","arguments":"{}"}`)
		assert.NotContains(t, fmt.Sprint(chat(t, s, more)), "odd")
	}
}

// TestParallelCalls: some answers call two tools, none does with parallel_tool_calls false. The same request
// has the same answer, but for its ids.
func TestParallelCalls(t *testing.T) {
	s, counts := start(t, fast()), map[int]int{}
	for seed := range 20 {
		more := fmt.Sprintf(`"seed":%d,"tools":[%s,%s]`, seed, weatherTool, clockTool)
		out := chat(t, s, more).Choices[0].Message
		counts[len(out.Calls)]++
		ids := map[string]bool{}
		for i, call := range out.Calls {
			ids[call.ID] = true
			again := chat(t, s, more).Choices[0].Message.Calls[i]
			assert.Equal(t, call.Function, again.Function)
			assert.NotEqual(t, call.ID, again.ID)
		}
		assert.Len(t, ids, len(out.Calls))
		single := chat(t, s, more+`,"parallel_tool_calls":false`).Choices[0].Message
		assert.Len(t, single.Calls, 1)
	}
	assert.Positive(t, counts[1])
	assert.Positive(t, counts[2])
	assert.Equal(t, 20, counts[1]+counts[2])
}

// TestToolAnswerEndsTheCalls: behind the answer of a tool the user gets prose, and the engine has the call
// and everything before it in its cache.
func TestToolAnswerEndsTheCalls(t *testing.T) {
	s := start(t, fast())
	first := chat(t, s, `"tools":[`+weatherTool+`]`)
	call := first.Choices[0].Message.Calls[0]
	arguments, err := json.Marshal(call.Function.Arguments)
	require.NoError(t, err)
	body := fmt.Sprintf(`{"tools":[%s],"messages":[{"role":"user","content":"How is the weather?"},
		{"role":"assistant","content":null,"tool_calls":[{"id":%q,"type":"function","function":
		{"name":"get_weather","arguments":%s}}]},{"role":"tool","tool_call_id":%q,"content":"rain"}]`,
		weatherTool, call.ID, arguments, call.ID)
	status, text := ask(t, s, "/v1/chat/completions", body+"}")
	require.Equal(t, 200, status, text)
	var out chatAnswer
	require.NoError(t, json.Unmarshal([]byte(text), &out))
	assert.Empty(t, out.Choices[0].Message.Calls)
	assert.Equal(t, "stop", out.Choices[0].FinishReason)
	assert.NotEmpty(t, out.Choices[0].Message.Content)
	assert.Greater(t, out.Usage.Details.Cached, first.Usage.PromptTokens,
		"the call stands in the prompt as the engine wrote it")

	_, text = ask(t, s, "/v1/chat/completions", body+`,"tool_choice":"required"}`)
	assert.Contains(t, text, `"finish_reason":"tool_calls"`)
	_, text = ask(t, s, "/v1/chat/completions", body+`,"response_format":{"type":"json_object"}}`)
	assert.Contains(t, text, `"content":"{\"answer\": \"`)

	var counted struct{ Count int }
	_, text = ask(t, s, "/tokenize", body+"}")
	require.NoError(t, json.Unmarshal([]byte(text), &counted))
	assert.Equal(t, out.Usage.PromptTokens, counted.Count, "/tokenize counts tools and calls as well")
}

// TestStreamedCalls: the deltas of a call, put together, are the call of the answer that does not stream. The
// first names the tool, the others have arguments, and the last event has the reason of the end.
func TestStreamedCalls(t *testing.T) {
	s := start(t, fast())
	for _, choice := range []string{
		`"auto"`, `"required"`, `{"type":"function","function":{"name":"get_weather"}}`,
	} {
		for _, more := range []string{
			"", `,"stream_interval":50`, `,"n":2`, `,"seed":7`, `,"logprobs":true`,
			`,"return_token_ids":true`,
		} {
			body := `"tools":[` + weatherTool + `,` + clockTool + `],"tool_choice":` + choice + more
			plain := chat(t, s, body)
			_, text := ask(t, s, "/v1/chat/completions", chatOf(body+`,"stream":true`))
			list := pieces(text)
			assert.Equal(t, "[DONE]", list[len(list)-1])
			for i, want := range plain.Choices {
				names, arguments, finish, roles := map[int]string{}, map[int]string{}, "", 0
				for _, e := range list[:len(list)-1] {
					var event chatAnswer
					require.NoError(t, json.Unmarshal([]byte(e), &event), e)
					if event.Choices[0].Index != i {
						continue
					}
					d := event.Choices[0].Delta
					if d.Role != "" {
						roles++
						assert.Contains(t, e, `"delta":{"role":"assistant","content":""}`)
					} else {
						assert.Nil(t, d.Content, e)
					}
					finish += event.Choices[0].FinishReason
					for _, call := range d.Calls {
						assert.Equal(t, call.ID != "", call.Function.Name != "", e)
						assert.Equal(t, call.ID != "", call.Type == "function", e)
						names[call.Index] += call.Function.Name
						arguments[call.Index] += call.Function.Arguments
					}
				}
				assert.Equal(t, 1, roles)
				assert.Equal(t, want.FinishReason, finish)
				require.Len(t, names, len(want.Message.Calls), text)
				for k, call := range want.Message.Calls {
					assert.Equal(t, call.Function.Name, names[k])
					assert.Equal(t, call.Function.Arguments, arguments[k])
				}
			}
		}
	}
}

// TestShapeOfStreamedCalls pins the bytes of the deltas, which are those of vLLM's parser for hermes models.
func TestShapeOfStreamedCalls(t *testing.T) {
	s := start(t, fast())
	deltas := func(more string) []string {
		_, text := ask(t, s, "/v1/chat/completions", chatOf(`"stream":true,"tools":[`+clockTool+`]`+more))
		var out []string
		for _, e := range pieces(text) {
			if _, d, ok := strings.Cut(e, `"delta":`); ok {
				d, _, _ = strings.Cut(d, `,"logprobs"`)
				out = append(out, toolID.ReplaceAllString(d, "ID"))
			}
		}
		return out
	}
	const role = `{"role":"assistant","content":""}`
	assert.Equal(t, []string{
		role,
		`{"content":null,"tool_calls":[{"id":"ID","type":"function","index":0,` +
			`"function":{"name":"get_time"}}]}`,
		`{"content":null,"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}`, `{}`,
	}, deltas(""))
	assert.Equal(t, []string{
		role,
		`{"tool_calls":[{"id":"ID","type":"function","index":0,` +
			`"function":{"name":"get_time","arguments":"{}"}}]}`,
		`{"tool_calls":[{"index":0,"function":{"arguments":""}}]}`,
	}, deltas(`,"tool_choice":{"type":"function","function":{"name":"get_time"}}`))
}

// TestConstrainedTexts: response_format and structured_outputs, on both routes, streaming and not.
func TestConstrainedTexts(t *testing.T) {
	s := start(t, fast())
	ok := func(t testing.TB, text string) { follows(t, weather, text) }
	quoted, err := json.Marshal(weather)
	require.NoError(t, err)
	for more, check := range map[string]func(testing.TB, string){
		`"response_format":{"type":"json_object"}`: func(t testing.TB, text string) {
			assert.Regexp(t, `^\{"answer": ".+"\}$`, text)
		},
		`"response_format":{"json_schema":{"name":"w","schema":` + weather + `},"type":"json_schema"}`: ok,
		`"structured_outputs":{"json":` + weather + `}`:                                                ok,
		`"structured_outputs":{"json":` + string(quoted) + `}`:                                         ok,
		`"structured_outputs":{"json_object":true}`: func(t testing.TB, text string) {
			assert.True(t, json.Valid([]byte(text)))
		},
		`"structured_outputs":{"regex":"[A-Z]{2}\\d+"}`: func(t testing.TB, text string) {
			assert.Regexp(t, `^[A-Z]{2}\d+$`, text)
		},
		`"structured_outputs":{"choice":["yes","größer"]}`: func(t testing.TB, text string) {
			assert.Contains(t, []string{"yes", "größer"}, text)
		},
	} {
		for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
			body := `{"prompt":"p","max_tokens":900,"seed":3,`
			if path == "/v1/chat/completions" {
				body = `{"messages":[{"role":"user","content":"p"}],"seed":3,`
			}
			status, text := ask(t, s, path, body+more+"}")
			require.Equal(t, 200, status, text)
			var plain struct {
				Choices []struct {
					Text    string
					Message struct{ Content string }
					Finish  string `json:"finish_reason"`
				}
			}
			require.NoError(t, json.Unmarshal([]byte(text), &plain))
			got := plain.Choices[0].Text + plain.Choices[0].Message.Content
			check(t, got)
			assert.Equal(t, "stop", plain.Choices[0].Finish)
			_, text = ask(t, s, path, body+more+`,"stream":true}`)
			texts, last, _ := joinStream(t, text)
			assert.Equal(t, got, texts[0])
			assert.Equal(t, "stop", last.Choices[0].FinishReason)
		}
	}
}

// TestConstrainedAnswersAreCutToo: max_tokens and stop strings cut calls and JSON as they cut prose.
func TestConstrainedAnswersAreCutToo(t *testing.T) {
	s := start(t, fast())
	whole := chat(t, s, `"tools":[`+weatherTool+`]`)
	tokens := whole.Usage.CompletionTokens
	for _, choice := range []string{`"auto"`, `"required"`} {
		more := fmt.Sprintf(`"tools":[%s],"tool_choice":%s,"max_tokens":`, weatherTool, choice)
		cut := chat(t, s, more+"12").Choices[0]
		assert.Equal(t, "length", cut.FinishReason)
		assert.Empty(t, cut.Message.Calls)
		assert.True(t, strings.HasPrefix(*cut.Message.Content, "<tool_call>\n{"), *cut.Message.Content)
		_, text := ask(t, s, "/v1/chat/completions", chatOf(more+`20,"stream":true`))
		assert.Contains(t, text, `"finish_reason":"length"`)
		assert.Contains(t, text, `"name":"get_weather"`)
		assert.Equal(t, "tool_calls", chat(t, s, fmt.Sprint(more, tokens)).Choices[0].FinishReason)
		last := chat(t, s, fmt.Sprint(more, tokens-1)).Choices[0]
		assert.Equal(t, "length", last.FinishReason, "the end of the sequence is a token, too")
		assert.Len(t, last.Message.Calls, 1)
	}
	named := chat(t, s, `"max_tokens":2,"tool_choice":{"type":"function","function":{"name":"get_weather"}},
		"tools":[`+weatherTool+`]`).Choices[0]
	assert.Equal(t, "length", named.FinishReason)
	assert.Len(t, named.Message.Calls[0].Function.Arguments, 8)

	text := chat(t, s, `"response_format":{"type":"json_object"},"max_tokens":2`).Choices[0]
	assert.Equal(t, `{"answer`, *text.Message.Content)
	text = chat(t, s, `"response_format":{"type":"json_object"},"stop":":"`).Choices[0]
	assert.Equal(t, `{"answer"`, *text.Message.Content)
	assert.Equal(t, "stop", text.FinishReason)
}

// TestRefusedDemands: what the real engine refuses is refused, and what the simulated one cannot do has an
// answer that says so.
func TestRefusedDemands(t *testing.T) {
	s := start(t, fast())
	const tools = `"tools":[` + weatherTool + `]`
	for _, c := range [][2]string{
		{`"tools":[]`, "`tools` must not be an empty array"},
		{`"tools":{}`, "tools"},
		{`"tools":[{"type":"function"}]`, "'loc': 'body.tools.0.function', 'msg': 'Field required'"},
		{`"tools":[{"function":{}}]`, "'loc': 'body.tools.0.function.name', 'msg': 'Field required'"},
		{`"tools":[{"type":"browser"}]`, "Input should be 'function'"},
		{`"tool_choice":"auto"`, "When using `tool_choice`, `tools` must be set."},
		{tools + `,"tool_choice":"all"`, "Invalid value for `tool_choice`"},
		{tools + `,"tool_choice":7`, "Invalid value for `tool_choice`"},
		{tools + `,"tool_choice":{}`, "Expected field `name` in `function`"},
		{
			tools + `,"tool_choice":{"function":{"name":"x"}}`,
			"does not match any of the specified `tools`",
		},
		{
			tools + `,"tool_choice":{"function":{"name":"get_weather"}},"structured_outputs":{"regex":"a"}`,
			"not both",
		},
		{`"tools":[{"function":{"name":"f","parameters":[]}}]`, "valid dictionary"},
		{`"tools":[` + oddTool + `]`, `the parameters of \"odd\": the simulated engine cannot`},
		{`"response_format":{"type":"json"}`, `'loc': 'body.type', 'msg': \"Input should be 'text'`},
		{`"response_format":{}`, "body.type"},
		{`"response_format":"json"`, "body.response_format"},
		{`"response_format":{"type":"json_schema"}`, "the 'json_schema' field must be provided"},
		{
			`"response_format":{"type":"json_schema","json_schema":{"schema":{}}}`,
			"json_schema.name', 'msg': 'Field required'",
		},
		{`"response_format":{"type":"json_schema","json_schema":{"name":"a"}}`, "none are specified"},
		{
			`"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":7}}`,
			"the schema is not an object",
		},
		{`"response_format":{"type":"structural_tag","format":{}}`, "has no structural_tag"},
		{`"structured_outputs":{}`, "none are specified"},
		{`"structured_outputs":7`, "body.structured_outputs"},
		{`"structured_outputs":{"json":{"$ref":"#"}}`, "too many steps"},
		{
			`"structured_outputs":{"json":{"type":"object","properties":{"a":false},"required":["a"]}}`,
			"no value was found",
		},
		{`"structured_outputs":{"regex":"("}`, "is not understood"},
		{`"structured_outputs":{"choice":[]}`, "an empty list"},
		{`"structured_outputs":{"grammar":"root ::= x"}`, "has no grammar"},
		{`"structured_outputs":{"regex":"a","choice":["a"]}`, "only use one kind"},
		{
			`"structured_outputs":{"regex":"a"},"response_format":{"type":"json_object"}`,
			"only use one kind",
		},
	} {
		more, want := c[0], c[1]
		status, text := ask(t, s, "/v1/chat/completions", chatOf(more))
		assert.Equal(t, 400, status, "%s: %s", more, text)
		assert.Contains(t, text, want, more)
	}
}

// TestWithoutAutoToolChoice: switched off, tools are refused as by an engine that was started without a
// parser of tool calls.
func TestWithoutAutoToolChoice(t *testing.T) {
	c, _, err := ParseFlags([]string{"--port", "0", "--no-enable-auto-tool-choice", "--sim-step-ms", "0"})
	require.NoError(t, err)
	s := start(t, c)
	for choice, want := range map[string]string{
		"":                          `\"auto\" tool choice requires --enable-auto-tool-choice`,
		`,"tool_choice":"auto"`:     `\"auto\" tool`,
		`,"tool_choice":"required"`: `tool_choice=\"required\" requires --tool-call-parser`,
		`,"tool_choice":{"function":{"name":"get_time"}}`: `tool_choice=function \"get_time\" requires`,
	} {
		status, text := ask(t, s, "/v1/chat/completions", chatOf(`"tools":[`+clockTool+`]`+choice))
		assert.Equal(t, 400, status, text)
		assert.Contains(t, text, want)
	}
	for _, choice := range []string{`"none"`, "null"} {
		out := chat(t, s, `"tools":[`+clockTool+`],"tool_choice":`+choice)
		assert.NotEmpty(t, out.Choices[0].Message.Content)
	}
}

// TestManyChoicesShareTexts: a request cannot make the engine decide more than a few texts.
func TestManyChoicesShareTexts(t *testing.T) {
	s := start(t, fast())
	out := chat(t, s, fmt.Sprintf(`"n":%d,"response_format":{"type":"json_object"}`, 3*maxScripts))
	texts := map[string]bool{}
	for _, c := range out.Choices {
		texts[*c.Message.Content] = true
	}
	assert.LessOrEqual(t, len(texts), maxScripts)
	assert.Greater(t, len(texts), maxScripts/2)
}

// FuzzReadChat: no body makes the engine panic, and every call that it decides has JSON for arguments.
func FuzzReadChat(f *testing.F) {
	for _, more := range []string{
		`"tools":[` + weatherTool + `,` + oddTool + `]`,
		`"tools":[` + clockTool + `],"tool_choice":"required"`,
		`"tools":[` + clockTool + `],"tool_choice":{"function":{"name":"get_time"}}`,
		`"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":` + weather + `}}`,
		`"structured_outputs":{"regex":"a+"},"n":3`,
	} {
		f.Add([]byte(chatOf(more)))
	}
	cfg := fast()
	set := cfg.settings()
	f.Fuzz(func(t *testing.T, body []byte) {
		in := &fields{}
		if json.Unmarshal(body, &in.members) != nil || in.members == nil {
			return
		}
		p, e := readChat(in, set)
		if e != nil {
			return
		}
		for _, s := range p.scripts {
			for _, call := range s.calls {
				require.True(t, json.Valid(s.text[call.from:call.to]), "%s", s.text)
			}
		}
	})
}
