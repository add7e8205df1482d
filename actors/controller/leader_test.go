package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// The ranks and epochs stay, and no node gets an order.
func TestRG4NewLeaderContinues(t *testing.T) {
	for _, coupling := range []app.Coupling{app.Independent, app.Lockstep} {
		c := newFleet(t, newHost("a", 9), newHost("b", 9))
		c.deploy(sim("m", 16, coupling))
		c.run(3 * time.Second)
		require.Equal(t, "RUNNING", c.status("m"))
		before, _ := c.state.Encode()
		c.takeTrace()
		for range 3 {
			c.newLeader()
			assert.Equal(t, "RUNNING", c.status("m"), "as the state says, before any node has spoken")
			c.run(30 * time.Second)
		}
		for _, verb := range []string{"start", "stop", "grant", "release", "unit_", "node_"} {
			assert.Zero(t, c.saw(verb), verb)
		}
		after, _ := c.state.Encode()
		assert.Equal(t, string(before), string(after))
		c.deploy(sim("more", 2, app.Lockstep)) // the new leader decides
		c.renew("a", "b")
		assert.Equal(t, "RUNNING", c.status("more"))
	}
}

// A node that has the unit gets no order, a node without it does.
func TestNewLeaderAmidAStart(t *testing.T) {
	a, b := newHost("a", 2), newHost("b", 2)
	a.slow, b.slow = true, true
	c := newFleet(t, a, b)
	b.cut = true
	c.deploy(sim("moe", 4, app.Lockstep))
	b.cut = false
	c.newLeader()
	c.takeTrace()
	c.renew("a")
	assert.Zero(t, c.saw("start"))
	c.renew("b")
	assert.Equal(t, []string{"start moe/0 epoch 1 on b"}, c.takeTrace())
	a.up("moe/0")
	b.up("moe/0")
	c.newLeader()
	c.renew("b", "a")
	assert.Equal(t, "RUNNING", c.status("moe"))
	assert.Equal(t, uint64(1), c.state.Epochs["moe/0"])
}

func TestNewLeaderTakesUpEveryPhase(t *testing.T) {
	ways := map[string]struct {
		way   func(c *fleet, a, b *host)
		epoch uint64
	}{
		"fenced": {
			func(c *fleet, _, b *host) {
				c.auto = dropOrders("a",
					c)
				b.crash("moe/0")
				c.renew("b")
				c.auto = c.carry
			}, 2,
		},
		"fenced and not told": {func(_ *fleet, _, b *host) { b.crash("moe/0") }, 2},
		"gone": {
			func(c *fleet, a, b *host) { b.crash("moe/0"); a.crash("moe/0"); c.renew("a", "b") }, 2,
		},
		"gone and not told": {func(_ *fleet, a, b *host) { b.crash("moe/0"); a.crash("moe/0") }, 2},
		"in backoff":        {func(c *fleet, a, b *host) { b.crash("moe/0"); c.renew("b", "a") }, 2},
		"with a lost node": {
			func(c *fleet, _,
				b *host,
			) {
				b.cut = true
				c.run(13 * time.Second)
				b.cut = false
				b.restart()
			}, 2,
		},
	}
	for name, w := range ways {
		t.Run(name, func(t *testing.T) {
			a, b := newHost("a", 4), newHost("b", 4)
			c := newFleet(t, a, b)
			c.deploy(sim("moe", 8, app.Lockstep))
			c.renew("a", "b")
			require.Equal(t, "RUNNING", c.status("moe"))
			w.way(c, a, b)
			c.newLeader()
			c.run(20 * time.Second)
			assert.Equal(t, "RUNNING", c.status("moe"), c.trace)
			assert.Equal(t, w.epoch, c.state.Epochs["moe/0"], c.trace)
		})
	}
}

// dropOrders loses the orders for a node.
func dropOrders(node string, c *fleet) func(*world, Effect) bool {
	return func(w *world, e Effect) bool {
		if s, ok := e.(StopEffect); ok && s.Node == node {
			return true
		}
		return c.carry(w, e)
	}
}

// The silent node is lost, and the unit starts elsewhere.
func TestNewLeaderFindsNothingWhereANodeIsSilent(t *testing.T) {
	a, b := newHost("a", 2), newHost("b", 2)
	c := newFleet(t, a, b)
	c.deploy(sim("chat", 2, app.Independent))
	c.renew("a", "b")
	require.Equal(t, "a:0", c.where("chat/0/0"))
	a.cut = true
	c.newLeader()
	c.run(11 * time.Second)
	assert.Equal(t, uint64(1), c.state.Epochs["chat/0/0"])
	c.run(2 * time.Second)
	assert.Equal(t, "b:0", c.where("chat/0/0"))
	assert.Equal(t, "RUNNING", c.status("chat"))
}

func TestDeletingAppOverALeaderChange(t *testing.T) {
	c := newFleet(t, newHost("a", 2))
	c.deploy(sim("chat", 2, app.Independent))
	c.renew("a")
	c.delete("chat")
	c.renew("a")
	c.newLeader()
	c.renew("a")
	c.drained("chat/0/0")
	c.drained("chat/0/1")
	assert.Empty(t, c.state.Apps)
	assert.Empty(t, c.core.units)
}

// A draining unit continues to drain, and no other unit begins to.
func TestNewLeaderGoesOnWithARollOut(t *testing.T) {
	c := newFleet(t, newHost("a", 3))
	c.deploy(sim("chat", 3, app.Independent))
	c.renew("a")
	next := sim("chat", 3, app.Independent)
	next.Model.Source = "m2"
	c.deploy(next)
	c.renew("a")
	require.Equal(t, state.Draining, c.phase("chat/0/0"))
	c.newLeader()
	assert.Zero(t, c.saw("stop chat/0/1"))
	c.renew("a")
	assert.Equal(t, state.Draining, c.phase("chat/0/0"))
	c.takeTrace()
	c.drained("chat/0/0")
	assert.Equal(t, uint64(2), c.state.Units["chat/0/0"].AppRevision, "at once")
	assert.Equal(t, 1, c.state.Units["chat/0/0"].Attempt)
	c.renew("a")
	assert.Equal(t, 1, c.saw("stop chat/0/1 epoch 1 on a, grace 30s"))
	assert.Zero(t, c.saw("stop chat/0/2"))
}

// Whenever leaders change, in whatever order nodes report to the new one, and whatever reports are lost: a
// running unit keeps its epoch, and each start takes exactly one epoch.
func TestLeaderChangesRestartNothing(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		hosts := []*host{newHost("a", 4), newHost("b", 4), newHost("c", 4)}
		c := newFleet(t, hosts...)
		for _, h := range hosts {
			h.slow = true
		}
		units := []string{"gang/0", "solo/0/0", "solo/0/1", "solo/0/2"}
		starts := map[string]uint64{}
		c.deploy(sim("gang", 6, app.Lockstep), sim("solo", 3, app.Independent))
		for _, u := range units {
			starts[u] = 1
		}
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			h := hosts[rapid.IntRange(0, 2).Draw(rt, "host")]
			u := units[rapid.IntRange(0, 3).Draw(rt, "unit")]
			switch rapid.SampledFrom([]string{
				"leader", "renew", "renew", "up", "pass", "crash",
				"lose",
			}).Draw(rt, "what") {
			case "leader":
				c.newLeader()
			case "renew":
				c.renew(h.node.ID)
			case "up":
				if h.runs[u] != 0 && !h.ready[u] {
					h.up(u)
				}
			case "pass":
				c.pass(time.Duration(rapid.IntRange(0, 2500).Draw(rt, "ms")) * time.Millisecond)
				for _, h := range hosts {
					c.renew(h.node.ID) // no node is lost here
				}
			case "crash":
				if rec := c.state.Units[u]; rec != nil && rec.Phase == state.Ready && wholly(hosts, rec) &&
					c.phase(u) == state.Ready && !c.core.units[u].hasUnreportedPart() {
					h.crash(u)
					if h.runs[u] == 0 && rec.IsOn(h.node.ID) {
						starts[u]++
						c.settleOf(hosts, u)
					}
				}
			case "lose":
				lost := false
				c.lose = func(state.Command) error {
					if lost {
						return nil
					}
					lost = true
					return errLost
				}
			}
			for _, u := range units {
				require.LessOrEqual(t, c.state.Epochs[u], starts[u], "%s: %v", u, c.trace)
			}
		}
		c.lose = nil
		for range 20 {
			for _, h := range hosts {
				for _, u := range units {
					if h.runs[u] != 0 && !h.ready[u] {
						h.up(u)
					}
				}
			}
			c.run(4 * time.Second)
		}
		for _, u := range units {
			require.Equal(t, starts[u], c.state.Epochs[u], "%s: %v", u, c.trace)
			require.Equal(t, state.Ready, c.state.Units[u].Phase, u)
		}
	})
}

// wholly reports whether every node of the unit runs it.
func wholly(hosts []*host, rec *state.Unit) bool {
	for _, h := range hosts {
		if rec.IsOn(h.node.ID) && h.runs[rec.ID] != rec.Epoch {
			return false
		}
	}
	return true
}

// settleOf waits for a crashed unit's next start, so that the next crash is another one.
func (c *fleet) settleOf(hosts []*host, unit string) {
	c.lose = nil
	want := c.state.Epochs[unit] + 1
	for range 100 {
		for _, h := range hosts {
			c.renew(h.node.ID)
		}
		if c.state.Epochs[unit] == want {
			return
		}
		c.pass(time.Second)
	}
	require.Fail(c.t, fmt.Sprint(unit, " does not start again"))
}
