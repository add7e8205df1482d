package system

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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
	assert.Less(t, back, slack*5*time.Second, "it is back")
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

// MB7: the only control node and the ingress-only node restart together; then a worker.
func TestMB7Restarts(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, [][]string{
		{"--roles", "control"},
		{"--roles", "ingress"},
		{"--roles", "worker"},
		{"--roles", "worker"},
	}, harness.MemberSlots(4))
	c.Expect(harness.NodeFails, harness.EngineFails, harness.StreamBreaks)
	control, ingress, w1, w2 := c.All[0], c.All[1], c.All[2], c.All[3]
	control.Want(spread("wide", 4))
	hand := handEngine(t)
	control.Want(strings.Replace(edgeApp(hand), "name: edge,", "name: edge, route_prefix: /edge,", 1))
	edge := c.WaitApp("edge", "RUNNING", runs)
	st := c.Running("wide")
	before := seats(&st)
	require.NotEmpty(t, on(before, w1.Name))
	require.NotEmpty(t, on(before, w2.Name))

	for name, end := range map[string]func(m *harness.Member){
		"killed":       (*harness.Member).Kill,
		"asked to end": (*harness.Member).Term,
	} {
		end(control)
		end(ingress)
		ingress.Launch("start")
		control.Start()
		c.Settled()
		st = c.Running("wide")
		assert.Equal(t, before, seats(&st), "%s: engines of workers that nobody touched", name)
		again := c.WaitApp("edge", "RUNNING", runs)
		assert.Equal(t, edge.Units[0].Ranks[0].URL, again.Units[0].Ranks[0].URL, "%s: attached ranks", name)
		load := harness.StartLoad(t, "wide", 4, 5, ingress.HTTP)
		load.Reaches(20)
		y := load.End()
		assert.Zero(t, y.Broken+y.Cut+y.Hung, "%s: %v", name, y)
	}

	load := harness.StartLoad(t, "wide", 4, 20, ingress.HTTP)
	load.Reaches(20)
	old := w1.Children()
	w1.Kill()
	w1.Start()
	c.Settled()
	st = c.Running("wide")
	assert.Len(t, seats(&st), 4)
	for seat, k := range seats(&st) {
		if was := before[seat]; was.Node == w2.Name {
			assert.Equal(t, was, k, "rank %s of the worker that nobody touched", seat)
		} else {
			assert.Greater(t, k.Epoch, was.Epoch, "rank %s is started again", seat)
		}
	}
	y := load.End()
	assert.Zero(t, y.Refused+y.Cut+y.Hung, "what clients saw: %v", y)
	for _, pid := range old {
		assert.False(t, harness.Alive(pid), "a stray engine")
	}

	late := c.Add("late", "--roles", "worker") // the first token of the cluster is still good
	c.Settled()
	assert.True(t, late.Runs())
	c.AllQuiet()
}

func runs(st *client.AppStatus) error {
	if st.Status != "RUNNING" {
		return errStatus(st)
	}
	return harness.Accounted(st)
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

// A rolling restart of one version, as MB6 has it of two: each node ends and comes back in turn, and clients
// of the others see nothing.
func TestMB6RollingRestart(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("restarts three nodes one by one")
	}
	c := harness.StartMembers(t, harness.Each(3), harness.MemberSlots(6), harness.LongLeases)
	c.Expect(harness.NodeFails)
	c.All[0].Want(spread("wide", 6))
	c.Running("wide")
	for _, m := range c.All {
		load := harness.StartLoad(t, "wide", 6, 20, others(c, m)...)
		load.Reaches(20)
		m.Term()
		load.Reaches(20)
		m.Start()
		c.Settled()
		c.Running("wide")
		y := load.End()
		assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "while %s restarted: %v", m.Name, y)
	}
	c.AllQuiet()
}
