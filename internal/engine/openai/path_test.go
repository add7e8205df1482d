package openai

import (
	"net/url"
	"path"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCleanPath(t *testing.T) {
	for in, want := range map[string]string{
		"/": "/", "//": "/", "/v1": "/v1", "/v1/": "/v1", "//v1///chat/completions//": "/v1/chat/completions",
		"/a.b/..c/...": "/a.b/..c/...", "/v1/responses/resp_1~x": "/v1/responses/resp_1~x",
		"/v1/models/org:7b@x": "/v1/models/org:7b@x",
	} {
		got, ok := CleanPath(in)
		require.True(t, ok, in)
		assert.Equal(t, want, got)
	}
	for _, in := range []string{
		"", "v1", "/.", "/..", "/v1/../sleep", "/v1/./x", "//..//sleep", "/v1/..", `/v1\sleep`,
		"/v1/%2e%2e/sleep", "/sleep;x", "/sleep\x00", "/a b", "/ä", "/a?b", "/a#b", "/\u2215sleep",
		"/" + strings.Repeat("x", maxPath),
	} {
		_, ok := CleanPath(in)
		assert.False(t, ok, "%q", in)
	}
}

func TestIsDenied(t *testing.T) {
	for _, in := range []string{
		"/sleep", "/Sleep", "/wake_up", "/v1/load_lora_adapter", "/V1/UNLOAD_LORA_ADAPTER", "/flush_cache",
		"/hicache/storage-backend/clear", "/collective_rpc", "/start_profile", "/update_weights_from_disk",
		"/server_info", "/metrics", "/sleep/x", "/reset_prefix_cache", "/scale_elastic_ep", "/abort_request",
		"/pause", "/dumper/start",
	} {
		assert.True(t, IsDenied(in), in)
	}
	for _, in := range []string{
		"/", "/v1", "/v1/chat/completions", "/load", "/generate", "/v1/sleep", "/sleeping",
		"/get_model_info", "/encode", "/v1/embeddings", "/inference/v1/generate",
	} {
		assert.False(t, IsDenied(in), in)
	}
}

// FuzzPath: whatever a client writes for a path, the engine reads the path that the deny list has seen: also
// an engine, or a proxy in front of it, that decodes once more, takes a backslash for a slash, cuts a segment
// at a semicolon, resolves dots, joins slashes or takes no notice of case.
func FuzzPath(f *testing.F) {
	for _, s := range []string{
		"/sleep", "//sleep/", "/v1/../sleep", "/v1/..%2fsleep", "/%73leep", "/%2573leep", "/SLEEP",
		"/sleep;a=b", "/v1%5c..%5csleep", "/v1/%2e%2e/sleep", "/.//sleep", "/v1/load_lora_adapter",
		"/%2fsleep", "/sleep%00", "/x%0d%0aGET%20/sleep", "/sleep%3fx", "/sleep%23",
		"/v1/chat/completions", "/ｓleep", "/a/b/../../sleep",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, sent string) {
		u, err := url.ParseRequestURI(sent)
		if err != nil {
			return
		}
		clean, ok := CleanPath(u.Path)
		if !ok || IsDenied(clean) {
			return
		}
		again := url.URL{Path: clean}
		require.Equal(t, clean, again.EscapedPath(), "written as it is")
		twice, err := url.PathUnescape(clean)
		require.NoError(t, err)
		read, _, _ := strings.Cut(strings.ReplaceAll(twice, `\`, "/"), ";")
		read = strings.ToLower(path.Clean(read))
		require.Equal(t, strings.ToLower(clean), read, "nobody reads another path")
		for p := range denied {
			require.False(t, read == p || strings.HasPrefix(read, p+"/"), "%q reaches %s", sent, p)
		}
		for _, p := range deniedBeginnings {
			require.False(t, strings.HasPrefix(read, p), "%q reaches %s", sent, p)
		}
	})
}
