package system

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// HF22: The only control node comes back under another address, and only the node itself can announce it. A
// worker that runs follows it there; one that was off meanwhile finds it by the gossip, as its own copy of
// the state has the old address; and one that moved as well is told by the address of a join.
func TestTheOnlyControlNodeMoves(t *testing.T) {
	c := harness.StartMembers(t, [][]string{{}, {"--roles", "worker"}}, harness.MemberSlots(4))
	c.Expect(harness.NodeFails)
	a, b := c.All[0], c.All[1]
	a.Want(spread("wide", 4))
	c.Running("wide")
	move := func() {
		a.Term()
		a.Move(c.NextIP())
		a.Start()
	}

	follows := func(who string, start func()) {
		move()
		began := time.Now()
		start()
		c.Settled()
		c.Running("wide")
		t.Logf("%s has followed after %s", who, time.Since(began).Round(time.Millisecond))
	}
	follows("a worker that runs", func() {})
	b.Term()
	follows("a worker that starts again", b.Start)

	b.Term()
	follows("a worker that moves as well", func() {
		b.Move(c.NextIP())
		b.Join(c.Token())
	})
	list, err := a.Nodes()
	require.NoError(t, err)
	for i := range list {
		m := c.By(list[i].Node)
		assert.Equal(t, m.NodePort(), list[i].Address, m.Name)
	}
}
