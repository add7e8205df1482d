package openai

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func scanFor(t *testing.T, route Route, body string) *Body {
	t.Helper()
	var b Body
	require.NoError(t, b.Scan(route, []byte(body)), body)
	return &b
}

// TestWhyPinned: which requests only the engine can finish that began to answer them.
func TestWhyPinned(t *testing.T) {
	const chat = `"messages":[{"role":"user","content":"a"}],"stream":true`
	for member, want := range map[string]string{
		`"temperature":0,"seed":7,"stop":["x"],"max_tokens":9,"logit_bias":{"1":2}`: "",
		`"tools":[],"response_format":{"type":"text"},"logprobs":false,"n":1`:       "",
		`"presence_penalty":0.0,"repetition_penalty":1.0,"frequency_penalty":null`:  "",
		`"continue_final_message":false,"add_generation_prompt":true`:               "",
		`"tools":[{"type":"function"}]`:                                             "tools",
		`"response_format":{"type":"json_object"}`:                                  "response_format",
		`"response_format":"text"`:                                                  "response_format",
		`"guided_json":{"type":"object"}`:                                           "grammar",
		`"structured_outputs":{"regex":"a"}`:                                        "grammar",
		`"regex":"a+"`:                                                              "grammar",
		`"logprobs":true`:                                                           "logprobs",
		`"logprobs":0`:                                                              "logprobs",
		`"top_logprobs":3`:                                                          "logprobs",
		`"return_token_ids":true`:                                                   "logprobs",
		`"echo":true`:                                                               "echo",
		`"use_beam_search":true`:                                                    "beam_search",
		`"n":2`:                                                                     "several choices",
		`"best_of":2`:                                                               "several choices",
		`"presence_penalty":0.1`:                                                    "penalties",
		`"repetition_penalty":1.1`:                                                  "penalties",
		`"bad_words":["a"]`:                                                         "bad_words",
		`"continue_final_message":true,"add_generation_prompt":false`:               "continues already",
	} {
		assert.Equal(t, want, scanFor(t, Chat, `{`+chat+`,`+member+`}`).WhyPinned(), member)
	}
	picture := `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]}`
	assert.Equal(t, "images", scanFor(t, Chat, picture).WhyPinned())
	assert.Empty(t, scanFor(t, Completions, `{"prompt":"a"}`).WhyPinned())
	assert.Empty(t, scanFor(t, Completions, `{"prompt":["a"]}`).WhyPinned())
	assert.Equal(t, "token ids", scanFor(t, Completions, `{"prompt":[1,2]}`).WhyPinned())
	assert.Equal(t, "several choices", scanFor(t, Completions, `{"prompt":["a","b"]}`).WhyPinned())
	assert.Equal(t, "suffix", scanFor(t, Completions, `{"prompt":"a","suffix":"b"}`).WhyPinned())
	assert.Equal(t, "route", scanFor(t, Tokenize, `{"prompt":"a"}`).WhyPinned())
}
