package openai

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestControlOf tells calls that the admin port passes on from those that nobody may make through dpserve,
// and both from the routes of clients.
func TestControlOf(t *testing.T) {
	for path, allowed := range map[string]bool{
		"/sleep": true, "/v1/load_lora_adapter": true, "/flush_cache": true, "/abort_request": true,
		"/collective_rpc": false, "/update_weights_from_disk": false, "/hicache/storage": false,
		"/hicache": false, "/scale_elastic_ep": false,
	} {
		c := ControlOf(path)
		require.NotNil(t, c, path)
		assert.Equal(t, allowed, c.IsAllowed(), path)
	}
	for r := Completions; int(r) < NumRoutes; r++ {
		assert.Nil(t, ControlOf(r.Path()), "a route of clients")
	}
	for _, path := range []string{"", "/", "/health", "/v1/responses", "/sleeping", "/generate"} {
		assert.Nil(t, ControlOf(path), path)
	}
	seen := map[string]bool{}
	for _, c := range controlCalls {
		assert.False(t, seen[c.Path], "%s is there twice", c.Path)
		seen[c.Path] = true
		assert.False(t, c.Effect != NoEffect && !c.IsAllowed(), c.Path)
	}
	assert.Contains(t, AllowedControls(), "/wake_up")
}
