package openai

import (
	"net/http"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestRouteOf(t *testing.T) {
	paths := map[string]Route{
		"/v1/completions": Completions, "/v1/chat/completions": Chat, "/tokenize": Tokenize,
		"/detokenize": Detokenize, "/v1/models": Models, "/v1/embeddings": Embeddings,
		"/v1/responses": Responses, "/v1/messages": Messages, "/v1/messages/count_tokens": CountTokens,
		"/generate": Generate, "/v1/audio/transcriptions": Transcriptions,
	}
	for path, want := range paths {
		assert.Equal(t, want, RouteOf(path), path)
		assert.Equal(t, path, want.Path())
	}
	for path, want := range map[string]Route{
		"/rerank": Rerank, "/v2/rerank": Rerank, "/score": Score, "/v1/responses/resp_1": ResponseRead,
		"/v1/responses/resp_1/cancel":        ResponseCancel,
		"/v1/responses/resp_1/input_items":   ResponseItems,
		"/v1/responses/cancel":               ResponseRead, // an id
		"/v1/responses/resp_1/cancel/cancel": NoRoute, "/v1/responses/a/b": NoRoute,
		"/v1/responses/": NoRoute, "/v1/responses//cancel": NoRoute, "/v1/responses/{id}/other": NoRoute,
		"": NoRoute, "/": NoRoute, "/v1/completions/": NoRoute, "/V1/models": NoRoute,
		"/inference/v1/generate": NoRoute,
	} {
		assert.Equal(t, want, RouteOf(path), path)
	}
	assert.Equal(t, ResponseDelete, ResponseRead.ForMethod("DELETE"))
	assert.Equal(t, ResponseRead, ResponseRead.ForMethod("PUT"))
	assert.Equal(t, Chat, Chat.ForMethod("DELETE"))
	assert.Equal(t, "resp_1", ResponseIDOf("/v1/responses/resp_1/cancel"))
	assert.Empty(t, ResponseIDOf("/v1/responses"))
	assert.Equal(t, "GET", Models.Method())
	assert.Equal(t, "POST", Chat.Method())
	assert.Equal(t, "chat", Chat.String())
}

// TestTheTableOfRoutes: each row has what the code takes for granted.
func TestTheTableOfRoutes(t *testing.T) {
	seen := map[string]bool{}
	for r := Completions; int(r) < NumRoutes; r++ {
		row := routes[r]
		assert.True(t, row.method == http.MethodGet || row.method == http.MethodPost || r == ResponseDelete)
		assert.True(t, row.computes || !row.generates, "what generates computes: %s", row.name)
		assert.True(t, row.method == http.MethodPost || !row.computes, row.name)
		for _, path := range row.paths {
			clean, ok := CleanPath(path)
			assert.True(t, path == clean && ok || slices.Contains(row.paths, path) && r > Responses, path)
			assert.False(t, IsDenied(path), path)
			assert.False(t, seen[row.method+path], path)
			seen[row.method+path] = true
		}
		assert.Equal(t, r == Other || r == OtherRead, len(row.paths) == 0, row.name)
	}
	assert.Equal(t, Other.String(), OtherRead.String())
}
