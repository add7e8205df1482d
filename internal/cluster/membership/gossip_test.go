package membership_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/test/parallel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var secret = []byte("0123456789abcdef0123456789abcdef")

func key(t testing.TB, secret []byte) []byte {
	t.Helper()
	k, err := membership.DeriveKey(secret, "c1")
	require.NoError(t, err)
	return k
}

func config(t testing.TB, node string, seeds ...string) membership.Config {
	t.Helper()
	return membership.Config{
		Self: membership.Member{
			Cluster: "c1", UID: "uid-" + node, Node: node, Address: "127.0.0.1:7947",
		},
		Incarnation: 1, Host: "127.0.0.1", Key: key(t, secret),
		Seeds: func() []string { return append([]string(nil), seeds...) },
		Log:   slog.New(slog.DiscardHandler),
	}
}

// view names the nodes that a member sees.
func view(g *membership.Gossip) string {
	var names []string
	for _, m := range g.Members() {
		names = append(names, m.Node)
	}
	return strings.Join(names, " ")
}

// TestTwoMembersOverSockets is the only test over real UDP and TCP.
func TestTwoMembersOverSockets(t *testing.T) {
	start := func(node string, seeds ...string) *membership.Gossip {
		g, err := membership.Start(t.Context(), config(t, node, seeds...))
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, g.Close()) })
		return g
	}
	a := start("a")
	b := start("b", a.Address())
	for _, g := range []*membership.Gossip{a, b} {
		require.Eventually(t, func() bool { return view(g) == "a b" }, 30*time.Second, time.Millisecond)
	}
	taken := config(t, "c")
	_, port, err := net.SplitHostPort(a.Address())
	require.NoError(t, err)
	_, err = fmt.Sscan(port, &taken.Port)
	require.NoError(t, err)
	_, err = membership.Start(t.Context(), taken)
	assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
}

func TestWhatStartRefuses(t *testing.T) {
	for name, change := range map[string]func(*membership.Config){
		"short key":  func(c *membership.Config) { c.Key = []byte("short") },
		"no cluster": func(c *membership.Config) { c.Self.Cluster = "" },
		"long name":  func(c *membership.Config) { c.Self.Node = strings.Repeat("n", 600) },
		"no address": func(c *membership.Config) { c.Host = "0.0.0.0" },
	} {
		cfg := config(t, "a")
		change(&cfg)
		_, err := membership.Start(t.Context(), cfg)
		assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err), "%s: %v", name, err)
	}
}

// lan is a network in memory that can be cut. The test runs in a bubble, on fake time.
type lan struct {
	t     *testing.T
	mu    sync.Mutex
	all   []*membership.Gossip
	ports map[string]*port
	cut   func(from, to string) bool
	wire  bytes.Buffer // all that was sent; under mu
}

// onLAN runs a test on fake time.
func onLAN(t *testing.T, test func(t *testing.T, l *lan)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := &lan{t: t, ports: map[string]*port{}}
		defer func() {
			for _, g := range l.all {
				require.NoError(t, g.Kill())
			}
			time.Sleep(5 * time.Second) // memberlist's last probes end by time-outs, not by Shutdown
		}()
		test(t, l)
	})
}

// start starts a node with the timers of production at 10.0.0.i. It runs until the test ends.
func (l *lan) start(i int, cfg membership.Config) *membership.Gossip {
	l.t.Helper()
	p := &port{
		lan: l, ip: net.IPv4(10, 0, 0, byte(i)).To4(), packets: make(chan *memberlist.Packet, 256),
		streams: make(chan net.Conn, 256),
	}
	l.mu.Lock()
	l.ports[p.String()] = p
	l.mu.Unlock()
	cfg.Transport = p
	g, err := membership.Start(l.t.Context(), cfg)
	require.NoError(l.t, err)
	l.all = append(l.all, g)
	return g
}

// three starts the nodes a, b and c, which know of each other's addresses.
func (l *lan) three(change func(cfg *membership.Config)) (a, b, c *membership.Gossip) {
	l.t.Helper()
	var all []*membership.Gossip
	for i, node := range []string{"a", "b", "c"} {
		cfg := config(l.t, node, "10.0.0.1:7946", "10.0.0.2:7946", "10.0.0.3:7946")
		if change != nil {
			change(&cfg)
		}
		all = append(all, l.start(i+1, cfg))
	}
	within(l.t, 2*time.Second, "a b c", all...)
	return all[0], all[1], all[2]
}

func (l *lan) set(cut func(from, to string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = cut
}

// sent is all that went over the wire so far.
func (l *lan) sent() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.wire.String()
}

// send notes what goes over the wire and returns where it arrives; nil: nowhere.
func (l *lan) send(from, to string, b []byte) *port {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wire.Write(b)
	if p := l.ports[to]; p != nil && !p.closed && (l.cut == nil || !l.cut(from, to) && !l.cut(to, from)) {
		return p
	}
	return nil
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

// port is a node's transport on a lan.
type port struct {
	lan     *lan
	ip      net.IP
	packets chan *memberlist.Packet
	streams chan net.Conn
	closed  bool // under lan.mu
}

func (p *port) Network() string { return "lan" }
func (p *port) String() string  { return net.JoinHostPort(p.ip.String(), "7946") }

func (p *port) FinalAdvertiseAddr(string, int) (net.IP, int, error) { return p.ip, 7946, nil }
func (p *port) PacketCh() <-chan *memberlist.Packet                 { return p.packets }
func (p *port) StreamCh() <-chan net.Conn                           { return p.streams }

func (p *port) WriteTo(b []byte, to string) (time.Time, error) {
	if there := p.lan.send(p.String(), to, b); there != nil {
		select {
		case there.packets <- &memberlist.Packet{Buf: bytes.Clone(b), From: p, Timestamp: time.Now()}:
		default:
		}
	}
	return time.Now(), nil
}

func (p *port) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	return p.WriteTo(b, a.Addr)
}

func (p *port) DialTimeout(to string, timeout time.Duration) (net.Conn, error) {
	there := p.lan.send(p.String(), to, nil)
	if there == nil {
		time.Sleep(timeout)
		return nil, context.DeadlineExceeded
	}
	here, other := net.Pipe()
	there.streams <- tappedConn{other, there, p.String()}
	return tappedConn{here, p, to}, nil
}

func (p *port) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	return p.DialTimeout(a.Addr, timeout)
}

func (p *port) Shutdown() error {
	p.lan.mu.Lock()
	defer p.lan.mu.Unlock()
	p.closed = true
	return nil
}

type tappedConn struct {
	net.Conn
	port *port
	to   string
}

func (c tappedConn) RemoteAddr() net.Addr { return c.port }

func (c tappedConn) Write(b []byte) (int, error) {
	c.port.lan.send(c.port.String(), c.to, b)
	return c.Conn.Write(b)
}

// MB1: TestTimesOfThreeNodes, with the real timers: a full view within 2 s of three starts, a power cut is
// seen within 3 s (MB1), and a split of 2 minutes is over within 13 s of its healing (MB2).
func TestTimesOfThreeNodes(t *testing.T) {
	onLAN(t, func(t *testing.T, l *lan) {
		a, b, c := l.three(nil)
		time.Sleep(time.Minute)
		assert.Equal(t, "a b c", view(a))
		for _, m := range a.Members()[1:] {
			assert.Less(t, time.Since(m.LastSeen), 2*time.Second, "probes are answered")
		}
		l.set(func(from, to string) bool { return from == a.Address() })
		within(t, 5*time.Second, "a", a)
		within(t, time.Second, "b c", b, c)
		time.Sleep(2 * time.Minute) // longer than memberlist itself would look for the dead
		l.set(nil)
		within(t, 13*time.Second, "a b c", a, b, c)

		require.NoError(t, c.Kill())
		within(t, 3*time.Second, "a b", a, b)
	})
}

// MB4: TestNodeIsBackUnderANewAddress (MB4): a node that was closed or killed is back within 5 s under
// another address. The old process is not taken for the new one, also if it is still thought to be alive.
func TestNodeIsBackUnderANewAddress(t *testing.T) {
	for name, away := range map[string]time.Duration{
		"closed": 4 * time.Second, "killed": 4 * time.Second, "at once": 0,
	} {
		t.Run(name, func(t *testing.T) {
			onLAN(t, func(t *testing.T, l *lan) {
				a, b, c := l.three(nil)
				m, ok := a.Find("uid-c")
				require.True(t, ok)
				assert.Equal(t, "10.0.0.3:7946", m.Gossip)
				assert.Equal(t, "127.0.0.1:7947", m.Address)
				if name == "closed" {
					require.NoError(t, c.Close())
					within(t, time.Second, "a b", a, b)
				} else {
					require.NoError(t, c.Kill())
				}
				time.Sleep(away) // a killed one is dead after 3

				began := time.Now()
				again := config(t, "c", a.Address(), b.Address())
				again.Incarnation = 2
				l.start(4, again)
				for _, g := range []*membership.Gossip{a, b} {
					for m.Gossip != "10.0.0.4:7946" {
						require.LessOrEqual(t, time.Since(began), 5*time.Second, "c is at %q", m.Gossip)
						time.Sleep(10 * time.Millisecond)
						m, _ = g.Find("uid-c")
					}
				}
				within(t, 5*time.Second, "a b c", a, b)
			})
		})
	}
}

// TestStrangersStayOutside: whoever has another key, another cluster or was removed is refused and counted.
// A removed node is no reason for a warning: it gossips on until it learns of its removal.
func TestStrangersStayOutside(t *testing.T) {
	for name, stranger := range map[string]struct {
		cfg    func(cfg *membership.Config)
		reason membership.Reason
		warns  bool
	}{
		"thief": {
			func(cfg *membership.Config) { cfg.Key = key(t, []byte("another")) }, membership.BadKey, true,
		},
		"foreign": {func(cfg *membership.Config) { cfg.Self.Cluster = "c2" }, membership.BadCluster, true},
		"removed": {func(*membership.Config) {}, membership.BadCluster, false},
	} {
		t.Run(name, func(t *testing.T) {
			onLAN(t, func(t *testing.T, l *lan) {
				var log parallel.Buffer
				var refused sync.Map
				guard := config(t, "a")
				guard.Log = slog.New(slog.NewTextHandler(&log, nil))
				guard.Refused = func(r membership.Reason) { refused.Store(r, true) }
				guard.Revoked = func(uid string) bool { return uid == "uid-removed" }
				a := l.start(1, guard)
				cfg := config(t, name, a.Address())
				stranger.cfg(&cfg)
				s := l.start(2, cfg)
				time.Sleep(time.Minute)
				_, ok := refused.Load(stranger.reason)
				assert.True(t, ok)
				assert.Equal(t, "a", view(a))
				if stranger.reason == membership.BadKey || name == "foreign" {
					assert.Equal(t, name, view(s))
				}
				warnings := strings.Count(log.String(), "level=WARN")
				assert.LessOrEqual(t, warnings, 61, "at most one a second")
				assert.Equal(t, stranger.warns, warnings > 0, log.String())
			})
		})
	}
}

// SP10: without the key nothing can be read: no name, no cluster, no address.
func TestNothingIsSentInClear(t *testing.T) {
	onLAN(t, func(t *testing.T, l *lan) {
		a := l.start(1, config(t, "alpha-node"))
		b := l.start(2, config(t, "beta-node", a.Address()))
		within(t, 2*time.Second, "alpha-node beta-node", a, b)
		require.NoError(t, b.Close())
		within(t, 2*time.Second, "alpha-node", a)
		sent := l.sent()
		require.Greater(t, len(sent), 1000)
		for _, word := range []string{"alpha-node", "beta-node", "uid-", "cluster", "7947"} {
			assert.NotContains(t, sent, word)
		}
	})
}

// SP10: each node takes the new key at its own time. In between they do not hear each other; ten seconds
// after the last one all are there again, and who has the old key is outside.
func TestTheKeyChanges(t *testing.T) {
	onLAN(t, func(t *testing.T, l *lan) {
		var unread atomic.Int32
		a, b, c := l.three(func(cfg *membership.Config) {
			cfg.Refused = func(membership.Reason) { unread.Add(1) }
		})
		for i, secret := range []string{"the second secret", "the third"} {
			for _, g := range []*membership.Gossip{a, b, c} {
				require.NoError(t, g.SetKey(key(t, []byte(secret))))
				require.NoError(t, g.SetKey(key(t, []byte(secret))), "again")
				time.Sleep(time.Duration(i*8) * time.Second)
			}
			within(t, 13*time.Second, "a b c", a, b, c)
		}
		require.Error(t, a.SetKey([]byte("short")))
		unread.Store(0)
		time.Sleep(time.Minute)
		assert.Zero(t, unread.Load())
		late := l.start(4, config(t, "late", a.Address()))
		time.Sleep(10 * time.Second)
		assert.Equal(t, "late", view(late))
		assert.NotZero(t, unread.Load())
		assert.Equal(t, "a b c", view(a))
	})
}
