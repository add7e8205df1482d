package inprocess

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// fewestReady follows the ready ranks of an application until it is stopped, and returns the lowest number.
func fewestReady(p *harness.Peer, app string) (stop func() int) {
	ended, low := make(chan struct{}), make(chan int, 1)
	go func() {
		least := 1 << 10
		for {
			st, _ := p.App(app)
			least = min(least, st.Ready)
			select {
			case <-ended:
				low <- least
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	return func() int { close(ended); return <-low }
}

// sized is an application of lockstep groups of two whose grace is longer than any stream of the test.
func sized(groups int, stepMS int, strategy string) string {
	return simApp("fleet", 2, "lockstep", fmt.Sprintf("sim_step_ms: %d", stepMS),
		fmt.Sprintf("num_groups: %d", groups),
		"graceful_shutdown_timeout_s: 20", "placement_group_strategy: "+strategy)
}

// FS10, PL3: Under load, an application rolls to another revision, shrinks and grows, a node is drained, and
// a node is told to stop. No request fails, no stream is cut, and no more ranks are missing than have to be.
// A single lockstep group is away as a whole while it rolls: its requests are refused or wait, and no stream
// breaks.
func TestFS10RollResizeDrainAndStop(t *testing.T) {
	t.Parallel()
	for strategy, parts := range map[string]int{"PACK": 1, "SPREAD": 2} { // nodes of a group
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			rollResizeDrainAndStop(t, strategy, parts)
		})
	}
}

func rollResizeDrainAndStop(t *testing.T, strategy string, parts int) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(8))
		c.Expect(harness.NodeFails)
		c.WaitVoters(3)
		c.Deploy(sized(4, 10, strategy))
		c.WaitStatus("fleet", "RUNNING")
		time.Sleep(5 * time.Second)
		leads := c.Leader()
		load := ask(t, leads, "fleet", 150*time.Millisecond, 100)
		busy := func() *harness.Peer { // another node with ranks
			for _, p := range c.Peers() {
				if p != leads && len(ranksOn(leads, p.ID)) > 0 {
					return p
				}
			}
			t.Fatal("the leader has all ranks")
			return nil
		}
		phase := func(what string, groups, missing int, do func()) {
			t.Helper()
			fewest := fewestReady(leads, "fleet")
			do()
			c.Until(what, func() error { return allReady(leads.Cluster, "fleet", 2*groups) })
			assert.GreaterOrEqual(t, fewest(), 2*groups-missing, what)
			time.Sleep(3 * time.Second)
		}
		phase("a new revision", 4, 2, func() {
			leads.Deploy(sized(4, 11, strategy))
			c.Until("it has begun", func() error {
				if st, _ := leads.App("fleet"); st.Ready == 8 {
					return fmt.Errorf("not yet")
				}
				return nil
			})
		})
		for _, n := range []int{2, 8} {
			before := epochs(leads)
			phase(fmt.Sprint(n, " groups"), n, 2*n, func() { leads.Deploy(sized(n, 11, strategy)) })
			after := epochs(leads)
			assert.Len(t, after, n)
			for unit, epoch := range after {
				if was := before[unit]; was != 0 {
					assert.Equal(t, was, epoch, "%s stays as it is", unit)
				}
			}
		}
		p := busy()
		phase("the drain of "+p.ID, 8, len(ranksOn(leads, p.ID)), func() {
			drained(t, leads.Cluster, p.ID)
			assert.Empty(t, ranksOn(leads, p.ID))
		})
		code, text := leads.Do(http.MethodDelete, "/api/v1/nodes/"+p.ID+"/drain", "")
		require.Equal(t, http.StatusAccepted, code, text)
		p = busy()
		phase("the stop of "+p.ID, 8, parts*len(ranksOn(leads, p.ID)), p.Close)
		assert.Zero(t, clean(t, load.end()), "streams broken")
	})
}

// epochs are the epochs of all units.
func epochs(p *harness.Peer) map[string]uint64 {
	out := map[string]uint64{}
	for id, u := range p.State().Units {
		out[id] = u.Epoch
	}
	return out
}

// A changed application with a single lockstep group is away as a whole, as docs/rollout.md says: requests
// are refused while the group drains, and wait while it starts. No stream breaks, and no request hangs.
func TestASingleGroupRollsAsAWhole(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Expect(harness.RequestRefused)
		c.Deploy(sized(1, 10, "PACK"))
		c.WaitStatus("fleet", "RUNNING")
		load := ask(t, c.Peer(0), "fleet", 100*time.Millisecond, 100)
		time.Sleep(3 * time.Second)
		c.Deploy(sized(1, 20, "PACK"))
		c.WaitUnit("fleet/0", "ready", 2)
		time.Sleep(3 * time.Second)
		refused := 0
		for _, a := range load.end() {
			if !a.OK() {
				refused++
				assert.Equal(t, http.StatusServiceUnavailable, a.Status, a.Stream)
			}
		}
		assert.NotZero(t, refused)
	})
}

// HF30: Without a majority of the voters a node names who votes.
func TestNoMajorityNamesTheVoters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3))
		c.Expect(harness.NodeFails)
		c.WaitVoters(3)
		c.Peer(1).Drop()
		c.Peer(2).Drop()
		c.Until("the voters are named", func() error {
			code, text := c.Do(http.MethodGet, "/api/v1/apps", "")
			if code != http.StatusServiceUnavailable ||
				!strings.Contains(text, "votes: node-1, node-2, node-3") {
				return fmt.Errorf("%d %s", code, text)
			}
			return nil
		})
	})
}

// The process of a node ends without its engines, and the next one begins when the ranks run elsewhere: it
// ends the old engines before anything else, and no request reaches them.
func TestEN2GrantedElsewhereFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(8), harness.OnDisk(), harness.EnginesLiveOn(),
			harness.Roles(2, "worker"))
		c.Expect(harness.NodeFails, harness.RanksMove)
		c.WaitVoters(1)
		c.Deploy(spread("a", 6))
		c.WaitStatus("a", "RUNNING")
		away := c.Peer(2)
		old := c.Engines.On(away.Host)
		require.NotEmpty(t, old)
		away.LetGo()
		c.Until("its ranks run elsewhere", func() error {
			if left := ranksOn(c.Peer(0), away.ID); len(left) > 0 {
				return fmt.Errorf("%v", left)
			}
			return allReady(c, "a", 6)
		})
		require.Len(t, c.Engines.On(away.Host), len(old), "they live on without their node")
		asked := map[string]uint64{}
		for _, e := range old {
			st, err := c.Stats(e.URL)
			require.NoError(t, err)
			asked[e.URL] = st.PromptTokens
		}
		load := ask(t, c.Peer(0), "a", 50*time.Millisecond, 5)
		began := time.Now()
		require.NoError(t, away.Again(nil))
		c.Until("the old engines end", func() error {
			for _, e := range c.Engines.On(away.Host) {
				if st, err := c.Stats(e.URL); err == nil {
					assert.Equal(t, asked[e.URL], st.PromptTokens, e.URL)
				}
			}
			if left := c.Engines.On(away.Host); len(left) > 0 {
				return fmt.Errorf("%v", left)
			}
			return nil
		})
		assert.Less(t, time.Since(began), 10*time.Second)
		c.Until("it is back", func() error { return aliveHere(c, away.ID) })
		assert.Zero(t, clean(t, load.end()))
	})
}
