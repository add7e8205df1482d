package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// keepPause is the least time between two writes of the state.
const keepPause = time.Second

// keeper writes the newest state of a node to its data dir, so that its next process knows the state also
// while no leader answers. The log of a control node does not tell that: without a leader nobody knows which
// of its entries are committed.
type keeper struct {
	dataDir string
	replace func(path string, data []byte) error
	log     *slog.Logger
	changed func() <-chan struct{}
	newest  func() *stateCopy // what is written; its data may be missing
	done    <-chan struct{}
}

// run writes the newest state, at most once per keepPause, and the last one when done is closed. It repeats a
// failed write; the log has one line when failures begin and one when they end. saved is the index on disk.
func (k *keeper) run(saved uint64) {
	failing, ended := false, false
	for !ended {
		changed := k.changed()
		now, err := k.saveNewer(saved)
		switch {
		case err != nil && !failing:
			k.log.Warn("the state cannot be kept for the next start", "component", "cluster", "err",
				fmt.Errorf("%w: %w", ErrDisk, err))
		case err == nil && failing:
			k.log.Info("the state is kept for the next start again", "component", "cluster")
		}
		saved, failing = now, err != nil
		pause := time.After(keepPause)
		if !failing {
			select {
			case <-changed:
			case <-k.done:
			}
		}
		select {
		case <-pause:
		case <-k.done:
			ended = true
		}
	}
	_, _ = k.saveNewer(saved)
}

// saveNewer writes the state if it is newer than the saved one, and returns the index of the saved state.
func (k *keeper) saveNewer(saved uint64) (uint64, error) {
	newest := k.newest()
	st, data := newest.state, newest.data
	if st.Index <= saved {
		return saved, nil
	}
	if data == nil {
		var err error
		if data, err = st.Public().Encode(); err != nil {
			return saved, fmt.Errorf("encode %s: %w", stateFile, err)
		}
	}
	if err := k.replace(filepath.Join(k.dataDir, stateFile), data); err != nil {
		return saved, fmt.Errorf("write %s: %w", stateFile, err)
	}
	return st.Index, nil
}

// stateFile is the last state that a node had.
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
