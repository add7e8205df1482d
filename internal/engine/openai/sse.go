package openai

import "bytes"

// MaxEvent is how many bytes of an incomplete event a relay holds back. A longer event passes without
// inspection.
const MaxEvent = 64 << 10

// EventEnd is the length of the first whole server-sent event in b, its blank line included; -1 while the end
// is missing. Lines end in LF or CRLF. from is the number of bytes of b that an earlier call has searched, 0
// at first, so that a long event that arrives in pieces is not searched again from its start.
func EventEnd(b []byte, from int) int {
	i := max(from-2, 0) // "\n\r" may be the beginning of a blank line
	for {
		j := bytes.IndexByte(b[i:], '\n')
		if j < 0 {
			return -1
		}
		i += j + 1
		if i < len(b) && b[i] == '\n' {
			return i + 1
		}
		if i+1 < len(b) && b[i] == '\r' && b[i+1] == '\n' {
			return i + 2
		}
	}
}

var dataField = []byte("data:")

// EventData is the value of the event's first data line, without its line end; nil if the event has none (a
// comment). Engines write one data line per event.
func EventData(event []byte) []byte {
	for len(event) > 0 {
		line := event
		if i := bytes.IndexByte(event, '\n'); i >= 0 {
			line, event = event[:i], event[i+1:]
		} else {
			event = nil
		}
		if !bytes.HasPrefix(line, dataField) {
			continue
		}
		line = line[len(dataField):]
		if len(line) > 0 && line[0] == ' ' {
			line = line[1:]
		}
		return bytes.TrimSuffix(line, []byte{'\r'})
	}
	return nil
}

// EventKind is the meaning of an event of an answer's stream for a relay.
type EventKind uint8

// The kinds of events, from the least to the most final.
const (
	// EventOther has no content and is no token: a comment, a chunk without choices (usage).
	EventOther EventKind = iota
	// EventEmpty is a chunk that is a token without visible content: a role, or an empty delta while a UTF-8
	// character is incomplete.
	EventEmpty
	// EventContent carries text, a tool call, reasoning or token ids.
	EventContent
	// EventFinish carries a finish_reason other than abort.
	EventFinish
	// EventAbort carries finish_reason "abort": the engine gave the request up.
	EventAbort
	// EventError is an error object instead of a chunk.
	EventError
	// EventDone is `[DONE]`. It does not prove a complete answer: vLLM sends it after errors as well.
	EventDone
)

var eventKindNames = [...]string{"other", "empty", "content", "finish", "abort", "error", "done"}

func (k EventKind) String() string { return eventKindNames[k] }

// Watcher classifies the events of an answer's stream with as little parsing as possible: once the stream has
// begun, an event that does not finish a choice costs three short searches. The zero value is not ready: call
// Reset. Not safe for concurrent use; it never allocates once its bit set has grown to the largest number of
// choices.
type Watcher struct {
	want     int // choices of the request
	finished int // distinct choices that have a finish_reason
	blind    bool
	begun    bool
	seen     []uint64 // bit set of finished choices
	look     chunk
	mark     func(int) // w.markFinished, bound once so that no event allocates
}

// maxChoice bounds the bit set against an engine that writes absurd indexes; no request may ask for so many.
const maxChoice = 1 << 20

// Reset prepares the watcher for a stream of the given number of choices (n × prompts); below 1 counts as 1.
func (w *Watcher) Reset(choices int) {
	w.want, w.finished, w.blind, w.begun = max(choices, 1), 0, false, false
	clear(w.seen)
	if w.mark == nil {
		w.mark = w.markFinished
	}
}

// Begun tells the watcher that content has passed: from now on it does not distinguish role-only and empty
// chunks from others.
func (w *Watcher) Begun() { w.begun = true }

// Blind tells the watcher that it cannot count finished choices, because an event was too long to inspect or
// the engine does not send finish reasons. Complete is true from now on.
func (w *Watcher) Blind() { w.blind = true }

// Complete reports that every choice has a finish_reason, or that the watcher cannot know (Blind).
func (w *Watcher) Complete() bool { return w.blind || w.finished >= w.want }

// Finishing reports that some choice has its finish_reason, so that later events may carry the usage.
func (w *Watcher) Finishing() bool { return w.finished > 0 }

var (
	doneMark  = []byte("[DONE]")
	finishKey = []byte(`finish_reason"`) // without its first quote: a search for a rare letter runs ahead
	errorKey  = []byte(`"error"`)
	objectKey = []byte(`"object"`)
)

// Event classifies one whole event.
func (w *Watcher) Event(event []byte) EventKind {
	data := EventData(event)
	switch {
	case len(data) == 0:
		return EventOther
	case data[0] == '[' && bytes.Equal(bytes.TrimSpace(data), doneMark):
		return EventDone
	case beginsAsError(data):
		return EventError
	case w.begun && !finishes(data):
		return EventContent
	default:
		return w.inspect(data)
	}
}

// inspect parses a chunk, before the stream has begun and when a choice ends.
func (w *Watcher) inspect(data []byte) EventKind {
	w.look = chunk{onFinish: w.mark}
	if !w.look.read(data) {
		return EventContent // unknown content passes unchanged
	}
	switch {
	case w.look.failed:
		return EventError
	case w.look.abort:
		return EventAbort
	case w.look.finished > 0:
		return EventFinish
	case w.look.content || w.begun:
		return EventContent
	case w.look.choices > 0:
		return EventEmpty
	default:
		return EventOther
	}
}

func (w *Watcher) markFinished(index int) {
	if w.want == 1 {
		index = 0 // one choice, whatever the engine calls it
	}
	if index > maxChoice {
		return
	}
	for len(w.seen) <= index/64 {
		w.seen = append(w.seen, 0)
	}
	bit := uint64(1) << (index % 64)
	if w.seen[index/64]&bit == 0 {
		w.seen[index/64] |= bit
		w.finished++
	}
}

// beginsAsError reports that data begins `{"error"`, or `{"object":"error"` as older engines write it.
func beginsAsError(data []byte) bool {
	c := cursor{b: data}
	if !c.take('{') || c.peek() != '"' {
		return false
	}
	rest := data[c.i:]
	if bytes.HasPrefix(rest, errorKey) {
		c.i += len(errorKey)
		return c.take(':') && c.peek() != 'n' // "error": null is none
	}
	if !bytes.HasPrefix(rest, objectKey) {
		return false
	}
	c.i += len(objectKey)
	return c.take(':') && bytes.HasPrefix(data[min(c.i, len(data)):], errorKey)
}

// finishes reports that data holds a finish_reason that is a string. Inside a JSON string the quotes are
// escaped, so text that talks of a finish_reason is not mistaken for one.
func finishes(data []byte) bool {
	for {
		i := bytes.Index(data, finishKey)
		if i < 0 {
			return false
		}
		isKey := i > 0 && data[i-1] == '"'
		data = data[i+len(finishKey):]
		c := cursor{b: data}
		if isKey && c.take(':') && c.peek() != 'n' {
			return true
		}
	}
}

// Aborted reports that an answer that is not streamed ended with finish_reason "abort".
func Aborted(body []byte) bool {
	if !bytes.Contains(body, []byte(`"abort"`)) {
		return false
	}
	var k chunk
	return k.read(body) && k.abort
}
