package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

func TestRanksAdd(t *testing.T) {
	cli := newCLI(t)
	require.Equal(t, 0, cli.run([]string{"ranks", "add", "edge", "http://h:1/v1/"}), cli.stderr())
	assert.Equal(t, []string{`edge {"url":"http://h:1"}`}, cli.cluster.added)
	assert.Equal(t, "dpserve: added edge/0/2 http://h:1\n", cli.stderr())
	assert.Equal(t, "RANK      ENGINE      REVISION\nedge/0/2  http://h:1  2\n", cli.stdout())
	assert.Zero(t, cli.cluster.calls, "nothing is waited for")

	cli = newCLI(t)
	require.Equal(t, 0,
		cli.run(strings.Fields(
			"ranks add edge http://h:1 --addressing header --selector 0 --node n1 --kv-connect tcp://h:2 "+
				"--kv-replay tcp://h:3 -o json")), cli.stderr())
	assert.Equal(t, []string{
		`edge {"url":"http://h:1","addressing":"header","selector":0,"node":"n1",` +
			`"kv_events":{"connect":"tcp://h:2","replay":"tcp://h:3"}}`,
	}, cli.cluster.added)
	assert.JSONEq(t,
		`{"apiVersion":"dpserve/v1","app":"edge","group":0,"rank":2,"url":"http://h:1","revision":2}`,
		cli.stdout())
}

func TestRanksAddWaits(t *testing.T) {
	now := func(revision uint64, phases ...state.Phase) []client.AppStatus {
		a := named("edge", client.StatusDeploying, revision, phases...)
		return []client.AppStatus{a}
	}
	cli := newCLI(t)
	cli.cluster.script = [][]client.AppStatus{
		now(1, state.Ready, state.Ready, state.Ready), // the old revision does not count
		now(2, state.Ready, state.Ready), now(2, state.Ready, state.Ready, state.Starting), now(2,
			state.Ready, state.Ready, state.Ready),
	}
	require.Equal(t, 0, cli.run([]string{"ranks", "add", "edge", "http://h:1", "--wait"}), cli.stderr())
	assert.Equal(t, 4, cli.cluster.calls)

	cli = newCLI(t)
	cli.cluster.script = [][]client.AppStatus{now(2, state.Ready, state.Ready, state.Starting)}
	assert.Equal(t, 8, cli.run([]string{"ranks", "add", "edge", "http://h:1", "--wait", "--timeout", "1ms"}))
	assert.Contains(t, cli.stderr(),
		"dpserve: edge/0/2 is not there yet; the change goes on\nhint: watch it with `dpserve status "+
			"edge -w`\n")

	cli = newCLI(t)
	cli.cluster.script = [][]client.AppStatus{now(2, state.Ready, state.Ready, state.Starting)}
	cli.cluster.onApps = cli.interruptOnce
	assert.Equal(t, 130, cli.run([]string{"ranks", "add", "edge", "http://h:1", "--wait"}))

	cli = newCLI(t)
	cli.cluster.script = [][]client.AppStatus{{}}
	assert.Equal(t, 1, cli.run([]string{"ranks", "add", "edge", "http://h:1", "--wait"}))
	assert.Contains(t, cli.stderr(), "dpserve: edge was deleted meanwhile\n")
}

func TestRanksRemove(t *testing.T) {
	zero := time.Duration(0)
	for args, want := range map[string]client.RankRemoval{
		"http://h:1":           {URL: "http://h:1"},
		"1/2":                  {Group: 1, Rank: 2},
		"0/2 --deadline 0s":    {Rank: 2, Deadline: &zero},
		"http://h:1/v1 --wait": {URL: "http://h:1"},
	} {
		cli := newCLI(t)
		gone := named("edge", client.StatusRunning, 3, state.Ready)
		cli.cluster.script = [][]client.AppStatus{{gone}}
		require.Equal(t, 0,
			cli.run(append(strings.Fields("ranks remove edge -o name"), strings.Fields(args)...)),
			cli.stderr())
		assert.Equal(t, []client.RankRemoval{want}, cli.cluster.removed)
		assert.Equal(t, "edge/0/1\n", cli.stdout())
		assert.Equal(t, "dpserve: removed edge/0/1 http://h:1 selector 7\n",
			cli.stderr()[:len("dpserve: removed edge/0/1 http://h:1 selector 7\n")])
	}
}

func TestRanksUsage(t *testing.T) {
	for args, want := range map[string]string{
		"ranks frob": "ranks has no command \"frob\"\nhint: see `dpserve " +
			"help ranks`",
		"ranks add edge": "ranks add wants URL\nhint: see `dpserve help " +
			"ranks add`",
		"ranks add edge h":                              `URL "h": wanted HOST:PORT or http://HOST:PORT`,
		"ranks add edge http://h:1 --selektor 1":        "did you mean --selector?",
		"ranks add edge http://h:1 --wait --timeout 0s": "--timeout 0s: must be positive",
		"ranks remove edge":                             "ranks remove wants URL|GROUP/RANK",
		"ranks remove edge seven":                       `"seven": wanted http://HOST:PORT or GROUP/RANK`,
		"ranks remove edge 0/1 --deadline -1s":          "--deadline -1s: must not be negative",
	} {
		cli := newCLI(t)
		assert.Equal(t, 2, cli.run(strings.Fields(args)), args)
		assert.Contains(t, cli.stderr(), want, args)
		assert.Empty(t, cli.cluster.added)
		assert.Empty(t, cli.cluster.removed)
	}
	cli := newCLI(t)
	cli.cluster.down = refused()
	assert.Equal(t, 1, cli.run([]string{"ranks", "remove", "edge", "0/1"}))
	help := newCLI(t)
	require.Equal(t, 0, help.run([]string{"ranks"}))
	assert.Contains(t, help.stdout(), "Commands:\n  add ")
}
