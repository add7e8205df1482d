package main

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/test/harness"
)

// runOperationsPage types the commands of docs/operations.md on one node. Its engines are in their
// development mode, because the page calls them.
func runOperationsPage(t *testing.T, blocks []block) {
	t.Helper()
	const text = "applications: [{name: demo, model: {id: demo}, data_parallel: {dp_size: 4}, " +
		"engine: {kind: sim, env: {VLLM_SERVER_DEV_MODE: \"1\"}}}]\n"
	m := &machines{dir: t.TempDir(), fixed: true}
	m.typeBlocks(t, blocks, map[string]string{"app.yaml": text})
}

// runComingFromPage types the commands of docs/coming-from.md on one node, and compares the files that
// convert prints with the page, which shows them in the same order.
func runComingFromPage(t *testing.T, blocks []block) {
	t.Helper()
	var foreign string
	var own []string
	for _, b := range blocksOf(t, "docs/coming-from.md") {
		switch {
		case b.language == "text" && strings.HasPrefix(b.text, "applications:"):
			foreign = b.text
		case b.language == "yaml":
			own = append(own, b.text)
		}
	}
	m := &machines{dir: harness.DataDir(t)}
	m.typeBlocks(t, blocks, map[string]string{"llm.yaml": foreign})
	for i := range blocks {
		for _, c := range blocks[i].commands() {
			_, name, isConverted := strings.Cut(c.text, " > ")
			if !isConverted {
				continue
			}
			converted, err := os.ReadFile(filepath.Join(m.dir, name))
			require.NoError(t, err)
			require.NotEmpty(t, own, "the page does not show %s", name)
			assert.Equal(t, own[0], string(converted), name)
			own = own[1:]
		}
	}
	assert.Empty(t, own, "no command of the page writes this")
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
