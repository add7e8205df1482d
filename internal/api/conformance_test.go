package api_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/test/ports"
)

func TestClientAndServerAgree(t *testing.T) {
	b := newBackend()
	s, c := serve(t, api.Config{Backend: b})
	ctx := t.Context()

	v, err := c.Version(ctx)
	require.NoError(t, err)
	assert.Equal(t, client.BuildInfo{Version: "0.1.0", Commit: "abc", Go: "go1.26"}, v)
	require.NoError(t, c.Healthz(ctx))

	apps, err := c.Apps(ctx)
	require.NoError(t, err)
	assert.Empty(t, apps)
	warnings, err := c.Validate(ctx, "my app.yaml", []byte("fine"))
	require.NoError(t, err)
	odd := client.Fault{File: "my app.yaml", Line: 1, Col: 1, Message: "legal but odd"}
	assert.Equal(t, []client.Fault{odd}, warnings)

	seven := uint64(7)
	want := client.DeployRequest{File: "a&b.yaml", Text: []byte("fine"), Revision: &seven, Prune: true}
	res, err := c.Deploy(ctx, want)
	require.NoError(t, err)
	assert.Equal(t, want, b.deployed[0])
	assert.Equal(t, client.DeployResult{
		Revision: 8, Apps: map[string]uint64{"demo": 3},
		Changes: []client.Change{{App: "demo", Gone: []string{"0/1 http://h:1"}}},
	}, res)

	status := client.AppStatus{
		Name: "demo", Status: "RUNNING", Revision: 3,
		Units: []client.UnitStatus{
			{Unit: "demo/0", Since: time.Unix(1, 0).UTC(), Ranks: []client.RankStatus{{Rank: 3}}},
		},
	}
	b.apps["demo"] = status
	got, err := c.App(ctx, "demo")
	require.NoError(t, err)
	assert.Equal(t, status, got)
	apps, err = c.Apps(ctx)
	require.NoError(t, err)
	assert.Equal(t, []client.AppStatus{status}, apps)
	revisions, err := c.History(ctx, "demo")
	require.NoError(t, err)
	assert.Equal(t, []client.Revision{{Revision: 3, IsCurrent: true, From: 1}}, revisions)
	for _, at := range []uint64{0, 2} {
		f, err := c.AppFile(ctx, "demo", at)
		require.NoError(t, err)
		assert.Equal(t, client.AppFile{App: "demo", Revision: cmp.Or(at, 3), Text: "applications: []\n"}, f)
		res, err := c.Rollback(ctx, "demo", at)
		require.NoError(t, err)
		assert.Equal(t, map[string]uint64{"demo": at}, res.Apps)
	}
	for _, path := range []string{"/revisions/0", "/revisions/x", "/rollback?to=-1", "/rollback?at=1"} {
		method := http.MethodGet
		if strings.HasPrefix(path, "/rollback") {
			method = http.MethodPost
		}
		url := "http://" + s.Addr().String() + "/api/v1/apps/demo" + path
		r, err := http.NewRequestWithContext(ctx, method, url, http.NoBody)
		require.NoError(t, err)
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		assert.Equal(t, http.StatusBadRequest, answer.StatusCode, path)
	}
	_, err = c.Rollback(ctx, "nope", 0)
	assert.Equal(t, client.CodeNotFound, client.CodeOf(err))
	require.NoError(t, c.Delete(ctx, "demo"))
}

// Code, message, hint, details and faults are the same on both sides.
func TestErrorsAreEqualOnBothSides(t *testing.T) {
	b := newBackend()
	_, c := serve(t, api.Config{Backend: b})
	_, err := c.Deploy(t.Context(), client.DeployRequest{File: "app.yaml", Text: []byte("faulty")})
	_, direct := b.Validate("app.yaml", []byte("faulty"))
	var want app.Faults
	var got *client.Error
	require.ErrorAs(t, direct, &want)
	require.ErrorAs(t, err, &got)
	faults := make([]client.Fault, len(want))
	for i, f := range want {
		faults[i] = client.Fault(f)
	}
	assert.Equal(t, client.Error{
		Status: 400, Code: client.CodeInvalidArgument,
		Message: want.Problem().Message, Hint: want.Problem().Hint,
		Details: want.Problem().Details, Faults: faults,
	}, *got)

	codes := map[problem.Code]string{
		problem.InvalidArgument:  client.CodeInvalidArgument,
		problem.Unauthenticated:  client.CodeUnauthenticated,
		problem.PermissionDenied: client.CodePermissionDenied, problem.NotFound: client.CodeNotFound,
		problem.SlowRequest: client.CodeSlowRequest, problem.Conflict: client.CodeConflict,
		problem.TooLarge: client.CodeTooLarge, problem.Unplaceable: client.CodeUnplaceable,
		problem.QuotaExceeded: client.CodeQuotaExceeded, problem.HeaderTooLarge: client.CodeHeaderTooLarge,
		problem.Internal: client.CodeInternal, problem.Upstream: client.CodeUpstream,
		problem.Overloaded: client.CodeOverloaded, problem.Unavailable: client.CodeUnavailable,
		problem.Timeout: client.CodeTimeout,
	}
	for code, name := range codes {
		b.fail = problem.New(code, "message of %s", code).WithHint("hint").WithDetails("one", "two")
		_, err := c.Apps(t.Context())
		require.ErrorAs(t, err, &got)
		assert.Equal(t, client.Error{
			Status: problem.HTTPStatus(code), Code: name, Message: "message of " + name, Hint: "hint",
			Details: []string{"one", "two"},
		}, *got)
	}
	b.fail = errors.New("plain")
	_, err = c.Apps(t.Context())
	assert.Equal(t, client.CodeInternal, client.CodeOf(err))
	assert.Equal(t, "plain", err.Error())
}

func TestDeployConflict(t *testing.T) {
	_, c := serve(t, api.Config{Backend: newBackend()})
	six := uint64(6)
	_, err := c.Deploy(t.Context(), client.DeployRequest{Text: []byte("fine"), Revision: &six})
	assert.Equal(t, client.CodeConflict, client.CodeOf(err))
}

func TestLogs(t *testing.T) {
	b := newBackend()
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	b.lines = []client.LogLine{
		{Time: at, App: "demo", Group: 0, Rank: 3, Stream: "stdout", Text: "two\nlines  and spaces"},
		{Time: at, App: "demo", Group: 1, Rank: 0, Stream: "stderr", Text: ""},
	}
	_, c := serve(t, api.Config{Backend: b})
	q := client.LogQuery{App: "demo", Group: 1, Rank: 0, Since: at, Tail: 20}
	r, err := c.Logs(t.Context(), q)
	require.NoError(t, err)
	text, err := io.ReadAll(r)
	require.NoError(t, err)
	require.NoError(t, r.Close())
	assert.Equal(t,
		"2026-01-02T03:04:05.000000006Z demo/0/3 stdout two lines  and "+
			"spaces\n2026-01-02T03:04:05.000000006Z demo/1/0 stderr \n", string(text))
	assert.Equal(t, q, b.queries[0])

	all := client.LogQuery{App: "demo", Group: client.AllRanks, Rank: client.AllRanks, Tail: client.AllLines}
	r, err = c.Logs(t.Context(), all)
	require.NoError(t, err)
	require.NoError(t, r.Close())
	assert.Equal(t, all, b.queries[1])
	assert.Eventually(t, func() bool { return b.openStreams() == 0 }, limit, time.Millisecond)
}

// A log that breaks off, and one whose server stops, end with an error. A client that leaves frees its
// stream.
func TestCutLogs(t *testing.T) {
	b := newBackend()
	b.lines = []client.LogLine{{App: "demo", Stream: "stdout", Text: "first"}}
	s, c := serve(t, api.Config{Backend: b})
	follow := client.LogQuery{App: "demo", Group: -1, Rank: -1, Tail: -1, Follow: true}

	left, err := c.Logs(t.Context(), follow)
	require.NoError(t, err)
	_, err = io.ReadFull(left, make([]byte, 10))
	require.NoError(t, err)
	require.NoError(t, left.Close())
	assert.Eventually(t, func() bool { return b.openStreams() == 0 }, limit, time.Millisecond,
		"the server still follows for a client that left")

	stopped, err := c.Logs(t.Context(), follow)
	require.NoError(t, err)
	go func() { _ = s.Close() }()
	_, err = io.ReadAll(stopped)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.NoError(t, stopped.Close())

	b = &backend{lines: b.lines, logError: errors.New("the ring is gone")}
	_, c = serve(t, api.Config{Backend: b})
	broken, err := c.Logs(t.Context(), follow)
	require.NoError(t, err)
	text, err := io.ReadAll(broken)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	assert.Contains(t, string(text), "stdout first")
	require.NoError(t, broken.Close())
	assert.Eventually(t, func() bool { return b.openStreams() == 0 }, limit, time.Millisecond)
}

func TestEvents(t *testing.T) {
	b := newBackend()
	_, c := serve(t, api.Config{Backend: b})
	rank := 0
	b.happen(client.Event{Kind: "deployed", App: "other"})
	b.happen(client.Event{Kind: "deployed", App: "demo", Time: time.Unix(1, 0).UTC()})
	b.happen(client.Event{
		Kind: "unit", App: "demo", Unit: "demo/0", Rank: &rank, Epoch: 4, Phase: "fenced", Reason: "exit 9",
	})
	var got []client.Event
	for e, err := range c.Events(t.Context(), "demo", 1) {
		require.NoError(t, err)
		got = append(got, e)
		if len(got) == 2 {
			b.happen(client.Event{Kind: "gone", App: "demo"}) // while the stream is open
		}
		if len(got) == 3 {
			break
		}
	}
	assert.Equal(t, append(b.events[1:3:3], client.Event{Number: 4, Kind: "gone", App: "demo"}), got)
	past, err := c.PastEvents(t.Context(), "demo")
	require.NoError(t, err)
	assert.Equal(t, got, past)
}

func TestEventsEndWithTheServerAndTheContext(t *testing.T) {
	b := newBackend()
	b.happen(client.Event{Kind: "deployed"})
	s, c := serve(t, api.Config{Backend: b})
	var last error
	for _, err := range c.Events(t.Context(), "", 0) {
		if err == nil {
			require.NoError(t, s.Close())
		}
		last = err
	}
	require.Equal(t, client.CodeUnavailable, client.CodeOf(last))
	assert.Contains(t, last.Error(), "the event stream of http://127.0.0.1:")

	_, c = serve(t, api.Config{Backend: b})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, err := range c.Events(ctx, "", 0) {
		cancel()
		last = err
	}
	require.ErrorIs(t, last, context.Canceled)
}

// The 65th follower is refused with a reason, and the API still answers.
func TestStreamsAreBounded(t *testing.T) {
	b := newBackend()
	_, c := serve(t, api.Config{Backend: b})
	follow := client.LogQuery{App: "demo", Follow: true}
	for range 64 {
		r, err := c.Logs(t.Context(), follow)
		require.NoError(t, err)
		defer func() { require.NoError(t, r.Close()) }()
	}
	_, err := c.Logs(t.Context(), follow)
	require.Equal(t, client.CodeOverloaded, client.CodeOf(err))
	require.NoError(t, c.Healthz(t.Context()))
}

func TestNoServerAnswers(t *testing.T) {
	addr := ports.TakeAddr(t)
	c, err := client.New(addr)
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Apps(t.Context())
	var p *client.Error
	require.ErrorAs(t, err, &p)
	assert.Equal(t, client.CodeUnavailable, p.Code)
	assert.Equal(t,
		fmt.Sprintf("no answer from http://%s: dial tcp %s: connect: connection refused", addr,
			addr), p.Message)
	assert.Equal(t, "is dpserve running? start it with `dpserve start`, or name another node with --addr or "+
		"DPSERVE_ADDR", p.Hint)
	_, err = c.Logs(t.Context(), client.LogQuery{App: "demo"})
	assert.Equal(t, client.CodeUnavailable, client.CodeOf(err))
}

func TestClientTimeout(t *testing.T) {
	_, c := serve(t, api.Config{Backend: newBackend()})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := c.App(ctx, "slow")
	require.Equal(t, client.CodeTimeout, client.CodeOf(err))
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// Answers of other servers give an error that says so and does not print their bodies.
func TestOtherServersAreRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		status  int
		body    string
		message string
	}{
		"html":     {404, "<html>secret</html>", "%s is not a dpserve admin api (status 404)"},
		"openai":   {200, `{"object":"list"}`, "%s is not a dpserve admin api (status 200)"},
		"redirect": {302, "", "%s is not a dpserve admin api (status 302)"},
		"other version": {
			200, `{"apiVersion":"dpserve/v9"}`, "%s speaks dpserve/v9, this command dpserve/v1",
		},
		"no error": {500, `{"apiVersion":"dpserve/v1"}`, "%s is not a dpserve admin api (status 500)"},
	} {
		t.Run(name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Location", "http://elsewhere.invalid/")
				w.WriteHeader(tc.status)
				_, _ = io.WriteString(w, tc.body)
			}))
			defer srv.Close()
			c, err := client.New(srv.URL + "/")
			require.NoError(t, err)
			defer c.Close()
			_, err = c.Apps(t.Context())
			require.Equal(t, client.CodeUpstream, client.CodeOf(err))
			assert.Equal(t, fmt.Sprintf(tc.message, srv.URL), err.Error())
		})
	}
}

func TestClientAddresses(t *testing.T) {
	for addr, want := range map[string]string{
		"":                      "http://127.0.0.1:8265",
		"127.0.0.1:9":           "http://127.0.0.1:9",
		"[::1]:9":               "http://[::1]:9",
		"https://host:9/":       "https://host:9",
		"http://host":           "http://host",
		"ftp://host":            "",
		"http://host:9/api":     "",
		"http://host:9?x=1":     "",
		"http://user:pw@host:9": "",
		"http://":               "",
		"host:not-a-port":       "",
	} {
		c, err := client.New(addr)
		if want == "" {
			assert.Equal(t, client.CodeInvalidArgument, client.CodeOf(err), addr)
			continue
		}
		require.NoError(t, err, addr)
		assert.Equal(t, want, c.Addr())
	}
}

func TestAServerWithoutServe(t *testing.T) {
	unserved := api.NewServer(api.Config{Backend: newBackend()})
	require.Error(t, unserved.Serve())
	require.NoError(t, unserved.Attach(listen(t)))
	require.NoError(t, unserved.Close())
	require.NoError(t, unserved.Close())
	require.Error(t, unserved.Attach(listen(t)))
}

// listen binds a free port.
func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return l
}
