package cluster_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

func recovery(t *testing.T, dir string) *cluster.Recovery {
	t.Helper()
	r, err := cluster.OpenRecovery(dir, nil)
	require.NoError(t, err)
	return r
}

// TestRecoverMakesOneOfThreeVotersTheCluster: two of three voters are gone for good. The third one leads
// alone, with everything of its log and higher epochs; it keeps its votes and its log over later starts, and
// takes new control nodes.
func TestRecoverMakesOneOfThreeVotersTheCluster(t *testing.T) {
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, true)
		g.propose(putApp("demo", "one"))
		g.propose(grant("demo", 1, 0))
		gone, last := g.members[:2], g.members[2]
		g.ready(last)
		for _, m := range g.members {
			g.stop(m)
		}
		dir := last.cfg.DataDir

		r := recovery(t, dir)
		assert.Equal(t, last.UID(), r.UID)
		assert.Len(t, state.OtherControl(r.State, r.UID), 2)
		for _, m := range g.members {
			assert.True(t, r.Voters()[m.UID()])
		}
		_, err := cluster.OpenRecovery(dir, nil)
		assert.Equal(t, problem.Conflict, problem.CodeOf(err), "it is in use")
		before := r.Index
		require.NoError(t, r.Apply(time.Now()))
		require.NoError(t, r.Close())
		_, err = cluster.OpenRecovery(dir, nil)
		assertConflict(t, err, "node-3 is the only voter of its cluster already: there is nothing to recover",
			"start it: it needs no other node to lead")

		for range 2 {
			g.start(last)
			g.ready(last)
			require.True(t, last.Leader())
			assert.Equal(t, []cluster.Member{{UID: last.UID(), Voter: true}}, last.Members())
			st := last.State()
			assert.Greater(t, st.Index, before+900_000, "above all that the lost voters can have decided")
			assert.Contains(t, st.Apps, "demo")
			assert.Len(t, st.Nodes, 1)
			assert.Empty(t, st.Units, "it was on a node that is gone")
			for _, m := range gone {
				assert.Contains(t, st.Removed, m.UID())
			}
			g.stop(last)
		}
		g.start(last)
		g.ready(last)
		res := g.propose(state.Command{GrantGroup: &state.GrantGroup{
			App: "demo", AppRevision: 1,
			Units: []state.UnitGrant{{
				Unit: "demo/0", ExpectEpoch: 1, Attempt: 1, Ranks: []state.RankGrant{{Node: "node-3"}},
			}},
		}})
		assert.Equal(t, uint64(1002), res.Epochs["demo/0"])
		g.join(cluster.Config{NodeID: "node-4", DataDir: t.TempDir()}, true)
	})
}

// TestWhatCannotBeRecovered: each refusal names what to do, and changes nothing.
func TestWhatCannotBeRecovered(t *testing.T) {
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, true)
		for _, m := range g.members {
			g.ready(m)
		}
		for _, m := range g.members {
			g.stop(m)
		}
		damaged, mixed, worker := g.members[0].cfg.DataDir, g.members[1].cfg.DataDir, t.TempDir()
		logs, err := filepath.Glob(filepath.Join(damaged, "raft", "*.wal"))
		require.NoError(t, err)
		require.NotEmpty(t, logs)
		for _, path := range logs {
			require.NoError(t, os.WriteFile(path, []byte("not a log"), 0o600))
		}
		whose := `{"format":1,"cluster":"beta","node":"node-2","uid":"` + g.members[1].UID() + `"}`
		require.NoError(t, os.WriteFile(filepath.Join(mixed, "cluster.json"), []byte(whose), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(worker, "cluster.json"), []byte(whose), 0o600))
		empty, missing := t.TempDir(), filepath.Join(t.TempDir(), "no")
		for dir, text := range map[string]string{
			damaged: "", // the log's own words
			mixed:   "its cluster.json says beta",
			worker:  "is of a node without role control",
			empty:   "is no data dir of dpserve",
			missing: "is no data dir of dpserve",
		} {
			_, err := cluster.OpenRecovery(dir, nil)
			var p *problem.Error
			require.ErrorAs(t, err, &p)
			assert.Contains(t, p.Error(), text)
			assert.NotEmpty(t, p.Hint)
		}
		assert.NoDirExists(t, missing)
		left, err := os.ReadDir(empty)
		require.NoError(t, err)
		assert.Empty(t, left)
	})
}
