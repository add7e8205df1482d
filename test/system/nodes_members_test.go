package system

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// spread is an app of independent ranks that are spread over the nodes.
func spread(name string, dp int) string {
	return strings.Replace(simApp(name, dp, "independent", "sim_step_ms: 10"), "    data_parallel:",
		"    placement_group_strategy: SPREAD\n    data_parallel:", 1)
}

// seats are an application's ranks by GROUP/RANK, without what changes from one moment to the next.
func seats(st *client.AppStatus) map[string]client.RankStatus {
	out := map[string]client.RankStatus{}
	for _, u := range st.Units {
		for i := range u.Ranks {
			k := &u.Ranks[i]
			out[fmt.Sprintf("%d/%d", k.Group, k.Rank)] = client.RankStatus{
				Group: k.Group, Rank: k.Rank, Node: k.Node, Phase: k.Phase, Epoch: k.Epoch,
				Incarnation: k.Incarnation, PID: k.PID, URL: k.URL,
			}
		}
	}
	return out
}

// on are the seats of one node.
func on(all map[string]client.RankStatus, node string) (out []string) {
	for seat := range all {
		if all[seat].Node == node {
			out = append(out, seat)
		}
	}
	return out
}

// outOf waits until an ingress no longer counts ranks as usable.
func outOf(c *harness.Members, at *harness.Member, app string, ranks []string) {
	c.T.Helper()
	c.Eventually("out of routing at "+at.Name, func() error {
		route, err := at.Route(app)
		for _, r := range ranks {
			if err == nil && route[r] == "ok" {
				err = fmt.Errorf("rank %s is still ok: %v", r, route)
			}
		}
		return err
	})
}

// MB1: three nodes join, one is killed under load. Timers of leases are a fifth of the real ones, those of
// streams a quarter.
func TestMB1JoinAndLoss(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(1), harness.MemberSlots(4))
	c.Expect(harness.NodeFails, harness.StreamBreaks)
	a := c.All[0]
	b, lost := c.Add("b"), c.Add("c")
	c.Settled()
	for _, m := range c.All {
		list, err := m.Nodes()
		require.NoError(t, err)
		assert.Len(t, list, 3, "each node tells of all")
	}

	a.Want(spread("wide", 6))
	st := c.Running("wide")
	before := seats(&st)
	gone := on(before, lost.Name)
	require.Len(t, gone, 2)
	load := harness.StartLoad(t, "wide", 8, 40, a.HTTP, b.HTTP)
	load.Reaches(50)

	lost.Kill()
	killed := lost.CrashedAt
	for _, at := range []*harness.Member{a, b} {
		outOf(c, at, "wide", gone)
	}
	out := time.Since(killed)
	noDetour := time.Now()
	c.WaitNode(lost.Name, "lost", func(s *client.NodeStatus) bool { return s.State == "lost" })
	lostAfter := time.Since(killed)
	assert.Greater(t, lostAfter, harness.LeaseTTL, "no sooner than its lease ends")
	st = c.WaitApp("wide", "whole again", func(st *client.AppStatus) error {
		for seat, k := range seats(st) {
			if k.Phase != "ready" || k.Node == lost.Name {
				return fmt.Errorf("rank %s: %+v", seat, k)
			}
		}
		return harness.Accounted(st)
	})
	t.Logf("out of routing after %s, lost after %s, granted again after %s", out, lostAfter,
		time.Since(killed))
	for seat, k := range seats(&st) {
		if was := before[seat]; was.Node != lost.Name {
			assert.Equal(t, was, k, "rank %s of a node that lives", seat)
		} else {
			assert.Equal(t, was.Epoch+1, k.Epoch, "rank %s is granted anew, once", seat)
		}
	}
	load.Reaches(50)
	y := load.End()
	assert.Zero(t, y.Refused+y.Cut+y.Hung, "what clients saw: %v", y)
	direct(t, load, noDetour)
	c.Settled()
	c.AllQuiet()
}

// direct checks that requests sent since a moment went to one rank each: nobody picked one that is gone.
func direct(t *testing.T, load *harness.Load, since time.Time) {
	t.Helper()
	for _, a := range load.Answers(since) {
		assert.Equal(t, "1", a.Attempts, "%v", a.String())
	}
}

func alive(s *client.NodeStatus) bool { return s.State == "alive" }
