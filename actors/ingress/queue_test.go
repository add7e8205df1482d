package ingress

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/state"
)

// queueModel is the queue of one application over ranks with places, as requests see it: the waiter with the
// turn takes a place on a rank that it may use, or yields.
type queueModel struct {
	t      *rapid.T
	f      *requestQueue
	order  []*waiter
	banned map[*waiter]map[int]bool // ranks that a waiter may not use
	needs  map[*waiter]int          // the adapter that a waiter needs; 0: none
	lacks  [3][]int                 // the ranks that lack an adapter, by adapter
	places []int                    // free ones, by rank
}

// usable is the first rank with a place that w may use, -1 if there is none.
func (m *queueModel) usable(w *waiter) int {
	for rank, free := range m.places {
		if free > 0 && !m.banned[w][rank] && !slices.Contains(m.lacks[m.needs[w]], rank) {
			return rank
		}
	}
	return -1
}

// restriction is w's by now. It has an adapter only while some ranks lack it.
func (m *queueModel) restriction(w *waiter) (sum uint64) {
	for rank := range m.banned[w] {
		sum |= 1 << rank
	}
	if adapter := m.needs[w]; len(m.lacks[adapter]) > 0 {
		sum |= uint64(adapter) << len(m.places)
	}
	return sum
}

// enter makes a waiter that has failed on the banned ranks.
func (m *queueModel) enter(banned []int) *waiter {
	w := newWaiter()
	w.client = rapid.Uint64Range(1, 3).Draw(m.t, "client")
	w.tokens = rapid.OneOf(rapid.Int64Range(0, 9), rapid.Just(int64(40))).Draw(m.t, "tokens")
	m.needs[w] = rapid.IntRange(0, len(m.lacks)-1).Draw(m.t, "adapter")
	m.banned[w] = map[int]bool{}
	for _, rank := range banned {
		m.banned[w][rank] = true
	}
	w.restriction = m.restriction(w)
	return w
}

// addInRound takes the place of a waiter that has joined over from the queue. Nobody else has moved, and no
// earlier request of its client is behind it.
func (m *queueModel) addInRound(w *waiter) {
	var now []*waiter
	for at := m.f.head; at != nil; at = at.next {
		now = append(now, at)
	}
	place := slices.Index(now, w)
	require.GreaterOrEqual(m.t, place, 0)
	require.True(m.t, slices.Equal(m.order, slices.Delete(slices.Clone(now), place, place+1)))
	for _, behind := range now[place+1:] {
		require.NotEqual(m.t, w.client, behind.client, "it overtook a request of its own client")
	}
	m.order = now
}

// loserTo is the waiter whose place w gets in a full queue: the newest of the client with most, if that has
// at least two more than w's.
func (m *queueModel) loserTo(w *waiter) (loser *waiter) {
	n := map[uint64]int{}
	for _, other := range m.order {
		n[other.client]++
	}
	for _, other := range m.order {
		if n[other.client] > n[w.client]+1 && (loser == nil || n[other.client] >= n[loser.client]) {
			loser = other
		}
	}
	return loser
}

// settle lets the waiter with the turn ask, until no waiter has it.
func (m *queueModel) settle() {
	for m.f.turn != nil {
		w := m.f.turn
		require.Contains(m.t, m.order, w)
		require.True(m.t, m.f.hasTurn(w))
		require.Len(m.t, w.wake, 1, "the turn comes with a wake-up")
		<-w.wake
		if rapid.IntRange(0, 9).Draw(m.t, "room while it asks") == 0 {
			m.f.room()
		}
		rank := m.usable(w)
		if rank < 0 {
			m.f.yield(w, m.restriction(w))
			continue
		}
		for _, before := range m.order[:slices.Index(m.order, w)] {
			require.Negative(m.t, m.usable(before), "it overtook one that could have been routed")
		}
		m.places[rank]--
		m.remove(w)
	}
}

func (m *queueModel) remove(w *waiter) {
	m.f.leave(w)
	m.f.leave(w)
	i := slices.Index(m.order, w)
	m.order = slices.Delete(m.order, i, i+1)
	require.Empty(m.t, w.wake, "no wake-up stays behind")
}

// RP1, RP40, RP40b: whatever requests wait for, whenever a rank has room and a waiting request may use it, a
// request is routed, also after ranks have got or lost an adapter; and no request overtakes one that could
// have had the place.
func TestNoWaiterBlocksAnotherThatCouldBeRouted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const ranks, maxN, maxTokens = 3, 6, int64(30)
		m := &queueModel{
			t: t, f: &requestQueue{}, banned: map[*waiter]map[int]bool{},
			places: make([]int, ranks), needs: map[*waiter]int{},
		}
		tokens := func() (n int64) {
			for _, w := range m.order {
				n += w.tokens
			}
			return n
		}
		drawRanks := func() []int {
			return rapid.SliceOfNDistinct(rapid.IntRange(0, ranks-1), 0, ranks-1, rapid.ID[int]).Draw(
				t, "ranks")
		}
		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				w := m.enter(nil)
				n, sum, loser := len(m.order), tokens(), (*waiter)(nil)
				if n >= maxN {
					if loser = m.loserTo(w); loser != nil {
						n, sum = n-1, sum-loser.tokens
					}
				}
				fits := n < max(maxN, len(m.order)) && (n == 0 || sum+w.tokens <= maxTokens)
				require.Equal(t, fits, m.f.join(w, queueBounds{maxN, maxTokens}) == "")
				if fits && loser != nil {
					require.Len(t, loser.wake, 1, "it hears that it has lost its place")
					require.Equal(t, "max_queued_requests: 6", m.f.lostPlace(loser))
					m.remove(loser)
				}
				if fits {
					m.addInRound(w)
				}
				m.settle()
			},
			"rejoin": func(*rapid.T) {
				w := m.enter(drawRanks())
				m.order = append([]*waiter{w}, m.order...)
				m.f.rejoin(w)
				m.settle()
			},
			"give up": func(t *rapid.T) {
				if len(m.order) == 0 {
					t.Skip("empty")
				}
				m.remove(m.order[rapid.IntRange(0, len(m.order)-1).Draw(t, "place")])
				m.settle()
			},
			"give up with the turn": func(t *rapid.T) {
				m.f.room()
				if w := m.f.turn; w != nil {
					m.remove(w)
				}
				m.settle()
			},
			"load and unload": func(t *rapid.T) {
				m.lacks[rapid.IntRange(1, len(m.lacks)-1).Draw(t, "of adapter")] = drawRanks()
				m.f.room()
				m.settle()
			},
			"done": func(t *rapid.T) {
				m.places[rapid.IntRange(0, ranks-1).Draw(t, "rank")]++
				m.f.room()
				m.settle()
			},
			"": func(t *rapid.T) {
				n, sum := m.f.size()
				require.Equal(t, len(m.order), n)
				require.Equal(t, tokens(), sum)
				require.Equal(t, n == 0, m.f.empty())
				for _, w := range m.order {
					require.Negative(t, m.usable(w),
						"a rank has room, a waiter may use it, and nobody is routed")
				}
			},
		})
	})
}

// RP40: the one request of a client does not wait for all requests of another one, and a client that comes
// back has its place in the next round.
func TestClientsTakeTurnsInTheQueue(t *testing.T) {
	f, most := &requestQueue{}, queueBounds{requests: 10_000, tokens: 1}
	names := map[*waiter]string{}
	join := func(client uint64, list ...string) {
		for _, name := range list {
			w := newWaiter()
			w.client, names[w] = client, name
			require.Empty(t, f.join(w, most))
		}
	}
	order := func() string {
		var out []string
		for w := f.head; w != nil; w = w.next {
			out = append(out, names[w])
		}
		return strings.Join(out, " ")
	}
	serve := func(n int) {
		for range n {
			f.leave(f.head)
		}
	}
	join(1, "a1", "a2", "a3", "a4", "a5")
	assert.Equal(t, "a1 a2 a3 a4 a5", order())
	join(2, "b1", "b2")
	join(3, "c1")
	assert.Equal(t, "a1 b1 c1 a2 b2 a3 a4 a5", order())
	serve(3)
	join(3, "c2")
	assert.Equal(t, "a2 b2 c2 a3 a4 a5", order())
	back := f.head
	serve(1)
	f.rejoin(back)
	join(4, "d1")
	join(2, "b3")
	assert.Equal(t, "a2 b2 c2 a3 d1 b3 a4 a5", order())
	serve(8)
	assert.Empty(t, f.clients)
	join(1, "a6")
	join(2, "b4")
	assert.Equal(t, "a6 b4", order())
}

// RP40b: whatever one client has taken, when all want more than there is, the places are even to one, never
// more than the bound, and whoever gets none or loses one hears it.
func TestPlacesAreSharedByClients(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f, most := &requestQueue{}, queueBounds{rapid.IntRange(1, 12).Draw(t, "bound"), 1}
		var waiters []*waiter
		join := func(client uint64) {
			w := newWaiter()
			if w.client = client; f.join(w, most) == "" {
				waiters = append(waiters, w)
			}
		}
		for range most.requests + 3 {
			join(0)
		}
		clients := rapid.Uint64Range(1, 4).Draw(t, "clients")
		for _, client := range rapid.SliceOf(rapid.Uint64Range(0, clients)).Draw(t, "order") {
			join(client)
		}
		for range most.requests {
			for client := range clients + 1 {
				join(client)
			}
		}
		left := map[uint64]int{}
		for _, w := range waiters {
			require.NotEqual(t, w.queued, f.lostPlace(w) != "")
			if w.queued {
				left[w.client]++
			}
		}
		require.Equal(t, most.requests, f.n)
		for client := range clients + 1 {
			require.InDelta(t, float64(most.requests)/float64(clients+1), left[client], 1)
		}
	})
}

// RP40: clients are told apart by key, without one by address.
func TestClientOf(t *testing.T) {
	of := func(address string, header http.Header) uint64 {
		return clientOf(&http.Request{RemoteAddr: address, Header: header})
	}
	key := http.Header{"Authorization": {"Bearer a"}}
	assert.Equal(t, of("10.0.0.1:1", nil), of("10.0.0.1:2", nil))
	assert.NotEqual(t, of("10.0.0.1:1", nil), of("10.0.0.2:1", nil))
	assert.Equal(t, of("10.0.0.1:1", key), of("10.0.0.2:1", key))
	assert.NotEqual(t, of("10.0.0.1:1", key), of("10.0.0.1:1", nil))
	assert.Zero(t, clientOf(nil))
}

func TestGuard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g phaseTimer
		arm := func(d time.Duration, cause error) { g.arm(time.Now(), time.Now().Add(d), cause) }
		ctx, cancel := context.WithCancelCause(t.Context())
		g.attach(cancel)
		arm(time.Second, errFirstToken)
		time.Sleep(900 * time.Millisecond)
		g.pause()
		time.Sleep(time.Hour)
		require.NoError(t, ctx.Err(), "paused")
		for range 100 {
			arm(time.Second, errStalled)
			time.Sleep(900 * time.Millisecond)
		}
		require.NoError(t, ctx.Err(), "always armed again in time")
		time.Sleep(101 * time.Millisecond)
		require.ErrorIs(t, context.Cause(ctx), errStalled)
		g.detach()

		ctx2, cancel2 := context.WithCancelCause(t.Context())
		defer cancel2(nil)
		g.attach(cancel2)
		arm(time.Hour, errFirstToken)
		arm(time.Second, errStalled) // an earlier end than the timer's
		time.Sleep(time.Second + time.Millisecond)
		require.ErrorIs(t, context.Cause(ctx2), errStalled)
		g.detach()
		ctx3, cancel3 := context.WithCancelCause(t.Context())
		defer cancel3(nil)
		g.attach(cancel3)
		arm(time.Second, errStalled)
		g.detach()
		time.Sleep(time.Hour)
		require.NoError(t, ctx3.Err(), "the attempt is over")
	})
}

// gatedEngine is an engine that answers one request per token.
type gatedEngine struct{ open chan struct{} }

func newGatedEngine() *gatedEngine { return &gatedEngine{open: make(chan struct{}, 1000)} }

func (e *gatedEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	drain(r)
	select {
	case <-e.open:
		replies(200, wholeAnswer)(w, r)
	case <-r.Context().Done():
	}
}

// queueUp sends n requests one after the other, each only when the one before is queued.
func queueUp(g *rig, from, n int) chan answer {
	got := make(chan answer, n)
	for i := range n {
		before := g.in.QueueLen("demo")
		go func() {
			got <- g.postCtx(g.t.Context(), "/v1/chat/completions", chatBody, "X-Request-Id",
				"q"+strconv.Itoa(from+i))
		}()
		eventually(g.t, func() bool { return g.in.QueueLen("demo") == before+1 }, "queued")
	}
	return got
}

// RT3: while the only rank is away and comes back, requests wait and none is refused; then nothing is hoped
// for any more.
func TestRequestsWaitForTheOnlyRank(t *testing.T) {
	restart := func(g *rig) {
		g.phase("demo/0/0", state.Starting, 2)
		assert.Equal(t, 3, g.in.QueueLen("demo"))
		g.replicas[0].reborn() // its stream knows it first …
		assert.Equal(t, 3, g.in.QueueLen("demo"), "… and that is not enough")
		g.phase("demo/0/0", state.Ready, 2)
	}
	for name, c := range map[string]struct {
		goes, comes func(g *rig)
		attempts    string // of the first request
	}{
		"its unit starts": {goes: func(g *rig) {
			g.phase("demo/0/0", state.Starting, 2)
			ar := g.in.ensureAppRouter("demo")
			eventually(t, func() bool { return !ar.canServe() }, "out of routing")
		}, comes: restart},
		"its stream shows a fence that the state does not have yet": {goes: func(g *rig) {
			g.replicas[0].say(false, true, "engine exited with code 1")
		}, comes: restart},
		"it dies with a request": {goes: func(g *rig) {
			var once sync.Once
			g.replicas[0].setRefuse(func(*msg.Admit) msg.Refusal {
				once.Do(func() { g.phase("demo/0/0", state.Starting, 2) })
				return msg.Granted
			})
		}, comes: restart, attempts: "2"},
		"the state has it, and no stream has reported it yet": {goes: func(g *rig) {
			g.phase("demo/0/0", state.Ready, 2)
		}, comes: func(g *rig) { g.replicas[0].reborn() }},
		"its node has started again, and has not found its engine well yet": {goes: func(g *rig) {
			g.phase("demo/0/0", state.Ready, 2)
			r := g.replicas[0]
			r.mu.Lock()
			defer r.mu.Unlock()
			r.epoch, r.incarnation, r.seq, r.accepting = 2, r.incarnation+1, 0, false
			r.snapshot()
		}, comes: func(g *rig) { g.replicas[0].say(true, false, "") }},
	} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int32
			engine := func(w http.ResponseWriter, r *http.Request) {
				if calls.Add(1) == 1 && c.attempts != "" {
					resets(w, r)
					return
				}
				replies(200, wholeAnswer)(w, r)
			}
			g := newRig(t, options{max: 4, engines: []http.HandlerFunc{engine}})
			c.goes(g)
			got := queueUp(g, 0, 3)
			c.comes(g)
			most := ""
			for range 3 {
				a := <-got
				require.NoError(t, a.err)
				require.Equal(t, 200, a.status, a.body)
				most = max(most, a.header.Get("X-Dpserve-Attempts"))
			}
			assert.Equal(t, cmp.Or(c.attempts, "1"), most)
			assert.Zero(t, g.in.ensureAppRouter("demo").router.Load().Snapshot().OnTheWay)
		})
	}
}

// RP1: the ready rank has failed one request, which waits for the other rank. The ready rank serves the
// requests behind it meanwhile.
func TestARequestThatFailedDoesNotHoldTheQueue(t *testing.T) {
	var calls atomic.Int32
	g := newRig(t, options{engines: []http.HandlerFunc{
		func(w http.ResponseWriter, r *http.Request) {
			if calls.Add(1) == 1 {
				replies(500, `{"error":{"message":"x"}}`)(w, r)
				return
			}
			replies(200, wholeAnswer)(w, r)
		},
		replies(200, wholeAnswer),
	}, max: 4})
	g.phase("demo/0/1", state.Starting, 2)
	ar := g.in.ensureAppRouter("demo")
	eventually(t, func() bool { return ar.router.Load().Snapshot().OnTheWay == 1 },
		"the other rank is on its way")
	waits := queueUp(g, 0, 1)
	for range 3 {
		a := g.post("/v1/chat/completions", chatBody)
		require.Equal(t, 200, a.status, a.body)
		assert.Equal(t, 1, g.in.QueueLen("demo"), "it still waits")
	}
	g.replicas[1].reborn()
	g.phase("demo/0/1", state.Ready, 2)
	a := <-waits
	require.Equal(t, 200, a.status, a.body)
	assert.Equal(t, "2", a.header.Get("X-Dpserve-Attempts"))
}

// TestRT3StaleFullNeverBlocks: a rank says full although it has no requests, and no record follows.
func TestRT3StaleFullNeverBlocks(t *testing.T) {
	g := newRig(t, options{
		engines: []http.HandlerFunc{replies(200, wholeAnswer)},
		timers:  Timers{FullRecheck: 20 * time.Millisecond},
	})
	var full atomic.Int32
	g.replicas[0].setRefuse(func(*msg.Admit) msg.Refusal {
		if full.Add(1) <= 3 {
			return msg.Full
		}
		return msg.Granted
	})
	a := g.post("/v1/chat/completions", chatBody)
	require.Equal(t, 200, a.status, a.body)
	assert.Equal(t, "1", a.header.Get("X-Dpserve-Attempts"), "full is no attempt")
	assert.EqualValues(t, 4, full.Load())
}

// RP40, RP40b: queues at both bounds; clients with five, two and one requests, one that comes back, one that
// is put back to the front; any order of joins, rejoins, ends and room, with three clients: 503 names the key
// and its value; the order is round robin between clients and by arrival within each; whenever a rank has
// room and a waiting request may use it, a request is routed.
func TestQueueBounds(t *testing.T) {
	e := newGatedEngine()
	g := newRig(t, options{
		engines: []http.HandlerFunc{e.ServeHTTP}, max: 1,
		app: func(a *app.Application) {
			a.MaxQueuedRequests, a.MaxQueuedTokens = 2, 50
			a.Timeouts.QueueS = 5
		},
	})
	first := make(chan answer, 1)
	go func() { first <- g.postCtx(t.Context(), "/v1/chat/completions", chatBody) }()
	eventually(t, func() bool { return g.replicas[0].inFlight() == 1 }, "the place is taken")
	got := queueUp(g, 0, 1)
	a := g.post("/v1/completions", `{"model":"demo","prompt":[`+ids(60)+`]}`)
	assert.Equal(t, 503, a.status, "too many tokens")
	assert.Equal(t, "overloaded", a.code(t))
	assert.Contains(t, a.body, "the queue of this application is full (max_queued_tokens: 50)")
	assert.NotEmpty(t, a.header.Get("Retry-After"))
	more := queueUp(g, 1, 1)
	a = g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, "overloaded", a.code(t))
	assert.Contains(t, a.body, "(max_queued_requests: 2)")
	other := make(chan answer, 1)
	go func() {
		other <- g.postCtx(t.Context(), "/v1/chat/completions", chatBody, "Authorization", "Bearer other")
	}()
	a = <-more
	assert.Equal(t, "overloaded", a.code(t), "another client has its place")
	assert.Contains(t, a.body, "(max_queued_requests: 2; this client holds more places than others)")
	assert.NotEmpty(t, a.header.Get("Retry-After"))
	for range 3 {
		e.open <- struct{}{}
	}
	for _, answers := range []chan answer{got, other, first} {
		assert.Equal(t, 200, (<-answers).status)
	}
}

// RP18: such a request would otherwise be refused for ever.
func TestAnEmptyQueueTakesARequestOfAnySize(t *testing.T) {
	e := newGatedEngine()
	g := newRig(t, options{
		engines: []http.HandlerFunc{e.ServeHTTP}, max: 1,
		app: func(a *app.Application) { a.MaxQueuedTokens = 50 },
	})
	first, large := make(chan answer, 1), make(chan answer, 1)
	go func() { first <- g.postCtx(t.Context(), "/v1/chat/completions", chatBody) }()
	eventually(t, func() bool { return g.replicas[0].inFlight() == 1 }, "the place is taken")
	go func() {
		large <- g.postCtx(t.Context(), "/v1/completions",
			`{"model":"demo","prompt":[`+ids(60)+`]}`)
	}()
	eventually(t, func() bool { return g.in.QueueLen("demo") == 1 }, "it waits")
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, "overloaded", a.code(t), "the second does not fit")
	e.open <- struct{}{}
	e.open <- struct{}{}
	assert.Equal(t, 200, (<-first).status)
	assert.Equal(t, 200, (<-large).status)
}

// picture is a message part with n bytes of a picture.
func picture(n int) string {
	return `{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("A", n) + `"}}`
}

// RP18: the bytes of pictures fill no queue and do not change the estimate of bytes per token. Tools are
// text.
func TestPicturesAreNotText(t *testing.T) {
	e := newGatedEngine()
	g := newRig(t, options{
		engines: []http.HandlerFunc{e.ServeHTTP}, max: 1,
		app: func(a *app.Application) { a.MaxQueuedTokens = 4 * openai.MediaTokens },
	})
	body := func(parts string) string {
		return `{"model":"demo","messages":[{"role":"user","content":[{"type":"text","text":"what is it?"},` +
			parts + `]}]}`
	}
	all := make(chan answer, 4)
	for i := range 4 {
		go func() { all <- g.postCtx(t.Context(), "/v1/chat/completions", body(picture(100_000))) }()
		if i == 0 {
			eventually(t, func() bool { return g.replicas[0].inFlight() == 1 }, "the place is taken")
		}
	}
	eventually(t, func() bool { return g.in.QueueLen("demo") == 3 }, "three wait, 300 KB together")
	for range 4 {
		e.open <- struct{}{}
	}
	for range 4 {
		assert.Equal(t, 200, (<-all).status)
	}
	k := &g.in.ensureAppRouter("demo").estimates.tokens[openai.Chat]
	assert.InDelta(t, 4, k.K(), 0, "nothing was learned")

	tools := `,"tools":[{"type":"function","function":{"name":"f","description":"` +
		strings.Repeat("x", 10_000) + `"}}]}`
	e.open <- struct{}{}
	assert.Equal(t, 200, g.post("/v1/chat/completions", strings.TrimSuffix(chatBody, "}")+tools).status)
	assert.Greater(t, k.K(), 4.3, "10 KB that the engine counts as 5 tokens are many bytes a token")
}

func ids(n int) string {
	s := "1"
	for range n - 1 {
		s += ",1"
	}
	return s
}

func TestNoReadyRankIsAnsweredAtOnce(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	g.phase("demo/0/0", state.Failed, 1)
	ar := g.in.ensureAppRouter("demo")
	eventually(t, func() bool { return !ar.canServe() }, "out of routing")
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, 503, a.status)
	assert.Equal(t, "no_ready_rank", a.code(t))
	assert.Equal(t, 503, g.get("/health").status)
	g.phase("demo/0/0", state.Ready, 1)
	eventually(t, ar.canServe, "back")
	assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
	assert.Equal(t, 200, g.get("/health").status)
}
