package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/server"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/parallel"
)

// cli is a command line whose streams, cluster and node are fakes.
type cli struct {
	*env
	cluster  *fakeCluster
	node     *fakeNode
	asked    []string // addresses of clients
	stdin    *strings.Reader
	out, err parallel.Buffer
}

func newCLI(t *testing.T) *cli {
	t.Helper()
	c := &cli{cluster: &fakeCluster{}, node: newFakeNode(), stdin: strings.NewReader("")}
	streams := &ioStreams{
		In: c.stdin, Out: &c.out, Err: &c.err, Color: true,
		Size: func() (width, height int) { return defaultWidth, defaultHeight },
	}
	c.env = newEnv(streams, newInterrupts())
	home := t.TempDir()
	c.getenv = func(name string) string { return map[string]string{"HOME": home}[name] }
	c.newAdmin = func(addr string, _ ...client.Option) (admin, error) {
		c.asked = append(c.asked, addr)
		return c.cluster, nil
	}
	c.newNode = func(config server.Config) (node, error) { c.node.config = config; return c.node, nil }
	return c
}

func (c *cli) stdout() string { return c.out.String() }
func (c *cli) stderr() string { return c.err.String() }

// interrupt sends the first signal, then the second.
func (c *cli) interrupt() {
	select {
	case <-c.sig.first:
		close(c.sig.second)
	default:
		close(c.sig.first)
	}
}

// interruptOnce sends one signal, at the first call of a fake.
func (c *cli) interruptOnce(call int) {
	if call == 0 {
		c.interrupt()
	}
}

// file writes a temporary app.yaml and returns its path.
func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "app.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// decode reads a document of -o json, which begins with its version.
func decode[T any](t *testing.T, text string) (doc T) {
	t.Helper()
	assert.True(t, strings.HasPrefix(text, "{\n  \"apiVersion\": \"dpserve/v1\",\n"), text)
	require.NoError(t, json.Unmarshal([]byte(text), &doc), text)
	return doc
}

// fakeCluster answers as the admin API does. Each call of Apps returns the next element of script; the last
// one repeats.
type fakeCluster struct {
	mu       sync.Mutex
	script   [][]client.AppStatus
	down     error   // returned by every call
	failures []error // of the next calls of Apps, Nodes, Drain, RotateKey and Logs; nil = it answers
	deployed []client.DeployRequest
	deleted  []string
	planned  []client.DeployRequest
	nodes    fakeNodes
	asked    []client.LogQuery
	logs     []io.Reader      // the next streams of log lines
	events   [][]client.Event // the next streams of events, or lists
	router   fakeRouter
	history  []client.Revision
	// APP REVISION
	rolledBack []string
	added      []string             // APP RANK
	removed    []client.RankRemoval // of edge
	onApps     func(call int)
	calls      int
	deadline   time.Time // of the last Apps
}

func (f *fakeCluster) Apps(ctx context.Context) ([]client.AppStatus, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deadline, _ = ctx.Deadline()
	if f.onApps != nil {
		f.onApps(f.calls)
	}
	f.calls++
	if err := f.fail(); err != nil || len(f.script) == 0 {
		return nil, err
	}
	now := f.script[0]
	if len(f.script) > 1 {
		f.script = f.script[1:]
	}
	return append([]client.AppStatus(nil), now...), nil
}

// fail returns the error of a call. The caller holds mu.
func (f *fakeCluster) fail() error {
	if len(f.failures) == 0 {
		return f.down
	}
	err := f.failures[0]
	f.failures = f.failures[1:]
	return err
}

func (f *fakeCluster) Deploy(_ context.Context, r client.DeployRequest) (client.DeployResult, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deployed = append(f.deployed, r)
	return client.DeployResult{
		Apps: map[string]uint64{"demo": 2},
		Changes: []client.Change{
			{
				App: "demo",
				Impact: client.Impact{
					Effect: client.EffectRestart, Reasons: []string{"engine.args.seed"},
					RanksBefore: 1, RanksAfter: 2,
				},
			},
		},
	}, f.down
}

func (f *fakeCluster) Close() {}

func (f *fakeCluster) Delete(_ context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deleted = append(f.deleted, name)
	return f.down
}

func (f *fakeCluster) History(context.Context, string) ([]client.Revision, error) {
	return f.history, f.down
}

func (f *fakeCluster) AppFile(_ context.Context, app string, revision uint64) (client.AppFile, error) {
	return client.AppFile{App: app, Revision: revision, Text: tiny}, f.down
}

func (f *fakeCluster) Rollback(_ context.Context, app string, to uint64) (client.DeployResult, error) {
	f.rolledBack = append(f.rolledBack, fmt.Sprint(app, " ", to))
	return client.DeployResult{Apps: map[string]uint64{app: 4}}, f.down
}

func (f *fakeCluster) AddRank(_ context.Context, app string, rank []byte) (client.RankChange, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.added = append(f.added, app+" "+string(rank))
	return client.RankChange{App: app, Rank: 2, URL: "http://h:1", Revision: 2}, f.down
}

func (f *fakeCluster) RemoveRank(_ context.Context, app string, r client.RankRemoval,
) (client.RankChange, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.removed = append(f.removed, r)
	seven := 7
	return client.RankChange{App: app, Rank: 1, URL: "http://h:1", Selector: &seven, Revision: 3}, f.down
}

func (f *fakeCluster) Logs(_ context.Context, q client.LogQuery) (io.ReadCloser, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, q)
	if err := f.fail(); err != nil || len(f.logs) == 0 {
		return io.NopCloser(strings.NewReader("demo/0/0 hello\n")), err
	}
	stream := f.logs[0]
	f.logs = f.logs[1:]
	return io.NopCloser(stream), nil
}

func (f *fakeCluster) PastEvents(context.Context, string) ([]client.Event, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.events[0], f.fail()
}

func (f *fakeCluster) Events(context.Context, string, uint64) iter.Seq2[client.Event, error] {
	return func(yield func(client.Event, error) bool) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if err := f.fail(); err != nil {
			yield(client.Event{}, err)
			return
		}
		for _, e := range f.events[0] {
			if !yield(e, nil) {
				return
			}
		}
		f.events = f.events[1:]
		yield(client.Event{}, &client.Error{Code: client.CodeUnavailable, Message: "the event stream ended"})
	}
}

// demo returns an application with one rank per phase.
func demo(status string, revision uint64, phases ...state.Phase) client.AppStatus {
	return named("demo", status, revision, phases...)
}

func named(name, status string, revision uint64, phases ...state.Phase) client.AppStatus {
	a := client.AppStatus{
		Name: name, Status: status, Revision: revision, Model: "demo", Kind: "sim", Coupling: "independent",
		Policy: "power-of-two",
		DPSize: len(phases), Groups: 1, Desired: len(phases),
	}
	for i, p := range phases {
		if p == state.Ready {
			a.Ready++
		}
		a.Units = append(a.Units, client.UnitStatus{
			Unit: fmt.Sprintf("%s/0/%d", name, i), Phase: string(p), Epoch: 1, Attempt: 1,
			Ranks: []client.RankStatus{
				{
					Rank: i, Node: "n1", Phase: string(p), Epoch: 1, PID: 100 + i,
					URL: "http://127.0.0.1:20000",
				},
			},
		})
	}
	return a
}

func refused() error {
	return &client.Error{
		Code: client.CodeUnavailable, Message: "no answer from 127.0.0.1:8265", Hint: "is dpserve running?",
	}
}

// fakeNode serves until its context ends; with slow, it drains until Kill.
type fakeNode struct {
	joinAt   string
	joinWith string
	left     bool
	refusal  error
	config   server.Config
	serveErr error
	slow     bool
	http     string
	killed   chan struct{}
	closed   bool
}

func newFakeNode() *fakeNode {
	return &fakeNode{http: server.DefaultHTTPBind, killed: make(chan struct{})}
}

func (n *fakeNode) Serve(ctx context.Context) error {
	if n.serveErr != nil || n.left {
		return n.serveErr
	}
	<-ctx.Done()
	if n.slow {
		<-n.killed
	}
	return nil
}

func (n *fakeNode) Kill()                                         { close(n.killed) }
func (n *fakeNode) Restart(context.Context, bool) (string, error) { return "v2", nil }
func (n *fakeNode) Close() error                                  { n.closed = true; return nil }
func (n *fakeNode) HTTPAddr() string                              { return n.http }
func (n *fakeNode) AdminAddr() string                             { return server.DefaultAdminBind }
func (n *fakeNode) AdminToken() string                            { return "" }
func (n *fakeNode) AdminTokenFile() string                        { return "" }
func (n *fakeNode) MetricsAddr() string                           { return "" }
func (n *fakeNode) Totals() (uint64, uint64, int)                 { return 3, 40, 1 }

// eventually waits for a condition that another goroutine makes true.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, 30*time.Second, 5*time.Millisecond, what)
}

// fakeNodes is the state of the fake cluster's nodes. Each call of Nodes returns the next element of script;
// the last one repeats.
type fakeNodes struct {
	script   [][]client.NodeStatus
	plan     client.Plan
	drained  []string
	deadline *time.Duration
	undone   []string
	gone     []string
	mayLeave []error // successive answers to CheckLeave; then nil
	tokens   []client.TokenRequest
	listed   []client.JoinToken
	revoked  []string // ids, and --all
	behind   []string // nodes that have not taken the gossip key
}

func (f *fakeCluster) Version(context.Context) (client.BuildInfo, error) {
	return client.BuildInfo{Version: "v1", Node: "b"}, f.down
}

func (f *fakeCluster) Plan(_ context.Context, r client.DeployRequest) (client.Plan, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.planned = append(f.planned, r)
	return f.nodes.plan, f.down
}

func (f *fakeCluster) Nodes(context.Context) ([]client.NodeStatus, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.fail(); err != nil || len(f.nodes.script) == 0 {
		return nil, err
	}
	now := f.nodes.script[0]
	if len(f.nodes.script) > 1 {
		f.nodes.script = f.nodes.script[1:]
	}
	return now, nil
}

func (f *fakeCluster) Restart(context.Context, bool) (client.Process, error) {
	return client.Process{Node: "n", Process: "1"}, nil
}

func (f *fakeCluster) Process(context.Context) (client.Process, error) {
	return client.Process{Node: "n", Process: "2"}, nil
}

func (f *fakeCluster) Drain(_ context.Context, node string, deadline *time.Duration) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.nodes.drained, f.nodes.deadline = append(f.nodes.drained, node), deadline
	return f.fail()
}

func (f *fakeCluster) Undrain(_ context.Context, node string) error {
	f.nodes.undone = append(f.nodes.undone, node)
	return f.down
}

func (f *fakeCluster) CheckLeave(context.Context, string) error {
	if len(f.nodes.mayLeave) == 0 {
		return f.down
	}
	err := f.nodes.mayLeave[0]
	f.nodes.mayLeave = f.nodes.mayLeave[1:]
	return err
}

func (f *fakeCluster) RemoveNode(_ context.Context, node string) error {
	f.nodes.gone = append(f.nodes.gone, node)
	return f.down
}

func (f *fakeCluster) NewToken(_ context.Context, req client.TokenRequest) (client.Token, error) {
	f.nodes.tokens = append(f.nodes.tokens, req)
	return client.Token{
		Token: "dpj1.x", ID: "5f2c9d0e11aa", Address: "10.0.0.1:7947", Uses: req.Uses, Roles: req.Roles,
		Expires: time.Unix(0, 0),
	}, f.down
}

func (f *fakeCluster) Tokens(context.Context) ([]client.JoinToken, error) {
	return f.nodes.listed, f.down
}

func (f *fakeCluster) RevokeToken(_ context.Context, id string) error {
	f.nodes.revoked = append(f.nodes.revoked, id)
	return f.down
}

func (f *fakeCluster) RevokeAllTokens(context.Context) error {
	f.nodes.revoked = append(f.nodes.revoked, "--all")
	return f.down
}

func (f *fakeCluster) RotateKey(context.Context) (client.KeyRotation, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return client.KeyRotation{Behind: f.nodes.behind}, f.fail()
}

func (n *fakeNode) FirstToken() (address, token string) { return n.joinAt, n.joinWith }
func (n *fakeNode) Left() bool                          { return n.left }
func (n *fakeNode) Refusal() error                      { return n.refusal }
