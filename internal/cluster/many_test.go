package cluster_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// same waits until every running member has the leader's state. Only Index may differ, by refused commands.
func (g *group) same() {
	g.t.Helper()
	shown := func(m *member) string {
		st := m.State().Clone()
		st.Index = 0
		data, err := st.Encode()
		require.NoError(g.t, err)
		return string(data)
	}
	require.Eventually(g.t, func() bool {
		want := shown(g.leader())
		for _, m := range g.running() {
			if shown(m) != want {
				return false
			}
		}
		return true
	}, limit, 10*time.Millisecond, "the copies differ")
}

func TestKilledLeader(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, true)
		rev := g.propose(putApp("demo", "one")).Apps["demo"]
		for epoch := range uint64(2) {
			old := g.leader()
			term := old.Term()
			res := g.propose(grantOn("node-1", rev, epoch))
			require.Equal(t, epoch+1, res.Epochs["demo/0"])
			g.stop(old)

			next := g.leader()
			assert.Greater(t, next.Term(), term)
			assert.Equal(t, epoch+1, next.State().Epochs["demo/0"],
				"a new leader does not know the last grant")
			_, err := next.Propose(t.Context(), grantOn("node-1", rev, epoch))
			require.ErrorIs(t, err, state.ErrStaleEpoch)
			g.start(old)
			g.ready(old)
			assert.Equal(t, epoch+1, old.State().Epochs["demo/0"], "ready, but behind what was acknowledged")
		}
		g.same()
	})
}

// grantOn is a grant of demo's only rank on a node; the former grant is released by the same name's next
// epoch.
func grantOn(node string, revision, expect uint64) state.Command {
	c := grant("demo", revision, expect)
	c.GrantGroup.Units[0].Ranks[0].Node = node
	c.GrantGroup.Units[0].Ranks[0].Slot = -1
	return c
}

func TestFollowerForwards(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, false)
		leader := g.leader()
		for i, m := range g.others(leader) {
			require.False(t, m.Leader())
			uid, ok := m.LeaderNode()
			require.True(t, ok)
			assert.Equal(t, leader.UID(), uid)

			name := fmt.Sprint("demo-", i)
			res, err := m.Propose(t.Context(), putApp(name, "one"))
			require.NoError(t, err)
			assert.NotZero(t, res.Index)
			assert.Contains(t, m.State().Apps, name, "a proposer must read its own write")

			stale := putApp(name, "two")
			stale.PutApps.Expect = map[string]uint64{name: 7}
			_, err = m.Propose(t.Context(), stale)
			require.ErrorIs(t, err, state.ErrStaleRevision, "the error must stay typed")
			_, err = m.ProposeHere(t.Context(), putApp(name, "two"))
			require.ErrorIs(t, err, cluster.ErrNotLeader)
			require.ErrorIs(t, m.Barrier(t.Context()), cluster.ErrNotLeader)
			require.ErrorIs(t, m.AddStandby(t.Context(), "x"), cluster.ErrNotLeader)
		}
		require.NoError(t, leader.Barrier(t.Context()))
	})
}

func TestMembers(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := newGroup(t)
		first := g.add(cluster.Config{NodeID: "node-1"})
		g.ready(first)
		g.put(first)
		ctx := t.Context()
		require.Equal(t, []cluster.Member{{UID: first.UID(), Voter: true}}, first.Members())
		for what, err := range map[string]error{
			"there is nobody to hand over to": first.StepDown(ctx),
			"the last voter stays":            first.Remove(ctx, first.UID()),
			"it stays a voter":                first.Demote(ctx, first.UID()),
		} {
			assert.Equal(t, problem.Conflict, problem.CodeOf(err), what)
		}

		second := g.join(cluster.Config{NodeID: "node-2"}, false)
		require.Contains(t, first.Members(), cluster.Member{UID: second.UID()})
		require.NoError(t, first.AddStandby(ctx, second.UID()), "may be repeated")
		for range 2 {
			require.NoError(t, first.Promote(ctx, second.UID()))
		}
		require.NoError(t, first.AddStandby(ctx, second.UID()))
		require.Contains(t, first.Members(), cluster.Member{UID: second.UID(), Voter: true},
			"a voter does not become a standby by being added")

		leaderChanged := second.Leadership()
		g.retry(func() error { return first.StepDown(ctx) })
		g.leader(second)
		select {
		case <-leaderChanged:
		case <-time.After(limit):
			t.Fatal("a change of leadership was not announced")
		}
		require.NoError(t, first.StepDown(ctx), "who does not lead has nothing to hand over")

		for range 2 {
			g.retry(func() error { return g.leader(second).Demote(ctx, first.UID()) })
		}
		require.Contains(t, second.Members(), cluster.Member{UID: first.UID()})
		for range 2 {
			g.retry(func() error { return second.Remove(ctx, first.UID()) })
		}
		require.Equal(t, []cluster.Member{{UID: second.UID(), Voter: true}}, second.Members())
		_, err := second.Propose(ctx, putApp("demo", "one"))
		require.NoError(t, err)
	})
}

// TestLeaderRemovesItself: the leader hands over by losing its vote, and its process goes on without a
// leader.
func TestLeaderRemovesItself(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, false)
		old := g.leader()
		require.NoError(t, old.Remove(t.Context(), old.UID()))
		next := g.leader(g.others(old)...)
		require.Len(t, next.Members(), 2)
		_, err := next.Propose(t.Context(), putApp("demo", "one"))
		require.NoError(t, err)
		assert.False(t, old.Leader())
	})
}

// TestCutOffLeader: a leader without a majority accepts nothing. The commands that it got are gone when it is
// back, and after its restart. (Its log was cut at the end, which raft-wal 0.4.0 could not read again.)
func TestCutOffLeader(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, true)
		old := g.leader()
		g.testNetwork.isolate(old.address, true)
		accepted := make(chan int, 1)
		go func() {
			n := 0
			for i := range 50 {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				if _, err := old.ProposeHere(ctx, putApp("lost", fmt.Sprint(i))); err == nil {
					n++
				}
				cancel()
			}
			accepted <- n
		}()
		next := g.leader(g.others(old)...)
		_, err := next.Propose(t.Context(), putApp("demo", "one"))
		require.NoError(t, err)
		assert.Zero(t, <-accepted, "a leader without a majority accepted writes")
		require.NoError(t, next.Confirm(t.Context()))
		require.ErrorIs(t, old.Confirm(t.Context()), cluster.ErrNotLeader)
		require.Eventually(t, func() bool { return !old.Leader() }, limit, 10*time.Millisecond,
			"it still takes itself for the leader")

		g.testNetwork.isolate(old.address, false)
		g.retry(func() error { _, err := old.Propose(t.Context(), putApp("back", "one")); return err })
		g.same()
		g.stop(old)
		g.start(old)
		g.ready(old)
		assert.NotContains(t, old.State().Apps, "lost")
		assert.Contains(t, old.State().Apps, "demo")
		assert.Contains(t, old.State().Apps, "back")
	})
}

// TestLeaderCutOffInTheMomentOfAVote: a voter that does not know of a new vote and the new voter do not elect
// each other (docs/internals.md). When the leader is back, there is one again, and no acknowledged command is
// lost.
func TestLeaderCutOffInTheMomentOfAVote(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := newGroup(t)
		first := g.add(cluster.Config{NodeID: "node-1"})
		g.ready(first)
		g.put(first)
		second := g.join(cluster.Config{NodeID: "node-2"}, true)
		third := g.join(cluster.Config{NodeID: "node-3"}, false)
		old, deaf := g.leader(), second
		if old == second {
			deaf = first
		}
		g.testNetwork.isolate(deaf.address, true)
		vote := cluster.Member{UID: third.UID(), Voter: true}
		g.retry(func() error { return old.Promote(t.Context(), third.UID()) })
		require.Contains(t, third.Members(), vote)
		require.NotContains(t, deaf.Members(), vote)
		g.testNetwork.isolate(old.address, true)
		g.testNetwork.isolate(deaf.address, false)
		require.Eventually(t, func() bool { return !old.Leader() }, limit, 10*time.Millisecond)
		assert.NotContains(t, deaf.Members(), vote)

		g.testNetwork.isolate(old.address, false)
		g.heard(vote)
		g.propose(putApp("demo", "one"))
		g.same()
	})
}

func TestNoMajority(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, false)
		last := g.leader()
		for _, m := range g.others(last) {
			g.stop(m)
		}
		require.Eventually(t, func() bool { return !last.Leader() }, limit, 10*time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		require.Eventually(t, func() bool { _, known := last.LeaderNode(); return !known }, limit,
			10*time.Millisecond)
		_, err := last.Propose(ctx, putApp("demo", "one"))
		require.ErrorIs(t, err, cluster.ErrNoMajority)
		var p *problem.Error
		require.ErrorAs(t, err, &p)
		assert.Equal(t, problem.Unavailable, p.Code)
		assert.Contains(t, p.Hint, "these vote: node-1, node-2, node-3")
		require.NoError(t, last.Fault())

		gone, cancelled := context.WithCancelCause(t.Context())
		cancelled(errCut)
		_, err = last.Propose(gone, putApp("demo", "one"))
		require.ErrorIs(t, err, errCut)
		assert.Equal(t, problem.Timeout, problem.CodeOf(last.Ready(ctx)))
	})
}

// TestAllStartAtOnce: there is no leader and the log's end may not be committed, so the state lacks
// addresses. The log has them.
func TestAllStartAtOnce(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, true)
		g.propose(putApp("demo", "one"))
		all := g.running()
		for _, m := range all {
			g.stop(m)
		}
		for _, m := range all {
			g.start(m)
		}
		g.propose(putApp("demo", "two"))
		for _, m := range all {
			g.ready(m)
			assert.Equal(t, uint64(2), m.State().Apps["demo"].Revision)
		}
	})
}

// TestSnapshotForANewcomer: the entries before the snapshot are gone when the newcomer comes.
func TestSnapshotForANewcomer(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := newGroup(t)
		first := g.add(cluster.Config{NodeID: "node-1", DataDir: t.TempDir(), SegmentSize: 64 << 10})
		g.ready(first)
		g.put(first)
		for i := range 400 {
			propose(t, first.Cluster, putApp(fmt.Sprint("app-", i%7), strings.Repeat("x", 256)+fmt.Sprint(i)))
		}
		require.NoError(t, first.Snapshot())
		index := first.State().Index
		second := g.join(cluster.Config{NodeID: "node-2", DataDir: t.TempDir(), SegmentSize: 64 << 10}, true)
		assert.GreaterOrEqual(t, second.State().Index, index)
		assert.Len(t, second.State().Apps, 7)
		g.same()
	})
}

// HF32: a standby that cannot be reached, or lacks a long log, must not get a vote.
func TestStandbyIsCloseBehindOnceItHasTheLog(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := newGroup(t)
		first := g.add(cluster.Config{NodeID: "node-1"})
		g.ready(first)
		g.put(first)
		for i := range 200 {
			propose(t, first.Cluster, putApp("demo", strings.Repeat("x", 256)+fmt.Sprint(i)))
		}
		second := g.add(cluster.Config{NodeID: "node-2", Member: true, ClusterID: first.ClusterID()})
		g.put(second)
		g.testNetwork.isolate(second.address, true)
		require.NoError(t, first.AddStandby(t.Context(), second.UID()))
		assert.True(t, first.IsCloseBehind(first.UID()))
		assert.Never(t, func() bool { return first.IsCloseBehind(second.UID()) }, 500*time.Millisecond,
			10*time.Millisecond, "it has no log")
		for _, c := range []struct {
			lacks uint64
			ago   time.Duration
			want  bool
		}{
			{0, 0, true},
			{64, 0, true},
			{65, 0, false},
			{200, 0, false},
			{0, 4 * time.Second, true},
			{0, 6 * time.Second, false},
		} {
			first.NoteLog(second.UID(), first.CommitIndex()-c.lacks, c.ago)
			assert.Equal(t, c.want, first.IsCloseBehind(second.UID()),
				"it answered %s ago and lacks %d entries", c.ago, c.lacks)
		}
		g.testNetwork.isolate(second.address, false)
		require.Eventually(t, func() bool { return first.IsCloseBehind(second.UID()) }, limit,
			5*time.Millisecond)
		require.NoError(t, first.Promote(t.Context(), second.UID()))

		for i := range 50 {
			propose(t, first.Cluster, putApp("demo", fmt.Sprint("after ", i)))
		}
		assert.False(t, second.IsCloseBehind(first.UID()), "who does not lead is told nothing")
	})
}

// TestPortComesAndGoes: a data dir that was made without a node port works with one, and the other way round.
func TestPortComesAndGoes(t *testing.T) {
	t.Parallel()
	dir, made := t.TempDir(), 0
	secrets := func() state.Secrets {
		made++
		return state.Secrets{
			Authority: fmt.Append(nil, "authority-", made), AuthorityKey: []byte("key"),
			GossipKey: make([]byte, 32),
		}
	}
	for i := range 4 {
		if i%2 == 0 {
			c := open(t, cluster.Config{DataDir: dir})
			propose(t, c, putApp("demo", fmt.Sprint(i)))
			require.NoError(t, c.Close())
			continue
		}
		w := newWires()
		l, err := w.listen()
		require.NoError(t, err)
		c := open(t, cluster.Config{DataDir: dir, Layer: &tcpLayer{l, w}, Secrets: secrets})
		propose(t, c, putApp("demo", fmt.Sprint(i)))
		assert.Equal(t, "authority-1", string(c.State().Secrets.Authority),
			"it gets an authority with its first node port, once")
		require.NoError(t, c.Close())
	}
}

// TestWipedDataDir: a node that lost its data dir is a different node, although it has the same name:
// consensus never takes an empty log for that of a voter that has acknowledged entries.
func TestWipedDataDir(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	before, err := cluster.Identify(dir, "node-1")
	require.NoError(t, err)
	again, err := cluster.Identify(dir, "")
	require.NoError(t, err)
	assert.Equal(t, before, again, "an attempt to join may be repeated")
	assert.Empty(t, before.Cluster)

	wiped, err := cluster.Identify(t.TempDir(), "node-1")
	require.NoError(t, err)
	assert.Equal(t, before.Node, wiped.Node)
	assert.NotEqual(t, before.UID, wiped.UID)

	_, err = cluster.Identify(dir, "node-2")
	assert.Equal(t, problem.Conflict, problem.CodeOf(err))
	c := open(t, cluster.Config{DataDir: dir, ClusterID: "alpha"})
	assert.Equal(t, before.UID, c.UID())
	_, err = cluster.Identify(dir, "")
	assert.Equal(t, problem.Conflict, problem.CodeOf(err), "in use")
	require.NoError(t, c.Close())
	joined, err := cluster.Identify(dir, "node-1")
	require.NoError(t, err)
	assert.Equal(t, "alpha", joined.Cluster)
}

func TestDefaultTimers(t *testing.T) {
	t.Parallel()
	assert.Equal(t, cluster.Timers{
		Heartbeat: time.Second, Election: time.Second,
		Lease: 500 * time.Millisecond,
	}, cluster.DefaultTimers(true))
	assert.Equal(t, cluster.Timers{
		Heartbeat: 200 * time.Millisecond, Election: 200 * time.Millisecond,
		Lease: 100 * time.Millisecond,
	}, cluster.DefaultTimers(false))
}
