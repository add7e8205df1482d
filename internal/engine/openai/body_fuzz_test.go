package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func addBodies(f *testing.F) {
	for _, body := range []string{
		`{}`, `[]`, ``, `{"a":1,}`, `{"model":"tiny","prompt":[[1,2],[3]],"n":3,"max_tokens":7}`,
		`{"model":"t\u0069ny","stream":true,"stream_options":{"include_usage":true}}`,
		`{"\u006e":2,"n":3}`, `{"bootstrap_room":1,"a":2,"routed_dp_rank":3}`,
		`{"messages":[{"role":"user","content":"a\n\ud83d\ude00"}],"n":"1_29"}`,
		`{"a":NaN,"b":-Infinity}`, `{"prompt":[1,02]}`, "{\"a\":\"\x01\"}",
		`{"n":1e400,"max_tokens":2147483649}`,
	} {
		for route := range uint8(NumRoutes) {
			f.Add(route, []byte(body))
		}
	}
}

// FuzzScan: Scan accepts exactly what encoding/json calls valid, is an object, and breaks no limit; a refusal
// of valid JSON names a limit, never the syntax. What it read of an accepted body is what encoding/json
// reads.
func FuzzScan(f *testing.F) {
	addBodies(f)
	f.Fuzz(func(t *testing.T, route uint8, body []byte) {
		before := bytes.Clone(body)
		var b Body
		r := Route(route % uint8(NumRoutes))
		err := b.Scan(r, body)
		require.Equal(t, before, body)
		valid := json.Valid(body)
		var refusal *BodyError
		if errors.As(err, &refusal) {
			require.NotEmpty(t, refusal.Message)
			if valid {
				require.False(t, isSyntax(refusal.Message), "%s: %s", body, refusal)
			}
			return
		}
		require.NoError(t, err)
		require.True(t, valid, "%q", body)
		checkScanned(t, r, &b, body)
	})
}

// isSyntax reports whether a refusal says that the body is no JSON.
func isSyntax(message string) bool {
	return strings.HasPrefix(message, "body is not valid JSON") || strings.HasPrefix(message, "body is empty")
}

// checkScanned compares an accepted body with what the standard library makes of it.
func checkScanned(t *testing.T, r Route, b *Body, body []byte) {
	seen := map[string]string{}
	for _, m := range rawMembers(t, body) {
		if _, double := seen[m.key]; double {
			// its decoder merges what is not UTF-8
			require.True(t, strings.ContainsRune(m.key, utf8.RuneError), "field %q twice", m.key)
			return
		}
		seen[m.key] = m.value
	}
	var model *string
	if raw, ok := seen["model"]; ok && utf8.ValidString(raw) && !strings.Contains(raw, `\u`) {
		require.NoError(t, json.Unmarshal([]byte(raw), &model))
		require.Equal(t, model != nil, b.HasModel)
		if model != nil {
			require.Equal(t, *model, string(b.Model))
		}
	}
	require.GreaterOrEqual(t, b.Choices, 1)
	require.LessOrEqual(t, b.N, maxN)
	require.LessOrEqual(t, b.MaxTokens, int64(maxMaxTokens))
	if r.Generates() {
		require.Equal(t, seen["stream"] == "true", b.Stream)
	}
	if r == Completions {
		require.Len(t, seen["prompt"], b.PromptBytes)
		checkIDs(t, b, seen["prompt"])
	}
}

// checkIDs compares the token count of an id prompt with the standard library's.
func checkIDs(t *testing.T, b *Body, prompt string) {
	var ids []int
	if json.Unmarshal([]byte(prompt), &ids) == nil && len(ids) > 0 && !strings.Contains(prompt, "null") {
		require.Equal(t, len(ids), b.PromptTokens)
	}
	var lists [][]int
	if json.Unmarshal([]byte(prompt), &lists) == nil && len(lists) > 0 && !strings.Contains(prompt, "null") {
		require.Equal(t, len(lists)*b.N, b.Choices)
	}
}

// RC1: a plain run ends where the rule for single bytes says.
func FuzzPlain(f *testing.F) {
	f.Add([]byte("short"), 0)
	f.Add([]byte(strings.Repeat("x", 16+3*block)+"\\"), 3)
	f.Add([]byte(strings.Repeat("\u65e5", 16+3*block)+"\x1f"), 1)
	f.Fuzz(func(t *testing.T, b []byte, from int) {
		from = min(max(from, 0), len(b))
		require.Equal(t, plainByBytes(b, from), plain(b, from))
	})
}

// FuzzSplice: what is left is the same object without our members, byte for byte where it stays.
func FuzzSplice(f *testing.F) {
	addBodies(f)
	f.Fuzz(func(t *testing.T, _ uint8, body []byte) {
		var b Body
		if b.Scan(Detokenize, body) == nil {
			checkSplice(t, body)
			require.True(t, json.Valid(AppendField(nil, b.Spliced(nil, body), "added", []byte("1"))))
		}
	})
}

// FuzzParseUsage: never panics; on valid JSON it agrees with encoding/json.
func FuzzParseUsage(f *testing.F) {
	f.Add([]byte(`{"usage":{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_to` +
		`kens":2}}}`))
	f.Add([]byte("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3}}\n\n"))
	f.Add([]byte(`{"usage":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, ok := ParseUsage(b)
		var want struct {
			Usage *struct {
				PromptTokens *int `json:"prompt_tokens"`
			} `json:"usage"`
		}
		if !ok || json.Unmarshal(b, &want) != nil ||
			bytes.Count(bytes.ToLower(b), []byte("prompt_tokens")) != 1 || bytes.Contains(b, []byte(`\u`)) {
			return
		}
		if bytes.Count(bytes.ToLower(b), []byte(`"usage"`)) == 1 {
			require.NotNil(t, want.Usage)
			require.NotNil(t, want.Usage.PromptTokens)
			require.Equal(t, *want.Usage.PromptTokens, got.PromptTokens)
		}
	})
}
