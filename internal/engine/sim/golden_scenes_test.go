package sim

import (
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// scene is what happens around a request of the fixtures.
type scene struct {
	before func(*testing.T, *Server) (after func())
	during func(*testing.T, *Server) // the request is sent, its answer is not read
}

// scenes are the fixtures that need more than their request.
func scenes() map[string]scene {
	paused := scene{before: func(t *testing.T, s *Server) func() {
		control(t, s, "/pause?mode=wait", "")
		return func() { control(t, s, "/resume", "") }
	}}
	return map[string]scene{
		"http_dev/is_paused_1":         paused,
		"http_dev/health_while_paused": paused,
		"http_dev/request_while_paused": {
			before: func(t *testing.T, s *Server) func() {
				control(t, s, "/pause?mode=wait", "")
				return func() {}
			},
			during: func(t *testing.T, s *Server) {
				eventually(t, func() bool { return s.ranks[0].holds() > 0 })
				control(t, s, "/resume", "")
			},
		},
		"http_dev/paused_abort_stream": {during: func(t *testing.T, s *Server) {
			awaitRunning(t, s)
			control(t, s, "/pause?mode=abort", "")
			control(t, s, "/resume", "")
		}},
		"http_dev/aborted_by_api_stream": {during: func(t *testing.T, s *Server) {
			awaitRunning(t, s)
			control(t, s, "/abort_requests", `{"request_ids":["cmpl-abort-me"]}`)
		}},
		"http_dev/aborted_by_api_nonstream": {during: func(t *testing.T, s *Server) {
			awaitRunning(t, s)
			control(t, s, "/abort_requests", `{"request_ids":["cmpl-abort-me2"]}`)
		}},
		"http_dev/abort_requests_all_with_missing_list": {before: func(t *testing.T, s *Server) func() {
			conn := begin(t, s, "/v1/completions", `{"prompt":"x","max_tokens":400,"ignore_eos":true}`)
			awaitRunning(t, s)
			return func() {
				body := string(readAnswer(t, http.MethodPost, conn).body)
				assert.Contains(t, body, `"finish_reason":"abort"`)
				require.NoError(t, conn.Close())
			}
		}},
		"http_dev/pause": {before: func(t *testing.T, s *Server) func() {
			return func() { control(t, s, "/resume", "") }
		}},
		"http_dev/pause_abort": {before: func(t *testing.T, s *Server) func() {
			return func() { control(t, s, "/resume", "") }
		}},
	}
}

// holds is how many sequences wait for the end of a pause.
func (r *rank) holds() int {
	r.inMu.Lock()
	defer r.inMu.Unlock()
	return len(r.held)
}

// awaitRunning waits until an answer is being written.
func awaitRunning(t *testing.T, s *Server) {
	t.Helper()
	before := s.Stats().Tokens
	eventually(t, func() bool { return s.ranks[0].stats().Running > 0 && s.Stats().Tokens > before+2 })
}

// begin sends a request whose answer is not read yet.
func begin(t *testing.T, s *Server, path, body string) net.Conn {
	t.Helper()
	conn, err := dial(t, s)
	require.NoError(t, err)
	_, err = io.WriteString(conn, strings.Join([]string{
		"POST " + path + " HTTP/1.1", "Host: engine", "Connection: close", "Content-Type: application/json",
		"Content-Length: " + strconv.Itoa(len(body)), "", body,
	}, "\r\n"))
	require.NoError(t, err)
	return conn
}

// control sends a request that has to succeed.
func control(t *testing.T, s *Server, path, body string) {
	t.Helper()
	conn := begin(t, s, path, body)
	defer func() { require.NoError(t, conn.Close()) }()
	require.Equal(t, http.StatusOK, readAnswer(t, http.MethodPost, conn).status)
}
