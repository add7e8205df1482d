package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/diskfile"
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

// processTable keeps the living process groups on disk. The parent-death signal does not reach the children
// of a dead front process, so a killed node can leave engines; its next process finds them here.
type processTable struct {
	path string // "" = memory only
	id   string // of this node process
	log  *slog.Logger

	mu       sync.Mutex
	launches int
	entries  map[int]entry
}

func newProcessTable(dir, id string, log *slog.Logger) *processTable {
	l := &processTable{id: id, log: log, entries: map[int]entry{}}
	if dir != "" {
		l.path = filepath.Join(dir, ledgerFile)
	}
	return l
}

// newMark draws the environment entry that identifies the processes of one launch. Engines rename their
// processes, so names do not identify them, and a mark also finds those that left their group.
func (l *processTable) newMark() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.launches++
	return fmt.Sprintf("DPSERVE_OWNER=%s.%d", l.id, l.launches)
}

func (l *processTable) add(group int, mark string) {
	s, _ := readStat(group)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries[group] = entry{Group: group, Start: s.start, Mark: mark}
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

// save writes the table under mu. If the write fails, the sweep after a crash misses groups, but running
// engines are not affected.
func (l *processTable) save() {
	if l.path == "" {
		return
	}
	list := make([]entry, 0, len(l.entries))
	for _, e := range l.entries {
		list = append(list, e)
	}
	if err := writeJSON(l.path, list); err != nil {
		l.log.Warn("cannot record the engines' process groups", slog.String("err", err.Error()))
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

func (l *processTable) end(left []entry) {
	for _, e := range left {
		if members := descendants(e.Group, e.Start, e.Mark); len(members) > 0 {
			l.log.Warn("ending engines that an earlier process of this node left behind",
				slog.Int("group", e.Group), slog.Int("processes", len(members)))
			l.endOne(e)
		}
	}
}

// endOne kills until nothing is left, at most for sweepWait, because the next start may need the ports.
func (l *processTable) endOne(e entry) {
	deadline := time.Now().Add(sweepWait)
	for members := descendants(e.Group, e.Start, e.Mark); len(members) > 0; members = descendants(e.Group,
		e.Start, e.Mark) {
		if time.Now().After(deadline) {
			l.log.Error("left-over engines do not end", slog.Any("pids", members))
			return
		}
		killAll(members)
		time.Sleep(DefaultPollFirst)
	}
}

func killAll(pids []int) {
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// descendants lists the living processes of one launch: those that carry its mark, and those of its group if
// the recorded process still leads the group (start is its start time). A later user of the number is not
// touched. A zombie is not listed: it holds nothing, and its parent reaps it.
func descendants(group int, start, mark string) []int {
	var out []int
	leader, ok := readStat(group)
	same := ok && leader.start == start
	for _, s := range allProcesses() {
		if !s.zombie && (same && s.group == group || environHas(s.pid, mark)) {
			out = append(out, s.pid)
		}
	}
	return out
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
	return writeJSON(filepath.Join(dir, stopFile), true)
}

// writeJSON replaces a file as a whole and syncs it: a crash or a power cut leaves the old or the new file.
func writeJSON(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return diskfile.Replace(path, append(b, '\n'))
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
