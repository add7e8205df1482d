package system

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// engines are the processes of a node's ranks.
func engines(all map[string]client.RankStatus, node string) (pids []int) {
	for _, seat := range on(all, node) {
		pids = append(pids, all[seat].PID)
	}
	return pids
}

// movedFrom waits until an application runs with no rank on a node and returns its ranks.
func movedFrom(c *harness.Members, app, node string) map[string]client.RankStatus {
	c.T.Helper()
	st := c.WaitApp(app, "whole without "+node, func(st *client.AppStatus) error {
		for seat, k := range seats(st) {
			if k.Phase != "ready" || k.Node == node || k.PID == 0 {
				return fmt.Errorf("rank %s: %+v", seat, k)
			}
		}
		return harness.Accounted(st)
	})
	return seats(&st)
}

// dead waits until processes are gone.
func dead(c *harness.Members, what string, pids []int) {
	c.T.Helper()
	c.Eventually(what, func() error {
		for _, p := range pids {
			if harness.Alive(p) {
				return fmt.Errorf("process %d lives", p)
			}
		}
		return nil
	})
}

// freezePast stops a node for longer than its lease, until its ranks serve elsewhere, and lets it go on: what
// it held is over.
func freezePast(t *testing.T, c *harness.Members, m *harness.Member, load *harness.Load) {
	t.Helper()
	st := c.Running("wide")
	before := seats(&st)
	old := engines(before, m.Name)
	require.NotEmpty(t, old)
	log := len(m.Log())
	m.Freeze()
	after := movedFrom(c, "wide", m.Name)
	for seat, k := range after {
		if was := before[seat]; was.Node == m.Name {
			assert.Equal(t, was.Epoch+1, k.Epoch, "rank %s is granted anew, once", seat)
		} else {
			assert.Equal(t, was, k, "rank %s of a node that is awake", seat)
		}
	}
	load.Reaches(20)
	thawed := time.Now()
	m.Thaw()
	code, _, err := m.Ask(http.MethodPut, "/api/v1/apps?file=app.yaml",
		simApp("late-"+m.Name, 1, "independent", "")+"    route_prefix: /late-"+m.Name+"\n")
	dead(c, "the old engines of "+m.Name, old)
	stopped := time.Since(thawed)
	c.WaitNode(m.Name, "back", func(s *client.NodeStatus) bool { return s.State == "alive" })
	if err == nil && code == http.StatusAccepted { // then the leader of now took it
		for _, o := range c.All {
			c.Eventually("what was accepted is known at "+o.Name, func() error {
				_, err := o.AppOf("late-" + m.Name)
				return err
			})
		}
	}
	t.Logf("%s stopped what it held %s after it went on; a write there: %d %v", m.Name, stopped, code, err)
	woke := m.Log()[log:]
	for line := range strings.Lines(woke) {
		if strings.Contains(line, "engine started") {
			assert.NotContains(t, line, "app=wide", "no start on a grant of before")
		}
	}
	st = c.Running("wide")
	for seat, k := range seats(&st) {
		assert.Equal(t, after[seat], k, "rank %s: a node's return moves nothing", seat)
	}
	c.Settled()
}

// FS7, MB3: a node that fences, then the leader, is stopped (SIGSTOP) longer than a lease under load and goes
// on. Nodes that hear of no majority are tested on fake time.
func TestMB3Freeze(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("stops nodes for longer than their leases")
	}
	c := harness.StartMembers(t, [][]string{{}, {}, {"--on-lease-loss", "fence"}}, harness.MemberSlots(6),
		harness.LongLeases) // no node that is awake loses its own on a busy machine
	c.Expect(harness.NodeFails, harness.RanksMove, harness.StreamBreaks)
	c.All[0].Want(spread("wide", 6))
	c.Running("wide")
	for _, next := range []func() *harness.Member{
		func() *harness.Member { return c.All[2] }, // without ranks it cannot fence while nobody leads
		c.Leader,
	} {
		m := next()
		load := harness.StartLoad(t, "wide", 6, 20, others(c, m)...)
		load.Reaches(20)
		freezePast(t, c, m, load)
		y := load.End()
		assert.Zero(t, y.Refused+y.Cut+y.Hung, "what clients saw: %v", y)
		assert.NotEqual(t, m.Name, c.Leader().Name, "it does not lead any more")
	}
	c.AllQuiet()
}

// others are the endpoints of all nodes but one.
func others(c *harness.Members, but *harness.Member) (out []string) {
	for _, m := range c.All {
		if m != but {
			out = append(out, m.HTTP)
		}
	}
	return out
}
