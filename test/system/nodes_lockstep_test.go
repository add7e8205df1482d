package system

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// A lockstep group lies over two nodes. The node of its first rank is killed, then the next such node is
// stopped (SIGSTOP): the group starts again as a whole where there is room, and clients of the other nodes
// wait for it.
func TestLockstepOverNodesLosesOne(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a group of engines more than once")
	}
	worker := []string{"--roles", "worker,ingress"}
	c := harness.StartMembers(t, [][]string{{"--roles", "control,ingress"}, worker, worker, worker, worker},
		harness.MemberSlots(4))
	c.Expect(harness.NodeFails, harness.EngineFails, harness.StreamBreaks)
	c.All[0].Want(simApp("wide", 8, "lockstep", "sim_step_ms: 10"))
	for _, end := range []func(m *harness.Member){(*harness.Member).Kill, (*harness.Member).Freeze} {
		st := c.Running("wide")
		before := seats(&st)
		victim := c.By(before["0/0"].Node) // whose ingress has the queue of the group
		require.Len(t, on(before, victim.Name), 4)
		load := harness.StartLoad(t, "wide", 4, 20, others(c, victim)...)
		load.Reaches(20)
		began := time.Now()
		end(victim)
		for _, m := range c.Up() {
			outOf(c, m, "wide", on(before, victim.Name))
		}
		out := time.Since(began)
		after := movedFrom(c, "wide", victim.Name)
		t.Logf("out of routing after %s, serving again after %s", out, time.Since(began))
		for seat, k := range after {
			assert.Equal(t, before[seat].Epoch+1, k.Epoch, "rank %s: one restart of the whole group", seat)
			assert.NotEqual(t, before[seat].Incarnation, k.Incarnation)
		}
		load.Reaches(20)
		y := load.End()
		assert.Zero(t, y.Refused+y.Cut+y.Hung, "what clients saw: %v", y)
		if victim.Runs() {
			old := engines(before, victim.Name)
			victim.Thaw()
			dead(c, "the old engines", old)
		} else {
			victim.Start()
		}
		c.Settled()
	}
	c.AllQuiet()
}

// The leader dies while a group starts: the next one goes on with it.
func TestLeaderDiesDuringDeploy(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a group of engines more than once")
	}
	control, worker := []string{"--roles", "control"}, []string{"--roles", "worker,ingress"}
	c := harness.StartMembers(t, [][]string{control, control, control, worker, worker},
		harness.MemberSlots(8),
		harness.RealLeases)
	c.Expect(harness.NodeFails)
	w := c.By("d")
	leader := c.Leader()
	w.Want(simApp("slow", 16, "lockstep", "sim_startup_s: 3"))
	c.WaitApp("slow", "starting", func(st *client.AppStatus) error {
		if len(st.Units) == 0 || st.Units[0].Phase != "starting" {
			return fmt.Errorf("%+v", st.Units)
		}
		return nil
	})
	leader.Kill()
	st := c.Running("slow")
	require.Len(t, st.Units, 1)
	assert.EqualValues(t, 1, st.Units[0].Epoch, "the start that was under way is the one that serves")
	assert.Zero(t, st.Units[0].Restarts)
	answersAt(t, "slow", w.HTTP)
}

func answersAt(t *testing.T, app string, endpoints ...string) {
	t.Helper()
	load := harness.StartLoad(t, app, 4, 8, endpoints...)
	load.Reaches(20)
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "%s: %v", app, y)
}
