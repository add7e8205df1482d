package system

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// HF22, HF66: Two of three control nodes are gone for good. `dpserve recover` makes the third one the only
// voter: the worker finds it and keeps its engines, deploys work, and a lost node that comes back with its
// old log ends. Then the only control node comes back under another address, and only the node itself can
// announce it. A worker that runs follows it there; one that was off meanwhile finds it by the gossip, as
// its own copy of the state has the old address; and one that moved as well is told by the address of a
// join.
func TestTheLastControlNodeIsRecoveredAndMoves(t *testing.T) {
	t.Parallel()
	control := []string{"--roles", "control,ingress"}
	c := harness.StartMembers(t, [][]string{control, control, control, {"--roles", "worker"}},
		harness.MemberSlots(8), harness.Calm)
	c.Expect(harness.NodeFails, harness.NodeRemoved)
	a, b, last, worker := c.All[0], c.All[1], c.All[2], c.All[3]
	a.Want(spread("wide", 4))
	st := c.Running("wide")
	before, engines := seats(&st), worker.Children()
	require.Len(t, engines, 4)
	a.Crash()
	b.Crash()

	recovers := func(m *harness.Member, more ...string) (int, string) {
		out := harness.Run(t, append([]string{"recover", "--data-dir", m.Dir}, more...)...)
		return out.ExitCode(), out.Output()
	}
	code, said := recovers(last, "--yes")
	assert.Equal(t, 1, code, said)
	assert.Contains(t, said, "is in use by another dpserve")
	last.Term()
	code, said = recovers(worker, "--yes")
	assert.Equal(t, 1, code, said)
	assert.Contains(t, said, "is of a node without role control")
	code, said = recovers(last)
	assert.Equal(t, 2, code, said)
	assert.Contains(t, said, "this needs a confirmation")
	code, said = recovers(last, "--yes")
	require.Zero(t, code, said)
	for _, part := range []string{
		"c becomes the only voter of its cluster",
		"removed: a (voted, " + a.NodePort(), "removed: b (voted, ",
		"kept: 1 application; c (0 ranks), d (4 ranks)", "c is the only voter now",
	} {
		assert.Contains(t, said, part)
	}
	code, said = recovers(last, "--yes")
	assert.Equal(t, 1, code, said)
	assert.Contains(t, said, "c is the only voter of its cluster already")

	last.Start()
	unchanged(c, "wide", before)
	assert.ElementsMatch(t, engines, worker.Children(), "the same engines")
	last.Want(spread("more", 2))
	c.Running("more")
	for _, m := range []*harness.Member{a, b} { // together they have a majority of the old votes
		m.Launch("start")
	}
	for _, m := range []*harness.Member{a, b} {
		c.Eventually(m.Name+" ends", func() error {
			if m.Runs() {
				return errors.New("it runs")
			}
			return nil
		})
		assert.Contains(t, m.Output(), "was removed from the cluster")
	}
	unchanged(c, "wide", before)
	c.Settled()

	follows := func(start func()) {
		last.Term()
		last.Move(c.NextIP())
		last.Start()
		start()
		c.Settled()
		c.Running("wide")
	}
	follows(func() {})
	unchanged(c, "wide", before)
	worker.Term()
	follows(worker.Start)
	worker.Term()
	follows(func() {
		worker.Move(c.NextIP())
		worker.Join(c.Token())
	})
	list, err := last.Nodes()
	require.NoError(t, err)
	for i := range list {
		m := c.By(list[i].Node)
		assert.Equal(t, m.NodePort(), list[i].Address, m.Name)
	}
}
