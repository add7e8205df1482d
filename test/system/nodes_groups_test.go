package system

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

func errStatus(st *client.AppStatus) error {
	return fmt.Errorf("%w: %s is %s: %s", errNotYet, st.Name, st.Status, st.Message)
}

var errNotYet = errors.New("not yet")

// RG1: two groups of 8 over two nodes of 8 slots, then one group of 16: 2 fresh starts of each, 20 under
// DPSERVE_ACCEPTANCE.
func TestRG1GroupsOverNodes(t *testing.T) {
	t.Parallel()
	starts := 2
	if accepting() {
		starts = 20
	}
	for range starts {
		t.Run("fresh", func(t *testing.T) {
			t.Parallel()
			// time is not the subject
			c := harness.StartMembers(t, harness.Each(2), harness.MemberSlots(8), harness.RealTimers)
			a, b := c.All[0], c.All[1]
			a.Want(simApp("pair", 8, "lockstep", "") + "    num_groups: 2\n")
			st := c.Running("pair")
			assert.Len(t, st.Units, 2)
			members, ids := map[string]int{}, map[string]bool{} // node → group
			for _, u := range st.Units {
				once(t, u.Ranks, 8)
				members[u.Ranks[0].Node] = u.Group
				for i := range u.Ranks {
					ids[u.Ranks[i].Incarnation], ids[u.Ranks[i].URL] = true, true
					assert.Equal(t, u.Group, u.Ranks[i].Group)
					assert.Equal(t, u.Ranks[0].Node, u.Ranks[i].Node,
						"a group that fits one node is packed there")
				}
			}
			assert.Len(t, members, 2, "members are disjoint outside")
			assert.Len(t, ids, 2*16, "incarnations and endpoints are distinct")
			answers(t, c, "pair")

			b.Delete("pair")
			b.Want(simApp("whole", 16, "lockstep", ""))
			st = c.Running("whole")
			assert.Len(t, st.Units, 1)
			once(t, st.Units[0].Ranks, 16)
			for _, k := range st.Units[0].Ranks {
				want := a.Name
				if k.Rank >= 8 {
					want = b.Name
				}
				assert.Equal(t, want, k.Node, "rank %d", k.Rank)
			}
			answers(t, c, "whole")
			b.Delete("whole")
		})
	}
}

// once checks that ranks 0 to n-1 are there once each, with identities of their own.
func once(t *testing.T, ranks []client.RankStatus, n int) {
	t.Helper()
	var numbers []int
	ids := map[string]bool{}
	for i := range ranks {
		k := &ranks[i]
		numbers = append(numbers, k.Rank)
		ids[k.Incarnation], ids[k.URL] = true, true
		assert.Equal(t, ranks[0].Epoch, k.Epoch)
	}
	slices.Sort(numbers)
	want := make([]int, n)
	for i := range want {
		want[i] = i
	}
	assert.Equal(t, want, numbers)
	assert.Len(t, ids, 2*n, "incarnations and endpoints are distinct")
}

// answers asks an application through every node.
func answers(t *testing.T, c *harness.Members, app string) {
	t.Helper()
	load := harness.StartLoad(t, app, 4, 8, others(c, nil)...)
	load.Reaches(40)
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "%s: %v", app, y)
}
