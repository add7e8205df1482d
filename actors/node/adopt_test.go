package node

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/state"
)

// foundIncarnation is the number that an earlier process gave to the first rank's engine.
const foundIncarnation = 1000

// leaves has an earlier process of the node leave a unit's engines. The state grants the unit.
func (b *bubble) leaves(unit string, epoch uint64, phase state.Phase) *fakeProcess {
	o := b.order(unit, epoch)
	b.grants(unit, epoch, phase)
	p := &fakeProcess{busy: &b.busy, exited: make(chan struct{})}
	b.found = append(b.found, Found{Process: p, LaunchOrder: LaunchOrder{
		Launch: engine.Launch{URL: "http://127.0.0.1:20000"},
		Unit:   unit, Epoch: epoch, Ranks: []int{0}, Incarnations: []uint64{foundIncarnation}, Order: o,
	}})
	return p
}

// grants has the state grant a unit of one rank to the node.
func (b *bubble) grants(unit string, epoch uint64, phase state.Phase) {
	b.store.change(func(s *state.State) {
		s.Epochs[unit] = epoch
		s.Units[unit] = &state.Unit{
			ID: unit, Epoch: epoch, Phase: phase, Ranks: []state.RankGrant{{Rank: 0, Node: "n"}},
		}
	})
}

// inRestart runs f with a node whose earlier process has left what leave says.
func inRestart(t *testing.T, leave func(b *bubble, c *Config), f func(t *testing.T, b *bubble)) {
	t.Helper()
	inBubble(t, func(c *Config) {
		b, _ := c.Launcher.(*bubble)
		leave(b, c)
	}, f)
}

// present lists the units that a report has without a phase.
func present(r *msg.NodeReport) (out []string) {
	for _, e := range r.Units {
		if e.Kind == msg.UnitPresent {
			out = append(out, fmt.Sprint(e.Unit, " ", e.Epoch))
		}
	}
	return out
}

// EN2: nothing admits before a renewal was answered; then the engine serves with the incarnation that it had,
// and nothing is launched.
func TestAFoundUnitIsAdoptedAfterAnAnswer(t *testing.T) {
	var p *fakeProcess
	inRestart(t, func(b *bubble, _ *Config) {
		p = b.leaves("demo/0/0", 3, state.Ready)
		b.leader.becomes(leaderless)
	}, func(t *testing.T, b *bubble) {
		time.Sleep(30 * time.Second)
		synctest.Wait()
		assert.Equal(t, []string{"demo/0/0 3"}, present(b.leader.last()))
		assert.Empty(t, b.leader.last().Events)
		assert.Zero(t, b.servers(), "no DPServer yet")
		assert.Equal(t, state.Starting, b.phase("demo/0/0"))
		assert.Equal(t, 1, b.node.RankStatuses()["demo/0/0"][0].PID)

		b.leader.becomes(nil)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		assert.Equal(t, state.Ready, b.phase("demo/0/0"))
		assert.Equal(t, []string{"3:ready"}, b.leader.kinds("demo/0/0"))
		facts := b.replica("demo/0/0", 3, 0).facts
		assert.EqualValues(t, foundIncarnation, facts.Incarnation)
		assert.NotZero(t, facts.Base, "numbers of the incarnation do not come again")
		assert.Zero(t, b.launched())
		assert.False(t, closed(p.exited))
		require.NoError(t, b.node.StartRank(t.Context(), b.found[0].Order), "a repeated order")
		assert.Zero(t, b.launched())

		require.NoError(t, b.node.StopRank(t.Context(), &msg.StopRank{Unit: "demo/0/0", Epoch: 3}))
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, state.Gone, b.phase("demo/0/0"))
		assert.True(t, p.released.Load())
	})
}

// TestWithoutALeaderTheCopyDecides: with on_lease_loss serve, what the copy of the state grants as ready is
// adopted once no leader has answered for a lease. Everything else waits for a leader, and nothing is ended.
func TestWithoutALeaderTheCopyDecides(t *testing.T) {
	for name, test := range map[string]struct {
		phase   state.Phase
		loss    LeaseLoss
		change  func(s *state.State)
		adopted bool
	}{
		"ready":    {state.Ready, Serve, func(*state.State) {}, true},
		"starting": {state.Starting, Serve, func(*state.State) {}, false},
		"fence":    {state.Ready, Fence, func(*state.State) {}, false},
		"lost":     {state.Ready, Serve, func(s *state.State) { s.Nodes["n"].Lost = true }, false},
		"removed":  {state.Ready, Serve, func(s *state.State) { delete(s.Nodes, "n") }, false},
		"moved": {state.Ready, Serve, func(s *state.State) {
			s.Units["demo/0/0"].Ranks[0].Node = "m"
		}, false},
		"older copy": {state.Ready, Serve, func(s *state.State) {
			s.Epochs["demo/0/0"], s.Units["demo/0/0"].Epoch = 2, 2
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var p *fakeProcess
			inRestart(t, func(b *bubble, c *Config) {
				c.OnLeaseLoss = test.loss
				p = b.leaves("demo/0/0", 3, test.phase)
				b.store.change(func(s *state.State) {
					s.Nodes["n"] = &state.Node{ID: "n", UID: "u"}
					test.change(s)
				})
				b.leader.becomes(leaderless)
			}, func(t *testing.T, b *bubble) {
				time.Sleep(DefaultLeaseTTL - time.Millisecond)
				synctest.Wait()
				assert.Zero(t, b.servers())
				time.Sleep(time.Minute)
				synctest.Wait()
				assert.False(t, closed(p.exited))
				assert.Zero(t, b.launched())
				require.Error(t, b.node.StartRank(t.Context(), b.order("demo/0/1", 1)), "nothing starts")
				if !test.adopted {
					assert.Zero(t, b.servers())
					return
				}
				assert.Equal(t, state.Ready, b.phase("demo/0/0"))
				assert.True(t, b.node.Admits())

				b.store.change(func(s *state.State) {
					s.Epochs["demo/0/0"] = 4
					delete(s.Units, "demo/0/0")
				})
				b.leader.becomes(nil)
				time.Sleep(time.Second)
				synctest.Wait()
				assert.True(t, closed(p.exited), "granted elsewhere")
				assert.Equal(t, causeSuperseded, b.leader.reason("demo/0/0"))
			})
		})
	}
}

// EN2: the answer of the leader may be newer than the node's copy of the state, and a newer copy may show the
// unit granted elsewhere.
func TestAFoundUnitIsNotAdoptedByAnOldCopy(t *testing.T) {
	inRestart(t, func(b *bubble, _ *Config) {
		b.leaves("demo/0/0", 3, state.Ready)
		newer := b.store.State().Index + 1
		b.leader.becomes(func(_ context.Context, r *msg.NodeReport) (msg.Lease, error) {
			l := b.leader.grant(r)
			l.Index = newer
			return l, nil
		})
	}, func(t *testing.T, b *bubble) {
		time.Sleep(time.Minute)
		assert.Zero(t, b.servers())
		b.store.change(func(s *state.State) { s.Epochs["demo/0/0"] = 4; delete(s.Units, "demo/0/0") })
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Zero(t, b.servers())
		assert.Equal(t, []string{"3:killing", "3:gone"}, b.leader.kinds("demo/0/0"))
		assert.Equal(t, causeSuperseded, b.leader.reason("demo/0/0"))
	})
}

// EN2: a found unit is ended if its grant is fenced, another node's, or unknown.
func TestWhatIsNotGrantedIsEnded(t *testing.T) {
	for name, change := range map[string]func(s *state.State){
		"fenced": func(s *state.State) { s.Units["demo/0/0"].Phase = state.Fenced },
		"moved":  func(s *state.State) { s.Units["demo/0/0"].Ranks[0].Node = "m" },
		"unknown": func(s *state.State) {
			delete(s.Units, "demo/0/0")
			delete(s.Epochs, "demo/0/0")
		},
	} {
		t.Run(name, func(t *testing.T) {
			var p *fakeProcess
			inRestart(t, func(b *bubble, _ *Config) {
				p = b.leaves("demo/0/0", 3, state.Ready)
				b.store.change(change)
			}, func(t *testing.T, b *bubble) {
				time.Sleep(time.Second)
				synctest.Wait()
				assert.True(t, closed(p.exited))
				assert.Equal(t, []string{"3:killing", "3:gone"}, b.leader.kinds("demo/0/0"))
				assert.Equal(t, causeNotGranted, b.leader.reason("demo/0/0"))
				assert.Zero(t, b.servers())
			})
		})
	}
}

// TestAnEngineThatEndedWithoutItsNode: its end is reported with what it was, at once.
func TestAnEngineThatEndedWithoutItsNode(t *testing.T) {
	var p *fakeProcess
	inRestart(t, func(b *bubble, _ *Config) {
		p = b.leaves("demo/0/0", 3, state.Ready)
		p.Kill()
	}, func(t *testing.T, b *bubble) {
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, []string{"3:killing", "3:gone"}, b.leader.kinds("demo/0/0"))
		assert.Equal(t, "engine exited with code 0 after 0s", b.leader.reason("demo/0/0"))
		assert.True(t, p.released.Load())
	})
}

// TestAFoundUnitEndsByAnOrder: a node that was taken for lost gets no answer, and is told to stop.
func TestAFoundUnitEndsByAnOrder(t *testing.T) {
	var p *fakeProcess
	inRestart(t, func(b *bubble, _ *Config) {
		p = b.leaves("demo/0/0", 3, state.Ready)
		b.leader.becomes(leaderless)
	}, func(t *testing.T, b *bubble) {
		time.Sleep(time.Second)
		require.NoError(t, b.node.StopRank(t.Context(), &msg.StopRank{Unit: "demo/0/0", Epoch: 3}))
		synctest.Wait()
		assert.True(t, closed(p.exited))
		b.leader.becomes(nil)
		time.Sleep(2 * time.Second)
		assert.Equal(t, []string{"3:killing", "3:gone"}, b.leader.kinds("demo/0/0"))
	})
}

// TestAFoundUnitOutlivesTheLeaseBefore: with on_lease_loss fence a process without a lease ends its units.
// The engines of an earlier one have the deadline of that one's lease, which their shims keep.
func TestAFoundUnitOutlivesTheLeaseBefore(t *testing.T) {
	inRestart(t, func(b *bubble, c *Config) {
		c.OnLeaseLoss = Fence
		b.leaves("demo/0/0", 3, state.Starting)
		b.leader.becomes(leaderless)
	}, func(t *testing.T, b *bubble) {
		time.Sleep(30 * time.Second)
		b.leader.becomes(nil)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		assert.Equal(t, []string{"3:ready"}, b.leader.kinds("demo/0/0"))
	})
}

// TestAnOlderEpochIsEndedFirst: of two epochs of one unit the older one ends before anything else, and an
// engine that does not say whom it belongs to is killed.
func TestAnOlderEpochIsEndedFirst(t *testing.T) {
	var old, now, stray *fakeProcess
	inRestart(t, func(b *bubble, _ *Config) {
		old = b.leaves("demo/0/0", 2, state.Ready)
		now = b.leaves("demo/0/0", 3, state.Ready)
		stray = &fakeProcess{busy: &b.busy, exited: make(chan struct{})}
		b.found = append(b.found, Found{Process: stray})
	}, func(t *testing.T, b *bubble) {
		time.Sleep(time.Second)
		synctest.Wait()
		assert.True(t, closed(old.exited))
		assert.True(t, closed(stray.exited))
		assert.True(t, stray.released.Load())
		assert.False(t, closed(now.exited))
		assert.Equal(t, []string{"2:killing", "2:gone", "3:ready"}, b.leader.kinds("demo/0/0"))
	})
}

// TestAMissingRankEndsItsUnit: the ranks of a unit on a node live and end together.
func TestAMissingRankEndsItsUnit(t *testing.T) {
	var p *fakeProcess
	inRestart(t, func(b *bubble, _ *Config) {
		p = b.leaves("demo/0", 3, state.Ready)
		o := b.found[0].Order
		o.App = testApp(app.KindSim, app.Lockstep, 2)
		o.Ranks = append(o.Ranks, state.RankGrant{Rank: 1, Node: "n"})
		o.AllRanks = o.Ranks
	}, func(t *testing.T, b *bubble) {
		time.Sleep(time.Second)
		synctest.Wait()
		assert.True(t, closed(p.exited))
		assert.Contains(t, b.leader.reason("demo/0"), "rank 1: its engine was not found")
	})
}

// EN2: a found unit that is over ends before another one gets its ports.
func TestAStartWaitsForWhatHoldsItsPorts(t *testing.T) {
	inRestart(t, func(b *bubble, _ *Config) {
		b.leaves("demo/0/0", 3, state.Fenced)
		b.busy.Store(true)
	}, func(t *testing.T, b *bubble) {
		began := time.Now()
		require.NoError(t, b.start("other/0/0", 1))
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Equal(t, 1, b.launched())
		events := b.leader.events
		at := map[string]time.Time{}
		for i := range events {
			at[events[i].Unit+" "+string(events[i].Kind)] = events[i].At
		}
		assert.Equal(t, DefaultKillGrace, at["demo/0/0 gone"].Sub(began))
		assert.False(t, at["other/0/0 ready"].Before(at["demo/0/0 gone"]))
	})
}

// TestDetachLeavesTheEngines: the leader is told, the ranks drain, nothing starts, and no engine ends.
func TestDetachLeavesTheEngines(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		b.serving("demo/0/0", 3)
		waits := b.order("demo/0/1", 1) // its start does not get far
		waits.App.DataParallel.Coupling = app.Lockstep
		waits.AllRanks = append(waits.AllRanks, state.RankGrant{Rank: 1, Node: "m"})
		waits.Ranks = waits.AllRanks[1:]
		require.NoError(t, b.node.StartRank(t.Context(), waits))
		before := b.leader.kinds("demo/0/0")
		b.node.Detach(t.Context(), 2*time.Minute, time.Second)
		assert.Equal(t, 2*time.Minute, b.leader.last().RestartGrace)
		assert.Equal(t, msg.CauseRestarting, b.replica("demo/0/0", 3, 0).drain)
		assert.Equal(t, before, b.leader.kinds("demo/0/0"))
		require.Len(t, b.procs, 1)
		assert.True(t, b.procs[0].detached.Load())
		assert.False(t, closed(b.procs[0].exited))
		require.Error(t, b.start("demo/0/2", 1))
		require.NoError(t, b.node.Close(t.Context(), time.Minute))
		assert.False(t, closed(b.procs[0].exited))
	})
}

// TestARestartingNodeRefusesStarts: the leader places the unit elsewhere.
func TestARestartingNodeRefusesStarts(t *testing.T) {
	now := time.Now()
	c := NewCore(now, CoreConfig{Node: "n", LeaseTTL: time.Second, LeaseRenew: time.Second})
	c.Renew(now)
	c.Renewed(now, &msg.Lease{TTL: time.Minute})
	c.Restart(time.Minute)
	_, err := c.MayStart(now, state.New(), &msg.StartRank{Unit: "u", Epoch: 1})
	require.ErrorIs(t, err, msg.ErrNodeStopping)
	assert.Equal(t, time.Minute, c.Renew(now).RestartGrace)
}

// Of two engines for one rank of a unit at one epoch only one can be adopted; the other one is ended.
func TestTwoEnginesForOneRank(t *testing.T) {
	order := &msg.StartRank{
		App: &app.Application{}, Unit: "demo/0/0", Epoch: 3, Ranks: []state.RankGrant{{Rank: 0}},
	}
	o := LaunchOrder{Order: order, Unit: order.Unit, Epoch: 3, Ranks: []int{0}, Incarnations: []uint64{7}}
	second := o
	second.Incarnations = []uint64{8}
	units, rest := groupFound([]Found{{LaunchOrder: o}, {LaunchOrder: second}})
	require.Len(t, units, 1)
	require.Len(t, rest, 1)
	assert.Equal(t, []uint64{7}, units[0].engines[0].Incarnations)
	assert.Equal(t, []uint64{8}, rest[0].Incarnations)
}
