package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// rayFiles lists the Ray Serve LLM files of a folder of internal/app/testdata.
func rayFiles(t *testing.T, folder string) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(repository, "internal/app/testdata", folder, "*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	return paths
}

// CC10: convert prints each Ray Serve LLM file as a sound app.yaml with comments, and deploy sends the same
// application.
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
		c = newCLI(t)
		c.run([]string{"deploy", path, "--detach"})
		require.Len(t, c.cluster.deployed, 1, c.stderr())
		assert.Equal(t, "applications:"+own, string(c.cluster.deployed[0].Text), path)
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
