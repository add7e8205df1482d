package system

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// Two of three control nodes are down. A restart of what is left is refused; a crash of it, or a forced
// restart, costs no engine: the third control node and a worker serve what their own copies of the state
// grant, say so, and start nothing. When a leader is back, all goes on as before.
func TestHF65NodesStartWithoutALeader(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, [][]string{{}, {}, {}, {"--roles", "worker"}}, harness.MemberSlots(4),
		harness.Calm)
	c.Expect(harness.NodeFails, harness.EngineFails, harness.StreamBreaks, harness.RequestsFail,
		harness.NoLeaderAtStart)
	a, b, third, worker := c.All[0], c.All[1], c.All[2], c.All[3]
	a.Want(spread("wide", 8))
	st := c.Running("wide")
	before := seats(&st)
	kept := map[*harness.Member][]int{third: third.Children(), worker: worker.Children()}
	require.Len(t, kept[third], 2)
	require.Len(t, kept[worker], 2)
	a.Crash()
	b.Crash()

	out := harness.Run(t, "restart", "--addr", third.Admin)
	assert.Equal(t, 1, out.ExitCode(), out.Output())
	assert.Contains(t, out.Output(), "no leader answers")
	assert.Contains(t, out.Output(), "dpserve restart --force")
	worker.Crash()
	worker.Start()
	out = harness.Run(t, "restart", "--addr", third.Admin, "--force")
	assert.Zero(t, out.ExitCode(), out.Output())

	ranks := append(on(before, third.Name), on(before, worker.Name)...)
	routesTo(c, third, "wide", ranks)
	y := harness.StartLoad(t, "wide", 4, 5, third.HTTP)
	y.Reaches(40)
	sum := y.End()
	assert.Zero(t, sum.Refused+sum.Broken+sum.Cut+sum.Hung, "%v", sum)
	for m, pids := range kept {
		assert.ElementsMatch(t, pids, m.Children(), "the same engines, and no other")
	}
	const says = "it serves what its own copy of the state grants, and starts nothing"
	health, err := http.Get("http://" + third.HTTP + "/health")
	require.NoError(t, err)
	defer health.Body.Close()
	body, err := io.ReadAll(health.Body)
	require.NoError(t, err)
	assert.Equal(t, http.StatusOK, health.StatusCode)
	var told map[string]string
	require.NoError(t, json.Unmarshal(body, &told))
	assert.Contains(t, told["note"], says)
	out = harness.Run(t, "status", "--addr", third.Admin)
	assert.Equal(t, 1, out.ExitCode())
	assert.Contains(t, out.Output(), says)
	out = harness.Run(t, "nodes", "--addr", third.Admin)
	assert.Zero(t, out.ExitCode())
	assert.Contains(t, out.Output(), says)

	a.Launch("start") // before the other votes it is not ready
	b.Launch("start")
	a.Ready()
	b.Ready()
	c.Settled()
	c.Running("wide")
	now := c.Running("wide")
	for seat, k := range seats(&now) {
		if was := before[seat]; was.Node == third.Name || was.Node == worker.Name {
			assert.Equal(t, was.PID, k.PID, seat)
			assert.Equal(t, was.Epoch, k.Epoch, seat)
			assert.Equal(t, was.Incarnation, k.Incarnation, seat)
		}
	}
	c.Eventually("the note is gone", func() error {
		list, err := third.Nodes()
		for i := range list {
			if len(list[i].Notes) > 0 {
				err = errors.Join(err, fmt.Errorf("%s: %v", list[i].Node, list[i].Notes))
			}
		}
		return err
	})
}
