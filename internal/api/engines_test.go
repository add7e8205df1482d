package api

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
)

// calls remembers the control calls that reach the engines.
type calls []msg.EngineCall

func (c *calls) CallEngines(_ context.Context, q *msg.EngineCall) ([]client.RankAnswer, error) {
	*c = append(*c, *q)
	if len(q.Ranks) > 1 {
		return nil, nil
	}
	return []client.RankAnswer{{Pool: q.App, Status: http.StatusOK}}, nil
}

// TestControlCalls passes on the control calls of the table, with their query and body, and no other path of
// an engine.
func TestControlCalls(t *testing.T) {
	var got calls
	h := NewServer(Config{Engines: &got}).Handler()
	call := func(path, more, body string) (int, string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost,
			"http://127.0.0.1/api/v1/apps/chat/call?path="+url.QueryEscape(path)+more,
			strings.NewReader(body)))
		return w.Code, w.Body.String()
	}
	status, text := call("/sleep?level=1", "&ranks=0/1", "")
	require.Equal(t, http.StatusOK, status, text)
	assert.Equal(t, calls{{
		App: "chat", Ranks: []string{"0/1"}, Method: "POST", Path: "/sleep?level=1",
		Body: []byte{},
	}}, got)
	var answers client.RankAnswers
	require.NoError(t, json.Unmarshal([]byte(text), &answers))
	assert.Equal(t, []client.RankAnswer{{Pool: "chat", Status: http.StatusOK}}, answers.Answers)
	for _, c := range []struct {
		path, more, body string
		status           int
		says             string
	}{
		{"/collective_rpc", "", "", http.StatusForbidden, "no control call that dpserve passes on"},
		{"/v1/chat/completions", "", "", http.StatusForbidden, "/wake_up"},
		{"/sleep/../collective_rpc", "", "", http.StatusForbidden, "no control call"},
		{"//sleep", "", "", http.StatusForbidden, "no control call"},
		{"http://10.0.0.1/sleep", "", "", http.StatusForbidden, "no control call"},
		{"/sleep", "&method=GET", "", http.StatusBadRequest, "use POST"},
		{"/sleep", "&ranks=1", "", http.StatusBadRequest, "GROUP/RANK"},
		{"/sleep", "&ranks=0/1,0/2", "", http.StatusNotFound, "no such rank of chat runs"},
		{"/sleep", "", "{", http.StatusBadRequest, "the body is no JSON"},
	} {
		status, text := call(c.path, c.more, c.body)
		assert.Equal(t, c.status, status, "%s: %s", c.path, text)
		assert.Contains(t, text, c.says)
	}
	assert.Len(t, got, 2)
}
