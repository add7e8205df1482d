package client

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// AllRanks in Group or Rank of a LogQuery means every one; AllLines in Tail means every line that is kept.
const (
	AllRanks = -1
	AllLines = -1
)

// LogQuery selects log lines. The zero value asks for rank 0 of group 0 and no old line: set AllRanks and
// AllLines.
type LogQuery struct {
	App    string
	Group  int       // AllRanks, or a group
	Rank   int       // AllRanks, or a rank of Group
	Since  time.Time // zero = no limit
	Tail   int       // last lines per rank; AllLines = all
	Follow bool      // go on with new lines
}

func (q *LogQuery) query() url.Values {
	v := url.Values{}
	for key, n := range map[string]int{"group": q.Group, "rank": q.Rank, "tail": q.Tail} {
		if n >= 0 {
			v.Set(key, strconv.Itoa(n))
		}
	}
	if !q.Since.IsZero() {
		v.Set("since", q.Since.Format(time.RFC3339Nano))
	}
	if q.Follow {
		v.Set("follow", "true")
	}
	return v
}

// LogLine is one line of one engine.
type LogLine struct {
	Time   time.Time
	App    string
	Group  int
	Rank   int
	Stream string // stdout | stderr
	Text   string // without its line end
}

// String returns the line as the API sends it, without line end: TIME APP/GROUP/RANK STREAM TEXT.
func (l LogLine) String() string {
	return fmt.Sprintf("%s %s/%d/%d %s %s", l.Time.UTC().Format(time.RFC3339Nano), l.App, l.Group, l.Rank,
		l.Stream, joinLines(l.Text))
}

// joinLines removes line breaks from an engine's output.
func joinLines(s string) string { return strings.NewReplacer("\r", "", "\n", " ").Replace(s) }

// ParseLogLine parses the result of LogLine.String.
func ParseLogLine(s string) (LogLine, error) {
	parts := strings.SplitN(s, " ", 4)
	if len(parts) != 4 {
		return LogLine{}, newError(CodeUpstream, "", "log line has %d of 4 parts", len(parts))
	}
	l := LogLine{Stream: parts[2], Text: parts[3]}
	var err error
	if l.Time, err = time.Parse(time.RFC3339Nano, parts[0]); err != nil {
		return LogLine{}, newError(CodeUpstream, "", "log line: %w", err)
	}
	app, rank, _ := strings.Cut(parts[1], "/")
	var ok bool
	if l.Group, l.Rank, ok = ParseRankName(rank); !ok || app == "" {
		return l, newError(CodeUpstream, "", "log line: %q is not APP/GROUP/RANK", parts[1])
	}
	l.App = app
	return l, nil
}

// Event is one change of state.
type Event struct {
	Number uint64    `json:"number"` // from 1 per process of the node; a jump means that events were dropped
	Time   time.Time `json:"time"`
	// unit, node, a status of an application, router-reset, load-uneven, load-even
	Kind   string `json:"kind"`
	App    string `json:"app,omitempty"`
	Unit   string `json:"unit,omitempty"`
	Node   string `json:"node,omitempty"` // of kind node
	Rank   *int   `json:"rank,omitempty"` // the rank that caused it, if one did
	Epoch  uint64 `json:"epoch,omitempty"`
	From   string `json:"from,omitempty"`  // what it was before; empty: nothing, or an earlier leader knew
	Phase  string `json:"phase,omitempty"` // what it is now
	Reason string `json:"reason,omitempty"`
	Action string `json:"action,omitempty"` // what dpserve does because of it
	// Former: an earlier leader saw it. A new leader knows of each unit the last change alone.
	Former bool `json:"former,omitempty"`
}

// Subject names what the event is about: a node, a unit or an application.
func (e *Event) Subject() string { return cmp.Or(e.Node, e.Unit, e.App) }

// readEvent reads the next server-sent event, whose data is one line of JSON. The stream has no regular end.
func readEvent(lines *bufio.Reader) (Event, error) {
	for {
		line, err := readLine(lines)
		if err != nil {
			return Event{}, err
		}
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue // ids, comments, blank lines
		}
		var e struct {
			APIVersion string `json:"apiVersion"`
			Event
		}
		if err := json.Unmarshal(data, &e); err != nil || e.APIVersion != APIVersion {
			return Event{}, newError(CodeUpstream, versionHint, "event stream cannot be read")
		}
		return e.Event, nil
	}
}

// readLine reads a line without its end, at most maxEvent bytes. It drops an unfinished line at the end of
// the stream.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if len(line) > maxEvent {
			return nil, newError(CodeUpstream, versionHint, "event is longer than %d bytes", maxEvent)
		}
		if err == nil {
			return bytes.TrimRight(line, "\r\n"), nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
	}
}
