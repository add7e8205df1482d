package membership_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/test/memnet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var secret = []byte("0123456789abcdef0123456789abcdef")

func key(t testing.TB, secret []byte) []byte {
	t.Helper()
	k, err := membership.DeriveKey(secret, "c1")
	require.NoError(t, err)
	return k
}

// config is that of a member on loopback with timers of a tenth.
func config(t testing.TB, node string, seeds ...string) membership.Config {
	t.Helper()
	return membership.Config{
		Node: node, Incarnation: 1, Bind: "127.0.0.1:0", Key: key(t, secret),
		Meta: membership.Meta{
			Cluster: "c1", UID: "uid-" + node, Address: "127.0.0.1:7947",
			Roles: []string{"control", "worker"}, Version: "v1", Zone: "z1",
		},
		Seeds: func() []string { return seeds },
		Timers: membership.Timers{
			Probe: 30 * time.Millisecond, ProbeTimeout: 15 * time.Millisecond,
			Rejoin: time.Second,
		},
	}
}

func start(t testing.TB, cfg membership.Config) *membership.Gossip {
	t.Helper()
	g, err := membership.New(context.WithoutCancel(t.Context()), cfg)
	require.NoError(t, err)
	require.NoError(t, g.Start())
	t.Cleanup(func() { assert.NoError(t, g.Close()) })
	return g
}

// view is what a member knows, as "a:alive b:dead".
func view(g *membership.Gossip) string {
	var words []string
	for _, m := range g.Members() {
		words = append(words, m.Node+":"+string(m.State))
	}
	return strings.Join(words, " ")
}

func eventually(t testing.TB, want string, members ...*membership.Gossip) {
	t.Helper()
	for _, g := range members {
		require.Eventually(t, func() bool { return view(g) == want }, 15*time.Second, 5*time.Millisecond,
			"wants %s", want)
	}
}

func TestThreeMembers(t *testing.T) {
	a := start(t, config(t, "a"))
	b := start(t, config(t, "b", a.Address()))
	c := start(t, config(t, "c", a.Address()))
	eventually(t, "a:alive b:alive c:alive", a, b, c)

	i := slices.IndexFunc(c.Members(), func(m membership.Member) bool { return m.Node == "a" })
	m := c.Members()[i]
	assert.WithinDuration(t, time.Now(), m.LastSeen, time.Minute)
	m.LastSeen = time.Time{}
	assert.Equal(t, membership.Member{
		Node: "a", UID: "uid-a", Address: "127.0.0.1:7947", Gossip: a.Address(),
		Roles: []string{"control", "worker"}, Version: "v1", Zone: "z1",
		State: membership.Alive, Incarnation: 1,
	}, m)

	require.NoError(t, b.Kill())
	eventually(t, "a:alive b:dead c:alive", a, c)

	// It comes back under the same name, with another address, and says farewell; packets get lost, so it may
	// take more than one.
	again := config(t, "b", a.Address())
	again.Bind = "127.0.0.2:0"
	for left := false; !left; {
		again.Incarnation++
		require.LessOrEqual(t, again.Incarnation, uint64(6), "nobody ever hears the farewell")
		b = start(t, again)
		eventually(t, "a:alive b:alive c:alive", a, b, c)
		m = a.Members()[1]
		assert.Equal(t, again.Incarnation, m.Incarnation)
		assert.True(t, strings.HasPrefix(m.Gossip, "127.0.0.2:"))

		require.NoError(t, b.Close())
		require.NoError(t, b.Close())
		gone := func(g *membership.Gossip) func() bool {
			return func() bool {
				return strings.Contains(view(g), "b:left") ||
					strings.Contains(view(g), "b:dead")
			}
		}
		require.Eventually(t, gone(a), 15*time.Second, 5*time.Millisecond)
		require.Eventually(t, gone(c), 15*time.Second, 5*time.Millisecond)
		left = view(a) == "a:alive b:left c:alive" && view(c) == view(a)
	}

	next := membership.Meta{Cluster: "c1", UID: "uid-c", Address: "127.0.0.9:7947"}
	require.NoError(t, c.UpdateMeta(next))
	require.Eventually(t, func() bool { return a.Members()[2].Address == next.Address }, 10*time.Second,
		time.Millisecond)
}

// TestAQuickRestart: a node is killed and comes back at once at the same address. The old process is not
// taken for the new one.
func TestAQuickRestart(t *testing.T) {
	a := start(t, config(t, "a"))
	b := start(t, config(t, "b", a.Address()))
	eventually(t, "a:alive b:alive", a, b)
	require.NoError(t, b.Kill())
	again := config(t, "b", a.Address())
	again.Incarnation, again.Bind = 2, b.Address()
	b = start(t, again)
	require.Eventually(t, func() bool {
		m := a.Members()
		return len(m) == 2 && m[1].Incarnation == 2 && m[1].State == membership.Alive
	}, 15*time.Second, time.Millisecond)
	eventually(t, "a:alive b:alive", a, b)
}

func TestStrangersStayOutside(t *testing.T) {
	var keys, clusters atomic.Int32
	var log syncBuffer
	guard := config(t, "a")
	guard.Log = slog.New(slog.NewTextHandler(&log, nil))
	guard.Refused = func(r membership.Reason) {
		switch r {
		case membership.BadKey:
			keys.Add(1)
		case membership.BadCluster:
			clusters.Add(1)
		default:
		}
	}
	guard.Revoked = func(uid string) bool { return uid == "uid-removed" }
	a := start(t, guard)

	wrong := config(t, "thief", a.Address())
	wrong.Key = key(t, []byte("another secret"))
	thief := start(t, wrong)
	require.Eventually(t, func() bool { return keys.Load() > 0 }, 10*time.Second, time.Millisecond)

	foreign := config(t, "foreign", a.Address())
	foreign.Meta.Cluster = "c2"
	f := start(t, foreign)
	require.Eventually(t, func() bool { return clusters.Load() > 0 }, 10*time.Second, time.Millisecond)

	before := clusters.Load()
	removed := start(t, config(t, "removed", a.Address()))
	require.Eventually(t, func() bool { return clusters.Load() > before }, 10*time.Second, time.Millisecond)

	junk, err := net.Dial("udp", a.Address())
	require.NoError(t, err)
	defer junk.Close()
	before = keys.Load()
	_, err = junk.Write([]byte("not gossip"))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return keys.Load() > before }, 10*time.Second, time.Millisecond)

	assert.Equal(t, "a:alive", view(a))
	assert.Equal(t, "thief:alive", view(thief))
	assert.Equal(t, "foreign:alive", view(f))
	require.NoError(t, removed.Close())
	assert.Contains(t, log.String(), "reason=key")
	assert.Contains(t, log.String(), "reason=cluster")
	assert.Less(t, strings.Count(log.String(), "level=WARN"), 30)
}

// TestNothingIsSentInClear: without the key nothing can be read: no name, no cluster, no address.
func TestNothingIsSentInClear(t *testing.T) {
	var wire syncBuffer
	tap := func(cfg membership.Config) membership.Config {
		cfg.Network = membership.Network{
			ListenPacket: func(ctx context.Context, addr string) (membership.Packets, error) {
				c, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", addr)
				return tappedPackets{c, &wire}, err
			},
			Listen: func(ctx context.Context, addr string) (net.Listener, error) {
				l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
				return tappedListener{l, &wire}, err
			},
			Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
				if err != nil {
					return nil, err
				}
				return tappedConn{c, &wire}, nil
			},
		}
		return cfg
	}
	a := start(t, tap(config(t, "alpha-node")))
	b := start(t, tap(config(t, "beta-node", a.Address())))
	eventually(t, "alpha-node:alive beta-node:alive", a, b)
	require.NoError(t, b.Close())
	eventually(t, "alpha-node:alive beta-node:left", a)
	seen := wire.String()
	require.Greater(t, len(seen), 1000)
	for _, word := range []string{"alpha-node", "beta-node", "uid-", "c1", "control", "7947", "z1"} {
		if len(word) > 3 { // shorter ones come by chance
			assert.NotContains(t, seen, word)
		}
	}
}

type tappedPackets struct {
	net.PacketConn
	wire *syncBuffer
}

func (p tappedPackets) WriteTo(b []byte, to net.Addr) (int, error) {
	_, _ = p.wire.Write(b)
	return p.PacketConn.WriteTo(b, to)
}

type tappedListener struct {
	net.Listener
	wire *syncBuffer
}

func (l tappedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return tappedConn{c, l.wire}, nil
}

type tappedConn struct {
	net.Conn
	wire *syncBuffer
}

func (c tappedConn) Write(b []byte) (int, error) {
	_, _ = c.wire.Write(b)
	return c.Conn.Write(b)
}

func TestTheKeyChangesWithoutALostMember(t *testing.T) {
	var unread atomic.Int32
	of := func(node string, seeds ...string) membership.Config {
		cfg := config(t, node, seeds...)
		cfg.Refused = func(r membership.Reason) {
			if r == membership.BadKey {
				unread.Add(1)
			}
		}
		return cfg
	}
	a := start(t, of("a"))
	b := start(t, of("b", a.Address()))
	eventually(t, "a:alive b:alive", a, b)
	first, second, third := key(t, secret), key(t, []byte("the second secret")), key(t, []byte("the third"))
	for _, keys := range [][][]byte{{first, second}, {second, first}, {second}} {
		for _, g := range []*membership.Gossip{a, b} {
			require.NoError(t, g.SetKeys(keys...))
			require.NoError(t, g.SetKeys(keys...), "again")
			time.Sleep(200 * time.Millisecond) // some probes, one node a step ahead
		}
	}
	assert.Zero(t, unread.Load(), "every message on the way was read")
	for _, bad := range [][][]byte{{}, {first, second, third}, {first[:5]}} {
		assert.Equal(t, problem.InvalidArgument, problem.CodeOf(a.SetKeys(bad...)))
	}
	for _, keys := range [][][]byte{{third, first}, {second}} { // of one that was away for more than a change
		require.NoError(t, b.SetKeys(keys...))
	}
	require.NoError(t, b.UpdateMeta(membership.Meta{Cluster: "c1", UID: "uid-b", Zone: "z50"}))
	require.Eventually(t, func() bool {
		m := a.Members()
		return m[1].Zone == "z50" &&
			m[1].State == membership.Alive
	}, 10*time.Second, time.Millisecond)
	late := config(t, "c", a.Address())
	late.Key = second
	c := start(t, late)
	eventually(t, "a:alive b:alive c:alive", a, b, c)
}

func TestWhatNewRefuses(t *testing.T) {
	for name, change := range map[string]func(*membership.Config){
		"short key":  func(c *membership.Config) { c.Key = []byte("short") },
		"no cluster": func(c *membership.Config) { c.Meta.Cluster = "" },
		"long zone":  func(c *membership.Config) { c.Meta.Zone = strings.Repeat("z", 600) },
		"advertised": func(c *membership.Config) { c.Advertise = "127.0.0.1:port" },
		"no address": func(c *membership.Config) { c.Bind = "0.0.0.0:0" },
	} {
		cfg := config(t, "a")
		change(&cfg)
		_, err := membership.New(t.Context(), cfg)
		assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err), "%s: %v", name, err)
	}
	cfg := config(t, "a")
	cfg.Bind, cfg.Advertise = "0.0.0.0:0", "127.0.0.1"
	a := start(t, cfg)
	assert.True(t, strings.HasPrefix(a.Address(), "127.0.0.1:"))
	assert.NotEqual(t, "127.0.0.1:0", a.Address())
	require.Error(t, a.Start(), "twice")
	taken := config(t, "b")
	taken.Bind = a.Address()
	_, err := membership.New(t.Context(), taken)
	assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
	never, err := membership.New(t.Context(), config(t, "c"))
	require.NoError(t, err)
	require.NoError(t, never.Close())
	require.Error(t, never.Start())
}

func TestDefaults(t *testing.T) {
	assert.Equal(t, 300*time.Millisecond, membership.Probe)
	assert.Equal(t, 150*time.Millisecond, membership.ProbeTimeout)
	assert.Equal(t, 10*time.Second, membership.Rejoin)
}

// lan is a network in memory that can be cut.
type lan struct {
	memnet.Network
	mu     sync.Mutex
	cut    func(from, to string) bool
	config func(cfg *membership.Config) // of each process; nil: nothing to change
}

func (l *lan) reaches(from, to string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cut == nil || !l.cut(from, to)
}

func (l *lan) set(cut func(from, to string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = cut
}

// member starts a node with the timers of production, reached under an IP of its own.
func (l *lan) member(t *testing.T, i int, seeds ...string) *membership.Gossip {
	t.Helper()
	return l.process(t, 1, fmt.Sprintf("n%d", i), i, seeds...)
}

// process is the n-th process of a node, at the i-th address.
func (l *lan) process(t *testing.T, n uint64, name string, i int, seeds ...string) *membership.Gossip {
	t.Helper()
	cfg := config(t, name, seeds...)
	cfg.Incarnation = n
	cfg.Timers = membership.Timers{}
	self := fmt.Sprintf("10.0.0.%d:7946", i)
	cfg.Bind = self
	cfg.Network = membership.Network{
		ListenPacket: func(_ context.Context, addr string) (membership.Packets, error) {
			p, err := l.ListenPacket(addr)
			return cutPackets{p, l, self}, err
		},
		Listen: func(_ context.Context, addr string) (net.Listener, error) { return l.Listen(addr) },
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if !l.reaches(self, addr) || !l.reaches(addr, self) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return l.DialContext(ctx, network, addr)
		},
	}
	if l.config != nil {
		l.config(&cfg)
	}
	g, err := membership.New(t.Context(), cfg)
	require.NoError(t, err)
	require.NoError(t, g.Start())
	return g
}

type cutPackets struct {
	*memnet.Packets
	lan  *lan
	self string
}

func (p cutPackets) WriteTo(b []byte, to net.Addr) (int, error) {
	if !p.lan.reaches(p.self, to.String()) {
		return len(b), nil
	}
	return p.Packets.WriteTo(b, to)
}

// within gives the fake time until a view is there.
func within(t *testing.T, limit time.Duration, want string, members ...*membership.Gossip) {
	t.Helper()
	began := time.Now()
	for _, g := range members {
		for view(g) != want {
			require.Less(t, time.Since(began), limit, "wants %q, has %q", want, view(g))
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// TestTimesOfThreeNodes, on fake time with the real timers: a full view within 2 s of three starts, a power
// cut is seen within 3 s (MB1), and a split of 30 s is over within 10 s of its healing (MB2).
func TestTimesOfThreeNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lan{}
		seeds := []string{"10.0.0.1:7946", "10.0.0.2:7946", "10.0.0.3:7946"}
		a, b, c := l.member(t, 1, seeds...), l.member(t, 2, seeds...), l.member(t, 3, seeds...)
		within(t, 2*time.Second, "n1:alive n2:alive n3:alive", a, b, c)
		time.Sleep(time.Minute)
		assert.Equal(t, "n1:alive n2:alive n3:alive", view(a))
		for _, m := range a.Members()[1:] {
			assert.Less(t, time.Since(m.LastSeen), 2*time.Second, "probes are answered")
		}

		l.set(func(from, to string) bool { return (from == seeds[0]) != (to == seeds[0]) })
		within(t, 5*time.Second, "n1:alive n2:dead n3:dead", a)
		within(t, time.Second, "n1:dead n2:alive n3:alive", b, c)
		time.Sleep(2 * time.Minute) // longer than memberlist itself would look for the dead
		l.set(nil)
		within(t, 13*time.Second, "n1:alive n2:alive n3:alive", a, b, c)

		require.NoError(t, c.Kill())
		within(t, 3*time.Second, "n1:alive n2:alive n3:dead", a, b)
		require.NoError(t, a.Close())
		require.NoError(t, b.Close())
		time.Sleep(5 * time.Second) // memberlist's last probes end by time-outs, not by Shutdown
	})
}

// TestNodeIsBackUnderANewAddress (MB4), on fake time with the real timers: a node that was closed or killed
// is back within 5 s under another address.
func TestNodeIsBackUnderANewAddress(t *testing.T) {
	for name, end := range map[string]func(g *membership.Gossip) error{
		"closed": (*membership.Gossip).Close,
		"killed": (*membership.Gossip).Kill,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &lan{}
				seeds := []string{"10.0.0.1:7946", "10.0.0.2:7946"}
				a, b, c := l.member(t, 1, seeds...), l.member(t, 2, seeds...), l.member(t, 3, seeds...)
				within(t, 2*time.Second, "n1:alive n2:alive n3:alive", a, b, c)
				require.NoError(t, end(c))
				time.Sleep(4 * time.Second) // a killed one is dead after 3

				began := time.Now()
				c = l.process(t, 2, "n3", 4, seeds...)
				at := func(g *membership.Gossip) string {
					for _, m := range g.Members() {
						if m.Node == "n3" && m.State == membership.Alive {
							return m.Gossip
						}
					}
					return ""
				}
				for _, g := range []*membership.Gossip{a, b} {
					for at(g) != "10.0.0.4:7946" {
						require.LessOrEqual(t, time.Since(began), 5*time.Second, "n3 is at %q: %s", at(g),
							view(g))
						time.Sleep(10 * time.Millisecond)
					}
				}
				t.Logf("back after %s", time.Since(began))
				for _, g := range []*membership.Gossip{a, b, c} {
					require.NoError(t, g.Close())
				}
				time.Sleep(5 * time.Second)
			})
		})
	}
}

// TestARemovedNodeMayGossipOnForAMoment: a node that was just removed has not heard of it yet. Its messages
// are ignored and counted, and are worth a warning only when they still come after 10 s.
func TestARemovedNodeMayGossipOnForAMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log syncBuffer
		var gone atomic.Bool
		var refused atomic.Int32
		l := &lan{config: func(cfg *membership.Config) {
			if cfg.Node != "n1" {
				return
			}
			cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
			cfg.Refused = func(membership.Reason) { refused.Add(1) }
			cfg.Revoked = func(uid string) bool { return gone.Load() && uid == "uid-n2" }
		}}
		a := l.member(t, 1)
		b := l.member(t, 2, a.Address())
		within(t, 2*time.Second, "n1:alive n2:alive", a, b)

		gone.Store(true)
		gossips := func(times int) {
			for range times {
				meta := config(t, "n2").Meta
				meta.Zone = time.Now().String()
				require.NoError(t, b.UpdateMeta(meta))
				time.Sleep(time.Second)
			}
		}
		gossips(8)
		assert.Positive(t, refused.Load())
		assert.NotContains(t, log.String(), "level=WARN")
		assert.Equal(t, "n1:alive", view(a))
		gossips(4)
		assert.Contains(t, log.String(), "gossip was refused")
		require.NoError(t, b.Close())
		require.NoError(t, a.Close())
		time.Sleep(5 * time.Second)
	})
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
