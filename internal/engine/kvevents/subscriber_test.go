package kvevents

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/kvevents/zmtp"
)

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, 30*time.Second, 2*time.Millisecond)
}

// script is a publisher and a ROUTER in the hands of a test.
type script struct {
	pub, router *zmtp.Server
	mu          sync.Mutex
	subs        []*zmtp.Conn
	asked       []uint64
	reply       func(c *zmtp.Conn, from uint64)
}

func newScript(t *testing.T, reply func(c *zmtp.Conn, from uint64)) *script {
	t.Helper()
	s := &script{reply: reply}
	bind := func(role zmtp.Role, handle func(*zmtp.Conn)) *zmtp.Server {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		server := zmtp.NewServer(l, role, zmtp.DefaultLimits(), 8, nil, handle)
		server.Start()
		t.Cleanup(func() { assert.NoError(t, server.Close()) })
		return server
	}
	s.pub = bind(zmtp.Pub, func(c *zmtp.Conn) {
		if _, err := c.Recv(); err != nil { // the subscription
			return
		}
		s.mu.Lock()
		s.subs = append(s.subs, c)
		s.mu.Unlock()
		_, _ = c.Recv()
	})
	s.router = bind(zmtp.Router, func(c *zmtp.Conn) {
		m, err := c.Recv()
		if err != nil || len(m) != 2 || len(m[1]) != 8 {
			return
		}
		from := binary.BigEndian.Uint64(m[1])
		s.mu.Lock()
		s.asked = append(s.asked, from)
		s.mu.Unlock()
		s.reply(c, from)
		_, _ = c.Recv()
	})
	return s
}

func (s *script) endpoints(replay bool) Endpoints {
	e := Endpoints{Connect: "tcp://" + s.pub.Addr().String()}
	if replay {
		e.Replay = "tcp://" + s.router.Addr().String()
	}
	return e
}

func (s *script) publish(t *testing.T, frames ...[]byte) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	require.NotEmpty(t, s.subs)
	require.NoError(t, s.subs[len(s.subs)-1].Send(frames...))
}

func (s *script) subscribed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.subs) > 0
}

func (s *script) asks() []uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]uint64{}, s.asked...)
}

// box is a Sink for two goroutines.
type box struct {
	mu  sync.Mutex
	log record
}

func (b *box) Stored(ev *Stored)   { b.mu.Lock(); b.log.Stored(ev); b.mu.Unlock() }
func (b *box) Removed(ev *Removed) { b.mu.Lock(); b.log.Removed(ev); b.mu.Unlock() }
func (b *box) Cleared()            { b.mu.Lock(); b.log.Cleared(); b.mu.Unlock() }
func (b *box) Reset(p bool)        { b.mu.Lock(); b.log.Reset(p); b.mu.Unlock() }

func (b *box) lines() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string{}, b.log...)
}

func begin(t *testing.T, cfg Config) (*Subscriber, *box) {
	t.Helper()
	sink := &box{}
	cfg.Sink = sink
	s, err := New(cfg)
	require.NoError(t, err)
	require.NoError(t, s.Start(t.Context()))
	require.ErrorIs(t, s.Start(t.Context()), errStarted)
	t.Cleanup(func() { assert.NoError(t, s.Close()); assert.NoError(t, s.Close()) })
	return s, sink
}

func seq(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func endMarker(c *zmtp.Conn) { _ = c.Send(nil, nil, seq(math.MaxUint64), nil) }

// The captured stream of an engine, its first batches from the captured replay, applied in order.
func TestCapturedStreamIsFollowed(t *testing.T) {
	ring := fixture(t, "testdata/v0.32.0/dense_default_replay_from_0.jsonl")
	live := fixture(t, "testdata/v0.32.0/dense_default_live.jsonl")
	s := newScript(t, func(c *zmtp.Conn, from uint64) {
		for _, r := range ring[1 : len(ring)-1] {
			if r.Seq >= from && r.Seq <= 11 { // the newest of them come live too
				_ = c.Send(unhexAll(t, r.Frames)...)
			}
		}
		_ = c.Send(unhexAll(t, ring[len(ring)-1].Frames)...)
	})
	sub, sink := begin(t, Config{Endpoints: s.endpoints(true), Replays: NewReplays()})
	eventually(t, s.subscribed)
	for _, l := range live {
		if l.Payload != "" {
			s.publish(t, nil, seq(l.Seq), unhex(t, l.Payload))
		}
	}
	eventually(t, func() bool { st := sub.Stats(); return st.Synced && st.LastSeq == 17 })
	var want []string
	for _, r := range ring[1 : len(ring)-1] {
		for _, e := range r.Decoded[1].([]any) {
			want = append(want, wantOf(e.(map[string]any)))
		}
	}
	assert.Equal(t, append([]string{"reset partial=false"}, want...), sink.lines())
	assert.Equal(t, []uint64{0}, s.asks())
	assert.Equal(t, uint64(3), sub.Stats().Duplicates)
}

func unhexAll(t testing.TB, frames []string) [][]byte {
	var out [][]byte
	for _, f := range frames {
		out = append(out, unhex(t, f))
	}
	return out
}

// The ring of 12 does not reach back to the first batch.
func TestShortRingIsPartial(t *testing.T) {
	ring := fixture(t, "testdata/v0.32.0/sha256_cbor_replay_from_0_ring12.jsonl")
	s := newScript(t, func(c *zmtp.Conn, _ uint64) {
		for _, r := range ring[1:] {
			_ = c.Send(unhexAll(t, r.Frames)...)
		}
	})
	sub, sink := begin(t, Config{Endpoints: s.endpoints(true)})
	eventually(t, func() bool { st := sub.Stats(); return st.Synced && st.LastSeq == 17 })
	assert.Equal(t, "reset partial=true", sink.lines()[0])
	assert.False(t, sub.Stats().Partial, "an AllBlocksCleared in it made it whole again")
}

func TestStrangeMessagesAreCountedAndChangeNothing(t *testing.T) {
	s := newScript(t, func(c *zmtp.Conn, _ uint64) { endMarker(c) })
	sub, sink := begin(t, Config{Endpoints: s.endpoints(true)})
	eventually(t, func() bool { return s.subscribed() && sub.Stats().Synced })
	good := unhex(t, goldens["map stored"])
	s.publish(t, []byte("t"))
	s.publish(t, []byte("t"), seq(0))
	s.publish(t, []byte("t"), []byte{1, 2, 3}, good)
	s.publish(t, []byte("t"), seq(0), good, []byte("more"))
	s.publish(t, []byte("any topic"), seq(0), good)
	eventually(t, func() bool { return sub.Stats().Batches == 1 })
	st := sub.Stats()
	assert.Equal(t, uint64(4), st.BadFrames)
	assert.Len(t, sink.lines(), 2)
	assert.False(t, st.Partial)
}

func TestReplayAnswersThatMakeNoSense(t *testing.T) {
	for name, reply := range map[string]func(c *zmtp.Conn){
		"one frame":      func(c *zmtp.Conn) { _ = c.Send([]byte("x")) },
		"five frames":    func(c *zmtp.Conn) { _ = c.Send(nil, nil, seq(0), nil, nil) },
		"short number":   func(c *zmtp.Conn) { _ = c.Send(nil, nil, []byte{1}, nil) },
		"no delimiter":   func(c *zmtp.Conn) { _ = c.Send([]byte("x"), seq(0), nil) },
		"closed at once": func(c *zmtp.Conn) { _ = c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newScript(t, func(c *zmtp.Conn, _ uint64) { reply(c) })
			sub, _ := begin(t, Config{Endpoints: s.endpoints(true)})
			eventually(t, func() bool { return s.subscribed() && sub.Stats().ReplayFailures == 1 })
			s.publish(t, nil, seq(0), unhex(t, goldens["array stored"]))
			eventually(t, func() bool { return sub.Stats().Batches == 1 })
			assert.False(t, sub.Stats().Partial, "the first batch of all is a baseline")
		})
	}
}

// Replays of a node share their places; those that wait are not lost.
func TestReplaysAreBounded(t *testing.T) {
	var mu sync.Mutex
	now, most := 0, 0
	release := make(chan struct{})
	s := newScript(t, func(c *zmtp.Conn, _ uint64) {
		mu.Lock()
		now++
		most = max(most, now)
		mu.Unlock()
		<-release
		mu.Lock()
		now--
		mu.Unlock()
		endMarker(c)
	})
	replays := &Replays{slots: make(chan struct{}, 2)}
	var subs []*Subscriber
	for range 5 {
		sub, _ := begin(t, Config{Endpoints: s.endpoints(true), Replays: replays})
		subs = append(subs, sub)
	}
	eventually(t, func() bool { return len(s.asks()) == 2 })
	close(release)
	for _, sub := range subs {
		eventually(t, func() bool { return sub.Stats().Synced })
	}
	assert.LessOrEqual(t, most, 2)
}

// The program of the page about engines publishes as it says there.
func TestTheProgramOfThePagePublishes(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("there is no python3")
	}
	page, err := os.ReadFile("../../../docs/real-engines.md")
	require.NoError(t, err)
	_, text, found := strings.Cut(string(page), "```python\n")
	require.True(t, found)
	program, _, _ := strings.Cut(text, "```")
	sub, sink := begin(t, Config{Endpoints: Endpoints{Bind: "tcp://127.0.0.1:0"}})
	_, port, err := net.SplitHostPort(sub.Addr().String())
	require.NoError(t, err)
	run := exec.CommandContext(t.Context(), python, "-c", program, port)
	run.Stderr = os.Stderr
	stdin, err := run.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, run.Start())
	eventually(t, func() bool { return sub.Stats().Batches == 2 })
	assert.Equal(t, []string{
		"reset partial=false",
		"S [11 12] parent=none tokens=[1 2 3 4] bs=2 medium= lora=/-1 group=0 kind= extra=[]",
		"R [12] medium= group=0",
	}, sink.lines())
	require.NoError(t, stdin.Close())
	require.NoError(t, run.Wait())
}

// Where the engine dials, the newest connection is the one that counts.
func TestNewestPublisherWins(t *testing.T) {
	sub, _ := begin(t, Config{Endpoints: Endpoints{Bind: "tcp://*:0"}})
	assert.True(t, sub.Addr().(*net.TCPAddr).IP.IsLoopback(), "a wildcard is never bound")
	publisher := func() *zmtp.Conn {
		c, err := zmtp.Dial(t.Context(), nil, sub.Addr().String(), zmtp.Pub, zmtp.DefaultLimits())
		require.NoError(t, err)
		m, err := c.Recv()
		require.NoError(t, err)
		require.Equal(t, [][]byte{{1}}, m)
		return c
	}
	old := publisher()
	eventually(t, func() bool { return sub.Stats().Connects == 1 })
	next := publisher()
	defer func() { _ = next.Close() }()
	_, err := old.Recv()
	require.Error(t, err, "closed by the other side")
	require.NoError(t, next.Send(nil, seq(0), unhex(t, goldens["map stored"])))
	eventually(t, func() bool { return sub.Stats().Batches == 1 })
	assert.True(t, sub.Stats().Connected)
}

func TestUndeclaredPeersAreRefused(t *testing.T) {
	h := Hosts{Node: "10.0.0.1", Peers: []string{"10.0.0.7", "engine-3"}}
	for ip, want := range map[string]bool{
		"127.0.0.1": true, "::1": true, "10.0.0.1": true, "10.0.0.7": true,
		"10.0.0.8": false, "::ffff:10.0.0.7": true,
	} {
		assert.Equal(t, want, h.accepts(&net.TCPAddr{IP: net.ParseIP(ip)}), ip)
	}
	s := &Subscriber{cfg: Config{Hosts: h}, log: discardLog()}
	assert.False(t, s.admit(&net.TCPAddr{IP: net.ParseIP("192.0.2.1")}))
	assert.Equal(t, uint64(1), s.Stats().Refused)
}

func TestEndpointsAreLoopbackOrDeclared(t *testing.T) {
	h := Hosts{Node: "10.0.0.1", Peers: []string{"10.0.0.7", "Engine-3"}}
	for _, e := range []Endpoints{
		{Connect: "tcp://127.0.0.1:5557"},
		{Connect: "tcp://localhost:5557", Replay: "tcp://[::1]:5558"},
		{Connect: "tcp://10.0.0.7:5557", Replay: "tcp://engine-3:5558"},
		{Bind: "tcp://127.0.0.1:0"},
		{Bind: "tcp://*:5557"},
		{Bind: "tcp://10.0.0.1:5557"},
	} {
		require.NoError(t, e.Check(h), "%+v", e)
	}
	for text, e := range map[string]Endpoints{
		"exactly one":       {},
		"exactly one of":    {Connect: "tcp://127.0.0.1:1", Bind: "tcp://127.0.0.1:1"},
		"not tcp":           {Connect: "ipc:///tmp/x"},
		"is not tcp":        {Connect: "tcp://127.0.0.1"},
		"is not tcp://":     {Bind: "tcp://127.0.0.1:99999"},
		"neither loopback":  {Connect: "tcp://10.0.0.8:5557"},
		"neither":           {Connect: "tcp://*:5557"},
		"loopback nor":      {Connect: "tcp://0.0.0.0:5557"},
		"a declared":        {Connect: "tcp://127.0.0.1:5557", Replay: "tcp://example.org:1"},
		"listen beyond":     {Bind: "tcp://0.0.0.0:5557"},
		"beyond loopback":   {Bind: "tcp://[::]:5557"},
		"and the node's":    {Bind: "tcp://10.0.0.7:5557"},
		"the node's addres": {Bind: "tcp://:5557"},
	} {
		require.ErrorContains(t, e.Check(h), text, "%+v", e)
	}
	_, err := New(Config{Endpoints: Endpoints{Connect: "tcp://192.0.2.1:1"}})
	assert.Error(t, err)
}

func TestStartTellsOfATakenPort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	s, err := New(Config{Endpoints: Endpoints{Bind: "tcp://" + l.Addr().String()}, Sink: discard{}})
	require.NoError(t, err)
	require.ErrorContains(t, s.Start(t.Context()), "listen for kv events on "+l.Addr().String())
	assert.Nil(t, s.Addr())
	require.NoError(t, s.Close())
}

func TestQueueOverflowIsOneGap(t *testing.T) {
	q := newQueue()
	for i := range maxQueued + 10 {
		q.push(item{kind: itemMessage, msg: message{seq: uint64(i)}})
	}
	q.push(item{kind: itemDisconnect})
	items := q.take(nil)
	require.Len(t, items, maxQueued+2)
	assert.Equal(t, itemOverflow, items[maxQueued].kind)
	assert.Equal(t, itemDisconnect, items[maxQueued+1].kind, "never lost")
	q.push(item{msg: message{payload: make([]byte, maxQueuedBytes)}})
	q.push(item{msg: message{payload: []byte{1}}})
	items = q.take(nil)
	require.Len(t, items, 2)
	assert.Equal(t, itemOverflow, items[1].kind)
}

func TestSilence(t *testing.T) {
	var s Silence
	at := time.Unix(1000, 0)
	check := func(seconds int, batches, completed uint64) time.Duration {
		return s.Check(at.Add(time.Duration(seconds)*time.Second), batches, completed)
	}
	assert.Zero(t, check(0, 0, 0))
	assert.Zero(t, check(40, 0, 0), "nothing completes: an idle engine is silent")
	assert.Zero(t, check(41, 0, 5), "the first one may have its batch on the way")
	assert.Equal(t, 20*time.Second, check(61, 0, 6))
	assert.Equal(t, 20*time.Second, check(99, 0, 6), "idle time does not count")
	assert.Zero(t, check(100, 1, 7), "events flow again")
	assert.Zero(t, check(101, 1, 8))
	assert.Equal(t, 30*time.Second, check(131, 1, 9))
	assert.Zero(t, check(132, 1, 0), "counters of a new process")
}

func TestSources(t *testing.T) {
	read := func(name string) map[int]Source {
		t.Helper()
		raw, err := os.ReadFile("testdata/v0.32.0/" + name)
		require.NoError(t, err)
		s, err := ParseSources(raw)
		require.NoError(t, err)
		return s
	}
	two := read("kv_event_sources_two_ranks.json")
	d, ok, err := Discover(two, 1, "10.0.0.7", Hosts{})
	require.NoError(t, err)
	require.True(t, ok)
	assert.Equal(t, Discovered{Endpoints: Endpoints{
		Connect: "tcp://10.0.0.7:15901",
		Replay:  "tcp://10.0.0.7:16901",
	}}, d)
	second, ok, err := Discover(map[int]Source{4: two[0], 5: two[1]}, 1, "10.0.0.7", Hosts{})
	require.NoError(t, err)
	assert.True(t, ok)
	assert.Equal(t, d, second, "the second rank behind a front end that counts from 0")
	_, ok, err = Discover(two, 2, "10.0.0.7", Hosts{})
	require.NoError(t, err)
	assert.False(t, ok)
	_, ok, err = Discover(two, -1, "10.0.0.7", Hosts{})
	require.NoError(t, err)
	assert.False(t, ok, "two ranks: which one?")

	dials := read("kv_event_sources_dials.json")
	d, ok, err = Discover(dials, -1, "127.0.0.1", Hosts{})
	require.NoError(t, err)
	require.True(t, ok)
	assert.Equal(t, Discovered{Endpoints: Endpoints{
		Bind:   "tcp://127.0.0.1:15700",
		Replay: "tcp://127.0.0.1:15800",
	}, Topic: "t"}, d)
	_, _, err = Discover(dials, 0, "10.0.0.7", Hosts{})
	require.ErrorContains(t, err, "not on its host", "the replay is on a loopback that is not ours")

	require.NoError(t, Verify(dials, 0, "tcp://127.0.0.1:15700", "tcp://127.0.0.1:15800"))
	require.ErrorContains(t, Verify(dials, 0, "tcp://127.0.0.1:15701", "tcp://127.0.0.1:15800"),
		"instead of tcp://127.0.0.1:15701")
	require.ErrorContains(t, Verify(dials, 0, "tcp://127.0.0.1:15700", "tcp://127.0.0.1:1"), "replays")
	assert.ErrorContains(t, Verify(dials, 1, "tcp://127.0.0.1:15700", "tcp://127.0.0.1:1"),
		"publishes no kv events")
}

func TestSourcesOfBadEngines(t *testing.T) {
	for _, body := range []string{
		"", "[]", `{"x":{}}`, `{"-1":{}}`, `{"0":3}`,
		strings.Repeat(" ", maxSourcesBody+1),
	} {
		_, err := ParseSources([]byte(body))
		require.Error(t, err)
	}
	for endpoint, want := range map[string]string{
		"tcp://192.0.2.9:5557": "would listen beyond", "ipc:///tmp/x": "not tcp", "tcp://*:x": "not tcp",
		"inproc://a": "not tcp",
	} {
		sources := map[int]Source{0: {Enabled: true, Publisher: "zmq", Endpoint: endpoint}}
		_, _, err := Discover(sources, 0, "127.0.0.1", Hosts{})
		require.ErrorContains(t, err, want)
	}
	other := "tcp://192.0.2.9:1"
	sources := map[int]Source{0: {
		Enabled: true, Publisher: "zmq", Endpoint: "tcp://*:5557",
		ReplayEndpoint: &other,
	}}
	_, _, err := Discover(sources, 0, "127.0.0.1", Hosts{})
	require.ErrorContains(t, err, "not on its host")
	_, ok, err := Discover(map[int]Source{0: {Enabled: true, Publisher: "null"}}, 0, "127.0.0.1", Hosts{})
	require.NoError(t, err)
	assert.False(t, ok)
}

func FuzzParseSources(f *testing.F) {
	f.Add([]byte(`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:15557",` +
		`"replay_endpoint":"tcp://*:16557"}}`))
	f.Add([]byte(`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://[::]:1",` +
		`"replay_endpoint":null}}`))
	hosts := Hosts{Node: "10.0.0.1"}
	f.Fuzz(func(t *testing.T, body []byte) {
		sources, err := ParseSources(body)
		if err != nil {
			return
		}
		for rank := range sources {
			d, ok, err := Discover(sources, rank, "10.0.0.7", hosts)
			if ok && err == nil {
				require.NoError(t, d.Endpoints.Check(Hosts{Node: "10.0.0.1", Peers: []string{"10.0.0.7"}}),
					"%+v", d)
				assert.NotContains(t, d.Endpoints.Connect+d.Endpoints.Replay, "*")
			}
		}
	})
}

func FuzzReplies(f *testing.F) {
	f.Add([]byte{}, []byte("t"), seq(0), []byte("p"), uint8(4))
	f.Add([]byte{}, []byte{}, seq(math.MaxUint64), []byte{}, uint8(3))
	f.Fuzz(func(t *testing.T, a, b, c, d []byte, n uint8) {
		frames := [][]byte{a, b, c, d, a, b}[:n%7]
		if m, end, err := replayReply(frames); err == nil {
			assert.Equal(t, end, m.seq == 0 && m.payload == nil && end)
			assert.Len(t, frames[len(frames)-2], 8)
		}
		if m, ok := liveMessage(frames); ok {
			assert.Equal(t, frames[2], m.payload)
		}
	})
}

func TestHashText(t *testing.T) {
	raw, ok := BytesHash([]byte{0xab, 0xcd})
	require.True(t, ok)
	assert.Equal(t, "abcd -3 18446744073709551615 none",
		fmt.Sprint(raw, " ", IntHash(-3), " ", UintHash(math.MaxUint64), " ", Hash{}))
}
