package node_test

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/ports"
)

// meeting is the RankAssigner of several nodes.
type meeting struct {
	mu   sync.Mutex
	at   map[uint64]msg.Publish // by epoch
	news chan struct{}
}

func (m *meeting) Publish(p msg.Publish) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.at[p.Epoch] = p
	close(m.news)
	m.news = make(chan struct{})
}

func (m *meeting) said(epoch uint64) msg.Publish {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.at[epoch]
}

func (m *meeting) Await(ctx context.Context, _ string, epoch uint64, _ int) (msg.AwaitReply, error) {
	for {
		m.mu.Lock()
		p, ok := m.at[epoch]
		news := m.news
		m.mu.Unlock()
		if ok {
			return msg.AwaitReply{Addr: p.Addr, Port: p.Port, Settings: p.Settings}, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return msg.AwaitReply{}, context.Cause(ctx)
		}
	}
}

// RG1: a lockstep group of 16 over two nodes of one machine, each with its own address: eight ranks on each,
// one rendezvous, KV events of every rank at its own node, and each node sees the end of its ranks.
func TestRG1AGroupOverTwoNodes(t *testing.T) {
	t.Parallel()
	const ranks = 16
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Skip("this machine has no 127.0.0.2")
	}
	require.NoError(t, l.Close())
	shared := &meeting{at: map[uint64]msg.Publish{}, news: make(chan struct{})}
	on := func(id, host string) *rig {
		return newRig(t, func(c *node.Config) {
			c.ID, c.EngineHost, c.Advertise = id, host, host
			own, _ := c.Leader.(*rig)
			c.Assigner = &meetingOf{shared, own}
		})
	}
	a, b := on("a", "127.0.0.1"), on("b", "127.0.0.2")
	group := cached(app.Lockstep, ranks, "")
	order := &msg.StartRank{App: group, Unit: "demo/0", Epoch: 1}
	for r := range ranks {
		order.AllRanks = append(order.AllRanks,
			state.RankGrant{Rank: r, Node: map[bool]string{true: "a", false: "b"}[r < ranks/2]})
	}
	blocks := map[string]state.Block{"a": wideBlock(t, "127.0.0.1"), "b": wideBlock(t, "127.0.0.2")}
	for id, r := range map[string]*rig{"b": b, "a": a} {
		m := *order
		m.Block = blocks[id]
		m.Ranks = m.AllRanks[:ranks/2]
		if id == "b" {
			m.Ranks = m.AllRanks[ranks/2:]
		}
		require.NoError(t, r.node.StartRank(t.Context(), &m))
	}
	for _, r := range []*rig{a, b} {
		r.expect(msg.UnitReady, msg.UnitStarted)
		require.Equal(t, ranks/2, r.accepts())
	}
	assert.Equal(t, msg.Publish{
		Unit: "demo/0", Epoch: 1, Addr: "127.0.0.1",
		Port: blocks["a"].Base + 5*ranks, Settings: "model demo, max_model_len 2048 and block size 16",
	}, shared.said(1))
	urls := map[int]string{}
	for _, r := range []*rig{a, b} {
		for _, s := range r.node.RankStatuses()["demo/0"] {
			urls[s.Rank] = s.URL
		}
	}
	require.Len(t, urls, ranks)
	assert.Equal(t, "http://127.0.0.2:"+strconv.Itoa(blocks["b"].Base+15), urls[15],
		"ports count the ranks of the group")
	prompt(t, urls[15], 4*16*5) // a lockstep step: it ends only if all sixteen take part
	prompt(t, urls[0], 4*16*5)

	victim := b.node.RankStatuses()["demo/0"][3]
	require.NoError(t, syscall.Kill(victim.PID, syscall.SIGKILL))
	e := b.expect(msg.UnitFenced)
	assert.GreaterOrEqual(t, e.Rank, ranks/2, "11, or another one of b whose engine missed it first")
	require.NoError(t, a.node.StopRank(t.Context(),
		&msg.StopRank{Unit: "demo/0", Epoch: 1, Reason: "a rank elsewhere failed"}))
	a.expect(msg.UnitGone, msg.UnitFenced, msg.UnitKilling)
	b.expect(msg.UnitGone, msg.UnitKilling)
}

// meetingOf is the shared meeting for one node's ranks.
type meetingOf struct {
	*meeting
	own *rig
}

func (m *meetingOf) Assign(ctx context.Context, app string, group int, replicaID string) (msg.AssignReply,
	error,
) {
	return m.own.Assign(ctx, app, group, replicaID)
}

// wideBlock is a block of free ports for a group of 16.
func wideBlock(t *testing.T, host string) state.Block {
	t.Helper()
	const size = 96
	return state.Block{Base: ports.Take(t, size, host), Size: size}
}

// A port that another program holds on the node's own address is found, even if it is free on loopback.
func TestBindTestsAskTheAddressThatWillBeBound(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Skip("this machine has no 127.0.0.2")
	}
	defer func() { _ = l.Close() }()
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	base, err := strconv.Atoi(port)
	require.NoError(t, err)
	r := newRig(t, func(c *node.Config) { c.EngineHost = "127.0.0.2" })
	m := r.order(demo(app.Independent, 1, ""))
	m.Block = state.Block{Base: base, Size: 16}
	require.NoError(t, r.node.StartRank(t.Context(), m))
	e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
	assert.True(t, strings.HasPrefix(e.Reason, fmt.Sprintf("port %d of the unit's block is taken", base)),
		e.Reason)
	assert.Equal(t, "127.0.0.1", engine.Loopback)
}
