package noderpc

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/memnet"
)

// groupPeer notes what its links say.
type groupPeer struct {
	mu   sync.Mutex
	got  []msg.GroupMessage
	news []string
}

func (p *groupPeer) ReceiveGroup(from string, m *msg.GroupMessage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.got = append(p.got, *m)
}

func (p *groupPeer) OwnerChanged(node string) { p.note("owner " + node) }
func (p *groupPeer) HolderLost(node string)   { p.note("lost " + node) }

func (p *groupPeer) note(s string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.news = append(p.news, s)
}

// take returns what came, and forgets it.
func (p *groupPeer) take() (got []msg.GroupMessage, news string) {
	synctest.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	got, news = p.got, strings.Join(p.news, ", ")
	p.got, p.news = nil, nil
	return got, news
}

// groupNet is two nodes, a and b, with links between their ingresses.
type groupNet struct {
	network memnet.Network
	links   map[string]*GroupLinks
	peers   map[string]*groupPeer
	ends    []func()
}

func newGroupNet(t *testing.T) *groupNet {
	n := &groupNet{links: map[string]*GroupLinks{}, peers: map[string]*groupPeer{}}
	for _, node := range []string{"a", "b"} {
		other := map[string]string{"a": "b", "b": "a"}[node]
		conn, err := grpc.NewClient("passthrough:///"+other+":1",
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
				return n.network.Host(node).DialContext(ctx, "tcp", addr)
			}))
		require.NoError(t, err)
		l := NewGroupLinks(GroupLinksConfig{
			Conn: func(string) (*grpc.ClientConn, error) { return conn, nil },
			Peer: func(context.Context) (pki.Identity, bool) {
				return pki.Identity{Node: other, Roles: []string{string(state.RoleIngress)}}, true
			},
			Log: slog.New(slog.DiscardHandler),
		})
		n.peers[node] = &groupPeer{}
		l.Bind(n.peers[node])
		server := grpc.NewServer()
		l.Register(server)
		listener, err := n.network.Host(node).Listen(node + ":1")
		require.NoError(t, err)
		go func() { _ = server.Serve(listener) }()
		n.links[node] = l
		n.ends = append(n.ends, l.Close, func() { _ = conn.Close() }, server.Stop)
	}
	return n
}

func (n *groupNet) close() {
	for _, end := range n.ends {
		end()
	}
}

// LG34: an ingress reaches the owner of a queue over one stream, which carries messages both ways in their
// order. Each end notices within a bit more than a second that the other one is not heard, whichever way is
// cut, and a later stream begins anew.
func TestGroupLinks(t *testing.T) {
	t.Parallel()
	for _, cut := range [][2]string{{"a", "b"}, {"b", "a"}} {
		t.Run(cut[0]+" to "+cut[1], func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newGroupNet(t)
				defer n.close()
				a, b := n.links["a"], n.links["b"]
				hold := msg.GroupMessage{
					Kind: msg.GroupHold, App: "demo", Group: 2, ID: 7, Tokens: 9000, Age: 3 * time.Second,
					Client: 5,
					Hits:   []routing.Hit{{Rank: 3, Tokens: 64}, {Rank: routing.ID(2, 1), Tokens: 128}},
				}
				assert.False(t, a.Send("b", &hold), "there is no link")
				assert.False(t, a.Reach("b"))
				_, news := n.peers["a"].take()
				assert.Equal(t, "owner b", news)
				assert.True(t, a.Reach("b"))
				synctest.Wait()
				assert.True(t, a.Send("b", &hold))
				assert.True(t, a.Send("b", &msg.GroupMessage{Kind: msg.GroupCancel, App: "demo", ID: 7}))
				got, _ := n.peers["b"].take()
				require.Len(t, got, 2)
				assert.Equal(t, hold, got[0])
				release := msg.GroupMessage{Kind: msg.GroupRelease, App: "demo", ID: 7, Rank: 5}
				assert.True(t, b.Send("a", &release))
				got, _ = n.peers["a"].take()
				assert.Equal(t, []msg.GroupMessage{release}, got)
				time.Sleep(time.Hour)
				assert.True(t, a.Reach("b"), "a quiet link lives")

				n.network.Silence(cut[0], cut[1])
				time.Sleep(2*time.Second + 100*time.Millisecond)
				_, news = n.peers["a"].take()
				assert.Equal(t, "owner b", news)
				assert.False(t, a.Send("b", &hold))
				if _, news = n.peers["b"].take(); cut[0] == "a" {
					assert.Equal(t, "lost a", news)
				}
				n.network.Heal(cut[0], cut[1])
				for range 40 {
					a.Reach("b")
					time.Sleep(250 * time.Millisecond)
				}
				assert.True(t, a.Reach("b"))
				got, news = n.peers["b"].take()
				assert.Empty(t, got)
				assert.Contains(t, "lost a", news)
				assert.True(t, a.Send("b", &hold))
				got, _ = n.peers["b"].take()
				assert.Len(t, got, 1)
			})
		})
	}
}

// TestLongestHits: a message has the longest ones, in the order of their ranks.
func TestLongestHits(t *testing.T) {
	t.Parallel()
	hits := make([]routing.Hit, 2*msg.MaxGroupHits)
	for i := range hits {
		hits[i] = routing.Hit{Rank: routing.RankID(i), Tokens: int32(i)}
	}
	assert.Equal(t, hits[msg.MaxGroupHits:], longestHits(hits))
	assert.Equal(t, routing.RankID(0), hits[0].Rank, "the caller's stay")
}
