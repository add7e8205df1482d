package system

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/test/harness"
)

// The first thing that a new operator sees is the log of a join: when all goes well it holds no warning, and
// neither does the first deploy, nor at a node that is told to end its end.
func TestCleanJoinWarnsOfNothing(t *testing.T) {
	t.Parallel()
	// the rig's short timers warn of a machine that is busy with other tests
	calm := []harness.MembersOption{harness.MemberSlots(4)}
	for name, d := range map[string]time.Duration{
		"lease_ttl": time.Minute, "lease_renew": time.Second, "lease_regrant": 2 * time.Minute,
		"stream_suspect": time.Minute, "stream_out": time.Minute,
	} {
		calm = append(calm, harness.MemberTimer(name, d))
	}
	c := harness.StartMembers(t, harness.Each(3), calm...)
	time.Sleep(2 * time.Second)
	c.All[1].Want(spread("wide", 6))
	c.Running("wide")
	for _, m := range c.All {
		warnsOfNothing(t, m)
	}
	c.All[2].Term()
	warnsOfNothing(t, c.All[2])
	c.Expect(harness.NodeFails) // the others notice
}

func warnsOfNothing(t *testing.T, m *harness.Member) {
	t.Helper()
	for line := range strings.Lines(m.Log()) {
		if strings.Contains(line, "UDP probes failed") {
			continue // a busy machine too
		}
		assert.False(t, strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR"),
			"node %s: %s", m.Name, line)
	}
}
