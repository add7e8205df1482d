package system

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// voters are the names of the nodes that vote, as a node tells it.
func voters(t *testing.T, at *harness.Member) (out []string) {
	t.Helper()
	list, err := at.Nodes()
	require.NoError(t, err)
	for i := range list {
		if list[i].Voter {
			out = append(out, list[i].Node)
		}
	}
	slices.Sort(out)
	return out
}

// stay checks over some rounds of the leader's care that the same nodes vote and that a write is still
// accepted.
func stay(t *testing.T, at *harness.Member, want []string) {
	t.Helper()
	for range 15 {
		assert.Equal(t, want, voters(t, at), "who votes")
		time.Sleep(100 * time.Millisecond)
	}
	code, text, err := at.Ask(http.MethodPost, "/api/v1/join-tokens?ttl=1h&uses=1", "")
	require.NoError(t, err)
	assert.Equal(t, http.StatusCreated, code, text)
}

// A removal that is refused changes no vote, also when one of three nodes is lost: the two that live go on,
// and the lost one can be removed first.
func TestRefusedRemovalsChangeNothing(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(3), harness.MemberSlots(8))
	c.Expect(harness.NodeRemoved)
	a, b, lost := c.By("a"), c.By("b"), c.By("c")
	a.Want(spread("wide", 6))
	c.Running("wide")
	all := []string{"a", "b", "c"}

	for _, node := range all {
		code, said := command(a, "nodes", "remove", node, "--yes")
		assert.Equal(t, 1, code, said)
		assert.Contains(t, said, "units are left", "a healthy node with ranks")
	}
	stay(t, a, all)

	lost.Kill()
	c.WaitNode("c", "lost", func(s *client.NodeStatus) bool { return s.State == "lost" })
	st := c.WaitApp("wide", "whole again", func(st *client.AppStatus) error {
		if st.Ready != st.Desired || len(on(seats(st), "c")) > 0 {
			return errNotYet
		}
		return harness.Accounted(st)
	})
	before := seats(&st)
	voted := voters(t, a)

	began := time.Now()
	code, said := command(b, "leave", "--yes", "--deadline", "1s")
	assert.Equal(t, 1, code, said)
	assert.Contains(t, said,
		`take the vote of node "b": the voters that remain have no living majority: a is alive, c is lost`)
	assert.Contains(t, said,
		"hint: c is lost and votes: bring it back or remove it first: dpserve nodes remove c")
	code, said = command(a, "nodes", "remove", "b", "--yes")
	assert.Equal(t, 1, code, said)
	assert.Contains(t, said, "units are left")
	assert.Less(t, time.Since(began), slack*time.Second, "refused at once")
	stay(t, a, voted)
	after, err := a.AppOf("wide")
	require.NoError(t, err)
	assert.Equal(t, before, seats(&after), "nothing was drained")

	code, said = command(a, "delete", "wide", "--yes")
	require.Zero(t, code, said)
	code, said = command(a, "nodes", "remove", "b", "--yes")
	assert.Equal(t, 1, code, said)
	assert.Contains(t, said, "neither lost nor drained", "a node without ranks that works")
	code, said = command(a, "drain", "b")
	require.Zero(t, code, said)
	code, said = command(a, "nodes", "remove", "b", "--yes")
	assert.Equal(t, 1, code, said)
	assert.Contains(t, said, "hint: c is lost and votes", "drained and without ranks, but its vote is needed")
	code, said = command(a, "undrain", "b")
	require.Zero(t, code, said)
	stay(t, a, voted)

	code, said = command(b, "nodes", "remove", "c", "--yes")
	require.Zero(t, code, said)
	c.All = slices.DeleteFunc(c.All, func(m *harness.Member) bool { return m == lost })
	c.Settled()
	code, said = command(b, "leave", "--yes")
	require.Zero(t, code, said)
	assert.Contains(t, said, "b has left")
	assert.Equal(t, []string{"a"}, voters(t, a))
	a.Want(strings.Replace(spread("last", 2), "SPREAD", "PACK", 1))
	c.All = []*harness.Member{a}
	c.Running("last")
	assert.Zero(t, b.ExitCode(), "a node that left ends by itself")
}

// Without a majority of the voters every node names who votes and who is not heard.
func TestNoMajorityNamesTheVoters(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(3))
	c.Expect(harness.NodeFails)
	a := c.By("a")
	c.By("b").Kill()
	c.By("c").Kill()
	c.Eventually("the voters are named", func() error {
		code, text, err := a.Ask(http.MethodGet, "/api/v1/apps", "")
		if err == nil && (code != http.StatusServiceUnavailable || !strings.Contains(text,
			"votes: a, b, c; b, c are not heard")) {
			err = errNotYet
		}
		return err
	})
	code, said := command(a, "status")
	assert.Equal(t, 1, code, said)
	assert.Contains(t, said, "a majority of the voters is not there (votes: a, b, c; b, c are not heard)")
}
