package inprocess

import (
	"encoding/json"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// logParts holds the parts of a log line that a person looks for.
type logParts struct {
	Level, Msg, Node, App, Unit, From, To, Cause, Peer, Change string
	Epoch                                                      uint64
}

// linesOf are the lines of the journal behind the first n.
func linesOf(t *testing.T, j *harness.Journal, n int) (out []logParts) {
	t.Helper()
	for _, line := range j.Find()[n:] {
		var e logParts
		require.NoError(t, json.Unmarshal([]byte(line), &e))
		out = append(out, e)
	}
	return out
}

// short are the level and the message of each line, and what it is about.
func short(list []logParts) (out []string) {
	for _, e := range list {
		text := e.Level + " " + e.Msg
		for _, more := range []string{e.Unit, e.From, e.To, e.Change, e.Peer} {
			if more != "" {
				text += " " + more
			}
		}
		out = append(out, text)
	}
	return out
}

// HF31: A join that goes well warns of nothing, and names the nodes whose part in consensus changes.
func TestCleanJoinWarnsOfNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3))
		c.WaitVoters(3)
		time.Sleep(time.Minute)
		for _, e := range linesOf(t, c.Journal, 0) {
			assert.Equal(t, "INFO", e.Level, "%+v", e)
		}
		all := short(linesOf(t, c.Journal, 0))
		for _, want := range []string{
			"INFO consensus changed add standby node-2", "INFO consensus changed give vote node-2",
			"INFO consensus changed add standby node-3", "INFO consensus changed give vote node-3",
		} {
			assert.Contains(t, all, want)
		}
		assert.Len(t, c.Journal.Find(`"msg":"this node leads the cluster"`), 1)
	})
}

// HF31: The end of one engine makes a few log lines in the whole cluster, and no event is logged twice.
func TestKilledRankIsAHandfulOfLines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3))
		c.Expect(harness.EngineFails)
		c.WaitVoters(3)
		c.Deploy(spread("a", 3))
		c.WaitStatus("a", "RUNNING")
		time.Sleep(10 * time.Second)
		n := len(c.Journal.Find())
		require.True(t, c.Kill("a", 0, 1))
		time.Sleep(20 * time.Second)
		list := linesOf(t, c.Journal, n)
		assert.Equal(t, []string{
			"WARN unit is fenced a/0/1",
			"INFO state changed RUNNING UNHEALTHY",
			"INFO state changed a/0/1 killing backoff",
			"INFO state changed a/0/1 backoff starting",
			"INFO engine started a/0/1",
			"INFO unit is ready a/0/1",
			"INFO state changed UNHEALTHY RUNNING",
		}, short(list))
		assert.Empty(t, list[3].Cause, "the cause of the end is none of the start")
	})
}

// HF31: A change of leaders is one line for the leadership and none for each unit, which goes on as it was.
// What cannot be reached has a name, and no line comes again and again.
func TestLeaderChangeIsAFewLines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Roles(0, "control", "ingress"), harness.Slots(50))
		c.Expect(harness.NodeFails)
		c.WaitVoters(3)
		c.Deploy(spread("a", 50))
		c.WaitStatus("a", "RUNNING")
		time.Sleep(10 * time.Second)
		n := len(c.Journal.Find())
		uid := c.Peer(1).State().Nodes["node-1"].UID
		c.Peer(0).Drop()
		time.Sleep(time.Minute)

		list := linesOf(t, c.Journal, n)
		assert.LessOrEqual(t, len(list), 10, "%v", short(list))
		leads := slices.DeleteFunc(slices.Clone(list), func(e logParts) bool {
			return e.Msg != "this node leads the cluster"
		})
		assert.Len(t, leads, 1)
		unreached := slices.DeleteFunc(slices.Clone(list), func(e logParts) bool {
			return e.Msg != "consensus does not reach a node"
		})
		require.Len(t, unreached, 1, "%v", short(list))
		assert.Equal(t, "WARN", unreached[0].Level)
		assert.Equal(t, "node-1", unreached[0].Peer)
		assert.Empty(t, c.Journal.Find(`"level":"ERROR"`))
		for _, line := range c.Journal.Find()[n:] {
			assert.NotContains(t, line, uid, "a node has a name")
		}
	})
}
