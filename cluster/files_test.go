package cluster_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func writeTo(t testing.TB, dir, name string, data []byte) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
}

// snapshots are the states in a data dir's snapshots.
func snapshots(t testing.TB, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "raft", "snapshots", "*", "state.bin"))
	require.NoError(t, err)
	return files
}

// knowsAll says whether each member has a snapshot with the addresses of all.
func knowsAll(t testing.TB, all []*member) bool {
	t.Helper()
	for _, m := range all {
		most := 0
		for _, file := range snapshots(t, m.cfg.DataDir) {
			data, err := os.ReadFile(file) //nolint:gosec // of this test
			var st struct{ Nodes map[string]any }
			if err == nil && json.Unmarshal(data, &st) == nil {
				most = max(most, len(st.Nodes))
			}
		}
		if most < len(all) {
			return false
		}
	}
	return true
}
