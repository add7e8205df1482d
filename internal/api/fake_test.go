package api_test

import (
	"cmp"
	"context"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// limit ends a test that hangs; no test depends on its value.
const limit = 20 * time.Second

// backend is a fake node: it records requests and answers from its fields.
type backend struct {
	mu       sync.Mutex
	apps     map[string]client.AppStatus
	deployed []client.DeployRequest
	deleted  []string
	queries  []client.LogQuery
	lines    []client.LogLine
	logError error // returned after lines; nil = io.EOF, or wait if the query follows
	fail     error // returned by every method
	events   []client.Event
	next     chan struct{}
	open     int // number of log streams that are not closed
}

var _ api.Backend = (*backend)(nil)

func newBackend() *backend {
	return &backend{apps: map[string]client.AppStatus{}, next: make(chan struct{})}
}

// Validate reports a fault for every text that contains "faulty".
func (b *backend) Validate(file string, text []byte) ([]app.Warning, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fail != nil {
		return nil, b.fail
	}
	if strings.Contains(string(text), "panic") {
		panic("as the test asked")
	}
	if strings.Contains(string(text), "faulty") {
		return nil, app.Faults{{
			File: file, Line: 3, Col: 5, Path: "applications[0].nmae", Message: "unknown key", Found: "nmae",
			Wanted: "name",
			Hint:   `did you mean "name"?`,
		}}
	}
	return []app.Warning{{File: file, Line: 1, Col: 1, Message: "legal but odd"}}, nil
}

func (b *backend) Deploy(_ context.Context, req client.DeployRequest) (api.DeployResult, error) {
	if _, err := b.Validate(req.File, req.Text); err != nil {
		return api.DeployResult{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.deployed = append(b.deployed, req)
	if req.Revision != nil && *req.Revision != 7 {
		return api.DeployResult{}, problem.New(problem.Conflict, "demo has changed: revision 7, not %d",
			*req.Revision).WithHint("look at the change and deploy again")
	}
	b.apps["demo"] = client.AppStatus{Name: "demo", Status: "DEPLOYING", Revision: 3}
	return api.DeployResult{
		Revision: 8, Apps: map[string]uint64{"demo": 3},
		Changes: []client.Change{{App: "demo", Gone: []string{"0/1 http://h:1"}}},
	}, nil
}

func (b *backend) Plan(_ context.Context, req client.DeployRequest) (client.Plan, []app.Warning, error) {
	warnings, err := b.Validate(req.File, req.Text)
	return client.Plan{
		Revision: 7, Fits: true, Apps: []client.AppPlan{{Change: client.Change{App: "demo"}}},
	}, warnings, err
}

func (b *backend) Apps(context.Context) ([]client.AppStatus, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []client.AppStatus
	for _, a := range b.apps {
		out = append(out, a)
	}
	return out, b.fail
}

func (b *backend) App(ctx context.Context, name string) (client.AppStatus, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if name == "slow" {
		<-ctx.Done()
		return client.AppStatus{}, ctx.Err()
	}
	a, ok := b.apps[name]
	if !ok {
		return a, problem.New(problem.NotFound, "there is no application %q", name).WithHint("there is demo")
	}
	return a, b.fail
}

func (b *backend) Delete(ctx context.Context, name string) error {
	_, err := b.App(ctx, name)
	if err == nil {
		b.deleted = append(b.deleted, name)
	}
	return err
}

func (b *backend) History(ctx context.Context, name string) ([]client.Revision, error) {
	_, err := b.App(ctx, name)
	return []client.Revision{{Revision: 3, IsCurrent: true, From: 1}}, err
}

func (b *backend) AppFile(ctx context.Context, name string, revision uint64) (client.AppFile, error) {
	_, err := b.App(ctx, name)
	return client.AppFile{App: name, Revision: cmp.Or(revision, 3), Text: "applications: []\n"}, err
}

func (b *backend) Rollback(ctx context.Context, name string, to uint64) (api.DeployResult, error) {
	_, err := b.App(ctx, name)
	return api.DeployResult{Apps: map[string]uint64{name: to}}, err
}

func (b *backend) Logs(_ context.Context, q client.LogQuery) (api.LogStream, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fail != nil {
		return nil, b.fail
	}
	b.queries = append(b.queries, q)
	b.open++
	return &stream{b: b, follow: q.Follow, left: slices.Clone(b.lines)}, nil
}

// stream returns one line per call.
type stream struct {
	b      *backend
	follow bool
	left   []client.LogLine
}

func (s *stream) Next(ctx context.Context) ([]client.LogLine, error) {
	if len(s.left) > 0 {
		line := s.left[:1]
		s.left = s.left[1:]
		return line, nil
	}
	switch {
	case s.b.logError != nil:
		return nil, s.b.logError
	case s.follow:
		<-ctx.Done()
		return nil, ctx.Err()
	default:
		return nil, io.EOF
	}
}

func (s *stream) Close() error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.b.open--
	return nil
}

func (b *backend) Events(since uint64) ([]client.Event, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []client.Event
	for _, e := range b.events {
		if e.Number > since {
			out = append(out, e)
		}
	}
	return out, b.next
}

// happen publishes an event.
func (b *backend) happen(e client.Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e.Number = uint64(len(b.events) + 1)
	b.events = append(b.events, e)
	close(b.next)
	b.next = make(chan struct{})
}

func (b *backend) openStreams() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open
}

// serve runs a server on a free port and returns a client of it.
func serve(t *testing.T, cfg api.Config) (*api.Server, *client.Client) {
	t.Helper()
	cfg.Version = client.BuildInfo{Version: "0.1.0", Commit: "abc", Go: "go1.26"}
	s := api.NewServer(cfg)
	require.NoError(t, s.Attach(listen(t)))
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	c, err := client.New(s.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() {
		c.Close()
		require.NoError(t, s.Close())
		require.NoError(t, <-served)
	})
	return s, c
}
