package main

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
)

// runOperationsPage types the commands of docs/operations.md on one node.
func runOperationsPage(t *testing.T, blocks []block) {
	t.Helper()
	m := &machines{dir: t.TempDir(), fixed: true}
	m.typeBlocks(t, blocks, map[string]string{"app.yaml": readPage(t, "examples/quickstart/app.yaml")})
}

// TestRealEnginesPageShowsWhatIsStarted: a command line on docs/real-engines.md is what dpserve renders for
// the application file above it, and so is the environment below the command line.
func TestRealEnginesPageShowsWhatIsStarted(t *testing.T) {
	var a *app.Application
	var launch engine.Launch
	shown, variables := 0, 0
	for _, b := range blocksOf(t, "docs/real-engines.md") {
		switch {
		case b.language == "yaml":
			file, _, err := app.Parse(app.Default(), b.page, []byte(b.text))
			require.NoError(t, err)
			a = file.Applications[0]
		case strings.HasPrefix(b.text, "vllm serve "), strings.HasPrefix(b.text, "python3 -m "):
			words := strings.Fields(strings.NewReplacer("\\\n", " ", "'", "").Replace(b.text))
			launch = rendered(t, a, words)
			assert.Equal(t, launch.Argv, words, "%s:%d", b.page, b.line)
			shown++
		case strings.HasPrefix(b.text, "CUDA_"):
			assert.Equal(t, launch.Env, strings.Fields(b.text), "%s:%d", b.page, b.line)
			variables++
		}
	}
	assert.Equal(t, []int{3, 1}, []int{shown, variables}, "this test no longer finds the blocks of the page")
}

// rendered returns the launch of the rank that a command line is of.
func rendered(t *testing.T, a *app.Application, words []string) engine.Launch {
	t.Helper()
	value := func(flag string) string {
		if i := slices.Index(words, flag); i >= 0 && i+1 < len(words) {
			return words[i+1]
		}
		return ""
	}
	number := func(flag string) int {
		n, err := strconv.Atoi(value(flag))
		require.NoError(t, err, flag)
		return n
	}
	s := &engine.Spec{App: a, Rank: 1, Base: number("--port"), Devices: []int{1}}
	if value("--data-parallel-rank") != "" {
		s.Rank, s.Rank0Addr = number("--data-parallel-rank"), value("--data-parallel-address")
		s.Rank0Port, s.Base = number("--data-parallel-rpc-port"), s.Base-s.Rank
	}
	launch, err := engine.Render(s, nil)
	require.NoError(t, err)
	return launch
}
