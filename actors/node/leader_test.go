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

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/engine"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// bubble is a node in virtual time with a leader, a state, engines and DPServers that the test holds.
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
	meets    []msg.Publish
	asked    map[int]bool // ranks that awaited rank 0

	known chan struct{} // closed: addr and port are set
	addr  string
	port  int
}

// fakeLeader takes what a node says, and answers as the test wants.
type fakeLeader struct {
	mu     sync.Mutex
	answer func(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) // nil: grants
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
	return msg.Lease{TTL: 10 * time.Second, Taken: l.high, Leader: "l"}
}

func (l *fakeLeader) becomes(answer func(ctx context.Context, r *msg.NodeReport) (msg.Lease, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answer = answer
}

// silent never answers, leaderless says at once that nobody leads.
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

// lastBegan is when the newest renewal was asked for.
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

// kinds are the events that were taken of a unit, as epoch:kind.
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

// reason is that of the last event of a unit.
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
	frozen  chan struct{} // State waits until it is closed: who looks stands still
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

// freeze makes everything that looks at the state stand still until thaw.
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

// fakeReplica is a DPServer that only remembers.
type fakeReplica struct {
	mu    sync.Mutex
	fence string // cause
	at    time.Time
}

func (*fakeReplica) Assign(context.Context) error           { return nil }
func (*fakeReplica) Ready(context.Context, msg.Facts) error { return nil }
func (*fakeReplica) Drain(string)                           {}
func (*fakeReplica) Drained() <-chan struct{}               { return over }
func (*fakeReplica) Stop(context.Context) error             { return nil }
func (*fakeReplica) Status() msg.RankStatus                 { return msg.RankStatus{} }

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

// fakeProcess is an engine that ends when it is told to, a busy one only when it is killed.
type fakeProcess struct {
	busy   *atomic.Bool
	once   sync.Once
	exited chan struct{}
}

func (*fakeProcess) PID() int                  { return 1 }
func (p *fakeProcess) Exited() <-chan struct{} { return p.exited }
func (*fakeProcess) Exit() Exit                { return Exit{} }
func (p *fakeProcess) Kill()                   { p.once.Do(func() { close(p.exited) }) }
func (*fakeProcess) Held() string              { return "" }

func (p *fakeProcess) Terminate() {
	if !p.busy.Load() {
		p.Kill()
	}
}

// Start implements Launcher.
func (b *bubble) Start(_ context.Context, l engine.Launch, _, _ io.Writer) (Process, error) {
	p := &fakeProcess{busy: &b.busy, exited: make(chan struct{})}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.procs, b.launches = append(b.procs, p), append(b.launches, l)
	return p, nil
}

func (b *bubble) launched() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.procs)
}

// RoundTrip implements http.RoundTripper: every engine is well.
func (b *bubble) RoundTrip(r *http.Request) (*http.Response, error) {
	body := ""
	switch r.URL.Path {
	case "/v1/models":
		body = `{"data":[{"id":"demo","max_model_len":2048}]}`
	case "/v1/completions":
		body = `{"choices":[{"finish_reason":"length"}]}`
	}
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
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

func (b *bubble) Await(ctx context.Context, _ string, _ uint64, rank int) (string, int, error) {
	b.mu.Lock()
	b.asked[rank] = true
	b.mu.Unlock()
	select {
	case <-b.known:
		return b.addr, b.port, nil
	case <-ctx.Done():
		return "", 0, fmt.Errorf("rank %d: %w", rank, errNobody)
	}
}

// answer tells everybody where rank 0 is.
func (b *bubble) answer(addr string, port int) {
	b.addr, b.port = addr, port
	close(b.known)
}

// inBubble runs f with a node that has a lease.
func inBubble(t *testing.T, change func(c *Config), f func(t *testing.T, b *bubble)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{
			t: t, leader: &fakeLeader{}, replicas: map[string]*fakeReplica{}, asked: map[int]bool{}, known: make(chan struct{}),
			store: &fakeStore{now: state.New(), changed: make(chan struct{})},
		}
		log := slog.New(slog.DiscardHandler)
		sys := inbox.NewSystem(log)
		var number uint64
		cfg := Config{
			ID: "n", Slots: 8, System: sys, Assigner: b, Launcher: b, Transport: b, BindTest: func(int) error { return nil }, Log: log,
			Rand: func() uint64 { number++; return number }, Executable: "dpserve", Environ: []string{}, Leader: b.leader, Store: b.store,
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

func (b *bubble) replica(unit string, epoch uint64, rank int) *fakeReplica {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.replicas[fmt.Sprint(unit, " ", epoch, " ", rank)]
	require.NotNil(b.t, r, "%s %d %d", unit, epoch, rank)
	return r
}

func testApp(kind app.Kind, coupling app.Coupling, dpSize int) *app.Application {
	return &app.Application{
		Name: "demo", Model: app.Model{ID: "demo"}, NumGroups: 1, Engine: app.Engine{Kind: kind, Ranks: []app.AttachRank{{URL: "http://e:1"}}},
		DataParallel: app.DataParallel{DPSize: dpSize, Coupling: coupling},
	}
}

// order is the start of an independent rank, which the state grants too.
func (b *bubble) order(unit string, epoch uint64) *msg.StartRank {
	b.store.change(func(s *state.State) {
		s.Epochs[unit] = epoch
		s.Units[unit] = &state.Unit{ID: unit, Epoch: epoch, Phase: state.Starting}
	})
	ranks := []state.RankGrant{{Rank: 0, Node: "n"}}
	return &msg.StartRank{
		App: testApp(app.KindSim, app.Independent, 1), Unit: unit, Epoch: epoch, Ranks: ranks, AllRanks: ranks, Block: state.Block{Node: "n", Base: 20000, Size: 16},
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
	if u := b.node.unit(unit); u != nil {
		return u.currentPhase()
	}
	return ""
}

func TestEventsGoOutAtOnceAndTheLeaseIsRenewed(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		assert.Equal(t, 1, b.leader.renewals(), "at once")
		assert.Equal(t, 10*time.Second, b.node.LeaseLeft())
		b.serving("demo/0/0", 3)
		assert.Equal(t, []string{"3:started", "3:ready"}, b.leader.kinds("demo/0/0"))
		r := b.leader.last()
		assert.Equal(t, "n", r.Node.ID)
		assert.Equal(t, 8, r.Node.Offer.Slots)
		assert.NotZero(t, r.Incarnation)
		assert.Equal(t, b.store.State().Index, r.Index)
		before := b.leader.renewals()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		assert.Equal(t, 10, b.leader.renewals()-before)
		r = b.leader.last()
		assert.Empty(t, r.Events)
		require.Len(t, r.Units, 1)
		assert.Equal(t, msg.UnitReady, r.Units[0].Kind)
		assert.True(t, b.node.Admits())
		assert.Nil(t, b.node.Serves())
	})
}

func TestWithoutALeaseNothingStartsAndWhatRunsIsServed(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		b.serving("demo/0/0", 1)
		began := b.leader.lastBegan()
		b.leader.becomes(silent)
		time.Sleep(time.Until(began.Add(9*time.Second - time.Millisecond)))
		require.NoError(t, b.node.mayStart())
		time.Sleep(time.Millisecond)
		launched := b.launched()
		err := b.start("demo/0/1", 1)
		require.ErrorIs(t, err, errNoLease)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
		time.Sleep(time.Hour)
		assert.Equal(t, launched, b.launched())
		assert.Equal(t, state.Ready, b.phase("demo/0/0"))
		assert.True(t, b.node.Admits())
		assert.Zero(t, b.node.LeaseLeft())
		b.leader.becomes(leaderless)
		time.Sleep(time.Minute)
		b.leader.becomes(nil)
		before := time.Now()
		defer func() { assert.Zero(t, time.Since(before)) }()
		require.NoError(t, b.start("demo/0/1", 1), "an order of a leader makes the node ask at once; the refused epoch is not spent")
	})
}

func TestRetriesFindTheNextLeaderWithinASecond(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		b.leader.becomes(leaderless)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		n := b.leader.renewals()
		assert.InDelta(t, 30, n, 5, "each second, and more often at first")
		b.leader.becomes(nil)
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Positive(t, b.node.LeaseLeft())
	})
}

func TestMB3FenceEndsAllBeforeTheLeaderGrantsItElsewhere(t *testing.T) {
	inBubble(t, func(c *Config) { c.OnLeaseLoss = Fence }, func(t *testing.T, b *bubble) {
		b.serving("demo/0/0", 1)
		attach := b.order("other/0/0", 1)
		attach.App, attach.Block = testApp(app.KindAttach, app.Independent, 1), state.Block{}
		require.NoError(t, b.node.StartRank(t.Context(), attach))
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, state.Ready, b.phase("other/0/0"))
		serves := b.node.Serves()
		require.True(t, serves())
		synctest.Wait()
		began := b.leader.lastBegan()
		b.leader.becomes(silent)
		time.Sleep(time.Until(began.Add(9*time.Second - time.Millisecond)))
		synctest.Wait()
		assert.True(t, b.node.Admits())
		assert.True(t, serves())
		time.Sleep(time.Millisecond)
		assert.False(t, b.node.Admits())
		assert.False(t, serves())
		synctest.Wait()
		for _, unit := range []string{"demo/0/0", "other/0/0"} {
			cause, at := b.replica(unit, 1, 0).fenced()
			assert.Equal(t, "lease_lost", cause)
			assert.Equal(t, 9*time.Second, at.Sub(began))
		}
		time.Sleep(2 * time.Second)
		assert.Equal(t, state.Gone, b.phase("demo/0/0"))
		assert.Equal(t, state.Gone, b.phase("other/0/0"), "an attached rank does not come back by itself")
		b.leader.becomes(nil)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		assert.True(t, b.node.Admits())
		assert.Equal(t, "lease_lost", b.leader.reason("demo/0/0"))
		require.NoError(t, b.start("demo/0/0", 2))
	})
}

// TestMB3ABusyEngineIsKilledInTime: neither the grace of other stops nor one that is under way already keeps an engine beyond the
// moment from which its unit may run elsewhere.
func TestMB3ABusyEngineIsKilledInTime(t *testing.T) {
	for name, asked := range map[string]bool{"serving": false, "ending already": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(c *Config) { c.OnLeaseLoss = Fence }, func(t *testing.T, b *bubble) {
				b.serving("demo/0/0", 1)
				b.busy.Store(true)
				synctest.Wait()
				began := b.leader.lastBegan()
				b.leader.becomes(silent)
				time.Sleep(time.Until(began.Add(8 * time.Second)))
				if asked {
					b.node.unit("demo/0/0").askStop(time.Minute, "drain")
				}
				time.Sleep(time.Until(began.Add(9*time.Second + 400*time.Millisecond)))
				assert.NotEqual(t, state.Gone, b.phase("demo/0/0"), "SIGTERM comes first")
				time.Sleep(600 * time.Millisecond)
				assert.Equal(t, state.Gone, b.phase("demo/0/0"))
			})
		})
	}
}

// TestMB3AThawedNodeAsksFirst: nothing is admitted between the thaw and the end of one renewal, whatever it says.
func TestMB3AThawedNodeAsksFirst(t *testing.T) {
	for _, mode := range []LeaseLoss{Serve, Fence} {
		for name, granted := range map[string]bool{"granted": true, "refused": false} {
			t.Run(string(mode)+" "+name, func(t *testing.T) {
				inBubble(t, func(c *Config) { c.OnLeaseLoss = mode }, func(t *testing.T, b *bubble) {
					b.serving("demo/0/0", 1)
					thaw := b.store.freeze()
					time.Sleep(15 * time.Second)
					assert.False(t, b.node.Admits(), "also for who comes before anybody has noticed")
					if mode == Fence {
						assert.False(t, b.node.Serves()())
					}
					answer := make(chan struct{})
					b.leader.becomes(func(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
						select {
						case <-answer:
						case <-ctx.Done(): // one that began before the freeze
							return msg.Lease{}, context.Cause(ctx)
						}
						if !granted {
							return leaderless(ctx, r)
						}
						return b.leader.grant(r), nil
					})
					thaw()
					synctest.Wait()
					time.Sleep(500 * time.Millisecond)
					assert.False(t, b.node.Admits())
					cause, _ := b.replica("demo/0/0", 1, 0).fenced()
					if mode == Fence {
						assert.Equal(t, "lease_lost", cause)
					} else {
						assert.Empty(t, cause)
					}
					close(answer)
					time.Sleep(200 * time.Millisecond) // the one that was under way at the freeze counts for nothing
					synctest.Wait()
					assert.Equal(t, granted || mode == Serve, b.node.Admits())
				})
			})
		}
	}
}

func TestRG3WhatTheStateShowsSupersededStopsAtOnce(t *testing.T) {
	for name, change := range map[string]func(s *state.State){
		"granted anew": func(s *state.State) {
			s.Epochs["demo/0/0"]++
			s.Units["demo/0/0"] = &state.Unit{ID: "demo/0/0", Epoch: 2}
		},
		"released": func(s *state.State) { delete(s.Units, "demo/0/0") },
		"granted anew and released": func(s *state.State) {
			s.Epochs["demo/0/0"] = 5
			delete(s.Units, "demo/0/0")
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, b *bubble) {
				b.serving("demo/0/0", 1)
				b.serving("demo/0/1", 1)
				b.leader.becomes(silent) // no lease is needed for it
				time.Sleep(time.Minute)
				began := time.Now()
				b.store.change(change)
				synctest.Wait()
				cause, at := b.replica("demo/0/0", 1, 0).fenced()
				assert.Equal(t, causeSuperseded, cause)
				assert.Less(t, at.Sub(began), time.Second)
				time.Sleep(2 * time.Second)
				assert.Empty(t, b.phase("demo/0/0"), "gone and forgotten")
				assert.Equal(t, state.Ready, b.phase("demo/0/1"))
				b.leader.becomes(nil)
				time.Sleep(3 * time.Second)
				synctest.Wait()
				assert.Equal(t, []string{"1:started", "1:ready", "1:killing", "1:gone"}, b.leader.kinds("demo/0/0"))
				assert.Equal(t, "superseded", b.leader.reason("demo/0/0"))
				require.Len(t, b.leader.last().Units, 1, "the digest holds what the cluster knows")
				m := b.order("x", 1)
				m.Unit = "demo/0/0"
				err := b.node.StartRank(t.Context(), m)
				require.ErrorIs(t, err, ErrStaleEpoch, "a late order")
			})
		})
	}
}

func TestACopyOfTheStateThatLagsEndsNothing(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		m := b.order("demo/0/0", 7)
		b.store.change(func(s *state.State) {
			s.Epochs["demo/0/0"] = 6
			delete(s.Units, "demo/0/0")
		})
		require.NoError(t, b.node.StartRank(t.Context(), m))
		time.Sleep(time.Minute)
		assert.Equal(t, state.Ready, b.phase("demo/0/0"))
	})
}

// A unit that has to wait (here for its rendezvous) while the lease runs out does not start its engines afterwards.
func TestALeaseThatEndsWhileAUnitWaits(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		m := b.order("demo/0", 1)
		m.App = testApp(app.KindSim, app.Lockstep, 3)
		m.AllRanks = []state.RankGrant{{Rank: 0, Node: "m"}, {Rank: 1, Node: "n"}, {Rank: 2, Node: "n"}}
		m.Ranks = m.AllRanks[1:]
		require.NoError(t, b.node.StartRank(t.Context(), m))
		b.leader.becomes(silent)
		time.Sleep(19 * time.Second)
		assert.Equal(t, state.Starting, b.phase("demo/0"))
		b.answer("10.0.0.7", 20010)
		time.Sleep(time.Second)
		assert.Zero(t, b.launched())
		assert.Equal(t, state.Gone, b.phase("demo/0"))
		b.leader.becomes(nil)
		time.Sleep(2 * time.Second)
		assert.Equal(t, "node n: no lease: it may start no engines", b.leader.reason("demo/0"))
	})
}

func TestARendezvousThatComesAndOneThatDoesNot(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		start := func(epoch uint64) {
			m := b.order("demo/0", epoch)
			m.App = testApp(app.KindSim, app.Lockstep, 3)
			m.AllRanks = []state.RankGrant{{Rank: 0, Node: "m"}, {Rank: 1, Node: "n"}, {Rank: 2, Node: "n"}}
			m.Ranks = m.AllRanks[1:]
			require.NoError(t, b.node.StartRank(t.Context(), m))
		}
		start(1)
		time.Sleep(121 * time.Second)
		assert.Contains(t, b.leader.reason("demo/0"), errNobody.Error())
		assert.Equal(t, map[int]bool{1: true, 2: true}, b.asked, "each rank reports, so that the missing ones can be named")
		assert.Zero(t, b.launched())
		b.answer("10.0.0.7", 20010)
		start(2)
		time.Sleep(time.Second)
		assert.Equal(t, state.Ready, b.phase("demo/0"))
		require.Equal(t, 2, b.launched())
		for _, l := range b.launches {
			assert.Subset(t, l.Argv, []string{"--data-parallel-address", "10.0.0.7", "--data-parallel-rpc-port", "20010"})
			assert.Equal(t, b.launches[0].Env, l.Env, "one secret for all")
			assert.Contains(t, strings.Join(l.Env, " "), engine.GroupKeyVar)
		}
		assert.Empty(t, b.published())
	})
}

func TestRankZeroIsPublishedAgainWhileTheUnitStarts(t *testing.T) {
	var slow chan struct{}
	inBubble(t, func(c *Config) {
		slow = make(chan struct{})
		c.Advertise = "10.0.0.7"
		inner := c.Transport
		c.Transport = roundTripper(func(r *http.Request) (*http.Response, error) {
			select {
			case <-slow:
				return inner.RoundTrip(r)
			case <-r.Context().Done():
				return nil, r.Context().Err()
			}
		})
	}, func(t *testing.T, b *bubble) {
		m := b.order("demo/0", 4)
		m.App = testApp(app.KindSim, app.Lockstep, 2)
		m.AllRanks = []state.RankGrant{{Rank: 0, Node: "n"}, {Rank: 1, Node: "m"}}
		m.Ranks = m.AllRanks[:1]
		require.NoError(t, b.node.StartRank(t.Context(), m))
		time.Sleep(9 * time.Second)
		want := msg.Publish{Unit: "demo/0", Epoch: 4, Rank: 0, Addr: "10.0.0.7", Port: 20010}
		assert.Equal(t, []msg.Publish{want, want, want, want, want}, b.published(), "a new leader knows of none")
		close(slow)
		time.Sleep(time.Minute)
		assert.Equal(t, state.Ready, b.phase("demo/0"))
		assert.Len(t, b.published(), 5)
	})
}

func TestAUnitOverNodesNeedsAnAddressThatOthersKnow(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		m := b.order("demo/0", 1)
		m.App = testApp(app.KindSim, app.Lockstep, 2)
		m.AllRanks = []state.RankGrant{{Rank: 0, Node: "n"}, {Rank: 1, Node: "m"}}
		m.Ranks = m.AllRanks[:1]
		require.NoError(t, b.node.StartRank(t.Context(), m))
		time.Sleep(time.Second)
		assert.Equal(t, "ranks of demo/0 on other nodes cannot reach rank 0: node n has no address that others know", b.leader.reason("demo/0"))
	})
}

type roundTripper func(r *http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestRenewAsksAtOnceAndOnlyOnce(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		b.leader.becomes(leaderless)
		time.Sleep(time.Minute)
		before, now := b.leader.renewals(), time.Now()
		b.node.Renew(t.Context())
		assert.Zero(t, time.Since(now))
		b.leader.becomes(nil)
		b.node.Renew(t.Context())
		assert.Zero(t, time.Since(now))
		assert.Equal(t, before+2, b.leader.renewals())
		assert.Equal(t, 10*time.Second, b.node.LeaseLeft())
		b.leader.becomes(silent)
		b.node.Renew(t.Context())
		assert.Equal(t, time.Second, time.Since(now), "one renewal's deadline")
	})
}

func TestTheLastEventsLeaveWithTheNode(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		b.serving("demo/0/0", 1)
		require.NoError(t, b.node.Close(t.Context(), 0))
		assert.Equal(t, []string{"1:started", "1:ready", "1:killing", "1:gone"}, b.leader.kinds("demo/0/0"))
		b.leader.becomes(silent)
		require.Error(t, b.start("demo/0/0", 2), "a closed node refuses at once")
	})
}
