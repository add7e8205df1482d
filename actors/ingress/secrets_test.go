package ingress

import (
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// RP20: engines repeat the request in their errors, in every shape of errors. Above level debug the log has
// status, type, field, length and a hash of the message.
func TestLogsHoldNoPromptOfAnEnginesMessage(t *testing.T) {
	const secret = "open sesame"
	for name, c := range map[string]struct {
		status int
		body   string
	}{
		"vllm": {400, `{"error":{"message":"1 validation error:\n  {'type': 'list_type', ` +
			`'loc': ('body', 'messages'), 'input': '` + secret + `'}",` +
			`"type":"Bad Request","param":"messages","code":400}}`},
		"vllm, 500": {500, `{"error":{"message":"cannot use '` + secret +
			`'","type":"InternalServerError","param":null,"code":500}}`},
		"sglang": {400, `{"object":"error","message":"[{'loc': ('body',), 'input': '` + secret +
			`'}]","type":"BadRequestError","param":null,"code":400}`},
		"a list": {422, `{"detail":[{"type":"list_type","loc":["body","messages"],` +
			`"msg":"Input should be a valid list",` +
			`"input":"` + secret + `"}]}`},
		"a whole body": {400, `{"detail":"{'model': 'demo', 'messages': '` + secret + `'}"}`},
		"a text":       {429, `{"error":"` + secret + `"}`},
		"no json":      {400, secret},
		"elsewhere": {400, `{"error":{"message":"Not Found","type":"` + secret + `","param":"` + secret +
			`","code":"` + secret + `"}}`},
	} {
		for _, level := range []slog.Level{slog.LevelInfo, slog.LevelDebug} {
			for kind, e := range map[string]http.HandlerFunc{
				"answer": replies(c.status, c.body), "event": sends(c.body),
			} {
				t.Run(name+" "+kind+" "+level.String(), func(t *testing.T) {
					t.Parallel()
					g := newRig(t, options{engines: []http.HandlerFunc{e, e}, level: level})
					a := g.post("/v1/chat/completions", streamBody)
					if kind == "answer" {
						assert.NotEqual(t, 200, a.status)
					}
					logs := g.logs.String()
					if level == slog.LevelInfo {
						assert.NotContains(t, logs, secret)
						assert.NotContains(t, logs, "sesame")
					}
					if level == slog.LevelInfo && strings.HasPrefix(name, "vllm") && kind == "answer" {
						assert.Contains(t, logs, "engine_message_hash=")
						assert.Contains(t, logs, "engine_message_bytes=")
						assert.Contains(t, logs, "engine_type=")
					}
					if level == slog.LevelDebug && name == "vllm" && kind == "answer" {
						assert.Contains(t, logs, secret, "debug shows it")
					}
				})
			}
		}
	}
}

// RP20: the log shows a sentence of the engine's own at every level.
func TestLogsShowWhatEnginesSayOfThemselves(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(503, busyError)}, level: slog.LevelDebug})
	g.post("/v1/chat/completions", chatBody, "X-Dpserve-Timeout-Ms", "200")
	assert.Contains(t, g.logs.String(), "The engine is currently busy")
	g = newRig(t, options{engines: []http.HandlerFunc{
		replies(400, `{"error":{"message":"n must be at least 1, got 0.","type":"BadRequestError",`+
			`"param":null,"code":400}}`),
	}})
	g.post("/v1/chat/completions", chatBody)
	assert.Contains(t, g.logs.String(), `engine_message="n must be at least 1, got 0."`)
}

// RP22: a client with its own cache_salt cannot learn from the header which prompts others sent.
func TestCachedTokensTellNothingAcrossSalts(t *testing.T) {
	g := newRig(t, options{
		engines: []http.HandlerFunc{replies(200, wholeAnswer)},
		app:     withRouting("scoring"),
	})
	remembers(t, g.replicas[0])
	cached := func(salt string) string {
		body := `{"model":"demo",` + salt + `"messages":[{"role":"user","content":"` +
			strings.Repeat("a secret plan ", 300) + `"}]}`
		a := g.post("/v1/chat/completions", body)
		assert.Equal(t, 200, a.status)
		return a.header.Get("X-Dpserve-Cached-Tokens")
	}
	assert.Equal(t, "0", cached(`"cache_salt":"alice",`))
	assert.NotEqual(t, "0", cached(`"cache_salt":"alice",`))
	assert.Equal(t, "0", cached(`"cache_salt":"bob",`))
	assert.Equal(t, "0", cached(``))
	assert.NotEqual(t, "0", cached(``))
}
