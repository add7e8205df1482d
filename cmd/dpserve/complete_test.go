package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// completed returns the words that a shell offers after args.
func completed(t *testing.T, c *cli, args ...string) []string {
	t.Helper()
	require.Zero(t, c.run(append([]string{"__complete"}, args...)))
	lines := strings.Split(strings.TrimSpace(c.stdout()), "\n")
	return lines[:len(lines)-1] // without the directive
}

func completingCLI(t *testing.T) *cli {
	t.Helper()
	c := newCLI(t)
	edge := demo(client.StatusUnhealthy, 1, state.Ready)
	edge.Name, edge.Kind, edge.Units[0].Unit = "edge", "attach", "edge/0/0"
	c.cluster.script = [][]client.AppStatus{{demo(client.StatusRunning, 1, state.Ready, state.Backoff), edge}}
	c.cluster.nodes.listed = []client.JoinToken{{ID: "5f2c9d0e11aa", Status: "valid"}}
	c.cluster.nodes.script = [][]client.NodeStatus{
		{{Node: "gpu-1", State: "alive"}, {Node: "gpu-2", State: "lost"}},
	}
	return c
}

func TestCompletionOfNames(t *testing.T) {
	apps := []string{"demo\tRUNNING 1/2 sim", "edge\tUNHEALTHY 1/1 attach"}
	for line, want := range map[string][]string{
		"status ":        apps,
		"status d":       apps[:1],
		"status demo ":   {},
		"delete e":       apps[1:],
		"route explain ": apps,
		"router show ":   apps,
		"router reset d": apps[:1],
		"logs demo":      {apps[0], "demo/0/0\tready n1", "demo/0/1\tbackoff n1"},
		"logs demo/0/1":  {"demo/0/1\tbackoff n1"},
		"ranks add ":     apps[1:],
		"ranks remove ":  apps[1:],
		"drain ":         {"gpu-1\talive", "gpu-2\tlost"},
		"undrain gpu-2":  {"gpu-2\tlost"},
		"nodes remove g": {"gpu-1\talive", "gpu-2\tlost"},
		"status -o ":     {"table", "wide", "json", "yaml", "name"}, // the shell keeps those that fit
		"start --roles ": {"control", "worker", "ingress"},
		"plan --engine ": {"sim"},

		"serve --engine ":                        {"vllm", "sglang", "sim"},
		"serve a --engine sglang -- --mem-fra":   {"--mem-fraction-static"},
		"serve a -- --gpu-memory-utilization-no": {},
		"token list ":                            {},
		"token revoke ":                          {"5f2c9d0e11aa\tvalid"},
	} {
		c := completingCLI(t)
		got := completed(t, c, strings.Split(line, " ")...)
		assert.Equal(t, want, append([]string{}, got...), line)
	}
	assert.Contains(t, completed(t, newCLI(t), "help", ""), "deploy")
	c := completingCLI(t)
	assert.Equal(t, []string{"0/0\thttp://127.0.0.1:20000"}, completed(t, c, "ranks", "remove", "edge", ""))
	assert.False(t, c.cluster.deadline.IsZero(), "a shell does not wait for ever")
}

// --addr counts in a completion, too.
func TestCompletionAsksTheNamedNode(t *testing.T) {
	c := completingCLI(t)
	completed(t, c, "--addr", "gpu-9", "status", "")
	assert.Equal(t, []string{"gpu-9"}, c.asked)
}

func TestCompletionWithoutClusterIsSilent(t *testing.T) {
	c := newCLI(t)
	c.cluster.down = refused()
	assert.Empty(t, completed(t, c, "status", ""))
	assert.NotContains(t, c.stderr(), "no answer")

	c = newCLI(t)
	c.newAdmin = func(string, ...client.Option) (admin, error) { return nil, errors.New("bad address") }
	assert.Empty(t, completed(t, c, "drain", ""))
	assert.NotContains(t, c.stderr(), "bad address")
}

// Every command says what its arguments are, so that no shell offers files where none belong.
func TestEveryCommandCompletesItsArguments(t *testing.T) {
	c := newCLI(t)
	for cmd := range allCommands(newRoot(c.env)) {
		assert.True(t, cmd.ValidArgsFunction != nil || len(cmd.ValidArgs) > 0, commandName(cmd))
		if !strings.Contains(cmd.Use, " APP") && !strings.Contains(cmd.Use, " NODE") &&
			!strings.Contains(cmd.Use, " FILE") {
			continue
		}
		c := completingCLI(t)
		assert.NotEmpty(t, completed(t, c, append(strings.Fields(commandName(cmd)), "")...), commandName(cmd))
	}
}

// The texts of flags have no marks that a shell would show.
func TestCompletionOfFlagsIsPlain(t *testing.T) {
	c := newCLI(t)
	for cmd := range allCommands(newRoot(c.env)) {
		c := newCLI(t)
		out := strings.Join(completed(t, c, append(strings.Fields(commandName(cmd)), "--")...), "\n")
		assert.NotContains(t, out, "`", commandName(cmd))
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				assert.Contains(t, out, "--"+f.Name, commandName(cmd))
			}
		})
	}
}
