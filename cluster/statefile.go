package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// stateFile is what a Watcher knew last.
const stateFile = "state.json"

// loadState reads the state of the last time. Without one that can be used it is an empty one: the control nodes have a newer.
func loadState(dataDir, cluster string) (*state.State, error) {
	if dataDir == "" {
		return state.New(), nil
	}
	data, err := os.ReadFile(filepath.Join(dataDir, stateFile)) //nolint:gosec // the operator's own data dir
	if errors.Is(err, fs.ErrNotExist) {
		return state.New(), nil
	}
	if err != nil {
		return state.New(), fmt.Errorf("read %s: %w", stateFile, err)
	}
	st, err := state.Decode(data)
	if err != nil {
		return state.New(), fmt.Errorf("%s: %w", stateFile, err)
	}
	if st.Cluster != cluster {
		return state.New(), problem.New(problem.Conflict, "%s is of cluster %s, not %s", stateFile, st.Cluster, cluster)
	}
	return st, nil
}

func saveState(dataDir string, st *state.State) error {
	data, err := st.Encode()
	if err != nil {
		return fmt.Errorf("encode %s: %w", stateFile, err)
	}
	return writeFile(filepath.Join(dataDir, stateFile), data)
}
