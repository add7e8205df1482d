package system

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// deploys puts an application with a path of its own and says whether that was acknowledged.
func deploys(m *harness.Member, name string) (code int, text string) {
	m.T.Helper()
	code, text, err := m.Ask(http.MethodPut, "/api/v1/apps?file=app.yaml",
		simApp(name, 1, "independent", "")+"    route_prefix: /"+name+"\n")
	if err != nil {
		return 0, err.Error()
	}
	return code, text
}

// known are the applications of a node's copy of the state.
func known(m *harness.Member) (names map[string]bool, err error) {
	var list struct{ Apps []client.AppStatus }
	err = m.Get("/api/v1/apps", &list)
	names = map[string]bool{}
	for i := range list.Apps {
		names[list.Apps[i].Name] = true
	}
	return names, err
}

// MB10, disk: the disk of the only voter, then of the leader of three, then of all refuses writes. Clocks
// that are wrong by an hour are the simulation's and the node port's: processes of one machine share its
// clock.
func TestMB10DiskRefusesWrites(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, [][]string{{}, {"--roles", "worker,ingress"}}, harness.MemberSlots(8))
	c.Expect(harness.NodeFails, harness.DiskFails)
	a, b := c.All[0], c.All[1]
	a.Want(spread("wide", 6))
	st := c.Running("wide")
	before := seats(&st)
	require.NotEmpty(t, on(before, a.Name))
	require.NotEmpty(t, on(before, b.Name))
	acknowledged := []string{"wide"}
	load := harness.StartLoad(t, "wide", 4, 20, a.HTTP, b.HTTP)
	load.Reaches(20)

	diskWrites(t, a, false)
	for _, m := range []*harness.Member{a, b} {
		code, text := deploys(m, "refused")
		assert.GreaterOrEqual(t, code, http.StatusInternalServerError, "at %s: %s", m.Name, text)
		t.Logf("a write at %s: %d %s", m.Name, code, text)
	}
	time.Sleep(2 * harness.LeaseRegrant) // the subject: leases are no writes, and go on
	code, text := deploys(a, "refused")
	assert.Equal(t, http.StatusServiceUnavailable, code, text)
	assert.Contains(t, text, "disk of the data dir refuses writes")
	assert.Contains(t, text, "hint")
	_, text = command(a, "nodes")
	assert.Contains(t, text, "disk", "people see it")
	load.Reaches(20)
	diskWrites(t, a, true)
	c.Eventually("writes are taken again", func() error {
		if code, text := deploys(b, "later"); code != http.StatusAccepted {
			return fmt.Errorf("%d %s", code, text)
		}
		return nil
	})
	acknowledged = append(acknowledged, "later")
	c.Settled()
	st = c.Running("wide")
	assert.Equal(t, before, seats(&st), "nothing was started anew")
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "what clients saw: %v", y)

	a.Kill()
	a.Start()
	c.Settled()
	keeps(c, acknowledged, "refused")
	c.AllQuiet()
}

// keeps checks that what was acknowledged is known to every node, and what was refused to none.
func keeps(c *harness.Members, acknowledged []string, never string) {
	c.T.Helper()
	for _, m := range c.All {
		c.Eventually("what was acknowledged is known at "+m.Name, func() error {
			names, err := known(m)
			if err != nil {
				return err
			}
			for _, name := range acknowledged {
				if !names[name] {
					return fmt.Errorf("%s is not there: %v", name, names)
				}
			}
			if names[never] {
				return fmt.Errorf("%s is there", never)
			}
			return nil
		})
	}
}
