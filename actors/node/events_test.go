package node_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// follower is a replica that only follows its engine's events and records what it got.
type follower struct {
	spec msg.ReplicaSpec
	sub  *kvevents.Subscriber

	mu     sync.Mutex
	facts  []msg.Facts
	blocks int
}

func newFollower(s msg.ReplicaSpec) (*follower, error) {
	f := &follower{spec: s}
	if s.Events == nil || s.Events.Bind == "" {
		return f, nil
	}
	var err error
	f.sub, err = kvevents.New(kvevents.Config{
		Endpoints: kvevents.Endpoints{Bind: s.Events.Bind, Replay: s.Events.Replay},
		Hosts:     kvevents.Hosts{Peers: []string{s.Events.Host}}, Sink: f,
	})
	if err == nil {
		err = f.sub.Start(context.Background())
	}
	return f, err
}

func (*follower) Assign(context.Context) error { return nil }

func (f *follower) Ready(_ context.Context, facts msg.Facts) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.facts = append(f.facts, facts)
	return nil
}

func (*follower) Fence(string) <-chan struct{} { return done() }
func (*follower) Controlled(openai.Effect)     {}
func (*follower) Drain(string)                 {}
func (*follower) Drained() <-chan struct{}     { return done() }
func (f *follower) Status() client.RankStatus  { return client.RankStatus{Rank: f.spec.Rank} }

func (f *follower) Stop(context.Context) error {
	if f.sub == nil {
		return nil
	}
	return f.sub.Close()
}

func (f *follower) Stored(e *kvevents.Stored) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.blocks += len(e.Hashes)
}
func (*follower) Removed(*kvevents.Removed) {}
func (*follower) Cleared()                  {}
func (*follower) Reset(bool)                {}

// seen returns the facts it got and the number of stored blocks.
func (f *follower) seen() ([]msg.Facts, int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.facts, f.blocks
}

func done() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// followers is a rig whose replicas are followers, by rank.
func followers(t testing.TB) (*rig, func(rank int) *follower) {
	var mu sync.Mutex
	all := map[int]*follower{}
	r := newRig(t, func(c *node.Config) {
		c.NewReplica = func(s msg.ReplicaSpec) (node.Replica, error) {
			f, err := newFollower(s)
			mu.Lock()
			defer mu.Unlock()
			all[s.Rank] = f
			return f, err
		}
	})
	return r, func(rank int) *follower {
		mu.Lock()
		defer mu.Unlock()
		return all[rank]
	}
}

// cached is an app whose policy reads the KV index. Its engines are simulated without a mode, else fake.
func cached(coupling app.Coupling, dpSize int, mode string) *app.Application {
	a := demo(coupling, dpSize, mode)
	a.Routing.Policy = "scoring"
	if mode == "" {
		a.Engine.Command = []string{os.Args[0], simWord}
		a.Engine.Args = app.Args{
			{Name: "block_size", Value: int64(16)},
			{Name: "num_gpu_blocks_override", Value: int64(600)},
			{Name: "max_model_len", Value: int64(2048)},
			{Name: "sim_speed", Value: int64(50)},
		}
	}
	return a
}

// The test uses real processes, the command line of the profile, and real sockets.
func TestKV8EventsOfEachRankArriveAtItsOwnDPServer(t *testing.T) {
	for coupling, ranks := range map[app.Coupling]int{app.Independent: 1, app.Lockstep: 3} {
		t.Run(string(coupling), func(t *testing.T) {
			r, of := followers(t)
			m := r.start(cached(coupling, ranks, ""))
			r.expect(msg.UnitReady, msg.UnitStarted)
			ports := engine.PortsOf(m.Block.Base, ranks)
			for rank := range ranks {
				facts, _ := of(rank).seen()
				require.Len(t, facts, 1)
				assert.NotZero(t, facts[0].Incarnation)
				facts[0].Incarnation = 0
				assert.Equal(t, msg.Facts{MaxOngoing: 256, BlockSize: 16, Blocks: 600, MaxModelLen: 2048},
					facts[0])
				assert.Equal(t, &msg.EventSource{
					Bind:   "tcp://127.0.0.1:" + strconv.Itoa(ports.KV(rank)),
					Replay: "tcp://127.0.0.1:" + strconv.Itoa(ports.Replay(rank)), Host: "127.0.0.1",
				}, of(rank).spec.Events)
			}
			last := ranks - 1
			prompt(t, of(last).spec.Target.URL, 4*16*5) // five blocks; a token is up to four bytes
			r.eventually("five blocks of the last rank",
				func() bool { _, n := of(last).seen(); return n >= 5 })
			for rank := range last {
				_, n := of(rank).seen()
				assert.Zero(t, n, "rank %d got what another one stored", rank)
			}
			r.stop(m, 0)
			r.expect(msg.UnitGone, msg.UnitKilling)
			for _, p := range portsOfRanks(ports, 0, last) {
				assert.True(t, portFree(t, p), p)
			}
		})
	}
}

// prompt has an engine compute a prompt of this many bytes.
func prompt(t testing.TB, url string, bytes int) {
	body := fmt.Sprintf(`{"model":"demo","prompt":%q,"max_tokens":1}`, strings.Repeat("x", bytes))
	resp, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
}

func TestNobodyIsAskedForEventsThatNobodyReads(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(a *app.Application)
		caching bool
	}{
		"kv_events: off": {func(a *app.Application) { a.Engine.KVEvents = app.KVEventsOff }, true},
		"caching off": {func(a *app.Application) {
			a.Engine.Args = append(a.Engine.Args, app.Arg{Name: "enable_prefix_caching", Value: false})
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			r, of := followers(t)
			a := cached(app.Independent, 1, "")
			c.change(a)
			m := r.start(a)
			r.expect(msg.UnitReady, msg.UnitStarted)
			f := of(0)
			assert.Nil(t, f.spec.Events)
			facts, _ := f.seen()
			assert.Equal(t, !c.caching, facts[0].CachingOff)
			assert.Equal(t, 16, facts[0].BlockSize)
			assert.Nil(t, facts[0].Events)
			r.stop(m, 0)
			r.expect(msg.UnitGone, msg.UnitKilling)
		})
	}
}

func TestALaunchedEngineThatPublishesElsewhereDoesNotStart(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		coupling app.Coupling
		mode     string
		rank     int
		reason   string
	}{
		"other sockets": {
			app.Independent, "elsewhere", 0,
			"the engine publishes kv events of rank 0 on tcp://*:5557 instead of tcp://127.0.0.1:",
		},
		"none": {
			app.Independent, "silent", 0,
			"the engine publishes no kv events for rank 0, though its command asks for them",
		},
		"garbage": {app.Independent, "garbage", 0, "/kv_event_sources: invalid character '<'"},
		"its sibling's ones": {
			app.Lockstep, "nooffset", 1, "the engine publishes kv events of rank 1 on tcp://127.0.0.1:",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := followers(t)
			r.start(cached(c.coupling, 2, c.mode))
			e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
			assert.Contains(t, e.Reason, c.reason)
			assert.Equal(t, c.rank, e.Rank)
			assert.False(t, e.WasReady)
		})
	}
}

// If an engine cannot be asked, its command line counts.
func TestALaunchedEngineThatDoesNotTellStarts(t *testing.T) {
	for _, mode := range []string{"old", "broken"} {
		r, of := followers(t)
		r.start(cached(app.Independent, 1, mode))
		r.expect(msg.UnitReady, msg.UnitStarted)
		assert.NotNil(t, of(0).spec.Events)
		facts, _ := of(0).seen()
		assert.Zero(t, facts[0].BlockSize)
		assert.False(t, facts[0].CachingOff)
	}
}

func TestAnEventPortThatIsTakenFailsTheStart(t *testing.T) {
	for _, offset := range []int{1, 2} {
		r, _ := followers(t)
		m := r.order(cached(app.Independent, 1, ""))
		ln, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(m.Block.Base+offset))
		require.NoError(t, err)
		defer ln.Close()
		require.NoError(t, r.node.StartRank(t.Context(), m))
		e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
		assert.Contains(t, e.Reason, strconv.Itoa(m.Block.Base+offset))
		assert.Regexp(t, "is taken|already in use", e.Reason)
	}
}

func TestAnAttachedEngineIsAskedForItsEventSockets(t *testing.T) {
	const one = `{"0":{"enable_kv_cache_events":true,"publisher":"zmq",` +
		`"endpoint":"tcp://*:15557","replay_endpoint":"tcp://*:16557","topic":"t"}}`
	const two = `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:15557"},` +
		`"1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:15558"}}`
	declared := &app.KVSocket{Connect: "tcp://127.0.0.1:7"}
	discovered := &msg.EventSource{
		Connect: "tcp://127.0.0.1:15557", Replay: "tcp://127.0.0.1:16557",
		Topic: "t", Host: "127.0.0.1",
	}
	for name, c := range map[string]struct {
		sources string // answer; "" = 404
		policy  string
		rank    app.AttachRank
		spec    *msg.EventSource
		facts   *msg.EventSource
	}{
		"it tells": {sources: one, policy: "scoring", facts: discovered},
		"it binds for its own": {
			sources: two, policy: "scoring",
			rank:  app.AttachRank{Addressing: app.AddressHeader, Selector: 1},
			facts: &msg.EventSource{Connect: "tcp://127.0.0.1:15558", Host: "127.0.0.1"},
		},
		"two behind one url": {sources: two, policy: "scoring"},
		"the file tells": {
			sources: one, policy: "scoring", rank: app.AttachRank{KVEvents: declared},
			spec: &msg.EventSource{Connect: "tcp://127.0.0.1:7", Host: "127.0.0.1"},
		},
		"nobody reads": {
			sources: one, policy: "power-of-two", rank: app.AttachRank{KVEvents: declared},
		},
		"no such route": {policy: "scoring"},
		"off": {
			sources: `{"0":{"enable_kv_cache_events":false,"publisher":"null","endpoint":"tcp://*:5557"}}`,
			policy:  "scoring",
		},
		"another host": {sources: strings.ReplaceAll(one, "*", "10.1.2.3"), policy: "scoring"},
		"another transport": {
			sources: strings.ReplaceAll(one, "tcp://*:15557", "ipc:///tmp/x"), policy: "scoring",
		},
		"garbage": {sources: `{"zero":{}}`, policy: "scoring"},
		"a list":  {sources: `[]`, policy: "scoring"},
	} {
		t.Run(name, func(t *testing.T) {
			r, of := followers(t)
			e := newRemote(t)
			e.pages = map[string]string{
				"/metrics": "vllm:cache_config_info{block_size=\"32\",num_gpu_blocks=\"24\"} 1\n",
			}
			if c.sources != "" {
				e.pages["/kv_event_sources"] = c.sources
			}
			e.start()
			c.rank.URL = "http://" + e.addr
			a := demo(app.Independent, 1, "")
			a.Engine, a.Routing.Policy = app.Engine{
				Kind:  app.KindAttach,
				Ranks: []app.AttachRank{c.rank},
			}, c.policy
			r.start(a)
			r.expect(msg.UnitReady, msg.UnitStarted)
			assert.Equal(t, c.spec, of(0).spec.Events)
			facts, _ := of(0).seen()
			assert.Equal(t, c.facts, facts[0].Events)
			assert.Equal(t, [...]int{32, 24}, [...]int{facts[0].BlockSize, facts[0].Blocks})
		})
	}
}

// An attached engine may be restarted with other settings.
func TestAnAttachedEngineThatComesBackIsAskedAgain(t *testing.T) {
	r, of := followers(t)
	e := newRemote(t)
	e.pages = map[string]string{
		"/metrics": `vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1`,
	}
	e.start()
	a := demo(app.Independent, 1, "")
	a.Engine, a.Routing.Policy = app.Engine{
		Kind:  app.KindAttach,
		Ranks: []app.AttachRank{{URL: "http://" + e.addr}},
	}, "scoring"
	m := r.start(a)
	r.expect(msg.UnitReady, msg.UnitStarted)
	e.stop()
	e.pages = map[string]string{
		"/metrics": `vllm:cache_config_info{block_size="64",num_gpu_blocks="20",` +
			`enable_prefix_caching="False"} 1`,
	}
	e.start()
	f := of(0)
	f.spec.Watcher.ReplicaEvent(msg.ReplicaEvent{
		Unit: m.Unit, Epoch: m.Epoch, Kind: msg.ReplicaLost,
		Cause: "gone",
	})
	r.expect(msg.UnitFenced)
	f.spec.Watcher.ReplicaEvent(msg.ReplicaEvent{Unit: m.Unit, Epoch: m.Epoch, Kind: msg.ReplicaBack})
	r.expect(msg.UnitReady)
	facts, _ := f.seen()
	require.Len(t, facts, 2)
	assert.NotEqual(t, facts[0].Incarnation, facts[1].Incarnation)
	facts[1].Incarnation = 0
	assert.Equal(t, msg.Facts{MaxOngoing: 256, BlockSize: 64, Blocks: 20, CachingOff: true}, facts[1])
}

// An engine without an answer about its settings starts all the same.
func TestSettingsThatDoNotComeAreZero(t *testing.T) {
	t.Parallel()
	r, of := followers(t)
	e := newRemote(t)
	e.slow = map[string]bool{"/metrics": true, "/kv_event_sources": true}
	e.start()
	a := demo(app.Independent, 1, "")
	a.HealthCheckTimeoutS = 0.2
	a.Engine, a.Routing.Policy = app.Engine{
		Kind:  app.KindAttach,
		Ranks: []app.AttachRank{{URL: "http://" + e.addr}},
	}, "scoring"
	r.start(a)
	r.expect(msg.UnitReady, msg.UnitStarted)
	facts, _ := of(0).seen()
	facts[0].Incarnation = 0
	assert.Equal(t, msg.Facts{MaxOngoing: 256}, facts[0])
}

// Real DPServers listen before their engines start, and leave every port free.
func TestDPServersFollowTheirEngines(t *testing.T) {
	r := newRig(t)
	m := r.start(cached(app.Lockstep, 2, ""))
	r.ready(m)
	prompt(t, r.statuses(m)[1].URL, 4*16*5)
	r.eventually("events of rank 1", func() bool {
		kv := r.statuses(m)[1].KV
		return kv != nil && kv.Events != nil && kv.Events.Batches > 0
	})
	st := r.statuses(m)
	assert.Equal(t, [...]any{16, int64(9600)}, [...]any{st[1].KV.BlockSize, st[1].KV.Capacity})
	assert.Zero(t, st[0].KV.Events.Batches)
	r.stop(m, 0)
	r.expect(msg.UnitGone, msg.UnitKilling)
	for _, p := range portsOfRanks(engine.PortsOf(m.Block.Base, 2), 0, 1) {
		assert.True(t, portFree(t, p), p)
	}
}

// portsOfRanks lists what engines and DPServers of some ranks of a unit bind.
func portsOfRanks(p engine.Ports, ranks ...int) []int {
	out := []int{p.RPC()}
	for _, r := range ranks {
		out = append(out, p.HTTP(r), p.KV(r), p.Replay(r))
	}
	return out
}
