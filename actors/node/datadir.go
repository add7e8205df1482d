package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
)

// EnginesDir is the folder of the shims in the data dir.
const EnginesDir = "engines"

// Names in the data dir.
const (
	epochsFile = "epochs.json"
	logsDir    = "logs"
	stopFile   = "stopped" // exists after a process of this node that was told to end
)

// loadEpochs reads the file of dir. An unreadable file is an error: a node that forgets epochs may serve an
// old one.
func loadEpochs(dir string) (seen map[string]uint64, err error) {
	if dir == "" {
		return nil, nil
	}
	if err := readJSON(filepath.Join(dir, epochsFile), &seen); err != nil {
		return nil, problem.New(problem.Internal, "%w", err).
			WithHint("restore the file, or remove it if no other node serves this cluster's units")
	}
	return seen, nil
}

// saveEpochs writes the file of dir. It returns after the file is on disk.
func saveEpochs(dir string, seen map[string]uint64) error {
	if dir == "" {
		return nil
	}
	return diskfile.ReplaceJSON(filepath.Join(dir, epochsFile), seen)
}

// takeStopMark reports whether the previous process of this node was told to end, and removes the mark.
func takeStopMark(dir string) bool {
	return dir != "" && os.Remove(filepath.Join(dir, stopFile)) == nil
}

// leaveStopMark records for the next process that this one was told to end.
func leaveStopMark(dir string) error {
	if dir == "" {
		return nil
	}
	return diskfile.ReplaceJSON(filepath.Join(dir, stopFile), true)
}

// readJSON reads a file if it exists.
func readJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}
