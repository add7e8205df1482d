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
)

// File names in the data dir.
const (
	ledgerFile = "pgids"
	epochsFile = "epochs.json"
	logsDir    = "logs"
)

// sweepWait bounds how long a start waits for killed leftovers to vanish.
const sweepWait = 5 * time.Second

// entry is one process group a node started.
type entry struct {
	Group int    `json:"group"`
	Start string `json:"start"` // of its leader, in clock ticks since boot
	Mark  string `json:"mark"`  // environment entry of every member
}

// ledger keeps the process groups that live, on disk: a node that was killed leaves engines only where the parent-death
// signal did not reach (children of a dead front process), and its successor finds them here.
type ledger struct {
	path string // "" = memory only
	id   string // of this node process
	log  *slog.Logger

	mu      sync.Mutex
	entries map[int]entry
}

func newLedger(dir, id string, log *slog.Logger) *ledger {
	l := &ledger{id: id, log: log, entries: map[int]entry{}}
	if dir != "" {
		l.path = filepath.Join(dir, ledgerFile)
	}
	return l
}

// mark is the environment entry by which members of our groups are known, whatever they call themselves (TRAPS 24).
func (l *ledger) mark() string { return "DPSERVE_OWNER=" + l.id }

func (l *ledger) add(group int) {
	s, _ := readStat(group)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries[group] = entry{Group: group, Start: s.start, Mark: l.mark()}
	l.save()
}

func (l *ledger) remove(group int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.entries[group]; ok {
		delete(l.entries, group)
		l.save()
	}
}

// save writes the ledger under mu. A ledger that cannot be written costs the sweep after a crash, not the running engines.
func (l *ledger) save() {
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

// sweep ends what an earlier process of this node left behind, and begins an empty ledger.
func (l *ledger) sweep() error {
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

func (l *ledger) end(left []entry) {
	byGroup := map[int][]stat{}
	for _, s := range allProcesses() {
		if !s.zombie {
			byGroup[s.group] = append(byGroup[s.group], s)
		}
	}
	for _, e := range left {
		if members := byGroup[e.Group]; ours(e, members) {
			l.log.Warn("ending engines that an earlier process of this node left behind", slog.Int("group", e.Group), slog.Int("processes", len(members)))
			_ = syscall.Kill(-e.Group, syscall.SIGKILL)
			awaitEmpty(e.Group)
		}
	}
}

// ours says whether a group is the one that was recorded and not a later user of its number: its leader has the recorded
// start time, or, where the leader is gone, every member carries the mark.
func ours(e entry, members []stat) bool {
	for _, s := range members {
		if s.pid == e.Group {
			return s.start == e.Start
		}
	}
	for _, s := range members {
		if !environHas(s.pid, e.Mark) {
			return false
		}
	}
	return len(members) > 0
}

func awaitEmpty(group int) {
	for deadline := time.Now().Add(sweepWait); time.Now().Before(deadline) && len(groupMembers(group)) > 0; {
		time.Sleep(DefaultPollFirst)
	}
}

// writeJSON replaces a file as a whole: a crash leaves the old or the new one.
func writeJSON(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// readJSON reads a file if there is one.
func readJSON(path string, v any) error {
	b, err := os.ReadFile(path) //nolint:gosec // a file of the data dir
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
