package inprocess

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/test/harness"
)

// takesAgain is how long after the leader's death assignments are taken again. test/acceptance.md, row RG4.
const takesAgain = 3 * time.Second

// RG4: The leader, which has no ranks, dies under load: only the leadership changes.
func TestLeaderDies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(10), harness.Roles(0, "control", "ingress"))
		c.Expect(harness.NodeFails)
		c.WaitVoters(3)
		c.Deploy(spread("a", 8) + simApp("gang", 8, "lockstep", "sim_step_ms: 10")[len("applications:\n"):])
		c.WaitStatus("a", "RUNNING")
		c.WaitStatus("gang", "RUNNING")
		require.True(t, c.Peer(0).Leads())
		left := c.Peer(1)
		before := owners(left)
		require.Len(t, before, 16)
		engines := len(c.Engines.Live())
		var loads []*traffic
		for _, p := range c.Peers()[1:] {
			loads = append(loads, ask(t, p, "a", 50*time.Millisecond, 20),
				ask(t, p, "gang", 50*time.Millisecond, 20))
		}
		time.Sleep(3 * time.Second)

		died := time.Now()
		c.Peer(0).Drop()
		took := deployed(t, left, spread("late", 2))
		t.Logf("deployed %s after the leader's death", took.Sub(died))
		assert.LessOrEqual(t, took.Sub(died), takesAgain)
		left.WaitStatus("late", "RUNNING")
		t.Logf("running %s after the leader's death", time.Since(died))
		wasLost := left.When(lost("node-1"))
		t.Logf("lost %s after its death", (<-wasLost).Sub(died))
		time.Sleep(5 * time.Second)
		for _, l := range loads {
			assert.Zero(t, clean(t, l.end()), "streams broken")
		}
		for k, was := range before {
			assert.Equal(t, was, owners(left)[k], k)
		}
		assert.Len(t, c.Engines.Live(), engines+2)
	})
}

// owners are who has each rank, of every app.
func owners(p *harness.Peer) map[string]string {
	out := map[string]string{}
	for _, a := range p.Apps() {
		for _, u := range a.Units {
			for _, k := range u.Ranks {
				out[fmt.Sprintf("%s %d", u.Unit, k.Rank)] = fmt.Sprintf("%s %s epoch %d incarnation %s %s",
					k.Node, k.URL, u.Epoch, k.Incarnation, u.Phase)
			}
		}
	}
	return out
}

// deployed tries until a deploy is accepted and returns the moment.
func deployed(t *testing.T, p *harness.Peer, yaml string) time.Time {
	t.Helper()
	for range 300 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		code, text := put(ctx, p, yaml)
		cancel()
		if code == http.StatusAccepted {
			return time.Now()
		}
		require.NotContains(t, []int{http.StatusOK, http.StatusBadRequest, http.StatusNotFound}, code, text)
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal("no deploy was accepted")
	return time.Time{}
}

// One engine of a lockstep group over two nodes dies: every ingress has the whole group out at once, and it
// comes back as a group.
func TestGroupOverTwoNodesFailsAsOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const outIn = 250 * time.Millisecond
		c := harness.New(t, harness.Nodes(3), harness.Slots(8), harness.Roles(0, "control", "ingress"))
		c.Expect(harness.EngineFails, harness.StreamBreaks)
		c.WaitVoters(3)
		c.Deploy(simApp("gang", 16, "lockstep", "sim_step_ms: 10, sim_startup_s: 2"))
		c.WaitUnit("gang/0", "ready", 1)
		require.Len(t, ranksOn(c.Peer(0), "node-2"), 8)
		var notes []*recordLog
		var loads []*traffic
		for _, p := range c.Peers() {
			notes = append(notes, follow(p))
			loads = append(loads, ask(t, p, "gang", 10*time.Millisecond, 10))
		}
		time.Sleep(2 * time.Second)

		killed := time.Now()
		require.True(t, c.Kill("gang", 0, 11))
		c.WaitUnit("gang/0", "ready", 2)
		back := time.Since(killed)
		t.Logf("ready again %s after the kill", back)
		time.Sleep(time.Second)
		broken := 0
		for _, l := range loads {
			broken += clean(t, l.end())
		}
		broken += len(c.Journal.Find("a stream broke and goes on from another rank"))
		assert.Positive(t, broken, "streams that the group had begun: they wait for its return, or end")
		for i, d := range notes {
			late := d.all(func(h rankRecord) bool {
				return h.kind == msg.RecAdmitted && h.epoch == 1 && h.at.After(killed.Add(outIn))
			})
			assert.Empty(t, late, "ingress %d used the group after it was dead", i+1)
		}
		assert.LessOrEqual(t, back, 2*time.Second+5*time.Second)
		assert.Len(t, c.Journal.Find(`"msg":"engine started"`, `"epoch":2`), 16, "one start of the gang")
		assert.Empty(t, c.Journal.Find(`"msg":"engine started"`, `"epoch":3`))
		assert.Equal(t, 1, c.Unit("gang/0").Restarts)
	})
}

// The leader dies at any moment of the start of a lockstep group over two nodes: the next one brings it up.
func TestLeaderDiesWhileAGangMeets(t *testing.T) {
	for _, after := range []int{0, 60, 140, 180, 220, 400, 2500} {
		t.Run(fmt.Sprintf("after %d ms", after), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { dieWhileMeeting(t, time.Duration(after)*time.Millisecond) })
		})
	}
}

func dieWhileMeeting(t *testing.T, after time.Duration) {
	c := harness.New(t, harness.Nodes(3), harness.Slots(4), harness.Roles(0, "control", "ingress"))
	c.Expect(harness.NodeFails)
	c.WaitVoters(3)
	for _, a := range c.Peers() { // far apart: the steps of a start take time
		for _, b := range c.Peers() {
			c.Net.Delay(a.Host, b.Host, 30*time.Millisecond)
		}
	}
	time.Sleep(3 * time.Second)
	c.Deploy(simApp("gang", 8, "lockstep", "sim_step_ms: 10, sim_startup_s: 2"))
	time.Sleep(after)
	died := time.Now()
	c.Peer(0).Drop()
	left := c.Peer(1)
	left.Led()
	left.WaitStatus("gang", "RUNNING")
	t.Logf("running %s after the leader's death, at epoch %d", time.Since(died), left.Epoch("gang/0"))
	assert.Less(t, time.Since(died), 30*time.Second)
	for rank := range 8 {
		s := left.StreamChat(t.Context(), "gang", 5)
		require.True(t, s.OK(), "%d: %s", rank, s)
	}
	assert.LessOrEqual(t, left.Epoch("gang/0"), uint64(2))
	assert.Len(t, c.Engines.Live(), 8)
}
