package state

import (
	"strings"
	"time"
)

// LastEnd is how a unit ended last without an order of the leader: an engine failed, or a node was lost. It
// outlives the next starts of the unit. Nobody writes into one: machines and records share it.
type LastEnd struct {
	At    int64  `json:"at"`              // unix ms, leader's clock
	Exit  string `json:"exit,omitempty"`  // of the engine that ended by itself: "code 1", "signal killed"
	Cause string `json:"cause,omitempty"` // as Unit.Reason
	Line  string `json:"line,omitempty"`  // the last one of the engine's log, cut to lastLineBytes
}

// lastLineBytes bounds LastEnd.Line, because every unit of the replicated state may have one.
const lastLineBytes = 200

// noteEnd notes that the grant in hand has ended, as its nodes have told.
func (m *Machine) noteEnd(now time.Time) {
	m.LastEnd = &LastEnd{
		At: now.UnixMilli(), Exit: m.Exit, Cause: cutLine(m.Reason, logLineBytes),
		Line: lastLine(m.LogTail),
	}
}

// noteLoss notes that the grant in hand has ended with a node. If its engines were ending already, what ended
// them is the cause.
func (m *Machine) noteLoss(now time.Time, reason string) {
	if m.Phase == Fenced || m.Phase == Killing {
		m.noteEnd(now)
		return
	}
	m.LastEnd = &LastEnd{At: now.UnixMilli(), Cause: cutLine(reason, logLineBytes)}
}

// lastLine returns the last line that is not empty.
func lastLine(lines []string) string {
	for i := len(lines) - 1; i >= 0; i-- {
		if line := strings.TrimSpace(lines[i]); line != "" {
			return cutLine(line, lastLineBytes)
		}
	}
	return ""
}

// cutLine returns at most so many bytes of a text, without a broken character at its end.
func cutLine(s string, most int) string { return strings.ToValidUTF8(s[:min(len(s), most)], "") }
