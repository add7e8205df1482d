package main

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// Errors of a cluster that elects a leader, and of one that is there.
func noLeader() error {
	return &client.Error{Status: 503, Code: client.CodeUnavailable, Message: "no node leads"}
}

func unknownApp() error {
	return &client.Error{Status: 404, Code: client.CodeNotFound, Message: "there is no demo"}
}

// A command asks again while no node leads, and after an answer also while no node answers. Other errors end
// it at once, and each kind of command has a longest wait.
func TestCommandsSurviveAChangeOfLeader(t *testing.T) {
	t.Parallel()
	times := func(n int, err error) (out []error) {
		for range n {
			out = append(out, err)
		}
		return out
	}
	again := "dpserve: no node leads; asking again for up to "
	for _, c := range []struct {
		name, command string
		failures      []error
		code          int
		says          string
	}{
		{"status", "status", times(3, noLeader()), 0, again + "3s\n"},
		{"status without end", "status", times(1000, noLeader()), 1, again + "3s\ndpserve: no node leads\n"},
		{"nothing runs at the address", "status", times(1, refused()), 1, "dpserve: no answer from 127"},
		{"nodes", "nodes", times(3, noLeader()), 0, again + "3s\n"},
		{"the node that was asked ends", "nodes", []error{noLeader(), refused()}, 0, again + "3s\n"},
		{"the start of a drain", "drain b", times(2, noLeader()), 0, again + "3s\n"},
		{
			"a drain", "drain b",
			[]error{nil, nil, refused(), refused()},
			0,
			"dpserve: no answer from 127.0.0.1:8265; asking again for up to 5s\ndpserve: b is drained\n",
		},
		{"leave", "leave --yes", []error{nil, nil, noLeader()}, 0, again + "5s\n"},
		{"rotate-key", "nodes rotate-key", times(2, noLeader()), 0, again + "5s\ndpserve: the gossip has"},
		{"a watch", "status -w", []error{nil, nil, noLeader(), refused(), nil}, 0, again + "5s\n"},
		{"a watch without end", "status -w", append(times(2, nil), times(999, refused())...), 1, "no answer"},
		{"what is watched goes", "status -w", []error{nil, nil, unknownApp()}, 1, "there is no demo\n"},
		{"a deletion", "delete demo --yes", []error{nil, noLeader()}, 0, again + "5s\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				cli := newCLI(t)
				cli.cluster.failures = c.failures
				cli.cluster.script = [][]client.AppStatus{{demo(client.StatusRunning, 1, state.Ready)}}
				if strings.HasPrefix(c.command, "delete") {
					cli.cluster.script = append(cli.cluster.script, nil)
				}
				drain := twoNodes(client.NodeStatus{Node: "b", State: "draining", Ranks: 1})
				cli.cluster.nodes.script = [][]client.NodeStatus{drain}
				if c.command != "nodes" {
					drained := twoNodes(client.NodeStatus{Node: "b", State: "drained"})
					cli.cluster.nodes.script = append(cli.cluster.nodes.script, drained)
				}
				if c.command == "status -w" {
					cli.cluster.onApps = func(call int) { cli.interruptOnce(call - len(c.failures)) }
				}
				assert.Equal(t, c.code, cli.run(strings.Fields(c.command)), cli.stderr())
				assert.Contains(t, cli.stderr(), c.says)
				assert.Less(t, time.Since(began), 15*time.Second)
			})
		})
	}
}

// A stream of log lines that was cut goes on: no line comes twice, and the line at the cut is whole.
func TestFollowedLogsGoOnAfterACut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const day = "2026-11-21T12:00:0"
		cut := func(text string) io.Reader {
			return io.MultiReader(strings.NewReader(text), iotest.ErrReader(io.ErrUnexpectedEOF))
		}
		first := day + "1Z demo/0/0 stdout one\n" + day + "2Z demo/0/1 stdout two\n"
		more := day + "1.5Z demo/0/2 stdout late\n" + day + "3Z demo/0/0 stdout three\n"
		cli := newCLI(t)
		cli.cluster.logs = []io.Reader{
			cut(first + day + "3Z demo/0/0 std"), cut(first + more),
			cut(first + more),
			strings.NewReader(first + more + "no line of an engine\n"),
		}
		cli.cluster.failures = []error{nil, noLeader(), refused(), nil, nil}
		require.Zero(t, cli.run([]string{"logs", "demo", "-f", "--tail", "7"}), cli.stderr())
		assert.Equal(t, first+more+"no line of an engine\n", cli.stdout())
		require.Len(t, cli.cluster.asked, 6)
		assert.Equal(t, 7, cli.cluster.asked[0].Tail)
		at := time.Date(2026, 11, 21, 12, 0, 2, 0, time.UTC).Add(-resumeOverlap)
		assert.Equal(t, client.LogQuery{
			App: "demo", Group: client.AllRanks, Rank: client.AllRanks, Since: at, Tail: client.AllLines,
			Follow: true,
		}, cli.cluster.asked[1])
		assert.Contains(t, cli.stderr(), "the log stream was cut: the leader has changed")
		assert.Contains(t, cli.stderr(), "dpserve: no node leads; asking again for up to 5s\n")

		cli = newCLI(t)
		cli.cluster.logs = []io.Reader{cut(first)}
		assert.Equal(t, 1, cli.run([]string{"logs", "demo"}))
		assert.Contains(t, cli.stderr(), "dpserve: the log stream was cut\n")

		cli = newCLI(t)
		cli.cluster.logs = []io.Reader{cut(first)}
		cli.cluster.failures = []error{nil, unknownApp()}
		assert.Equal(t, 1, cli.run([]string{"logs", "demo", "-f"}))
		assert.Contains(t, cli.stderr(), "dpserve: there is no demo\n")

		broken := errors.New("disk full")
		cli = newCLI(t)
		cli.cluster.logs = []io.Reader{iotest.ErrReader(broken)}
		assert.Equal(t, 1, cli.run([]string{"logs", "demo", "-f"}))
		assert.Contains(t, cli.stderr(), "disk full")
	})
}
