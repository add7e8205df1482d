package system

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// MB4, MB7: a node returns under another address; another machine comes under the name of a node; then, as a
// power cut does it, every node is killed at once and started again, in another order.
func TestMB4NewAddressSameNamePowerCut(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(3), harness.MemberSlots(6))
	c.Expect(harness.NodeFails, harness.JoinRefused, harness.NoLeaderAtStart)
	a, b := c.All[0], c.All[1]
	a.Want(spread("wide", 6))
	c.Running("wide")
	c.Leader()
	m := c.All[2]
	m.Term()
	movedFrom(c, "wide", m.Name)

	m.Move(c.NextIP())
	m.Start()
	c.WaitNode(m.Name, "alive at its new address", func(s *client.NodeStatus) bool {
		return s.State == "alive" && s.Address == m.NodePort()
	})
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
	c.Running("more")
	load := harness.StartLoad(t, "wide", 4, 8, others(c, nil)...)
	load.Reaches(40)
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "%v", y)
	c.AllQuiet()
}
