package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// bubble is a node in virtual time. The test controls its leader, state, engines and DPServers.
type bubble struct {
	t      testing.TB
	node   *Node
	leader *fakeLeader
	store  *fakeStore
	busy   atomic.Bool // engines do not end by themselves

	mu       sync.Mutex
	replicas map[string]*fakeReplica // by unit, epoch and rank
	procs    []*fakeProcess
	launches []engine.Launch
	found    []Found // of an earlier process; set before the node is made
	meets    []msg.Publish
	asked    map[int]bool // ranks that awaited rank 0

	known chan struct{} // closed: addr and port are set
	addr  string
	port  int
}

// fakeLeader takes the node's reports, and answers as the test wants.
type fakeLeader struct {
	mu     sync.Mutex
	answer func(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) // nil: grants the lease
	began  []time.Time                                                     // of each renewal
	asked  []*msg.NodeReport
	events []msg.UnitEvent // in order of arrival, each number once
	high   uint64
}

func (l *fakeLeader) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	l.mu.Lock()
	l.began, l.asked = append(l.began, time.Now()), append(l.asked, r)
	answer := l.answer
	l.mu.Unlock()
	if answer != nil {
		return answer(ctx, r)
	}
	return l.grant(r), nil
}

func (l *fakeLeader) grant(r *msg.NodeReport) msg.Lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range r.Events {
		if e.Number > l.high {
			l.high, l.events = e.Number, append(l.events, e)
		}
	}
	return msg.Lease{TTL: 10 * time.Second, Acked: l.high, Leader: "l"}
}

func (l *fakeLeader) becomes(answer func(ctx context.Context, r *msg.NodeReport) (msg.Lease, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answer = answer
}

// silent never answers; leaderless returns at once that no node leads.
func silent(ctx context.Context, _ *msg.NodeReport) (msg.Lease, error) {
	<-ctx.Done()
	return msg.Lease{}, context.Cause(ctx)
}

func leaderless(context.Context, *msg.NodeReport) (msg.Lease, error) {
	return msg.Lease{}, problem.New(problem.Unavailable, "nobody leads")
}

func (l *fakeLeader) renewals() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.asked)
}

// lastBegan is when the newest renewal began.
func (l *fakeLeader) lastBegan() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.began[len(l.began)-1]
}

// last is the newest report.
func (l *fakeLeader) last() *msg.NodeReport {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asked[len(l.asked)-1]
}

// kinds lists the events taken of a unit, as epoch:kind.
func (l *fakeLeader) kinds(unit string) (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		if e.Unit == unit {
			out = append(out, fmt.Sprint(e.Epoch, ":", e.Kind))
		}
	}
	return out
}

// reason is the reason of the last event of a unit.
func (l *fakeLeader) reason(unit string) (out string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		if e.Unit == unit {
			out = e.Reason
		}
	}
	return out
}

// fakeStore is a copy of the state.
type fakeStore struct {
	mu      sync.Mutex
	now     *state.State
	changed chan struct{}
	frozen  chan struct{} // State blocks until it is closed
}

func (s *fakeStore) State() *state.State {
	s.mu.Lock()
	now, frozen := s.now, s.frozen
	s.mu.Unlock()
	if frozen != nil {
		<-frozen
	}
	return now
}

func (s *fakeStore) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *fakeStore) change(f func(s *state.State)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := *s.now
	next.Units, next.Epochs = maps.Clone(next.Units), maps.Clone(next.Epochs)
	f(&next)
	next.Index++
	s.now = &next
	close(s.changed)
	s.changed = make(chan struct{})
}

// freeze blocks every reader of the state until thaw.
func (s *fakeStore) freeze() (thaw func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := make(chan struct{})
	s.frozen = c
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.frozen = nil
		close(c)
	}
}

// fakeReplica is a DPServer that only records the calls.
type fakeReplica struct {
	mu    sync.Mutex
	fence string // cause
	at    time.Time
	drain string // cause
	facts msg.Facts
}

func (*fakeReplica) Assign(context.Context) error { return nil }

func (r *fakeReplica) Ready(_ context.Context, f msg.Facts) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.facts = f
	return nil
}

func (r *fakeReplica) Drain(cause string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drain = cause
}

func (*fakeReplica) Controlled(openai.Effect)   {}
func (*fakeReplica) Drained() <-chan struct{}   { return over }
func (*fakeReplica) Stop(context.Context) error { return nil }
func (*fakeReplica) Status() client.RankStatus  { return client.RankStatus{} }

func (r *fakeReplica) Fence(cause string) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fence == "" {
		r.fence, r.at = cause, time.Now()
	}
	return over
}

var over = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func (r *fakeReplica) fenced() (cause string, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fence, r.at
}

// fakeProcess is an engine that ends at SIGTERM, a busy one only at SIGKILL.
type fakeProcess struct {
	busy   *atomic.Bool
	once   sync.Once
	exited chan struct{}

	released, detached atomic.Bool
}

func (*fakeProcess) PID() int                  { return 1 }
func (p *fakeProcess) Exited() <-chan struct{} { return p.exited }
func (*fakeProcess) Exit() Exit                { return Exit{} }
func (p *fakeProcess) Kill()                   { p.once.Do(func() { close(p.exited) }) }
func (*fakeProcess) Held() string              { return "" }
func (*fakeProcess) Memory() uint64            { return 0 }
func (*fakeProcess) Adopt(_, _ io.Writer)      {}
func (p *fakeProcess) Release()                { p.released.Store(true) }
func (p *fakeProcess) Detach()                 { p.detached.Store(true) }

func (p *fakeProcess) Terminate() {
	if !p.busy.Load() {
		p.Kill()
	}
}

// Start implements Launcher.
func (b *bubble) Start(_ context.Context, o LaunchOrder, _, _ io.Writer) (Process, error) {
	p := &fakeProcess{busy: &b.busy, exited: make(chan struct{})}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.procs, b.launches = append(b.procs, p), append(b.launches, o.Launch)
	return p, nil
}

// Found implements Launcher.
func (b *bubble) Found() []Found { return b.found }

// Extend implements Launcher.
func (*bubble) Extend(time.Duration) {}

func (b *bubble) launched() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.procs)
}

// RoundTrip implements http.RoundTripper: every engine is healthy.
func (b *bubble) RoundTrip(r *http.Request) (*http.Response, error) {
	body := ""
	switch r.URL.Path {
	case "/v1/models":
		body = `{"data":[{"id":"demo","max_model_len":2048}]}`
	case "/v1/completions":
		body = `{"choices":[{"finish_reason":"length"}]}`
	}
	return &http.Response{
		StatusCode: 200, Header: http.Header{},
		Body: io.NopCloser(strings.NewReader(body)), Request: r,
	}, nil
}

func (b *bubble) Assign(context.Context, string, int, string) (msg.AssignReply, error) {
	return msg.AssignReply{}, nil
}

func (b *bubble) Publish(p msg.Publish) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.meets = append(b.meets, p)
}

func (b *bubble) published() []msg.Publish {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.meets)
}

var errNobody = errors.New("no report from rank 0")

func (b *bubble) Await(ctx context.Context, _ string, _ uint64, rank int) (msg.AwaitReply, error) {
	b.mu.Lock()
	b.asked[rank] = true
	b.mu.Unlock()
	select {
	case <-b.known:
		return msg.AwaitReply{Addr: b.addr, Port: b.port}, nil
	case <-ctx.Done():
		return msg.AwaitReply{}, fmt.Errorf("rank %d: %w", rank, errNobody)
	}
}

// answer announces the address of rank 0.
func (b *bubble) answer(addr string, port int) {
	b.addr, b.port = addr, port
	close(b.known)
}

// inBubble runs f with a node that has a lease.
func inBubble(t *testing.T, change func(c *Config), f func(t *testing.T, b *bubble)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{
			t: t, leader: &fakeLeader{}, replicas: map[string]*fakeReplica{}, asked: map[int]bool{},
			known: make(chan struct{}),
			store: &fakeStore{now: state.New(), changed: make(chan struct{})},
		}
		log := slog.New(slog.DiscardHandler)
		sys := inbox.NewSystem(log)
		var number uint64
		cfg := Config{
			ID: "n", System: sys, Assigner: b, Launcher: b, Transport: b,
			Checks: Checks{BindTest: func(int) error { return nil }}, Log: log,
			Rand: func() uint64 { number++; return number }, Executable: "dpserve",
			Leader: b.leader, Store: b.store,
			Self: func() state.Node { return state.Node{ID: "n", Resources: state.Resources{Slots: 8}} },
			NewReplica: func(s msg.ReplicaSpec) (Replica, error) {
				r := &fakeReplica{}
				b.mu.Lock()
				defer b.mu.Unlock()
				b.replicas[fmt.Sprint(s.Unit, " ", s.Epoch, " ", s.Rank)] = r
				return r, nil
			},
		}
		if change != nil {
			change(&cfg)
		}
		var err error
		b.node, err = New(cfg)
		require.NoError(t, err)
		synctest.Wait()
		f(t, b)
		require.NoError(t, b.node.Close(t.Context(), 0))
		sys.Shutdown()
	})
}

// servers counts the DPServers that the node has made.
func (b *bubble) servers() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.replicas)
}

func (b *bubble) replica(unit string, epoch uint64, rank int) *fakeReplica {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.replicas[fmt.Sprint(unit, " ", epoch, " ", rank)]
	require.NotNil(b.t, r, "%s %d %d", unit, epoch, rank)
	return r
}

func testApp(kind app.Kind, coupling app.Coupling, dpSize int) *app.Application {
	return &app.Application{
		Name: "demo", Model: app.Model{ID: "demo"}, NumGroups: 1,
		Engine:       app.Engine{Kind: kind, Ranks: []app.AttachRank{{URL: "http://e:1"}}},
		DataParallel: app.DataParallel{DPSize: dpSize, Coupling: coupling},
	}
}

// order is the start of an independent rank; the state grants it too.
func (b *bubble) order(unit string, epoch uint64) *msg.StartRank {
	b.store.change(func(s *state.State) {
		s.Epochs[unit] = epoch
		s.Units[unit] = &state.Unit{ID: unit, Epoch: epoch, Phase: state.Starting}
	})
	ranks := []state.RankGrant{{Rank: 0, Node: "n"}}
	return &msg.StartRank{
		App: testApp(app.KindSim, app.Independent, 1), Unit: unit, Epoch: epoch, Ranks: ranks,
		AllRanks: ranks, Block: state.Block{Node: "n", Base: 20000, Size: 16},
	}
}

func (b *bubble) start(unit string, epoch uint64) error {
	return b.node.StartRank(b.t.Context(), b.order(unit, epoch))
}

// serving starts a unit and waits until it is ready.
func (b *bubble) serving(unit string, epoch uint64) {
	b.t.Helper()
	require.NoError(b.t, b.start(unit, epoch))
	time.Sleep(100 * time.Millisecond)
	require.Equal(b.t, state.Ready, b.phase(unit))
}

func (b *bubble) phase(unit string) state.Phase {
	b.node.mu.Lock()
	u := b.node.units[unit]
	b.node.mu.Unlock()
	if u == nil {
		return ""
	}
	return u.currentPhase()
}
