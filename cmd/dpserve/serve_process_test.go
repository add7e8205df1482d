package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// answer is what a client sees of an answer, without what differs from request to request.
type answer struct {
	Object  string
	Model   string
	Choices []struct {
		Message      struct{ Role, Content string }
		FinishReason string `json:"finish_reason"`
	}
	Usage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	}
}

// call calls a route of the endpoint of a process.
func (p *foreground) call(t *testing.T, method, route string, body []byte) []byte {
	t.Helper()
	url := "http://" + p.endpoint(t) + route
	req, err := http.NewRequestWithContext(t.Context(), method, url, bytes.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: scriptWait}
	r, err := c.Do(req)
	require.NoError(t, err)
	defer func() { _ = r.Body.Close() }()
	text, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.Equal(t, 200, r.StatusCode, string(text))
	return text
}

// ask sends one request to the endpoint of a process.
func (p *foreground) ask(t *testing.T, model string) answer {
	t.Helper()
	body, err := json.Marshal(map[string]any{
		"model": model, "max_tokens": 8, "seed": 1, "temperature": 0,
		"messages": []map[string]string{{"role": "user", "content": "Hello"}},
	})
	require.NoError(t, err)
	text := p.call(t, http.MethodPost, "/v1/chat/completions", body)
	var a answer
	require.NoError(t, json.Unmarshal(text, &a))
	require.NotEmpty(t, a.Choices, string(text))
	return a
}

// models lists the names that an endpoint serves.
func (p *foreground) models(t *testing.T) []string {
	t.Helper()
	var list struct{ Data []struct{ ID string } }
	require.NoError(t, json.Unmarshal(p.call(t, http.MethodGet, "/v1/models", nil), &list))
	var out []string
	for _, m := range list.Data {
		out = append(out, m.ID)
	}
	return out
}

// `serve MODEL` is `up FILE` with the file that it prints: the same endpoint, and a deploy of the file finds
// nothing to change.
func TestEN1ServeIsAsItsFile(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts real nodes")
	}
	words := []string{
		"serve", "acme/tiny-8b", "--dp-size", "4", "--engine", "sim",
		"--served-model-name", "tiny", "tiny-8b",
		"--max-num-seqs", "8", "--tensor-parallel-size=2", "--no-enable-prefix-caching",
	}
	began := time.Now()
	p := startUp(t, words...)
	p.Expect(harness.CachingOff)
	first := p.ask(t, "tiny")
	t.Logf("serve to an answer of 8 tokens: %.2f s (goal: a first token within 1.5 s on an idle machine)",
		time.Since(began).Seconds())
	assert.Equal(t, "tiny", first.Model)
	models := p.models(t)
	assert.Equal(t, []string{"tiny", "tiny-8b"}, models)

	_, text, ok := strings.Cut(p.stdout.String(), "# the app.yaml this stands for\n")
	require.True(t, ok, p.stdout.String())
	text, _, ok = strings.Cut(text, "endpoint ")
	require.True(t, ok)
	assert.Equal(t, printServe(t, words[1:]...), text, "--print prints what runs")
	path := filepath.Join(t.TempDir(), "app.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	addr := strings.TrimPrefix(p.printed(t, "admin "), "admin http://")
	bin := asDpserve(t)
	shell(t, "DPSERVE_ADDR="+addr+" "+bin+" plan --exit-code "+path) // exit code 3 if anything differs
	p.interrupt(t)

	p = startUp(t, "up", path)
	p.Expect(harness.CachingOff)
	assert.Equal(t, first, p.ask(t, "tiny"))
	assert.Equal(t, models, p.models(t))
	p.interrupt(t)
}
