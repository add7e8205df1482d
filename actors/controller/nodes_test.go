package controller

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

func TestNodeThatIsSilentIsLostAndItsRanksGoElsewhere(t *testing.T) {
	a, b := newHost("a", 2), newHost("b", 4)
	c := newFleet(t, a, b)
	c.deploy(sim("chat", 4, app.Independent))
	c.renew("a", "b")
	require.Equal(t, "RUNNING", c.status("chat"))
	require.Equal(t, "b:0", c.where("chat/0/0"))
	c.join(newHost("c", 4))
	b.cut = true
	c.run(11 * time.Second)
	assert.Zero(t, c.saw("node_lost"), "within its lease and two seconds")
	c.takeTrace()
	c.run(2 * time.Second)
	assert.Equal(t, 1, c.saw("node_lost"))
	assert.True(t, c.state.Nodes["b"].Lost)
	assert.Equal(t, "silent for 12s", c.state.Nodes["b"].Reason)
	for _, u := range []string{"chat/0/0", "chat/0/1", "chat/0/2", "chat/0/3"} {
		assert.NotContains(t, c.where(u), "b")
		assert.Equal(t, uint64(2), c.state.Epochs[u], u)
	}
	assert.Equal(t, "RUNNING", c.status("chat"))

	require.Len(t, b.runs, 4, "it serves what it has until it hears of it")
	b.cut = false
	c.renew("b")
	assert.Equal(t, problem.Unavailable, problem.CodeOf(c.lease["b"].Err), "first its return is recorded")
	assert.False(t, c.state.Nodes["b"].Lost)
	c.renew("b")
	require.NoError(t, c.lease["b"].Err)
	assert.Equal(t, 10*time.Second, c.lease["b"].Lease.TTL)
	assert.Empty(t, b.runs, "the state says that its units are elsewhere")
	c.run(20 * time.Second)
	assert.Equal(t, uint64(2), c.state.Epochs["chat/0/0"], "nothing moves back")
}

// The slots of the lost node were released, and nothing is placed there while old processes still end.
func TestLostNodeIsBackWhenNothingIsLeftThere(t *testing.T) {
	a, b := newHost("a", 1), newHost("b", 1)
	c := newFleet(t, a, b)
	c.deploy(sim("chat", 2, app.Independent))
	c.renew("a", "b")
	require.Equal(t, "b:1", c.where("chat/0/1"))
	b.cut = true
	c.run(13 * time.Second)
	require.Equal(t, state.Pending, c.phase("chat/0/1"), "no room elsewhere")
	b.cut = false
	c.auto = dropOrders("b", c) // its engines end slowly
	b.tell("chat/0/1", 1, msg.UnitKilling)
	for range 3 {
		c.step(NodeReported{b.report(c.now)})
		assert.Equal(t, problem.Unavailable, problem.CodeOf(c.lease["b"].Err))
		assert.True(t, c.state.Nodes["b"].Lost)
		assert.Equal(t, state.Pending, c.phase("chat/0/1"))
	}
	c.auto = c.carry
	b.gone("chat/0/1")
	c.renew("b", "b", "b")
	require.NoError(t, c.lease["b"].Err)
	assert.False(t, c.state.Nodes["b"].Lost)
	assert.Equal(t, "RUNNING", c.status("chat"))
	assert.Equal(t, uint64(2), c.state.Epochs["chat/0/1"])
}

func TestRanksOfOtherNodesDoNotNoticeALostNode(t *testing.T) {
	c := newFleet(t, newHost("a", 2), newHost("b", 2), newHost("c", 2))
	spread := sim("chat", 3, app.Independent)
	spread.PlacementGroupStrategy = "SPREAD"
	c.deploy(spread)
	c.run(time.Second)
	var lost string
	for _, u := range []string{"chat/0/0", "chat/0/1", "chat/0/2"} {
		if c.where(u)[0] == 'b' {
			lost = u
		}
	}
	c.hosts["b"].cut = true
	c.run(15 * time.Second)
	for _, u := range []string{"chat/0/0", "chat/0/1", "chat/0/2"} {
		want := uint64(1)
		if u == lost {
			want = 2
		}
		assert.Equal(t, want, c.state.Epochs[u], u)
	}
}

// The living part of the gang ends before its slots are granted again.
func TestGangOfALostNode(t *testing.T) {
	a, b := newHost("a", 4), newHost("b", 4)
	c := newFleet(t, a, b, newHost("c", 4))
	c.deploy(sim("moe", 8, app.Lockstep))
	c.renew("a", "b", "c")
	require.Equal(t, "a:0,1,2,3 b:4,5,6,7", c.where("moe/0"))
	require.Equal(t, "RUNNING", c.status("moe"))
	b.cut = true
	held := false
	c.auto = func(w *world, e Effect) bool { // a's engines end slowly
		if s, ok := e.(StopEffect); ok && s.Node == "a" {
			held = true
			return true
		}
		return c.carry(w, e)
	}
	c.run(14 * time.Second)
	require.True(t, held)
	assert.Equal(t, state.Killing, c.phase("moe/0"))
	assert.Equal(t, state.Fenced, c.state.Units["moe/0"].Phase)
	assert.Zero(t, c.saw("release"))
	c.auto = c.carry
	a.gone("moe/0")
	c.renew("a")
	assert.Equal(t, 1, c.saw("release"))
	assert.Equal(t, "a:0,1,2,3 c:4,5,6,7", c.where("moe/0"))
	c.renew("a", "c")
	assert.Equal(t, "RUNNING", c.status("moe"))
	assert.Equal(t, uint64(2), c.state.Epochs["moe/0"])
	assert.Equal(t, 1, c.state.Units["moe/0"].Attempt, "no failed start")
}

func TestNodeThatStartsAgainStartsItsUnitsAgain(t *testing.T) {
	for _, changes := range []bool{false, true} { // whether the leader changes too
		a, b := newHost("a", 2), newHost("b", 2)
		c := newFleet(t, a, b)
		spread := sim("chat", 2, app.Independent)
		spread.PlacementGroupStrategy = "STRICT_SPREAD"
		c.deploy(spread)
		c.renew("a", "b")
		require.Equal(t, "a:0", c.where("chat/0/0"))
		a.restart()
		if changes {
			c.newLeader()
		}
		c.takeTrace()
		c.renew("b", "a", "b")
		assert.Equal(t, 1, c.saw("start chat/0/0 epoch 2 on a"))
		assert.Zero(t, c.saw("stop"))
		c.renew("a")
		assert.Equal(t, "RUNNING", c.status("chat"))
		assert.Equal(t, uint64(1), c.state.Epochs["chat/0/1"])
		assert.Equal(t, 1, c.state.Units["chat/0/0"].Restarts)
		assert.Equal(t, 1, c.state.Units["chat/0/0"].Attempt)
	}
}

// The start does not count as failed, whoever leads, even if the node's last report is lost.
func TestNodeThatIsStoppedAmidAStart(t *testing.T) {
	for _, changes := range []bool{false, true} {
		a := newHost("a", 2)
		a.slow = true
		c := newFleet(t, a)
		c.deploy(sim("chat", 1, app.Independent))
		c.renew("a")
		for want := uint64(2); want < 7; want++ {
			a.close()
			a.restart()
			if changes {
				c.newLeader()
			}
			c.renew("a")
			require.Equal(t, want, c.state.Epochs["chat/0/0"])
			require.Equal(t, state.Starting, c.phase("chat/0/0"))
			c.renew("a")
		}
		assert.Equal(t, 1, c.state.Units["chat/0/0"].Attempt)
	}
}

func TestPartOfAGangThatEndsWithItsNodeEndsTheOthers(t *testing.T) {
	a, b := newHost("a", 4), newHost("b", 4)
	c := newFleet(t, a, b)
	c.deploy(sim("moe", 8, app.Lockstep))
	c.renew("a", "b")
	b.restart()
	c.takeTrace()
	c.renew("b")
	assert.Equal(t, []string{
		"moe/0: ready → killing", "stop moe/0 epoch 1 on a, grace 0s",
		"unit_fenced moe/0", "moe: RUNNING → UNHEALTHY",
	}, c.takeTrace())
	c.renew("a")
	assert.Equal(t, state.Backoff, c.phase("moe/0"))
	c.run(2 * time.Second)
	assert.Equal(t, uint64(2), c.state.Epochs["moe/0"])
	assert.Equal(t, "RUNNING", c.status("moe"))
}

// The events are lost, but the digest has the newest event of each unit.
func TestDigestBringsBackWhatWasMissed(t *testing.T) {
	a := newHost("a", 2)
	c := newFleet(t, a)
	c.deploy(sim("chat", 2, app.Independent))
	a.events = nil
	c.renew("a")
	assert.Equal(t, "RUNNING", c.status("chat"))
	a.crash("chat/0/1")
	a.events = nil
	c.renew("a")
	assert.Equal(t, state.Backoff, c.phase("chat/0/1"))
	c.run(2 * time.Second)
	assert.Equal(t, "RUNNING", c.status("chat"))
	assert.Equal(t, uint64(2), c.state.Epochs["chat/0/1"])

	delete(a.runs, "chat/0/0") // the node has lost track of the unit
	delete(a.newest, "chat/0/0")
	c.run(4 * time.Second)
	assert.Equal(t, state.Ready, c.phase("chat/0/0"), "a report may have been overtaken")
	c.run(2 * time.Second)
	assert.Equal(t, state.Backoff, c.phase("chat/0/0"))
	assert.Contains(t, view{c.core}.Status()[0].Message, "node a has it no more")
}

// The voters were lost and the state is an older copy: a node has a unit at an epoch that it does not know.
// That one is stopped, and the unit starts anew.
func TestAUnitOfALaterEpochThanTheStateIsStartedAnew(t *testing.T) {
	a := newHost("a", 1)
	c := newFleet(t, a)
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a")
	require.Equal(t, "RUNNING", c.status("chat"))
	c.state.EpochLeast = 1000
	a.runs["chat/0/0"], a.events = 3, nil
	e := a.newest["chat/0/0"]
	e.Epoch = 3
	a.newest["chat/0/0"] = e
	c.takeTrace()
	c.run(20 * time.Second)
	assert.Contains(t, c.takeTrace(), "stop chat/0/0 epoch 3 on a, grace 0s")
	assert.Equal(t, uint64(1001), c.state.Epochs["chat/0/0"])
	assert.Equal(t, "RUNNING", c.status("chat"))
}

func TestUnknownNodesGetNoLease(t *testing.T) {
	c := newFleet(t, newHost("a", 2), newHost("b", 2))
	ask := func(id, uid string) error {
		h := newHost(id, 2)
		h.node.UID = uid
		c.step(NodeReported{h.report(c.now)})
		return c.lease[id].Err
	}
	err := ask("nobody", "uid-x")
	assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
	require.ErrorIs(t, err, state.ErrUnknownNode)
	err = ask("a", "uid-x")
	assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
	require.ErrorIs(t, err, state.ErrNodeTaken)
	_, err = c.apply(state.Command{RemoveNode: &state.RemoveNode{Node: "b"}})
	require.NoError(t, err)
	err = ask("b", "uid-b")
	require.ErrorIs(t, err, state.ErrNodeRemoved)
	require.NoError(t, ask("a", "uid-a"), "the first is unharmed")
}

func TestNodeThatSaysOtherThanItsRecordChangesIt(t *testing.T) {
	a := newHost("a", 1)
	c := newFleet(t, a)
	c.deploy(sim("chat", 2, app.Independent))
	require.Equal(t, state.Pending, c.phase("chat/0/0"))
	a.node.Resources.Slots, a.node.Address = 2, "10.0.0.9:7947"
	c.takeTrace()
	c.renew("a")
	assert.Equal(t, 1, c.saw("put_node"))
	assert.Equal(t, "10.0.0.9:7947", c.state.Nodes["a"].Address)
	c.renew("a")
	assert.Equal(t, "RUNNING", c.status("chat"))
	a.node.Roles = []state.Role{state.RoleWorker} // roles are fixed at the join
	c.takeTrace()
	c.run(20 * time.Second)
	assert.Equal(t, 1, c.saw("put_node"), "what is refused is not asked for again")
	require.Len(t, view{c.core}.nodeStatus(c.now, c.state.Nodes["a"], "a").Notes, 1)
}

// Roles are fixed at the join; the address may change.
func TestReportedRolesDoNotBecomeTheRecord(t *testing.T) {
	edge := newHost("edge", 0)
	edge.node.Roles = []state.Role{state.RoleIngress}
	c := newFleet(t, newHost("a", 1), edge)
	edge.node.Roles = []state.Role{state.RoleControl, state.RoleIngress}
	c.renew("edge")
	assert.Equal(t, []state.Role{state.RoleIngress}, c.state.Nodes["edge"].Roles)
	edge.node.Roles, edge.node.Address = []state.Role{state.RoleIngress}, "10.0.0.9:7947"
	c.run(2 * time.Second)
	c.renew("edge")
	assert.Equal(t, "10.0.0.9:7947", c.state.Nodes["edge"].Address)
}

func TestOvertakenReportsAreRefused(t *testing.T) {
	a := newHost("a", 2)
	c := newFleet(t, a)
	old := a.report(c.now)
	c.now = c.now.Add(time.Second)
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a")
	c.step(NodeReported{old})
	assert.Equal(t, problem.Conflict, problem.CodeOf(c.lease["a"].Err))
	assert.Equal(t, state.Ready, c.phase("chat/0/0"), "an old report does not know of it")

	twin := *a // a copy of its data dir on another machine
	a.restart()
	c.renew("a")
	twin.forget()
	c.hosts["twin"] = &twin
	c.renew("twin")
	assert.Equal(t, problem.Conflict, problem.CodeOf(c.lease["a"].Err))

	delete(c.hosts, "twin")
	c.renew("a", "a")
	require.Equal(t, "RUNNING", c.status("chat"))
	c.step(NodeReported{a.report(c.now.Add(-time.Hour))}) // its clock was set back
	require.NoError(t, c.lease["a"].Err)
	assert.Equal(t, "RUNNING", c.status("chat"))
}

// The leader did not run, so it received no renewals.
func TestLeaderThatWasFrozenBlamesNobody(t *testing.T) {
	c := newFleet(t, newHost("a", 2), newHost("b", 2))
	c.deploy(sim("chat", 2, app.Independent))
	c.run(5 * time.Second)
	c.now = c.now.Add(time.Minute)
	c.step(TimerFired{})
	c.run(5 * time.Second)
	assert.Zero(t, c.saw("node_lost"))
	c.hosts["b"].cut = true
	c.run(15 * time.Second)
	assert.Equal(t, 1, c.saw("node_lost"))
}

func TestNewLeaderGivesEveryNodeOneWholeLease(t *testing.T) {
	a, b := newHost("a", 2), newHost("b", 2)
	c := newFleet(t, a, b)
	b.cut = true
	c.run(9 * time.Second)
	c.newLeader()
	c.run(11 * time.Second)
	assert.Zero(t, c.saw("node_lost"))
	c.run(2 * time.Second)
	assert.Equal(t, 1, c.saw("node_lost"))
}

func TestLostNodeThatIsRemovedFreesItsRanks(t *testing.T) {
	a, b := newHost("a", 4), newHost("b", 2)
	c := newFleet(t, a, b)
	c.deploy(sim("chat", 2, app.Independent))
	c.renew("a", "b")
	require.Equal(t, "b:0", c.where("chat/0/0"))
	b.cut = true
	c.run(9 * time.Second)
	_, err := c.apply(state.Command{RemoveNode: &state.RemoveNode{Node: "b"}})
	require.ErrorIs(t, err, state.ErrUnitsLeft)
	c.run(5 * time.Second)
	_, err = c.apply(state.Command{RemoveNode: &state.RemoveNode{Node: "b"}})
	require.NoError(t, err)
	c.step(TimerFired{})
	assert.Equal(t, "a:0", c.where("chat/0/0"))
	assert.NotContains(t, c.core.peers, "b")
}

func TestCommandsAboutNodesAreRepeatedUntilTheyGetThrough(t *testing.T) {
	a, b := newHost("a", 2), newHost("b", 2)
	c := newFleet(t, a, b)
	tries := 0
	c.lose = func(cmd state.Command) error {
		if cmd.NodeLost == nil {
			return nil
		}
		if tries++; tries < 3 {
			return errLost
		}
		return nil
	}
	b.cut = true
	c.run(16 * time.Second)
	assert.Equal(t, 3, tries)
	assert.True(t, c.state.Nodes["b"].Lost)
	assert.LessOrEqual(t, c.core.Due().Sub(c.now), 5*time.Second)
}

func TestNodeStatuses(t *testing.T) {
	a, b := newHost("a", 4), newHost("b", 4)
	a.node.Version, b.node.Version = "1", "2"
	b.node.Resources.Devices = []int{0, 1}
	c := newFleet(t, a, b)
	spread := sim("moe", 2, app.Lockstep)
	spread.PlacementGroupStrategy = "STRICT_SPREAD"
	c.deploy(spread)
	c.renew("a", "b")
	look := func(id string) client.NodeStatus {
		return view{c.core}.nodeStatus(c.now, c.state.Nodes[id],
			"a")
	}
	assert.Equal(t, client.NodeStatus{
		Node: "a", State: "alive", Roles: []string{"control", "worker", "ingress"}, Version: "1",
		Leader: true, Slots: 4, SlotsUsed: 1,
		Ranks: 1, Groups: []string{"moe/0"}, LeaseLeftS: 10, LastSeen: c.now, SeenBy: "leader",
	}, look("a"))
	assert.Equal(t, 2, look("b").GPUs)
	assert.Equal(t, []string{"it runs version 2, the leader 1"}, look("b").Notes)
	c.step(NodeReported{b.report(c.now.Add(time.Hour))})
	assert.Equal(t, int64(3600_000), look("b").SkewMs)
	assert.Contains(t, look("b").Notes[0], "clock differs by 1h0m0s")
	b.cut = true
	c.run(7 * time.Second)
	assert.Equal(t, "silent", look("b").State)
	c.run(7 * time.Second)
	assert.Equal(t, "lost", look("b").State)
	assert.Equal(t, "silent for 12s", look("b").Reason)
	c.newLeader()
	assert.Equal(t, "unknown", look("a").State)
}

// TestTheOrdersOfARemovedNodeEnd: nothing is kept for a node that was removed, so that nodes may come and go
// under one leader without end.
func TestTheOrdersOfARemovedNodeEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := state.New()
		for _, id := range []string{"a", "b"} {
			n := node(id, 8)
			s.Nodes[id] = &n
		}
		c := NewCore(Timers{})
		c.Step(start, StateSeen{s})
		without := s.Clone()
		without.Index++
		delete(without.Nodes, "b")
		assert.Contains(t, c.Step(start, StateSeen{without}), Effect(ForgetNodeEffect{"b"}))

		noAgent := func(string) (msg.NodeAgent, bool) { return nil, false }
		x := newExecutor(t.Context(), &Config{Agent: noAgent, Timers: Timers{}.withDefaults()}, nil, nil)
		x.execute(StopEffect{"b", &msg.StopRank{Unit: "chat/0/0", Epoch: 1}})
		x.execute(ForgetNodeEffect{"b"})
		assert.Empty(t, x.nodes)
		x.work.Wait()
	})
}

// refusingAgent refuses orders, after meanwhile.
type refusingAgent struct {
	msg.NodeAgent
	err       error
	meanwhile func()
}

func (a refusingAgent) StopRank(context.Context, *msg.StopRank) error { return a.err }

func (a refusingAgent) StartRank(context.Context, *msg.StartRank) error {
	a.meanwhile()
	return a.err
}

// TestALateStopIsNoFault: a node that has seen a later epoch has nothing to stop.
func TestALateStopIsNoFault(t *testing.T) {
	for _, err := range []error{state.ErrStaleEpoch, errors.New("broken")} {
		var log bytes.Buffer
		agent := refusingAgent{err: fmt.Errorf("unit chat/0/0: %w", err)}
		x := newExecutor(t.Context(), &Config{
			Agent:  func(string) (msg.NodeAgent, bool) { return agent, true },
			Log:    slog.New(slog.NewTextHandler(&log, nil)),
			Timers: Timers{}.withDefaults(),
		}, nil, nil)
		x.sendOrder(StopEffect{"a", &msg.StopRank{Unit: "chat/0/0", Epoch: 1}})
		assert.Equal(t, errors.Is(err, state.ErrStaleEpoch), log.Len() == 0, log.String())
	}
}

// TestALateStartIsNoFault: a start that was on its way while its unit got another epoch has not failed. The
// refusal of a start that is still wanted has.
func TestALateStartIsNoFault(t *testing.T) {
	const id = "chat/0/0"
	for name, later := range map[string]func(*state.State){
		"wanted":      func(*state.State) {},
		"later epoch": func(s *state.State) { s.Units[id].Epoch++ },
		"gone":        func(s *state.State) { delete(s.Units, id) },
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			var refused []any
			store := newMemStore()
			store.state.Units[id] = &state.Unit{ID: id, Epoch: 1}
			agent := refusingAgent{
				err:       fmt.Errorf("unit %s: %w", id, state.ErrStaleEpoch),
				meanwhile: func() { later(store.state) },
			}
			x := newExecutor(t.Context(), &Config{
				Agent:  func(string) (msg.NodeAgent, bool) { return agent, true },
				Store:  store,
				Log:    slog.New(slog.NewTextHandler(&log, nil)),
				Timers: Timers{}.withDefaults(),
			}, func(e any) { refused = append(refused, e) }, nil)
			x.sendOrder(StartEffect{Node: "a", Order: &msg.StartRank{Unit: id, Epoch: 1}})
			isFault := name == "wanted"
			assert.Equal(t, isFault, log.Len() > 0, log.String())
			assert.Equal(t, isFault, len(refused) > 0, refused)
		})
	}
}
