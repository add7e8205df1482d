// Package examples_test checks the files that users start from.
package examples_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/routing"
)

// files are the examples with their text.
func files(t *testing.T) map[string]string {
	t.Helper()
	names, err := filepath.Glob("*/app.yaml")
	require.NoError(t, err)
	require.Greater(t, len(names), 8)
	out := map[string]string{}
	for _, name := range names {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		out[name] = string(text)
	}
	return out
}

// TestExamplesAreValid: by all rules, without a warning, and with a comment that says how to start them.
func TestExamplesAreValid(t *testing.T) {
	for name, text := range files(t) {
		_, warnings, err := app.Parse(app.Default(), name, []byte(text))
		require.NoError(t, err, name)
		assert.Empty(t, warnings, name)
		assert.True(t, strings.HasPrefix(text, "# "), name)
		assert.Contains(t, text, "#   dpserve up examples/"+name+"\n")
	}
}

// HF74: the systemd unit has what docs/operations.md shows and explains, folders that engines may write, and,
// where the machine has it, the approval of systemd-analyze.
func TestTheUnitFile(t *testing.T) {
	const name = "cluster/dpserve.service"
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	unit := string(text)
	page, err := os.ReadFile("../docs/operations.md")
	require.NoError(t, err)
	_, block, found := strings.Cut(string(page), "```text\n[Service]\n")
	require.True(t, found)
	block, _, _ = strings.Cut(block, "```")
	for line := range strings.Lines(block) {
		assert.Contains(t, unit, "\n"+strings.TrimSpace(line), "a line of docs/operations.md")
	}
	for _, line := range []string{
		"KillMode=process", "Delegate=yes", "StateDirectoryMode=0700", "CacheDirectory=dpserve",
		"Environment=HOME=/var/cache/dpserve", "ProtectSystem=strict",
	} {
		assert.Contains(t, unit, "\n"+line+"\n")
	}
	writable := regexp.MustCompile(`^(/var/lib/dpserve|/var/cache/dpserve)(/.*)?$`)
	for _, set := range regexp.MustCompile(`(?m)^Environment=(\w+)=(/.*)$`).FindAllStringSubmatch(unit, -1) {
		assert.Regexp(t, writable, set[2], "%s: the service may write nowhere else", set[1])
	}
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	self, err := os.Executable()
	require.NoError(t, err)
	copied := filepath.Join(t.TempDir(), "dpserve.service")
	unit = strings.ReplaceAll(unit, "/usr/local/bin/dpserve", self)
	require.NoError(t, os.WriteFile(copied, []byte(unit), 0o600))
	out, err := exec.CommandContext(t.Context(), analyze, "verify", copied).CombinedOutput()
	require.NoError(t, err, string(out))
	assert.Empty(t, string(out))
}

// TestExampleOfRouting: examples/routing is valid with each of its commented lines in place of its routing
// block, and shows every policy that independent ranks take.
func TestExampleOfRouting(t *testing.T) {
	const name = "routing/app.yaml"
	text := files(t)[name]
	head, _, found := strings.Cut(text, "    routing:\n")
	require.True(t, found)
	shown := []string{"mex", "cohorts"} // its own, and that of lockstep groups
	for _, line := range regexp.MustCompile(`(?m)^    # (routing: .*)$`).FindAllStringSubmatch(text, -1) {
		parsed, warnings, err := app.Parse(app.Default(), name, []byte(head+"    "+line[1]+"\n"))
		require.NoError(t, err, line[1])
		assert.Empty(t, warnings, line[1])
		shown = append(shown, parsed.Applications[0].Routing.Policy)
	}
	assert.Subset(t, shown, routing.Names())
}

// TestExamplesOfRealEnginesCanBeLaunched: their engines have a command line with the arguments of the file.
func TestExamplesOfRealEnginesCanBeLaunched(t *testing.T) {
	seen := map[app.Kind]bool{}
	for name, text := range files(t) {
		parsed, _, err := app.Parse(app.Default(), name, []byte(text))
		require.NoError(t, err)
		for _, a := range parsed.Applications {
			if a.Engine.Kind != app.KindVLLM && a.Engine.Kind != app.KindSGLang {
				continue
			}
			seen[a.Engine.Kind] = true
			l, err := engine.Render(&engine.Spec{App: a, Base: 20000}, nil)
			require.NoError(t, err, name)
			for _, arg := range a.Engine.Args {
				assert.Contains(t, l.Argv, "--"+strings.ReplaceAll(arg.Name, "_", "-"), name)
			}
			assert.NotNil(t, l.Events, "%s: its policy reads the KV index", name)
		}
	}
	assert.Len(t, seen, 2)
}
