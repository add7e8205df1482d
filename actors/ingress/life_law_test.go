package ingress

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/pairengine"
	"github.com/dpserve/dpserve/test/ports"
)

// The tests of this file hold for every request, whatever its policy, its ranks and its connections.

// mortal is an engine that dies of a request with "poison" in it, as a process does: its connections end, and
// it takes no others.
type mortal struct {
	http.Handler
	url    string
	isDead atomic.Bool
	die    func()
}

func newMortal(t *testing.T, inner http.Handler) *mortal {
	t.Helper()
	e := &mortal{Handler: inner}
	srv := httptest.NewUnstartedServer(e)
	l, err := net.Listen("tcp", ports.TakeAddr(t)) // no other test listens there when the engine is dead
	require.NoError(t, err)
	require.NoError(t, srv.Listener.Close())
	srv.Listener = l
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	srv.Config.ConnState = func(c net.Conn, s http.ConnState) {
		mu.Lock()
		defer mu.Unlock()
		open[c] = s != http.StateClosed
	}
	srv.Start()
	e.url = srv.URL
	e.die = func() {
		e.isDead.Store(true)
		_ = srv.Listener.Close()
		mu.Lock()
		defer mu.Unlock()
		for c := range open {
			_ = c.Close()
		}
	}
	t.Cleanup(func() { e.die(); srv.Close() })
	return e
}

func (e *mortal) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if strings.Contains(string(body), "poison") {
		e.die()
		return
	}
	r.Body = io.NopCloser(strings.NewReader(string(body)))
	e.Handler.ServeHTTP(w, r)
}

func deaths(engines []*mortal) (n int) {
	for _, e := range engines {
		if e.isDead.Load() {
			n++
		}
	}
	return n
}

// RP23: whether its connections are new or were used, and wherever the ranks are.
func TestARequestKillsAtMostTwoRanks(t *testing.T) {
	for _, warm := range []bool{false, true} {
		t.Run(fmt.Sprintf("warm %v", warm), func(t *testing.T) {
			forEachTransport(t, func(t *testing.T, far bool) {
				for _, policy := range []string{"least-loaded", "cache-aware"} { // cache-aware asks one again
					var engines []*mortal
					o := options{far: far, app: func(a *app.Application) {
						a.Retries.Attempts, a.Routing.Policy = 8, policy
					}}
					for range 4 {
						e := newMortal(t, replies(200, wholeAnswer))
						engines, o.urls = append(engines, e), append(o.urls, e.url)
					}
					g := newRig(t, o)
					for range 8 {
						if warm {
							require.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
						}
					}
					a := g.post("/v1/chat/completions", poisonBody)
					assert.Equal(t, 502, a.status, policy)
					assert.Contains(t, a.body, "two ranks died while they had this request", policy)
					assert.Equal(t, 2, deaths(engines), policy)
				}
			})
		})
	}
}

// RP23, RP24: of both pools together, whether the legs run one after the other, one inside the other, or at
// once.
func TestASplitRequestKillsAtMostTwoRanks(t *testing.T) {
	for _, transfer := range []string{app.TransferNIXL, app.TransferNIXLPush, app.TransferMooncake} {
		for _, warm := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, warm %v", transfer, warm), func(t *testing.T) {
				t.Parallel()
				var engines []*mortal
				o := options{prefills: 2, decodes: 3, transfer: transfer, wrap: func(h http.Handler) string {
					e := newMortal(t, h)
					engines = append(engines, e)
					return e.url
				}}
				g := newPairRig(t, o)
				for range 12 {
					if warm {
						require.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
					}
				}
				a := g.post("/v1/chat/completions", poisonBody)
				assert.Equal(t, 502, a.status)
				assert.Contains(t, a.body, "two ranks died while they had this request")
				assert.Equal(t, 2, deaths(engines))
			})
		}
	}
}

// fault is how an engine fails every request.
type fault struct {
	name    string
	engine  http.HandlerFunc
	streams bool // the requests ask for streams
	passed  int  // status of an answer that is about the request, as another rank would say; 0: it is not
	begun   bool // the client has a part of the answer, so that only the rank's ejection helps
}

// faults are all failures of one rank beside good ones: a status of each row of causes and every way in which
// a connection may end. Package dispatch classifies all other statuses.
func faults() []fault {
	var all []fault
	for _, n := range []int{
		300, 301, 304, 307, 400, 401, 403, 404, 405, 408, 409, 422, 429, 451,
		500, 501, 502, 503, 504, 505, 599,
	} {
		f := fault{
			name:    fmt.Sprint(n),
			engine:  replies(n, fmt.Sprintf(`{"error":{"message":"no, %d","code":%d}}`, n, n)),
			streams: n%2 == 0,
		}
		switch n {
		case 401, 403, 404, 405, 408, 429: // of the rank
		case 501, 505:
			f.passed = n
		default:
			if n >= 400 && n < 500 {
				f.passed = n
			}
		}
		all = append(all, f)
	}
	const head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n"
	return append(
		all,
		fault{name: "resets", engine: resets},
		fault{name: "breaks off", engine: breaksOff, streams: true},
		fault{name: "no HTTP", engine: writesRaw("what?\r\n\r\n")},
		fault{name: "101", engine: writesRaw("HTTP/1.1 101 Switching Protocols\r\n\r\n")},
		fault{name: "ends in its header", engine: writesRaw(head)},
		fault{name: "ends behind its header", engine: writesRaw(head + "\r\n")},
		fault{name: "nothing", engine: sends(), streams: true},
		fault{name: "ends before the first token", engine: cutAfter(roleChunk), streams: true},
		fault{name: "busy", engine: replies(503, busyError), streams: true},
		fault{name: "an error as the first event", streams: true, engine: sends(
			`{"error":{"message":"no","type":"InternalServerError","code":500}}`)},
		fault{name: "ends after a token", engine: cutAfter(roleChunk, textChunk), streams: true, begun: true},
		fault{
			name: "ends in its body", engine: writesRaw(head + "\r\n" + `{"id":"c","choices":[`), begun: true,
		},
	)
}

// loop sends n requests from 12 clients, and counts the answers by status; 0 is an answer that is not whole.
func (g *rig) loop(n int, body string) map[int]int {
	var mu sync.Mutex
	var wg sync.WaitGroup
	out, left := map[int]int{}, atomic.Int64{}
	left.Store(int64(n))
	for range 12 {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				a := g.postCtx(g.t.Context(), "/v1/chat/completions", body)
				if a.err != nil || a.status == 200 && strings.Contains(a.body, `"error"`) {
					a.status = 0
				}
				mu.Lock()
				out[a.status]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return out
}

// setEjects makes five failures in a row eject the rank, or ends its ejection.
func (r *replica) setEjects(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ejects, r.failures = on, 0
	if r.ejected && !on {
		r.accepting, r.ejected = true, false
		r.emit(&msg.Record{Kind: msg.RecState, RankState: msg.RankState{Accepting: true}})
	}
}

func (r *replica) isEjected() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ejected
}

// usesPolicy deploys every application with another policy.
func (g *rig) usesPolicy(policy string) {
	before := g.in.table.Load()
	g.store.set(func(st *state.State) {
		for name, old := range st.Apps {
			var pools []app.Application
			require.NoError(g.t, json.Unmarshal(old.Spec, &pools))
			for i := range pools {
				pools[i].Routing.Policy = policy
			}
			next := *old
			next.Revision++
			next.Spec, _ = json.Marshal(pools)
			st.Apps[name] = &next
		}
	})
	eventually(g.t, func() bool { return g.in.table.Load() != before }, policy)
}

// lawEngine is the engine of a rank that may fail.
type lawEngine struct {
	*pairengine.Engine
	*httptest.Server
}

func newLawEngine(t *testing.T, e *pairengine.Engine) lawEngine {
	srv := httptest.NewServer(e)
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	return lawEngine{e, srv}
}

// suffers gives a rank a fault, and requires that clients get the answers of the others. It says what it saw
// otherwise.
func (g *rig) suffers(f *fault, rank *replica, engine lawEngine, isCold bool) string {
	n, body := 12, chatBody
	if f.streams {
		body = streamBody
	}
	if isCold {
		engine.CloseClientConnections()
	}
	engine.Do(answers(f.engine))
	defer engine.Do(nil)
	if f.begun {
		n = 40
		rank.setEjects(true)
		defer rank.setEjects(false)
	}
	for range 10 {
		wasEjected := rank.isEjected()
		got := g.loop(n, body)
		good := got[200]
		if f.passed != 0 {
			good += got[f.passed]
		}
		switch {
		case f.begun && !wasEjected: // a policy that counts failed answers as load may ask it seldom
		case 100*good >= 95*n:
			return ""
		default:
			return fmt.Sprintf("%s, cold %v: %v", f.name, isCold, got)
		}
	}
	return ""
}

// lawPolicies are the policies that choose a rank.
func lawPolicies() []string {
	return slices.DeleteFunc(routing.Names(), func(name string) bool { return name == "direct" })
}

// RP25: one of three ranks fails every request at once, in any way, and the clients are well. Every way
// happens in each world; the policies share them, in each world others.
func TestLawABadRankOfThree(t *testing.T) {
	all, policies := faults(), lawPolicies()
	for world, name := range []string{"near", "far", "two pools, near", "two pools, far"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var g *rig
			var engines []lawEngine
			serve := func(e http.Handler) string {
				engines = append(engines, newLawEngine(t, e.(*pairengine.Engine)))
				return engines[len(engines)-1].URL
			}
			far, bad := world%2 == 1, []int{2}
			if world < 2 {
				fleet := pairengine.New(t, app.TransferSim, model1)
				fleet.Mark = ""
				var urls []string
				for range 3 {
					urls = append(urls, serve(fleet.Make(pairengine.Both, 1)))
				}
				g = newRig(t, options{far: far, urls: urls})
			} else {
				g = newPairRig(t, options{prefills: 3, decodes: 3, max: 32, far: far, wrap: serve}).rig
				bad = []int{0, 3} // the first of each pool
			}
			for i, policy := range policies {
				g.usesPolicy(policy)
				require.Equal(t, map[int]int{200: 12}, g.loop(12, chatBody), policy)
				for n := (i + 5*world) % len(policies); n < len(all); n += len(policies) {
					turn := n / len(policies)
					k := bad[turn%len(bad)]
					assert.Empty(t, g.suffers(&all[n], g.replicas[k], engines[k], turn/2%2 == 0),
						"%s, rank %d", policy, k)
				}
			}
		})
	}
}

// RP28, RP41: ranks that refuse are no attempts of a request or of a reservation, as in one pool.
func TestRefusalsOfASplitRequest(t *testing.T) {
	g := newPairRig(t, options{prefills: 2, decodes: 8})
	for _, r := range g.decodes[:6] {
		r.setRefuse(func(*msg.Admit) msg.Refusal { return msg.NoLease })
	}
	for range 20 {
		assert.Equal(t, 200, g.post("/v1/chat/completions", streamBody).status)
	}
	for i := range 10 {
		q := &client.BestWorkerRequest{TokenIDs: []uint32{1, 2, 3}, RequestID: fmt.Sprint(i)}
		w, err := g.in.BestWorker(t.Context(), "demo", q)
		require.NoError(t, err)
		require.NotNil(t, w.PrefillWorker)
		require.NoError(t, g.in.Free("demo", q.RequestID))
	}
	g.requireMetric(`dpserve_pd_requests_total{app="demo",outcome="ok",way="remote"}`, "20")
}
