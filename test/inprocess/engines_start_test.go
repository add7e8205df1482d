package inprocess

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// CC12, MB8, RP34: engines that load for 42 s. The status says what they do, nothing fails before the
// deadline of the start, and the application runs only after each rank of each group has computed a token.
// When both groups start again, a request does not wait for what cannot be there in time, and is told why.
func TestCC12ColdStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		began := time.Now()
		c.Deploy(simApp("cold", 2, "lockstep", "sim_step_ms: 10, sim_startup_s: 42", "num_groups: 2",
			"timeouts: {queue_s: 30}"))
		time.Sleep(30 * time.Second)
		st, _ := c.App("cold")
		assert.Equal(t, "DEPLOYING", st.Status)
		assert.Zero(t, st.Ready)
		require.Len(t, st.Units, 2)
		for _, u := range st.Units {
			assert.Equal(t, "starting", u.Phase)
			for _, k := range u.Ranks {
				assert.Equal(t, "making its KV cache of 1.00 GiB", k.Progress)
			}
		}
		early := make(chan *harness.Stream)
		go func() { early <- c.StreamChat(t.Context(), "cold", 5) }()

		st = c.WaitStatus("cold", "RUNNING")
		assert.GreaterOrEqual(t, time.Since(began), 42*time.Second)
		assert.Less(t, time.Since(began), 44*time.Second)
		assert.Equal(t, 4, st.Ready)
		for _, u := range st.Units {
			assert.Equal(t, [...]any{uint64(1), 0}, [...]any{u.Epoch, u.Restarts}, "one start is enough")
			for _, k := range u.Ranks {
				assert.Empty(t, k.Progress)
				stats, err := c.Stats(k.URL)
				require.NoError(t, err)
				assert.GreaterOrEqual(t, stats.Tokens, uint64(1), "rank %d/%d has computed", k.Group, k.Rank)
			}
		}
		s := <-early
		assert.True(t, s.OK(), "a request of before waits: %v", s)
		for _, e := range c.Events("cold") {
			assert.NotContains(t, []string{"fenced", "killing", "backoff", "failed"}, e.Phase, e)
		}

		c.Expect(harness.EngineFails, harness.RequestRefused)
		for group := range 2 {
			c.Kill("cold", group, 1)
		}
		time.Sleep(100 * time.Millisecond) // a request of this moment may meet both engines as they die
		s = c.StreamChat(t.Context(), "cold", 5)
		assert.Equal(t, "no_ready_rank", s.Error)
		assert.Less(t, s.Total, 5*time.Second)
		time.Sleep(20 * time.Second)
		s = c.StreamChat(t.Context(), "cold", 5)
		assert.True(t, s.OK(), "it waits for a start that may end in time: %v", s)
		assert.Greater(t, s.Total, 15*time.Second)
		c.Quiet()
	})
}

// A start that takes longer than its deadline fails at the deadline, and says what the engine was doing.
func TestCC12ColdStartBeyondItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		yaml := strings.Replace(simApp("cold", 1, "independent", "sim_step_ms: 10, sim_startup_s: 42"),
			"engine: {kind: sim,", "engine: {kind: sim, startup_timeout_s: 20,", 1)
		c.Deploy(yaml)
		began := time.Now()
		u := c.WaitUnit("cold/0/0", "backoff", 1)
		assert.InDelta(t, 20, time.Since(began).Seconds(), 1)
		assert.Contains(t, u.Reason, "not ready within the startup timeout of 20s "+
			"(engine.startup_timeout_s); rank 0: loading weights 6 of 8")
		c.Delete("cold")
	})
}

// RG8: 100 groups of two ranks start at once on one host with two nodes. No port is given twice, and no start
// has to be repeated; ranks of the second node learn where rank 0 is well within a second.
func TestRG8HundredGroupsStartAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const groups = 100
		c := harness.New(t, harness.Nodes(2), harness.Slots(groups))
		for _, p := range c.Peers() {
			c.Until(p.ID+" is there", func() error { return aliveHere(c, p.ID) })
		}
		time.Sleep(3 * time.Second)
		c.Deploy(simApp("many", 2, "lockstep", "sim_step_ms: 100", fmt.Sprintf("num_groups: %d", groups),
			"placement_group_strategy: SPREAD"))
		st := c.WaitStatus("many", "RUNNING")
		assert.Equal(t, 2*groups, st.Ready)
		urls := map[string]bool{}
		for _, u := range st.Units {
			assert.Equal(t, [...]any{uint64(1), 0}, [...]any{u.Epoch, u.Restarts}, "%s: %s", u.Unit, u.Reason)
			require.Len(t, u.Ranks, 2)
			assert.NotEqual(t, u.Ranks[0].Node, u.Ranks[1].Node)
			for _, k := range u.Ranks {
				urls[k.URL] = true
			}
		}
		assert.Len(t, urls, 2*groups)
		begun := map[string]time.Time{}
		for _, e := range c.Events("many") {
			switch e.Phase {
			case "starting":
				begun[e.Unit] = e.Time
			case "ready":
				assert.Less(t, e.Time.Sub(begun[e.Unit]), time.Second, "%s: peers have met", e.Unit)
			case "backoff", "killing", "failed":
				assert.Fail(t, "a start has failed", "%+v", e)
			}
		}
		assert.Len(t, begun, groups)
		c.Quiet()
	})
}

// RG8: the node of rank 0 hears nothing any more and keeps its lease. The other rank waits for 120 s, and the
// error names the one that is missing.
func TestRG8ARankThatNeverReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(1), harness.Roles(0, "control", "ingress"),
			harness.Roles(1, "worker"), harness.Roles(2, "worker"), harness.Timers(map[string]time.Duration{
				"lease_ttl": time.Hour, "lease_regrant": time.Hour + time.Minute,
			}))
		c.Expect(harness.NodeFails, harness.EngineFails)
		yaml := simApp("pair", 2, "lockstep", "sim_step_ms: 10")
		c.Deploy(yaml)
		st := c.WaitStatus("pair", "RUNNING")
		zero := st.Units[0].Ranks[0]
		require.Zero(t, zero.Rank)
		c.Delete("pair")
		c.Until("pair is gone", gone(c, "pair"))
		for _, p := range c.Peers() {
			if p.ID == zero.Node {
				p.Silence()
			}
		}
		c.Deploy(yaml)
		began := time.Now()
		const missing = "rendezvous timed out: pair/0, epoch 2: after 2m0s no report from rank 0"
		c.Until("the error of the rank that waits", func() error {
			if len(c.Journal.Find(missing)) == 0 {
				return errors.New("not yet")
			}
			return nil
		})
		assert.InDelta(t, 120, time.Since(began).Seconds(), 1)

		c.Reconnect()
		st = c.WaitStatus("pair", "RUNNING")
		assert.Equal(t, uint64(3), st.Units[0].Epoch)
		reasons := map[string]string{}
		for _, e := range c.Events("pair") {
			reasons[e.Phase] = e.Reason
		}
		assert.Equal(t, missing, reasons["backoff"])
		c.Quiet()
	})
}

// Another program holds a port in each of the first twelve blocks. The first start of each rank finds that
// out, and the next one has a free block: no attempt is lost.
func TestHF68BlocksOfAnotherProgramAreLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		var held []net.Listener
		for block := range 12 {
			l, err := c.Net.Host("127.0.0.1").Listen(fmt.Sprintf("127.0.0.1:%d", 20000+16*block+block%3))
			require.NoError(t, err)
			held = append(held, l)
		}
		began := time.Now()
		c.Deploy(simApp("a", 3, "independent", "sim_step_ms: 10"))
		st := c.WaitStatus("a", "RUNNING")
		assert.Less(t, time.Since(began), 3*time.Second)
		for _, u := range st.Units {
			assert.Equal(t, [...]any{uint64(2), 1}, [...]any{u.Epoch, u.Attempt}, u.Unit)
		}
		taken := c.Peer(0).State().Nodes["node-1"].Resources.Taken
		assert.Len(t, taken, 12)
		for _, l := range held {
			require.NoError(t, l.Close())
		}
		c.Delete("a")
		time.Sleep(11 * time.Minute)
		assert.Empty(t, c.Peer(0).State().Nodes["node-1"].Resources.Taken, "they are free again")
	})
}
