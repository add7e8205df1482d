package routerapi

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// TestABodyTellsItsRouteByExactNames: engines do not read a field with almost the same name.
func TestABodyTellsItsRouteByExactNames(t *testing.T) {
	for body, want := range map[string]openai.Route{
		`{"messages":[]}`: openai.Chat, `{"prompt":"x"}`: openai.Completions,
		`{"prompt":"x","Messages":[]}`:       openai.Completions,
		`{"prompt":"x", "\u006dessages":[]}`: openai.Chat,
	} {
		route, err := RouteOf("", []byte(body))
		require.NoError(t, err)
		assert.Equal(t, want, route, body)
	}
}

// TestAPromptOfEveryRoute: a prompt is asked about as the body that the route takes, and every path that
// clients post to has a route.
func TestAPromptOfEveryRoute(t *testing.T) {
	text, messages := "hi", `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
	for path, want := range map[string]struct {
		route openai.Route
		body  string
	}{
		"":                     {openai.Completions, `{"model":"m","prompt":"hi"}`},
		"/v1/chat/completions": {openai.Chat, messages},
		"/v1/messages":         {openai.Messages, messages},
		"/v1/responses":        {openai.Responses, `{"model":"m","input":"hi"}`},
		"/generate":            {openai.Generate, `{"model":"m","text":"hi"}`},
		"/v1/embeddings/":      {openai.Embeddings, `{"model":"m","input":"hi"}`},
		"/invocations":         {openai.Other, `{"model":"m"}`},
	} {
		body, at, err := QueryBody(&client.Query{Prompt: &text, Route: path}, "m")
		require.NoError(t, err)
		assert.JSONEq(t, want.body, string(body), path)
		route, err := RouteOf(at, body)
		require.NoError(t, err)
		assert.Equal(t, want.route, route, path)
	}
}

func TestFormulaWithALastResort(t *testing.T) {
	of := func(policy string, weight float64) string {
		return formula(policy, []routing.Term{
			{Name: "not_session_rank", Unit: "none", Weight: weight},
			{Name: "open", Unit: "requests", Weight: 1},
		})
	}
	assert.Equal(t, "not_session_rank (never unless nothing else is left) + open (requests); lowest wins",
		of("session-affinity", 1<<45))
	assert.Equal(t, "2 × not_session_rank + open (requests); lowest wins", of("session-affinity", 2))
}
