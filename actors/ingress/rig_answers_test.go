package ingress

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// answer is a client's view of an answer.
type answer struct {
	status int
	header http.Header
	body   string
	err    error // while reading the body
}

func (a answer) code(t *testing.T) string {
	t.Helper()
	var e struct {
		Error struct{ Code, Message, Type string }
	}
	require.NoError(t, json.Unmarshal([]byte(a.body), &e), a.body)
	return e.Error.Code
}

func (g *rig) post(path, body string, headers ...string) answer {
	g.t.Helper()
	return g.postCtx(g.t.Context(), path, body, headers...)
}

func (g *rig) postCtx(ctx context.Context, path, body string, headers ...string) answer {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.url+path, strings.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header[headers[i]] = []string{headers[i+1]}
	}
	return g.do(req)
}

func (g *rig) do(req *http.Request) answer {
	resp, err := g.client.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, header: resp.Header, body: string(raw), err: err}
}

func (g *rig) get(path string, headers ...string) answer {
	req, err := http.NewRequestWithContext(g.t.Context(), http.MethodGet, g.url+path, nil)
	require.NoError(g.t, err)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return g.do(req)
}

const (
	chatBody   = `{"model":"demo","messages":[{"role":"user","content":"hi"}]}`
	streamBody = `{"model":"demo","stream":true,"messages":[{"role":"user","content":"hi"}]}`

	roleChunk = `{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},` +
		`"finish_reason":null}]}`
	emptyChunk = `{"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":null}]}`
	textChunk  = `{"id":"c","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}`
	stopChunk  = `{"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}`
	abortChunk = `{"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}`
	usageChunk = `{"id":"c","choices":[],"usage":{"prompt_tokens":5,"total_tokens":12,` +
		`"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":3}}}`
	busyError = `{"error": {"message": "The engine is currently busy", "type": "Service Unavailable", ` +
		`"param": null, "code": 503}}`
	doneEvent = `[DONE]`

	wholeAnswer = `{"id":"c","choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}],` +
		`"usage":{"prompt_tokens":5,"total_tokens":6,"completion_tokens":1}}`
	cachedAnswer = `{"id":"c","choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}],` +
		`"usage":{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":3}}}`
)
