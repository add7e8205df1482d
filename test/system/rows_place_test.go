package system

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// command runs a dpserve command against a node and returns its exit code and all that it wrote.
func command(m *harness.Member, args ...string) (code int, text string) {
	m.T.Helper()
	return commandAt(m.T, m.Admin, args...)
}

// commandAt is command with the node's admin address.
func commandAt(t testing.TB, admin string, args ...string) (code int, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Binary(t), args...)
	cmd.Env = append(os.Environ(), "DPSERVE_ADDR="+admin)
	b, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("dpserve %v: %v\n%s", args, err, b)
	}
	return cmd.ProcessState.ExitCode(), string(b)
}

// written is a file with a text, for commands.
func written(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "app.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// RG7: three gangs of 4 on 10 slots; without --partial nothing happens, with it two serve and the third waits
// for the node that joins.
func TestRG7PartialDeploy(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(2), harness.MemberSlots(5), harness.Calm)
	a, b := c.All[0], c.All[1]
	file := written(t, simApp("gangs", 4, "lockstep", "sim_step_ms: 10")+"    num_groups: 3\n")

	code, text := command(b, "deploy", file)
	assert.Equal(t, 5, code, text)
	assert.Contains(t, text, "hint:")
	_, err := a.AppOf("gangs")
	require.Error(t, err, "a refused deploy leaves nothing")
	assert.Empty(t, append(a.Children(), b.Children()...), "and starts nothing")

	code, text = command(b, "deploy", "--partial", "--detach", file)
	require.Zero(t, code, text)
	st := c.WaitApp("gangs", "two gangs of three", func(st *client.AppStatus) error {
		if st.Ready != 8 {
			return fmt.Errorf("%s: %d ready: %s", st.Status, st.Ready, st.Message)
		}
		return harness.Accounted(st)
	})
	assert.Equal(t, "DEPLOYING", st.Status)
	assert.Contains(t, st.Message, "2 of 4")
	before := map[int]uint64{}
	for _, u := range st.Units {
		if u.Phase == "ready" {
			once(t, u.Ranks, 4)
			before[u.Group] = u.Epoch
		} else {
			assert.Equal(t, "pending", u.Phase)
		}
	}
	assert.Len(t, before, 2)
	_, text = command(a, "status", "gangs")
	assert.Contains(t, text, "2 of 4", "people see it too")
	list, err := a.Nodes()
	require.NoError(t, err)
	assert.Equal(t, 8, list[0].SlotsUsed+list[1].SlotsUsed, "two slots stay empty")
	answers(t, c, "gangs")

	joins := time.Now()
	c.Add("c")
	st = c.Running("gangs")
	took := time.Since(joins)
	assert.Less(t, took, slack*10*time.Second)
	assert.Equal(t, 12, st.Ready)
	for _, u := range st.Units {
		once(t, u.Ranks, 4)
		if epoch, was := before[u.Group]; was {
			assert.Equal(t, epoch, u.Epoch, "who served is not touched")
		}
	}
	t.Logf("12 ranks %s after the start of a third node", took.Round(time.Millisecond))
	answers(t, c, "gangs")
	c.AllQuiet()
}

// tp2 is two groups of 4 ranks with two devices each.
func tp2(labels string) string {
	return strings.Replace(simApp("tp", 4, "lockstep", "tensor_parallel_size: 2"), "    data_parallel:",
		"    num_groups: 2\n    resources: {gpus: 2"+labels+"}\n    data_parallel:", 1)
}

// devicesOf checks where the ranks of tp2 are and returns the nodes.
func devicesOf(t *testing.T, st *client.AppStatus) (nodes []string) {
	t.Helper()
	devices := map[string]bool{}
	for _, u := range st.Units {
		once(t, u.Ranks, 4)
		for i := range u.Ranks {
			k := &u.Ranks[i]
			assert.Equal(t, u.Ranks[0].Node, k.Node, "a group is on one node")
			require.Len(t, k.Devices, 2)
			for _, d := range k.Devices {
				devices[fmt.Sprintf("%s/%d", k.Node, d)] = true
			}
		}
		nodes = append(nodes, u.Ranks[0].Node)
	}
	assert.Len(t, devices, 16, "devices are distinct: %v", devices)
	slices.Sort(nodes)
	assert.Len(t, slices.Compact(slices.Clone(nodes)), 2, "groups are on two nodes: %v", nodes)
	return nodes
}

// PL1: two groups of 4 ranks with TP 2 over three nodes of 8 devices, whose lists are written in any order; a
// label moves all members.
func TestPL1DevicesAndLabels(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, [][]string{
		{"--gpus", "0,2,4,6,1,3,5,7", "--labels", "rack=left"},
		{"--gpus", "7,0,6,1,5,2,4,3", "--labels", "rack=right"},
		{"--gpus", "1,3,5,7,9,11,13,15", "--labels", "rack=right"},
	}, harness.Calm)
	a := c.All[0]
	for _, rack := range []string{"", ", labels: {rack: right}"} {
		a.Want(tp2(rack))
		st := c.WaitApp("tp", "on its nodes", func(st *client.AppStatus) error {
			if st.Status != "RUNNING" || st.Ready != 8 {
				return errStatus(st)
			}
			for seat, k := range seats(st) {
				if rack != "" && k.Node == "a" {
					return fmt.Errorf("rank %s is on node a", seat)
				}
			}
			return harness.Accounted(st)
		})
		nodes := devicesOf(t, &st)
		t.Logf("labels %q: groups on %v", rack, nodes)
		answers(t, c, "tp")
	}
	code, text := command(a, "deploy", written(t, tp2(", labels: {rack: attic}")))
	assert.Equal(t, 5, code, text)
	assert.Contains(t, text, "rack", "the error names what no node has")
	st := c.Running("tp")
	assert.Equal(t, []string{"b", "c"}, devicesOf(t, &st), "a refused deploy moves nothing")
	c.AllQuiet()
}

// PL3: 4 to 2 to 8 groups under load. Ranks per group are 2 here, 4 in an acceptance run. Sizes that are no
// whole groups are refused, which is all an autoscaler could wish for: there is none in this version.
func TestPL3GroupsComeAndGo(t *testing.T) {
	t.Parallel()
	dp := 2
	if accepting() {
		dp = 4
	}
	c := harness.StartMembers(t, harness.Each(2), harness.MemberSlots(4*dp), harness.Calm)
	a, b := c.All[0], c.All[1]
	size := func(groups int) string { // a grace longer than any stream
		return strings.Replace(simApp("fleet", dp, "lockstep", "sim_step_ms: 10"), "timeout_s: 2",
			"timeout_s: 20", 1) + fmt.Sprintf("    num_groups: %d\n", groups)
	}
	a.Want(size(4))
	st := c.Running("fleet")
	load := harness.StartLoad(t, "fleet", 6, 60, a.HTTP, b.HTTP)
	load.Reaches(30)
	for _, n := range []int{2, 8} {
		before := seats(&st)
		began := time.Now()
		b.Want(size(n))
		st = c.WaitApp("fleet", fmt.Sprintf("%d groups", n), func(st *client.AppStatus) error {
			if st.Status != "RUNNING" || len(st.Units) != n || st.Ready != n*dp {
				return errStatus(st)
			}
			return harness.Accounted(st)
		})
		t.Logf("%d groups after %s", n, time.Since(began).Round(time.Millisecond))
		for seat, k := range seats(&st) {
			if was, ok := before[seat]; ok {
				assert.Equal(t, was, k, "rank %s stays as it is", seat)
			}
		}
		for _, u := range st.Units {
			once(t, u.Ranks, dp)
		}
		load.Reaches(30)
	}
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "what clients saw: %v", y)

	code, text, err := a.Ask(http.MethodPut, "/api/v1/apps?file=app.yaml",
		simApp("fleet", 4, "lockstep", "")+"    num_replicas: 5\n")
	require.NoError(t, err)
	assert.GreaterOrEqual(t, code, http.StatusBadRequest, "5 ranks at dp 4: %s", text)
	assert.Contains(t, text, "dp_size")
	c.AllQuiet()
}
