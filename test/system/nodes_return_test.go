package system

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// MB4: a node returns under another address; then another machine comes under the name of a node.
func TestMB4NewAddressSameName(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(3), harness.MemberSlots(6))
	c.Expect(harness.NodeFails, harness.JoinRefused)
	a, b := c.All[0], c.All[1]
	a.Want(spread("wide", 6))
	c.Running("wide")
	c.Leader()
	m := c.All[2]
	m.Term()
	movedFrom(c, "wide", m.Name)

	m.Move(c.NextIP())
	began := time.Now()
	m.Start()
	c.WaitNode(m.Name, "alive at its new address", func(s *client.NodeStatus) bool {
		return s.State == "alive" && s.Address == m.NodePort()
	})
	back := time.Since(began)
	t.Logf("back %s after its start", back)
	c.Settled()
	a.Want(spread("more", 6) + "    route_prefix: /more\n") // room is where the node has come back to
	st := c.Running("more")
	assert.NotEmpty(t, on(seats(&st), m.Name), "it takes ranks again")

	st = c.Running("wide")
	before := seats(&st)
	other := harness.Run(t, "join", a.NodePort(), "--token", c.Token(), "--node-id", b.Name, "--advertise",
		c.NextIP(), "--data-dir", filepath.Join(t.TempDir(), "b"),
		"--http-bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0")
	assert.NotZero(t, other.ExitCode(), "a second node of a name is refused")
	assert.Contains(t, other.Output(), b.Name)
	assert.Contains(t, other.Output(), "hint:")
	c.Settled()
	st = c.Running("wide")
	assert.Equal(t, before, seats(&st), "the first is unharmed")
	assert.True(t, b.Runs())
	c.AllQuiet()
}

// MB7, as a power cut does it: every node is killed at once and started again, in any order.
func TestMB7AllAtOnce(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(3), harness.MemberSlots(4))
	c.Expect(harness.NodeFails, harness.NoLeaderAtStart)
	c.All[0].Want(spread("wide", 6))
	st := c.Running("wide")
	before := seats(&st)
	for _, m := range c.All {
		m.Kill()
	}
	for i := range c.All {
		c.All[len(c.All)-1-i].Launch("start")
	}
	for _, m := range c.All {
		m.Ready()
	}
	c.Settled()
	st = c.Running("wide")
	after := seats(&st)
	assert.Len(t, after, len(before))
	for seat, k := range after {
		assert.Greater(t, k.Epoch, before[seat].Epoch, "rank %s was started again", seat)
		assert.NotEqual(t, before[seat].Incarnation, k.Incarnation)
	}
	load := harness.StartLoad(t, "wide", 4, 8, others(c, nil)...)
	load.Reaches(40)
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "%v", y)
	c.AllQuiet()
}
