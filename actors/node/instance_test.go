package node_test

import (
	"net"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/ports"
)

// attention is an SGLang application with DP attention, whose engine is the test binary.
func attention(ranks int, mode string) *app.Application {
	a := demo(app.Lockstep, ranks, "attention"+mode)
	a.Engine.Kind = app.KindSGLang
	a.Engine.Args = append(a.Engine.Args, app.Arg{Name: "enable_dp_attention", Value: true})
	return a
}

// One process hosts all ranks of the unit: each rank is asked for a token by its number, the log of the first
// one has the output, and the end of the process fails all of them.
func TestOneProcessForSeveralRanks(t *testing.T) {
	t.Parallel()
	const ranks = 3
	r := newRig(t)
	m := r.start(attention(ranks, ""))
	r.ready(m)
	st := r.statuses(m)
	require.Len(t, st, ranks)
	seen := map[string]bool{}
	for _, s := range st {
		assert.Equal(t, st[0].PID, s.PID)
		assert.Equal(t, st[0].URL, s.URL)
		assert.False(t, seen[s.Incarnation], "every rank is an incarnation of its own")
		seen[s.Incarnation] = true
	}
	assert.Len(t, group(st[0].PID), 1)
	require.NoError(t, syscall.Kill(st[0].PID, syscall.SIGKILL))
	r.expect(msg.UnitFenced) // by its exit, or by a health check that came before
	e := r.expect(msg.UnitGone, msg.UnitKilling)
	for rank := range ranks {
		assert.Contains(t, strings.Join(e.LogTail, "\n"), "a token of rank "+strconv.Itoa(rank))
	}
	assert.Zero(t, r.accepts())

	r.ports.epoch++
	m = r.start(attention(ranks, ",stubborn")) // ended once, by force
	r.ready(m)
	pid := r.statuses(m)[0].PID
	r.stop(m, 0)
	r.expect(msg.UnitGone, msg.UnitKilling)
	assert.True(t, dead(pid))
}

// The ranks of both nodes are served by the process of rank 0's node, and each node watches its own process.
func TestOneProcessPerNode(t *testing.T) {
	const ranks = 4
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Skip("this machine has no 127.0.0.2")
	}
	require.NoError(t, l.Close())
	shared := &meeting{at: map[uint64]msg.Publish{}, news: make(chan struct{})}
	rigs := map[string]*rig{}
	for id, host := range map[string]string{"a": "127.0.0.1", "b": "127.0.0.2"} {
		rigs[id] = newRig(t, func(c *node.Config) {
			c.ID, c.EngineHost, c.Advertise = id, host, host
			own, _ := c.Leader.(*rig)
			c.Assigner = &meetingOf{shared, own}
		})
	}
	order := &msg.StartRank{App: attention(ranks, ""), Unit: "demo/0", Epoch: 1}
	for rank := range ranks {
		order.AllRanks = append(order.AllRanks,
			state.RankGrant{Rank: rank, Node: []string{"a", "b"}[rank*2/ranks]})
	}
	blocks := map[string]state.Block{"a": wideBlock(t, "127.0.0.1"), "b": wideBlock(t, "127.0.0.2")}
	start := func(id string, mine []state.RankGrant) {
		m := *order
		m.Block, m.Ranks = blocks[id], mine
		require.NoError(t, rigs[id].node.StartRank(t.Context(), &m))
	}
	start("b", order.AllRanks[ranks/2:])
	start("a", order.AllRanks[:ranks/2])
	pids := map[int]bool{}
	for _, r := range rigs {
		r.expect(msg.UnitReady, msg.UnitStarted)
		for _, s := range r.node.RankStatuses()["demo/0"] {
			assert.Equal(t, "http://127.0.0.1:"+strconv.Itoa(blocks["a"].Base), s.URL)
			pids[s.PID] = true
		}
	}
	assert.Len(t, pids, 2)
	require.NoError(t, syscall.Kill(rigs["b"].node.RankStatuses()["demo/0"][0].PID, syscall.SIGKILL))
	rigs["b"].expect(msg.UnitGone, msg.UnitFenced, msg.UnitKilling)

	order.Epoch = 2
	order.AllRanks[2].Node = "a"
	rigs["b"].ports.epoch, rigs["a"].ports.epoch = 2, 2
	start("b", order.AllRanks[3:])
	e := rigs["b"].expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
	assert.Contains(t, e.Reason, "SGLang needs the same number of consecutive ranks on each node, and the 4 "+
		"ranks of demo/0 are on a, b; write max_ranks_per_node")
}

// An engine that will never answer as one is named long before its startup timeout.
func TestEnginesThatWillNeverAnswer(t *testing.T) {
	t.Parallel()
	hasty := func(c *node.Config) { c.Timers.Probe = 300 * time.Millisecond }
	other := ports.Take(t, 1)
	for mode, want := range map[string]string{
		"moved":  "it answers on port " + strconv.Itoa(other) + ", not on http://" + engine.Loopback,
		"teapot": "what answers on the engine's port is no engine: /health answered 418",
	} {
		r := newRig(t, hasty)
		a := demo(app.Independent, 1, mode)
		a.Engine.StartupTimeoutS = 3600
		a.Engine.Args = append(a.Engine.Args, app.Arg{Name: "file", Value: strconv.Itoa(other)})
		r.start(a)
		e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
		assert.Contains(t, e.Reason, want)
	}
}

// Ranks of one group on different nodes whose engines have different settings do not become ready: the other
// nodes compare theirs with those of rank 0.
func TestSettingsAreComparedOverAllNodes(t *testing.T) {
	for mode, isSame := range map[string]bool{"": true, "mismatch": false} {
		shared := &meeting{at: map[uint64]msg.Publish{}, news: make(chan struct{})}
		order := &msg.StartRank{
			App: demo(app.Lockstep, 2, mode), Unit: "demo/0", Epoch: 1,
			AllRanks: []state.RankGrant{{Rank: 0, Node: "a"}, {Rank: 1, Node: "b"}},
		}
		rigs := map[string]*rig{}
		for i, id := range []string{"a", "b"} {
			rigs[id] = newRig(t, func(c *node.Config) {
				c.ID, c.Advertise = id, engine.Loopback
				own, _ := c.Leader.(*rig)
				c.Assigner = &meetingOf{shared, own}
			})
			m := *order
			m.Ranks, m.Block = order.AllRanks[i:i+1], rigs[id].ports.block(t)
			require.NoError(t, rigs[id].node.StartRank(t.Context(), &m))
		}
		rigs["a"].expect(msg.UnitReady, msg.UnitStarted)
		assert.Equal(t, "model demo, max_model_len 2048 and block size 0", shared.said(1).Settings)
		if isSame {
			rigs["b"].expect(msg.UnitReady, msg.UnitStarted)
			continue
		}
		e := rigs["b"].expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
		assert.Equal(t, "ranks of one group disagree on their settings: rank 0 has model demo, "+
			"max_model_len 2048 and block size 0, rank 1 has model demo, max_model_len 2049 and block size 0",
			e.Reason)
	}
}
