package main

import (
	"context"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/attach"
	"github.com/dpserve/dpserve/internal/problem"
)

// CC45: `up --attach` waits for an engine that is started later than itself, says once what it waits for, and
// gives up after --attach-wait with exit code 8. It does not wait where waiting does not help.
func TestUpWaitsForLateEngines(t *testing.T) {
	refused := problem.New(problem.Unavailable, "nothing listens: %w",
		&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED})
	noName := problem.New(problem.Unavailable, "no address: %w", &net.DNSError{Err: "no such host"})
	locked := problem.New(problem.Unavailable, "it asks for an API key")
	for name, c := range map[string]struct {
		wait    time.Duration
		answers []error // of the engine, the last one forever
		took    time.Duration
		code    problem.Code
		said    string
	}{
		"there at once": {wait: time.Minute, answers: []error{nil}},
		"late": {
			time.Minute, []error{noName, refused, refused, nil}, 3 * time.Second, "", "no such host",
		},
		"never":          {time.Minute, []error{refused}, time.Minute, problem.Timeout, "refused"},
		"wants a key":    {time.Minute, []error{locked}, 0, problem.Unavailable, ""},
		"shall not wait": {0, []error{refused}, 0, problem.Unavailable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var said []string
				begun, asked := time.Now(), 0
				found, err := awaitURLs(t.Context(), c.wait, []string{"http://a:1"},
					func(context.Context, string) (attach.Found, error) {
						asked++
						return attach.Found{URL: "http://a:1"}, c.answers[min(asked, len(c.answers))-1]
					},
					func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)) })
				assert.Equal(t, c.took, time.Since(begun))
				if c.code == "" {
					require.NoError(t, err)
					assert.Equal(t, "http://a:1", found[0].URL)
				} else {
					assert.Equal(t, c.code, problem.CodeOf(err))
				}
				if c.said == "" {
					assert.Empty(t, said)
				} else {
					assert.Len(t, said, 1)
					assert.Contains(t, strings.Join(said, ""), "waiting for http://a:1, for up to 1m0s: ")
					assert.Contains(t, said[0], c.said)
				}
			})
		})
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errInterrupted)
	_, err := awaitURLs(ctx, time.Minute, []string{"http://a:1"},
		func(context.Context, string) (attach.Found, error) { return attach.Found{}, refused },
		func(string, ...any) {})
	assert.ErrorIs(t, err, errInterrupted)
}
