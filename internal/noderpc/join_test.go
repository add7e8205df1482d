package noderpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/memnet"
)

// joinRig is a control node that strangers can join at, behind its real node port over a network in memory.
type joinRig struct {
	t         *testing.T
	net       memnet.Network
	store     *fakeStore
	authority *pki.Authority
	token     pki.Token
}

const gateAddress = "10.0.0.1:7947"

func newJoinRig(t *testing.T) *joinRig {
	t.Helper()
	g := &joinRig{t: t, store: newFakeStore()}
	g.store.authority(t)
	secrets := g.store.State().Secrets
	var err error
	g.authority, err = pki.LoadAuthority(secrets.Authority, secrets.AuthorityKey)
	require.NoError(t, err)
	g.store.put(&state.Node{
		ID: "a", UID: "uid-a", Address: gateAddress, Gossip: "10.0.0.1:7946",
		Roles: []state.Role{state.RoleControl},
	})
	g.store.put(&state.Node{
		ID: "0-worker", UID: "uid-w", Address: "10.0.0.9:7947",
		Roles: []state.Role{state.RoleWorker},
	})
	g.store.put(&state.Node{
		ID: "lost", UID: "uid-l", Address: "10.0.0.8:7947",
		Roles: []state.Role{state.RoleControl}, Lost: true,
	})
	g.token = g.newToken(time.Now().Add(time.Hour), 1)
	g.serve()
	return g
}

func (g *joinRig) newToken(expires time.Time, uses int) pki.Token {
	token, err := pki.NewToken(g.store.State().Secrets.Authority)
	require.NoError(g.t, err)
	_, err = g.store.Propose(g.t.Context(),
		state.Command{PutToken: &state.Token{Hash: token.Hash(), Expires: expires.UnixMilli(), Uses: uses}})
	require.NoError(g.t, err)
	return token
}

func (g *joinRig) serve() {
	key, err := pki.NewKey()
	require.NoError(g.t, err)
	csr, err := pki.NewCSR(key)
	require.NoError(g.t, err)
	id := pki.Identity{Cluster: "c", Node: "a", UID: "uid-a", Roles: []string{string(state.RoleControl)}}
	cert, err := g.authority.Sign(csr, id, time.Now(), time.Hour)
	require.NoError(g.t, err)
	ca, _ := g.authority.PEM()
	credentials, err := pki.NewCredentials(ca, cert, key)
	require.NoError(g.t, err)
	port := nodeport.New(nodeport.Config{
		Credentials: func() *pki.Credentials { return credentials },
		Bind:        func(_ context.Context, addr string) (net.Listener, error) { return g.net.Listen(addr) },
	})
	require.NoError(g.t, port.Listen(g.t.Context(), gateAddress))
	server := grpc.NewServer(append(nodeport.ServerOptions(), EnrollOptions()...)...)
	NewEnrollServer(EnrollConfig{
		Store: g.store, Proposer: g.store, Log: slog.New(slog.DiscardHandler),
	}).Register(server)
	var served sync.WaitGroup
	join := port.Listener(nodeport.Join)
	served.Go(func() { _ = port.Serve() })
	served.Go(func() { _ = server.Serve(join) })
	g.t.Cleanup(func() {
		server.Stop()
		require.NoError(g.t, port.Close())
		served.Wait()
	})
}

func (g *joinRig) join(change func(c *JoinConfig)) (*Joined, error) {
	cfg := JoinConfig{
		Address: gateAddress, Token: g.token.String(), Node: newcomer("b"), Dial: g.net.DialContext,
	}
	if change != nil {
		change(&cfg)
	}
	return Join(g.t.Context(), cfg)
}

func newcomer(id string) state.Node {
	return state.Node{
		ID: id, UID: "uid-" + id, Advertise: "10.0.0.2", Address: "10.0.0.2:7947", Gossip: "10.0.0.2:7946",
		Version:   "v0.2.0",
		Roles:     []state.Role{state.RoleControl, state.RoleWorker},
		Resources: state.Resources{Slots: 8, PortLo: 20000, PortHi: 29999},
	}
}

func TestJoin(t *testing.T) {
	g := newJoinRig(t)
	n := newcomer("b")
	n.Lost, n.Draining = true, true // not its to say
	joined, err := g.join(func(c *JoinConfig) { c.Node = n })
	require.NoError(t, err)
	credentials, err := joined.Files.Credentials()
	require.NoError(t, err)
	assert.Equal(t, pki.Identity{Cluster: "c", Node: "b", UID: "uid-b", Roles: []string{"control", "worker"}},
		credentials.Identity)
	assert.Equal(t, "c", joined.Cluster)
	assert.Len(t, joined.Files.GossipKey, 32)
	assert.Equal(t, []state.Node{
		{
			ID: "a", UID: "uid-a", Address: gateAddress, Gossip: "10.0.0.1:7946",
			Roles: []state.Role{state.RoleControl},
		},
		{ID: "0-worker", UID: "uid-w", Address: "10.0.0.9:7947", Roles: []state.Role{state.RoleWorker}},
	}, joined.Seeds, "control nodes first, no lost ones")
	want := newcomer("b")
	want.Key = keySum(t, joined.Files.Key)
	assert.Equal(t, want, *g.store.nodes()["b"])

	again, err := g.join(func(c *JoinConfig) { c.Key = joined.Files.Key })
	require.NoError(t, err, "safe to repeat")
	assert.Equal(t, joined.Files.Key, again.Files.Key)
	_, err = g.join(func(c *JoinConfig) { c.Node = newcomer("d") })
	require.ErrorIs(t, err, state.ErrTokenUsed)
}

func keySum(t *testing.T, key []byte) string {
	t.Helper()
	csr, err := pki.NewCSR(key)
	require.NoError(t, err)
	sum, err := pki.KeySum(csr)
	require.NoError(t, err)
	return sum
}

// HF21: Name and UID of a node are in the certificate that it shows to every peer, and a token may be in a
// journal. A stranger that has both still lacks the key; and the node itself cannot change its roles by a
// repeated join.
func TestAUsedTokenGivesNothingToAnotherKey(t *testing.T) {
	g := newJoinRig(t)
	victim := newcomer("b")
	victim.Roles = []state.Role{state.RoleWorker}
	own, err := g.join(func(c *JoinConfig) { c.Node = victim })
	require.NoError(t, err)
	before := *g.store.nodes()["b"]
	fresh := g.newToken(time.Now().Add(time.Hour), 1)
	for _, token := range []pki.Token{g.token, fresh} {
		_, err = g.join(func(c *JoinConfig) {
			c.Node, c.Token = victim, token.String()
			c.Node.Address, c.Node.Gossip = "10.6.6.6:7947", "10.6.6.6:7946"
		})
		require.ErrorIs(t, err, state.ErrNodeTaken)
		require.ErrorContains(t, err, `token: node name taken: "uid-b" belongs to a node with another key`)
	}
	_, err = g.join(func(c *JoinConfig) {
		c.Node, c.Key = victim, own.Files.Key
		c.Node.Roles = []state.Role{state.RoleControl, state.RoleWorker}
	})
	require.ErrorIs(t, err, state.ErrRolesFixed)
	require.ErrorContains(t, err, "member: ")
	assert.Equal(t, before, *g.store.nodes()["b"])
	_, err = g.join(func(c *JoinConfig) { c.Node, c.Key = victim, own.Files.Key })
	require.NoError(t, err, "the node itself may repeat it")
}

// HF73: TestJoinNamesTheStepThatFailed checks text, code and hint of the new node's error.
func TestJoinNamesTheStepThatFailed(t *testing.T) {
	g := newJoinRig(t)
	own, _ := newCertificateRequest(t)
	expired := g.newToken(time.Now().Add(-time.Minute), 1)
	stranger, err := pki.NewAuthority("other", time.Now())
	require.NoError(t, err)
	otherCA, _ := stranger.PEM()
	foreign, err := pki.NewToken(otherCA)
	require.NoError(t, err)
	unknown := g.token
	unknown.Secret[0]++
	revoked := g.newToken(time.Now().Add(time.Hour), 1)
	for _, c := range []state.Command{
		{RevokeToken: &state.RevokeToken{ID: revoked.Hash()[:12]}},
		{PutToken: &state.Token{
			Hash: foreign.Hash(), Expires: time.Now().Add(time.Hour).UnixMilli(), Uses: 9,
			Roles: []state.Role{state.RoleWorker},
		}},
	} {
		_, err := g.store.Propose(t.Context(), c)
		require.NoError(t, err)
	}
	workers := foreign
	workers.Fingerprint = g.token.Fingerprint
	for name, c := range map[string]struct {
		change func(c *JoinConfig)
		step   string
		text   string
		is     error
		code   problem.Code
	}{
		"cut token": {
			func(c *JoinConfig) { c.Token = c.Token[:20] }, "token", "was cut", nil,
			problem.InvalidArgument,
		},
		"unknown token": {
			func(c *JoinConfig) { c.Token = unknown.String() }, "token", "unknown join token",
			state.ErrTokenUnknown, problem.Unauthenticated,
		},
		"expired token": {
			func(c *JoinConfig) { c.Token = expired.String() }, "token", "has expired",
			state.ErrTokenExpired, problem.Unauthenticated,
		},
		"revoked token": {
			func(c *JoinConfig) { c.Token = revoked.String() }, "token",
			"join token was revoked: " + revoked.Hash()[:12], state.ErrTokenRevoked, problem.Unauthenticated,
		},
		"more roles than the token's": {
			func(c *JoinConfig) { c.Token = workers.String() }, "token",
			"is for worker, and the node asks for control", state.ErrTokenRoles, problem.PermissionDenied,
		},
		"other cluster": {
			func(c *JoinConfig) { c.Token = foreign.String() }, "token", "another cluster",
			nodeport.ErrOtherCluster, problem.PermissionDenied,
		},
		"broken key": {
			func(c *JoinConfig) { c.Key = []byte("x") }, "certificate", "key", nil,
			problem.InvalidArgument,
		},
		"nobody there": {
			func(c *JoinConfig) { c.Address = "10.0.0.7:7947" }, "member", "10.0.0.7:7947", nil,
			problem.Unavailable,
		},
		"taken name": {
			func(c *JoinConfig) { c.Node.ID = "a" }, "member",
			`node name taken: "a" is held by another node`, state.ErrNodeTaken, problem.Conflict,
		},
		"no role": {
			func(c *JoinConfig) { c.Node.Roles = nil }, "member", "has no role", nil,
			problem.InvalidArgument,
		},
		"no address": {
			func(c *JoinConfig) { c.Node.Address = "" }, "member", "node port", nil,
			problem.InvalidArgument,
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := g.join(func(cfg *JoinConfig) { cfg.Key = own; c.change(cfg) })
			require.Error(t, err)
			assert.True(t, strings.HasPrefix(err.Error(), c.step+": "), err.Error())
			assert.Contains(t, err.Error(), c.text)
			assert.Equal(t, c.code, problem.CodeOf(err))
			if c.is != nil {
				require.ErrorIs(t, err, c.is)
			}
			assert.NotContains(t, err.Error(), "use token: ")
			assert.NotContains(t, err.Error(), g.token.SecretText())
		})
	}
	_, err = g.join(func(c *JoinConfig) { c.Key = own })
	require.NoError(t, err, "none of them spent the token for somebody else")
}

// TestJoinWaitsForAnElection: errors that may pass are retried.
func TestJoinWaitsForAnElection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(time.Minute) }) // connections see that both ends are gone
		g := newJoinRig(t)
		g.store.mu.Lock()
		g.store.err = problem.New(problem.Unavailable, "propose: %w", cluster.ErrNotLeader)
		g.store.mu.Unlock()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := Join(ctx, JoinConfig{
			Address: gateAddress, Token: g.token.String(), Node: newcomer("b"),
			Dial: g.net.DialContext,
		})
		require.ErrorIs(t, err, cluster.ErrNotLeader)
		time.AfterFunc(100*time.Millisecond, func() {
			g.store.mu.Lock()
			defer g.store.mu.Unlock()
			g.store.err = nil
		})
		_, err = g.join(nil)
		require.NoError(t, err)
	})
}

// TestWrongTokensAreLimited: strangers cannot fill the log, and do not delay nodes with a valid token.
func TestWrongTokensAreLimited(t *testing.T) {
	g := newJoinRig(t)
	wrong := g.token
	before := g.store.State().Index
	held, unknown := 0, 0
	for i := 0; held+unknown < 2*wrongPerSource && i < 4*wrongPerSource; i++ {
		wrong.Secret[1] = g.token.Secret[1] + byte(i) + 1
		_, err := g.join(func(c *JoinConfig) { c.Token = wrong.String() })
		require.Error(t, err)
		switch {
		case problem.CodeOf(err) == problem.Overloaded:
			held++
			assert.Contains(t, err.Error(), "token: too many wrong tokens")
		case errors.Is(err, state.ErrTokenUnknown):
			unknown++
		default:
			t.Log("no answer: ", err)
		}
	}
	assert.Equal(t, wrongPerSource, unknown)
	assert.Equal(t, wrongPerSource, held)
	assert.Equal(t, before, g.store.State().Index)
	_, err := g.join(nil)
	require.NoError(t, err)
}

func TestWrongTokensByWindow(t *testing.T) {
	var w tokenLimiter
	now := time.Unix(1000, 0)
	allowed := 0
	for i := range 1000 {
		if w.allow(fmt.Sprint(i), now) {
			allowed++
		}
	}
	assert.Equal(t, wrongTotal, allowed)
	assert.Len(t, w.sources, wrongTotal, "bounded")
	assert.False(t, w.allow("x", now.Add(wrongWindow-1)))
	assert.True(t, w.allow("x", now.Add(wrongWindow)))
	assert.True(t, w.allow("x", now.Add(-time.Hour)), "the clock was set back")
}

// TestJoinChecksTheAnswer: a man in the middle cannot hand out another cluster.
func TestJoinChecksTheAnswer(t *testing.T) {
	g := newJoinRig(t)
	good, err := g.join(nil)
	require.NoError(t, err)
	fingerprint, n := g.token.Fingerprint, newcomer("b")
	require.NoError(t, good.check(fingerprint, &n))
	other := newcomer("d")
	require.ErrorContains(t, good.check(fingerprint, &other), "certificate: it is for node b")
	require.ErrorContains(t, good.check([32]byte{1}, &n), "certificate: it is of another authority")
	bad := *good
	bad.Cluster = "x"
	require.Error(t, bad.check(fingerprint, &n))
	bad = *good
	bad.Files.Key, _ = pki.NewKey()
	require.Error(t, bad.check(fingerprint, &n))
}

// TestJoinTakesNoMoreThanItsBounds: a stranger's message is small.
func TestJoinTakesNoMoreThanItsBounds(t *testing.T) {
	g := newJoinRig(t)
	_, err := g.join(func(c *JoinConfig) { c.Node.Zone = strings.Repeat("z", 2*maxEnroll) })
	require.Error(t, err)
	_, err = g.join(func(c *JoinConfig) { c.Node.Zone = strings.Repeat("z", 64<<10) })
	assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
	assert.NotContains(t, g.store.nodes(), "b")
}

func TestNodesThatCannotBeMembers(t *testing.T) {
	for what, spoil := range map[string]func(n *state.Node){
		"spaces in the name": func(n *state.Node) { n.ID = "a b" },
		"a slash":            func(n *state.Node) { n.ID = "a/b" },
		"no UTF-8":           func(n *state.Node) { n.ID = "a\xff" },
		"long name":          func(n *state.Node) { n.ID = strings.Repeat("a", maxNodeID+1) },
		"no UID":             func(n *state.Node) { n.UID = "" },
		"no port":            func(n *state.Node) { n.Address = "10.0.0.2" },
		"no gossip":          func(n *state.Node) { n.Gossip = "" },
		"strange role":       func(n *state.Node) { n.Roles = []state.Role{"king"} },
		"role twice": func(n *state.Node) {
			n.Roles = []state.Role{
				state.RoleWorker,
				state.RoleWorker,
			}
		},
		"many slots":     func(n *state.Node) { n.Resources.Slots = maxSlots + 1 },
		"negative slots": func(n *state.Node) { n.Resources.Slots = -1 },
		"ports":          func(n *state.Node) { n.Resources.PortHi = 65536 },
	} {
		n := newcomer("b")
		require.NoError(t, checkNode(&n))
		spoil(&n)
		err := checkNode(&n)
		assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err), what)
	}
}

func TestSeedsAreBounded(t *testing.T) {
	s := newFakeStore()
	for i := range 100 {
		s.put(&state.Node{
			ID: fmt.Sprintf("n%02d", i), UID: "u", Address: "x:1",
			Roles: []state.Role{state.RoleWorker},
		})
	}
	seeds := seedsOf(s.State(), "n00")
	assert.Len(t, seeds, maxSeeds)
	assert.True(t, slices.IsSortedFunc(seeds,
		func(a, b state.Node) int { return strings.Compare(a.ID, b.ID) }))
	assert.Equal(t, "n01", seeds[0].ID)
}

// FuzzNewcomer: any record of a new node is refused or within bounds.
func FuzzNewcomer(f *testing.F) {
	text, err := json.Marshal(newcomer("b"))
	require.NoError(f, err)
	f.Add(text, "", []byte("csr"))
	s := NewEnrollServer(EnrollConfig{
		Store: newFakeStore(), Proposer: newFakeStore(),
		Log: slog.New(slog.DiscardHandler),
	})
	f.Fuzz(func(t *testing.T, node []byte, token string, csr []byte) {
		r := joinRequest{Token: token, CSR: csr}
		if json.Unmarshal(node, &r.Node) != nil {
			return
		}
		_, err := s.join(t.Context(), &r)
		require.Error(t, err)
		var p *problem.Error
		require.ErrorAs(t, fromStatus("a", toStatus(err)), &p)
		require.NotEqual(t, problem.Internal, p.Code, p.Message)
	})
}
