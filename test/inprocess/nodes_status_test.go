package inprocess

import (
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/harness"
)

// shownAt is how soon after the end of a node `status` shows its ranks as unreachable.
const shownAt = time.Second

// oneAnswer is how long an answer of `status` takes at most, also while a node is silent.
const oneAnswer = time.Second

// unreachableRanks counts the ranks that an application's status shows as unreachable, and asserts that they
// are on one node.
func unreachableRanks(t *testing.T, st client.AppStatus, node string) (count int) {
	t.Helper()
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			if k.Phase == client.Unreachable {
				count++
				assert.Equal(t, node, k.Node, u.Unit)
				assert.Contains(t, u.Reason, "node "+node+" is silent for ", u.Unit)
			}
		}
	}
	return count
}

// ST1: A node's process dies: whichever node is asked, its ranks are unreachable at once and the application
// is not RUNNING, long before the node is lost. Nothing is restarted because of it.
func TestRanksOfADeadNodeAreShownUnreachable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(4), harness.Slots(2),
			harness.Roles(0, "control", "worker"), harness.Roles(1, "control"))
		c.Expect(harness.NodeFails)
		c.WaitVoters(3)
		c.Deploy(spread("a", 6))
		c.WaitStatus("a", "RUNNING")
		dead := c.Peer(3)
		require.True(t, c.Peer(0).Leads())
		require.Len(t, ranksOn(c.Peer(0), dead.ID), 2)
		time.Sleep(5 * time.Second)

		died := time.Now()
		dead.Drop()
		time.Sleep(shownAt)
		for _, p := range c.Peers()[:3] { // the leader, which has no ingress, and two that ask it
			st, _ := p.App("a")
			assert.Equal(t, "UNHEALTHY", st.Status, "asked at %s", p.ID)
			assert.Equal(t, 4, st.Ready, "asked at %s", p.ID)
			assert.Contains(t, st.Message, "is unreachable: node "+dead.ID+" is silent for ")
			assert.Equal(t, 2, unreachableRanks(t, st, dead.ID), "asked at %s", p.ID)
		}
		assert.Less(t, time.Since(died), shownAt+100*time.Millisecond,
			"nobody waits for a node whose connections were reset")
		assert.False(t, lost(dead.ID)(c.Peer(0).State()), "it is not lost yet")
		for id, u := range c.Peer(0).State().Units {
			assert.Equal(t, uint64(1), u.Epoch, id)
		}
	})
}

// ST1: A node's power is cut: once it is silent for a second, an answer, which takes a second at most, shows
// it; a node that is only late with one renewal is not shown so.
func TestRanksOfASilentNodeAreShownUnreachable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(4))
		c.Expect(harness.NodeFails)
		c.WaitVoters(3)
		c.Deploy(spread("a", 6))
		c.WaitStatus("a", "RUNNING")
		time.Sleep(5 * time.Second)
		for range 100 { // healthy, asked at any moment between two renewals
			st, _ := c.App("a")
			require.Equal(t, "RUNNING", st.Status, st.Message)
			time.Sleep(70 * time.Millisecond)
		}

		silent := c.Peer(2)
		cut := time.Now()
		silent.Silence()
		var st client.AppStatus
		for st.Status = "RUNNING"; st.Status == "RUNNING"; {
			asked := time.Now()
			st, _ = c.App("a")
			require.LessOrEqual(t, time.Since(asked), oneAnswer)
		}
		t.Logf("shown %s after the cut", time.Since(cut))
		assert.LessOrEqual(t, time.Since(cut), shownAt+oneAnswer)
		assert.Equal(t, "UNHEALTHY", st.Status, st.Message)
		assert.Equal(t, 2, unreachableRanks(t, st, silent.ID))
		assert.Equal(t, 4, st.Ready)
		time.Sleep(6 * time.Second)
		asked := time.Now()
		st, _ = c.App("a")
		assert.Equal(t, 2, unreachableRanks(t, st, silent.ID))
		assert.Zero(t, time.Since(asked), "nobody waits for a node that is silent for half its lease")

		c.Reconnect()
		time.Sleep(5 * time.Second)
		st, _ = c.App("a")
		assert.Equal(t, "RUNNING", st.Status, st.Message)
		for _, u := range st.Units {
			assert.Equal(t, uint64(1), u.Epoch, u.Unit)
		}
	})
}

// chatAt asks a node for a completion that is not streamed and returns the answer's status and body.
func chatAt(t *testing.T, p *harness.Peer, model string) (code int, text string, took time.Duration) {
	t.Helper()
	began := time.Now()
	resp, err := p.Post(t.Context(), "/v1/chat/completions", harness.Chat(model, "hello", 3, false))
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(body), time.Since(began)
}

// ST2: An application that finds no room answers with the placement's reason at once, on every ingress; the
// requests of a deploy that is just being placed wait; and when room appears, requests are served again.
func TestRequestsForAnAppWithoutRoomAreRefusedWithTheReason(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(1),
			harness.Roles(1, "control", "ingress"), harness.Roles(2, "control", "ingress"))
		c.Expect(harness.RequestRefused)
		c.WaitVoters(3)
		code, text := c.Do(http.MethodPut, "/api/v1/apps?file=app.yaml&partial=true",
			simApp("gang", 2, "lockstep", "sim_step_ms: 10"))
		require.Equal(t, http.StatusAccepted, code, text)
		for _, p := range c.Peers()[:3] {
			code, text, took := chatAt(t, p, "gang") // the first may wait for one renewal
			assert.Equal(t, http.StatusServiceUnavailable, code, "asked at %s", p.ID)
			assert.Contains(t, text, "no_ready_rank", "asked at %s", p.ID)
			assert.Contains(t, text, "1 of 2 ranks can be placed", "asked at %s", p.ID)
			assert.LessOrEqual(t, took, 2500*time.Millisecond, "asked at %s", p.ID)
		}
		time.Sleep(3 * time.Second)
		for _, p := range c.Peers()[:3] {
			code, text, took := chatAt(t, p, "gang")
			assert.Equal(t, http.StatusServiceUnavailable, code, text)
			assert.Less(t, took, 100*time.Millisecond, "asked at %s", p.ID)
			for _, n := range c.Peers() {
				assert.NotContains(t, text, n.ID, "a client is not told the names of nodes")
			}
		}

		joined := time.Now()
		c.Grow()
		granted := func(st *state.State) bool { return st.Epochs["gang/0"] == 1 }
		for _, p := range c.Peers()[:3] {
			<-p.When(granted)
		}
		assert.Less(t, time.Since(joined), 3*time.Second)
		for _, p := range c.Peers()[:3] {
			code, text, took := chatAt(t, p, "gang")
			assert.Equal(t, http.StatusOK, code, "asked at %s after %s: %s", p.ID, took, text)
		}
	})
}
