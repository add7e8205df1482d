// Package mutants breaks rules of the product on purpose, one at a time, and expects a test to notice. A test
// that passes with its rule broken says nothing.
package mutants

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// mutant is a rule that is broken by one change of one file.
type mutant struct {
	rule      string // as it is without its mutant
	file      string
	from, to  string // from occurs once in the file
	noticedBy []string
}

// limit is the time of one mutant: to compile what it changes, and to run the tests.
const limit = 15 * time.Minute

// walk are arguments of the walk over whole nodes with as many seeds as a mutant may need.
func walk(seeds string) []string {
	return []string{"./test/inprocess", "-run", "TestRandomWalkOverNodes", "-nodes.seeds", seeds}
}

func mutants() []mutant {
	return []mutant{
		{
			"a unit that the state shows superseded ends", "actors/node/core.go",
			"case over && l.cut(now, causeSuperseded), ", "case ",
			[]string{"./actors/node"},
		},
		{
			"with on_lease_loss fence all units end with the lease", "actors/node/lease.go",
			"return l.fence && !now.Before(l.stop())", "return false",
			[]string{"./actors/node"},
		},
		{
			"the same, seen from outside", "actors/node/lease.go",
			"return l.fence && !now.Before(l.stop())", "return false", walk("20"),
		},
		{
			"a process that was frozen asks the leader before it admits", "actors/node/lease.go",
			"if now.Sub(l.beat) > l.ttl {", "if false {",
			[]string{"./actors/node"},
		},
		{
			"an epoch that was seen is not started again", "actors/node/epochs.go",
			"if epoch > 0 && epoch == e.seen[unit] {", "if false {",
			[]string{"./actors/node"},
		},
		{
			"an engine that was found is adopted after the leader has answered", "actors/node/core.go",
			"if l.found != foundOpen || c.IsBehind(s) || c.MayLaunch(now) != nil && !alone {",
			"if l.found != foundOpen {",
			[]string{"./actors/node"},
		},
		{
			"ranks are granted again only after their leases", "actors/controller/core.go",
			"state.NewLeases(t.LeaseTTL, t.Regrant-t.LeaseTTL)", "state.NewLeases(t.LeaseTTL/2, 0)",
			[]string{"./actors/controller"},
		},
		{
			"a node is lost only after a majority has confirmed the leader", "actors/controller/executor.go",
			"if err := a.cfg.Confirm(ctx); err != nil {", "if err := ctx.Err(); err != nil {",
			[]string{"./actors/controller"},
		},
		{
			"nothing is granted on a node that stops", "actors/controller/nodes.go",
			"marked.Draining = true", "marked.Draining = false",
			[]string{"./actors/controller"},
		},
		{
			"what a unit was ready with is known for ever", "internal/state/apply.go",
			"s.Served[u.ID] = u.Launch", "_ = u.Launch",
			[]string{"./internal/state"},
		},
		{
			"three failed starts are the end of a unit that never served", "internal/state/unit.go",
			"last := m.Attempt >= MaxStartAttempts", "last := false",
			[]string{"./internal/state"},
		},
		{
			"a control node stops before a command that it cannot read", "internal/state/command.go",
			"d.DisallowUnknownFields()", "_ = d",
			[]string{"./internal/state"},
		},
		{
			"the epochs of a name never repeat", "internal/state/apply.go",
			"Epoch: max(s.LastEpoch(g.Unit), s.EpochLeast) + 1,", "Epoch: s.EpochLeast + 1,",
			[]string{"./internal/state"},
		},
		{
			"a write of the log has a limit", "internal/cluster/disk.go",
			"diskLimit = 1500 * time.Millisecond", "diskLimit = 1500 * time.Second",
			[]string{"./test/inprocess", "-run", "TestLeadersDiskHangs"},
		},
		{
			"a request costs two engines at most", "internal/dispatch/legs.go",
			"if p.deaths >= 2 {", "if p.deaths >= 200 {",
			[]string{"./internal/dispatch"},
		},
	}
}

// TestMutantsApply: each mutant still changes what it names.
func TestMutantsApply(t *testing.T) {
	for _, m := range mutants() {
		m.apply(t)
	}
}

// apply returns the text of the changed file.
func (m *mutant) apply(t *testing.T) (root, text string) {
	t.Helper()
	root, err := harness.Root()
	require.NoError(t, err)
	b, err := os.ReadFile(filepath.Join(root, m.file))
	require.NoError(t, err)
	n := strings.Count(string(b), m.from)
	assert.Equal(t, 1, n, "%s: %q is not in %s any more, or more than once", m.rule, m.from, m.file)
	return root, strings.Replace(string(b), m.from, m.to, 1)
}

// SK7: the tests that a mutant names fail with it, and compile.
func TestMutants(t *testing.T) {
	if os.Getenv("DPSERVE_MUTANTS") == "" {
		t.Skip("it compiles the product for each mutant: make nightly")
	}
	for _, m := range mutants() {
		t.Run(m.rule, func(t *testing.T) {
			root, text := m.apply(t)
			changed := filepath.Join(t.TempDir(), filepath.Base(m.file))
			require.NoError(t, os.WriteFile(changed, []byte(text), 0o600))
			overlay, err := json.Marshal(map[string]any{
				"Replace": map[string]string{filepath.Join(root, m.file): changed},
			})
			require.NoError(t, err)
			file := filepath.Join(t.TempDir(), "overlay.json")
			require.NoError(t, os.WriteFile(file, overlay, 0o600))
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			args := append([]string{"test", "-overlay", file}, m.noticedBy...)
			cmd := exec.CommandContext(ctx, "go", args...)
			cmd.Dir = root
			out, err := cmd.CombinedOutput()
			require.Error(t, err, "nobody has noticed it")
			assert.Contains(t, string(out), "--- FAIL", "it did not run: %.2000s", out)
		})
	}
}
