package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

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

// takeStopMark reports whether the previous process of this node was told to end, and removes the mark.
func takeStopMark(dir string) bool {
	return dir != "" && os.Remove(filepath.Join(dir, stopFile)) == nil
}

// save writes a file of the data dir. It returns after the file is on disk.
func (c *Config) save(name string, v any) error {
	if c.DataDir == "" {
		return nil
	}
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return c.Replace(filepath.Join(c.DataDir, name), append(line, '\n'))
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
