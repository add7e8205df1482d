// Package examples_test checks the files that users start from.
package examples_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/server"
	"github.com/dpserve/dpserve/routing"
)

// files are the examples with their text.
func files(t *testing.T) map[string]string {
	t.Helper()
	names, err := filepath.Glob("*/app.yaml")
	require.NoError(t, err)
	require.Greater(t, len(names), 10)
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
		_, warnings, err := server.ParseApps(name, []byte(text))
		require.NoError(t, err, name)
		assert.Empty(t, warnings, name)
		assert.True(t, strings.HasPrefix(text, "# "), name)
		assert.Contains(t, text, "#   dpserve up examples/"+name+"\n")
	}
}

// TestTheUnitFile: the systemd unit has what docs/operations.md shows and explains, folders that engines may
// write, and, where the machine has it, the approval of systemd-analyze.
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

// TestExamplesWithTheirOtherLinesAreValid: a routing line that is commented out takes the place of the lines
// of its key.
func TestExamplesWithTheirOtherLinesAreValid(t *testing.T) {
	other := regexp.MustCompile(`(?m)^      # ((policy|params): .*)$`)
	for name, text := range files(t) {
		for _, found := range other.FindAllStringSubmatch(text, -1) {
			parsed, _, err := server.ParseApps(name, []byte(text))
			require.NoError(t, err)
			own := parsed.Applications[0].Routing
			routed := "policy: " + own.Policy + "\n      " + found[1]
			if found[2] == "policy" {
				routed = found[1]
			}
			head, _, _ := strings.Cut(text, "    routing:\n")
			_, _, err = server.ParseApps(name, []byte(head+"    routing:\n      "+routed+"\n"))
			require.NoError(t, err, "%s: %s", name, found[1])
		}
	}
}

// TestEveryPolicyHasAnExample: as the policy of an application, or as a line of the comment that opens one.
func TestEveryPolicyHasAnExample(t *testing.T) {
	var shown []string
	for name, text := range files(t) {
		parsed, _, err := server.ParseApps(name, []byte(text))
		require.NoError(t, err)
		for _, a := range parsed.Applications {
			shown = append(shown, a.Routing.Policy)
			if strings.HasPrefix(name, "routing-") {
				assert.Equal(t, app.KindSim, a.Engine.Kind, name)
				assert.Equal(t, 4, a.DataParallel.DPSize, name)
			}
		}
		for _, policy := range routing.Names() {
			if strings.Contains(text, "\n#   "+policy+" ") {
				shown = append(shown, policy)
			}
		}
	}
	for _, policy := range routing.Names() {
		// direct is the caller's own choice, lmetric is worse than lmetric-1
		if !slices.Contains([]string{"direct", "lmetric"}, policy) {
			assert.Contains(t, shown, policy)
		}
	}
}

// TestExamplesOfRealEnginesCanBeLaunched: their engines have a command line with the arguments of the file.
func TestExamplesOfRealEnginesCanBeLaunched(t *testing.T) {
	seen := map[app.Kind]bool{}
	for name, text := range files(t) {
		parsed, _, err := server.ParseApps(name, []byte(text))
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
