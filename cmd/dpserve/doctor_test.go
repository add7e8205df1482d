package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/internal/state"
)

// doctorArgs are the arguments of a doctor whose findings do not depend on what else runs here.
func doctorArgs(t *testing.T, args ...string) []string {
	t.Helper()
	return append([]string{
		"doctor", "--data-dir", t.TempDir(), "--http-bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0",
		"--port-range", "30000-30100",
	}, args...)
}

// examine runs doctor with -o json and returns its findings that are not ok, and the exit code.
func (c *cli) examine(t *testing.T, args []string) (bad []doctor.Finding, code int) {
	t.Helper()
	code = c.run(append(args, "-o", "json"))
	doc := decode[doctorDocument](t, c.stdout())
	assert.Equal(t, code == 0, doc.OK, c.stderr())
	for _, f := range doc.Findings {
		if f.Level != doctor.OK {
			assert.NotEmpty(t, f.Hint, "%+v", f)
			bad = append(bad, f)
		}
	}
	return bad, code
}

// failing returns the findings that fail.
func failing(list []doctor.Finding) []string {
	var out []string
	for _, f := range list {
		if f.Level == doctor.Fail {
			out = append(out, f.Check+": "+f.Found)
		}
	}
	return out
}

// TestDoctorOfACluster: what a node that runs tells.
func TestDoctorOfACluster(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	a := demo(client.StatusRunning, 1, state.Ready, state.Ready)
	a.Identity = "tokens"
	for i, size := range []int{16, 64} {
		a.Units[i].Ranks[0].KV = &client.KVStatus{BlockSize: size}
	}
	a.Units[1].Ranks[0].KV.Events = &client.EventStatus{State: client.EventsSilent, SilentFor: 40}
	c.cluster.router.answer = &client.Explanation{BlockSize: 16, BlockUnit: "tokens"}
	c.cluster.script = [][]client.AppStatus{{a}}
	c.cluster.nodes.script = [][]client.NodeStatus{twoNodes(client.NodeStatus{Node: "b", State: "lost"})}
	bad, code := c.examine(t, doctorArgs(t))
	assert.Equal(t, 1, code)
	found := strings.Join(failing(bad), "\n")
	for _, want := range []string{
		"clock: the clock of node a differs by 1h0m0s", "node: b is lost",
		"block-size: the ranks of demo have KV blocks of several sizes",
		"kv-events: demo/0/1: no KV event for 40 s",
	} {
		assert.Contains(t, found, want)
	}
}

// TestDoctorWithoutANode: a node that the user names must answer, the default one need not.
func TestDoctorWithoutANode(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	c.cluster.down = refused()
	bad, _ := c.examine(t, doctorArgs(t))
	for _, f := range bad {
		assert.NotEqual(t, "node", f.Check)
	}
	c = newCLI(t)
	c.cluster.down = refused()
	bad, code := c.examine(t, doctorArgs(t, "--addr", "10.0.0.9"))
	assert.Equal(t, 1, code)
	assert.Contains(t, failing(bad), "node: no answer from 127.0.0.1:8265")
}

// TestDoctorPrintsLines: level, check and finding, and the hint under it.
func TestDoctorPrintsLines(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	path := file(t, `applications:
  - name: chat
    model: {id: chat, source: /nowhere/model}
    engine: {kind: vllm, command: [/nowhere/vllm, serve]}
    resources: {gpus: 0}
`)
	assert.Equal(t, 1, c.run(doctorArgs(t, path)))
	assert.Contains(t, c.stdout(), "FAIL  engine        chat: /nowhere/vllm: /nowhere/vllm: no such file or "+
		"directory\n      hint: write its whole path as engine.command, or install it: `pip install ")
	assert.Contains(t, c.stdout(), "FAIL  model         chat: /nowhere/model: ")
	assert.Regexp(t, "\n(ok  |warn)  data-dir      ", c.stdout()) // a busy disk makes it a warning
	assert.Regexp(t, `^dpserve: \d of \d+ findings fail; \d warnings?\n$`, c.stderr())

	c = newCLI(t)
	assert.Equal(t, 1, c.run(doctorArgs(t, path, "-o", "name")))
	assert.Equal(t, "engine\nmodel\n", c.stdout())
}

func TestDoctorRefusesUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"doctor", "--port-range", "9"},
		{"doctor", "--http-bind", "8000"},
		{"doctor", "a", "b"},
		{"doctor", filepath.Join(t.TempDir(), "missing.yaml")},
		{"doctor", file(t, "applications: [{nam: x}]")},
	} {
		c := newCLI(t)
		assert.Equal(t, 2, c.run(args), "%v", args)
		assert.Empty(t, c.stdout())
	}
}
