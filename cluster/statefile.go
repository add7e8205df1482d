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

// stateFile is the last state of a Watcher.
const stateFile = "state.json"

// loadState reads the saved state. If it cannot be used, the result is an empty state: the control nodes have
// a newer one.
func loadState(dataDir, cluster string) (*stateCopy, error) {
	none := &stateCopy{state: state.New()}
	if dataDir == "" {
		return none, nil
	}
	data, err := os.ReadFile(filepath.Join(dataDir, stateFile)) //nolint:gosec // the data dir
	if errors.Is(err, fs.ErrNotExist) {
		return none, nil
	}
	if err != nil {
		return none, fmt.Errorf("read %s: %w", stateFile, err)
	}
	c, err := decodeCopy(data)
	if err != nil {
		return none, fmt.Errorf("%s: %w", stateFile, err)
	}
	if c.state.Cluster != cluster {
		return none, problem.New(problem.Conflict, "%s is of cluster %s, not %s", stateFile, c.state.Cluster,
			cluster)
	}
	return c, nil
}
