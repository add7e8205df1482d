package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/process"
)

// File names in the data dir.
const (
	ledgerFile = "pgids"
	epochsFile = "epochs.json"
	logsDir    = "logs"
	stopFile   = "stopped" // exists after a process of this node that was told to end
)

// sweepWait bounds how long a start waits for killed leftovers to end.
const sweepWait = 5 * time.Second

// entry is a process group that a node started.
type entry struct {
	Group int    `json:"group"`
	Start string `json:"start"` // of its leader, in clock ticks since boot
	Mark  string `json:"mark"`  // environment entry of every member
}

// processTable keeps the living process groups of direct children on disk. The parent-death signal does not
// reach the children of a dead front process, so a killed node can leave engines; its next process finds them
// here. Engines in shims are not in it: they are to live on, and have folders of their own.
type processTable struct {
	path string // "" = memory only
	id   string // of this node process
	log  *slog.Logger

	mu       sync.Mutex
	launches int
	entries  map[int]entry
	hangs    bool // a write has not returned
	stale    bool // the table has changed since that write began
}

func newProcessTable(dir, id string, log *slog.Logger) *processTable {
	l := &processTable{id: id, log: log, entries: map[int]entry{}}
	if dir != "" {
		l.path = filepath.Join(dir, ledgerFile)
	}
	return l
}

// newLaunch draws the id of a launch.
func (l *processTable) newLaunch() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.launches++
	return fmt.Sprintf("%s.%d", l.id, l.launches)
}

func (l *processTable) add(group int, mark string) {
	s, _ := process.ReadStat(group)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries[group] = entry{Group: group, Start: s.Start, Mark: mark}
	l.save()
}

// owns reports whether a process leads a group of the table.
func (l *processTable) owns(pid int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.entries[pid]
	return ok
}

func (l *processTable) remove(group int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.entries[group]; ok {
		delete(l.entries, group)
		l.save()
	}
}

// tableWait is how long the table waits for a disk that hangs.
const tableWait = 2 * time.Second

// save writes the table under mu. If the write fails, the sweep after a crash misses groups, but running
// engines are not affected. One write at a time: what changes while one hangs is written after it.
func (l *processTable) save() {
	if l.path == "" {
		return
	}
	if l.hangs {
		l.stale = true
		return
	}
	list := slices.AppendSeq(make([]entry, 0, len(l.entries)), maps.Values(l.entries))
	returned := make(chan struct{})
	err := diskfile.Await(filepath.Dir(l.path), tableWait, func() error {
		defer close(returned)
		return diskfile.ReplaceJSON(l.path, list)
	})
	if err != nil {
		l.log.Warn("cannot record the engines' process groups", slog.String("err", err.Error()))
	}
	if errors.Is(err, diskfile.ErrHangs) {
		l.hangs = true
		go func() { // ends with the write
			<-returned
			l.saveAgain()
		}()
	}
}

// saveAgain goes on after a write that hung.
func (l *processTable) saveAgain() {
	l.mu.Lock()
	defer l.mu.Unlock()
	stale := l.stale
	l.hangs, l.stale = false, false
	if stale {
		l.save()
	}
}

// sweep ends what an earlier process of this node left behind, and begins an empty table.
func (l *processTable) sweep() error {
	if l.path == "" {
		return nil
	}
	var left []entry
	if err := readJSON(l.path, &left); err != nil {
		return err
	}
	if len(left) > 0 {
		l.end(left)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.save()
	return nil
}

// end kills until nothing is left, at most for sweepWait, because the next start may need the ports.
func (l *processTable) end(left []entry) {
	for _, e := range left {
		members := func() []int { return process.Descendants(e.Group, e.Start, e.Mark) }
		n := len(members())
		if n == 0 {
			continue
		}
		l.log.Warn("ending engines that an earlier process of this node left behind",
			slog.Int("group", e.Group), slog.Int("processes", n))
		if left := process.EndAll(members, sweepWait); len(left) > 0 {
			l.log.Error("left-over engines do not end", slog.Any("pids", left))
		}
	}
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
