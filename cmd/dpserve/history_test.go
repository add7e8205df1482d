package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// deploy goes on while a revision rolls out, also after its ranks are ready, and while the cluster goes back
// after a halt. Then it ends with what the failing rank said.
func TestDeployWaitsForTheWholeRollout(t *testing.T) {
	rolling := demo(client.StatusRunning, 2, state.Ready, state.Ready)
	rolling.RollingOut = true
	failing := demo(client.StatusDeployFailed, 2, state.Ready, state.Failed)
	failing.RollingOut = true
	halted := demo(client.StatusDeployFailed, 2, state.Ready, state.Backoff)
	halted.Halt = &client.Halt{Revision: 2, Unit: "demo/0/1", Cause: "exit status 1"}
	for i := range 30 {
		halted.Halt.LogTail = append(halted.Halt.LogTail, fmt.Sprint("line ", i))
	}
	back := *halted.Halt
	back.BackTo = 1
	unready := halted
	never := *halted.Halt
	never.Unready, unready.Halt = true, &never
	goesBack := demo(client.StatusDeploying, 3, state.Ready, state.Starting)
	isBack := demo(client.StatusRunning, 3, state.Ready, state.Ready)
	goesBack.Halt, isBack.Halt = &back, &back

	for name, c := range map[string]struct {
		script []client.AppStatus
		code   int
		says   string
	}{
		"on probation": {
			[]client.AppStatus{rolling, demo(client.StatusRunning, 2, state.Ready, state.Ready)}, 0, "",
		},
		"halted": {
			[]client.AppStatus{rolling, failing, halted},
			1,
			"dpserve: demo: the rollout of revision 2 was halted, because demo/0/1 ended: exit status 1; " +
				"the units that were not replaced go on\n  line 10\n",
		},
		"rolled back": {
			[]client.AppStatus{rolling, goesBack, isBack},
			1,
			"ended: exit status 1; revision 1 is back, 2 of 2 ranks are ready\n  line 10\n",
		},
		"not started": {
			[]client.AppStatus{rolling, failing, unready},
			5,
			"because demo/0/1 did not start: exit status 1; the units",
		},
	} {
		cli := newCLI(t)
		for _, a := range c.script {
			cli.cluster.script = append(cli.cluster.script, []client.AppStatus{a})
		}
		assert.Equal(t, c.code, cli.run([]string{"deploy", file(t, tiny)}), name)
		assert.Contains(t, cli.stderr(), c.says, name)
		assert.Len(t, cli.cluster.script, 1, name)
		if c.code != 0 {
			assert.Equal(t, 20, strings.Count(cli.stderr(), "\n  line "), name)
			assert.Contains(t, cli.stderr(), "`dpserve get demo --revision 2` prints what was halted", name)
		}
	}
	cli := newCLI(t)
	cli.cluster.script = [][]client.AppStatus{{isBack}}
	require.Equal(t, 0, cli.run([]string{"status", "-o", "wide"}))
	assert.Contains(t, cli.stdout(), "the last lines of demo/0/1 of revision 2:\n  line 10\n")
}

func TestHistoryGetRollback(t *testing.T) {
	at := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	start := func() *cli {
		c := newCLI(t)
		c.cluster.history = []client.Revision{
			{Revision: 3, At: at, From: 1, IsCurrent: true, IsGood: true},
			{Revision: 2, At: at, Halted: "demo/0/0 ended: exit status 1"},
			{Revision: 1, At: at},
		}
		c.cluster.script = [][]client.AppStatus{{demo(client.StatusRunning, 4, state.Ready)}}
		c.cluster.nodes.plan = client.Plan{Fits: true, Changes: true}
		return c
	}
	for line, want := range map[string]string{
		"history demo": "REVISION  DEPLOYED              FROM  STATE\n" +
			"3         2026-11-21T12:00:00Z  1     current, good\n" +
			"2         2026-11-21T12:00:00Z  -     halted: demo/0/0 ended: exit status 1\n" +
			"1         2026-11-21T12:00:00Z  -     -\n",
		"history demo -o name":               "3\n2\n1\n",
		"get demo --revision 2":              tiny,
		"plan demo --revision 2":             "to do this: dpserve rollback demo --to 2\n",
		"rollback demo --to 2":               "demo  RUNNING  1/1 ",
		"__complete rollback demo --to ":     "2\thalted: demo/0/0 ended: exit status 1\n",
		"__complete get demo --revision ":    "3\tcurrent, good\n",
		"__complete rollback ":               "demo\tRUNNING 1/1 sim\n",
		"plan demo --revision 2 --exit-code": "to do this: dpserve rollback demo --to 2\n",
		"rollback demo --detach -o name":     "demo\n",
		"history demo -o json":               "\"halted\": \"demo/0/0 ended: exit status 1\"",
	} {
		c := start()
		code := c.run(strings.Split(line, " "))
		assert.Equal(t, map[bool]int{true: 3, false: 0}[strings.Contains(line, "exit-code")], code, line)
		assert.Contains(t, c.stdout(), want, line)
		if strings.HasPrefix(line, "rollback demo --to") {
			assert.Equal(t, []string{"demo 2"}, c.cluster.rolledBack)
		}
	}
	for _, line := range []string{"get", "plan demo --revision 2 --prune", "rollback demo --timeout 0s"} {
		assert.Equal(t, 2, start().run(strings.Split(line, " ")), line)
	}
}
