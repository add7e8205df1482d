package openai

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestRouteOf(t *testing.T) {
	paths := map[string]Route{
		"/v1/completions": Completions, "/v1/chat/completions": Chat, "/tokenize": Tokenize,
		"/detokenize": Detokenize, "/v1/models": Models,
		"": NoRoute, "/": NoRoute, "/v1/completions/": NoRoute, "/v1/embeddings": NoRoute,
		"/V1/models": NoRoute,
	}
	for path, want := range paths {
		assert.Equal(t, want, RouteOf(path), path)
		if want != NoRoute {
			assert.Equal(t, path, want.Path())
		}
	}
	assert.Equal(t, "GET", Models.Method())
	assert.Equal(t, "POST", Chat.Method())
	assert.Equal(t, "chat", Chat.String())
	assert.True(t, Completions.Generates())
	assert.False(t, Tokenize.Generates())
}
