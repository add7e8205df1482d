package main

import (
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/test/harness"
)

// rayFiles lists the Ray Serve LLM files of a folder of internal/app/testdata.
func rayFiles(t *testing.T, folder string) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(repository, "internal/app/testdata", folder, "*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	return paths
}

// sentBy returns what a command line sends to the cluster.
func sentBy(t *testing.T, line ...string) client.DeployRequest {
	t.Helper()
	c := newCLI(t)
	c.run(line)
	require.Len(t, c.cluster.deployed, 1, c.stderr())
	return c.cluster.deployed[0]
}

// Convert prints each Ray Serve LLM file as a sound app.yaml with comments, and deploy sends the same.
func TestConvertPrintsRayFiles(t *testing.T) {
	for _, path := range rayFiles(t, "ray") {
		c := newCLI(t)
		if strings.Contains(path, "05_") { // a range of groups
			require.Equal(t, 2, c.run([]string{"convert", path}), path)
			continue
		}
		require.Zero(t, c.run([]string{"convert", path}), c.stderr())
		assert.Empty(t, c.stderr(), path)
		printed := c.stdout()
		notes, own, isFile := strings.Cut("\n"+printed, "\napplications:")
		require.True(t, isFile, printed)
		for line := range strings.Lines(strings.TrimPrefix(notes, "\n")) {
			assert.Regexp(t, `^# .*\.yaml:\d+:\d+: `, line)
		}

		c = newCLI(t)
		c.stdin.Reset(printed)
		require.Zero(t, c.run([]string{"validate", "-"}), c.stderr())
		assert.Equal(t, "applications:"+own, string(sentBy(t, "deploy", path, "--detach").Text), path)
	}
}

// Each command that reads a file refuses the faulty ones alike, before it asks a node.
func TestFaultyRayFilesEndWithTwo(t *testing.T) {
	for _, path := range rayFiles(t, "ray_bad") {
		want := 2
		if strings.Contains(path, "09_dp_size_one") || strings.Contains(path, "18_lora_local_path") {
			want = 0 // fine here
		}
		for _, command := range []string{"convert", "validate", "plan", "deploy"} {
			if want == 0 && (command == "plan" || command == "deploy") {
				continue
			}
			c := newCLI(t)
			assert.Equal(t, want, c.run([]string{command, path}), "%s %s\n%s", command, path, c.stderr())
			if want == 2 {
				assert.Empty(t, c.stdout(), path)
				assert.Regexp(t, `(?m)^\S+\.yaml:\d+:\d+: `, c.stderr(), path)
				assert.Empty(t, c.asked, path)
			}
		}
	}
}

// CC10: each Ray Serve LLM file serves: vLLM's command lines on nodes with the devices and labels that the
// file wants, and the simulated engine on a node without any.
func TestRayFilesServe(t *testing.T) {
	for _, path := range rayFiles(t, "ray") {
		if strings.Contains(path, "05_") {
			continue // refused
		}
		t.Run(filepath.Base(path), func(t *testing.T) {
			file, _, err := app.Parse(app.Default(), path, sentBy(t, "deploy", path, "--detach").Text)
			require.NoError(t, err)
			kinds := map[string]bool{} // of nodes
			for _, a := range file.Applications {
				kinds[a.Resources.Labels["accelerator"]] = true
			}
			nodes := slices.Collect(maps.Keys(kinds))
			t.Run("vllm", func(t *testing.T) {
				serveRay(t, file, file.Print(), len(nodes), harness.Nodes(len(nodes)), harness.Slots(16),
					harness.Machine(func(i int) (string, map[string]string) {
						return "16", map[string]string{"accelerator": nodes[i]}
					}))
			})
			t.Run("sim", func(t *testing.T) {
				sent := sentBy(t, "deploy", path, "--engine", "sim", "--detach")
				serveRay(t, file, sent.Text, 0, harness.Slots(16))
			})
		})
	}
}

// serveRay deploys a file when so many nodes have told their labels, and asks each of its models once, at its
// route prefix.
func serveRay(t *testing.T, file *app.File, text []byte, labelled int, options ...harness.Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, options...)
		c.Until("the nodes have told their labels", func() error {
			told := 0
			for _, n := range c.Store().State().Nodes {
				told += min(len(n.Resources.Labels), 1)
			}
			if told < labelled {
				return fmt.Errorf("%d of %d have", told, labelled)
			}
			return nil
		})
		c.Deploy(string(text))
		for _, pools := range app.ByName(file.Applications) {
			a := pools[0]
			c.WaitStatus(a.Name, "RUNNING")
			answer, err := c.Post(t.Context(), strings.TrimSuffix(a.RoutePrefix, "/")+"/v1/chat/completions",
				harness.Chat(a.Model.ID, "hello", 4, false))
			require.NoError(t, err)
			require.NoError(t, answer.Body.Close())
			assert.Equal(t, http.StatusOK, answer.StatusCode, a.Name)
		}
	})
}
