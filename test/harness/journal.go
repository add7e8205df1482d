package harness

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// Journal is what a cluster logs, as lines of JSON. Safe for concurrent use.
type Journal struct {
	started func(unit string, rank int, epoch uint64, url string) // told of every engine; nil = nobody

	mu    sync.Mutex
	lines []string
}

// entry is the part of a line that the harness reads.
type entry struct {
	Level string
	Msg   string
	Unit  string
	Rank  int
	Epoch uint64
	URL   string
	Time  time.Time
}

// Write takes one line.
func (j *Journal) Write(line []byte) (int, error) {
	var e entry
	if err := json.Unmarshal(line, &e); err != nil {
		return 0, fmt.Errorf("read the log line %q: %w", line, err)
	}
	j.mu.Lock()
	j.lines = append(j.lines, string(line))
	j.mu.Unlock()
	if e.Msg == "engine started" && j.started != nil {
		j.started(e.Unit, e.Rank, e.Epoch, e.URL)
	}
	return len(line), nil
}

// Errors are the lines of level ERROR.
func (j *Journal) Errors() []string { return j.Find(`"level":"` + slog.LevelError.String() + `"`) }

// Find are the lines that hold every one of the texts.
func (j *Journal) Find(texts ...string) []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	var out []string
	for _, line := range j.lines {
		all := true
		for _, text := range texts {
			all = all && strings.Contains(line, text)
		}
		if all {
			out = append(out, line)
		}
	}
	return out
}

// Times are the moments of the lines that hold every one of the texts.
func (j *Journal) Times(texts ...string) []time.Time {
	var out []time.Time
	for _, line := range j.Find(texts...) {
		var e entry
		if json.Unmarshal([]byte(line), &e) == nil { // Write has read it once
			out = append(out, e.Time)
		}
	}
	return out
}

func (j *Journal) String() string { return strings.Join(j.Find(), "") }
