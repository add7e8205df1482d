package openai

import (
	"bytes"
	"strconv"
)

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

// EventData is the value of the event's data line, without its line end; nil if the event has none (a
// comment). Several data lines are joined, in new memory; engines mostly write one.
func EventData(event []byte) (data []byte) {
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
		line = bytes.TrimSuffix(line, []byte{'\r'})
		if data == nil {
			data = line[:len(line):len(line)]
			continue
		}
		data = append(append(data, '\n'), line...)
	}
	return data
}

// EventKind is the meaning of an event of an answer's stream for a relay.
type EventKind uint8

// The kinds of events, from the least to the most final.
const (
	EventOther EventKind = iota // no content and no token: a comment, a chunk without choices (usage)
	// a token without visible content: a role, or an empty delta while a UTF-8 character is incomplete
	EventEmpty
	EventContent // text, a tool call, reasoning or token ids
	EventFinish  // a finish_reason other than abort
	EventAbort   // finish_reason "abort": the engine gave the request up
	EventError   // an error object instead of a chunk
	EventDone    // `[DONE]`. It does not prove a complete answer: vLLM sends it after errors as well
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
	isOver   bool        // an event that ends a good stream has passed; of a stream with marks
	marks    *eventMarks // of a route whose stream has no choices; else nil
	seen     []uint64    // bit set of finished choices
	look     chunk
	mark     func(int) // w.markFinished, bound once so that no event allocates
}

// maxChoice bounds the bit set against an engine that writes absurd indexes; no request may ask for so many.
const maxChoice = 1 << 20

// Reset prepares the watcher for a stream of the given number of choices (n × prompts); below 1 counts as 1.
func (w *Watcher) Reset(choices int) {
	w.want, w.finished, w.blind, w.begun = max(choices, 1), 0, false, false
	w.isOver, w.marks = false, nil
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
func (w *Watcher) Complete() bool {
	if w.marks != nil && !w.blind {
		return w.isOver || len(w.marks.last) == 0
	}
	return w.blind || w.finished >= w.want
}

// Finishing reports that events may carry the usage: some choice has its finish_reason, or the stream has no
// choices.
func (w *Watcher) Finishing() bool { return w.finished > 0 || w.marks != nil }

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
	case w.marks != nil:
		return w.marked(data)
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

// cursor reads JSON that an engine wrote. It does not validate: input that it cannot read sets bad and ends
// the reading. It never allocates and does not unescape, because engines write keys and finish reasons
// without escapes.
type cursor struct {
	b   []byte
	i   int
	bad bool
}

// peek skips white space and gives the next byte, 0 at the end.
func (c *cursor) peek() byte {
	for c.i < len(c.b) {
		switch c.b[c.i] {
		case ' ', '\t', '\r', '\n':
			c.i++
		default:
			return c.b[c.i]
		}
	}
	return 0
}

// take consumes ch if it is next.
func (c *cursor) take(ch byte) bool {
	if c.peek() != ch {
		return false
	}
	c.i++
	return true
}

// want consumes ch or ends the walk.
func (c *cursor) want(ch byte) {
	if !c.take(ch) {
		c.bad = true
	}
}

// str consumes a string and gives it without its quotes, escapes as written.
func (c *cursor) str() []byte {
	if !c.take('"') {
		c.bad = true
		return nil
	}
	start := c.i
	for c.i < len(c.b) {
		j := bytes.IndexByte(c.b[c.i:], '"')
		if j < 0 {
			break
		}
		c.i += j + 1
		if !escaped(c.b[start : c.i-1]) {
			return c.b[start : c.i-1]
		}
	}
	c.i, c.bad = len(c.b), true
	return nil
}

// escaped reports that the byte behind s is escaped: s ends in an odd number of backslashes.
func escaped(s []byte) bool {
	n := 0
	for n < len(s) && s[len(s)-1-n] == '\\' {
		n++
	}
	return n%2 == 1
}

// skip consumes a value and says whether it holds something: not null, false, "", [] or {}.
func (c *cursor) skip() bool {
	switch c.peek() {
	case '"':
		return len(c.str()) > 0
	case '{', '[':
		return c.skipNested()
	case 0, ',', ':', '}', ']':
		c.bad = true
		return false
	default:
		word := c.word()
		return word[0] != 'n' && word[0] != 'f'
	}
}

// word consumes a number or a literal; there is at least one byte of it.
func (c *cursor) word() []byte {
	start := c.i
	for c.i < len(c.b) {
		switch c.b[c.i] {
		case ',', ':', '}', ']', '{', '[', '"', ' ', '\t', '\r', '\n':
			return c.b[start:c.i]
		}
		c.i++
	}
	return c.b[start:c.i]
}

// skipNested consumes an object or array of any depth, without recursion.
func (c *cursor) skipNested() bool {
	c.i++
	first := c.peek()
	filled := first != '}' && first != ']'
	for depth := 1; depth > 0 && !c.bad; {
		switch c.peek() {
		case '"':
			c.str()
			continue
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		case 0:
			c.bad = true
			return false
		}
		c.i++
	}
	return filled
}

// object calls member for each key; member consumes the value.
func (c *cursor) object(member func(c *cursor, key []byte)) {
	c.want('{')
	if c.bad || c.take('}') {
		return
	}
	for !c.bad {
		key := c.str()
		c.want(':')
		if c.bad {
			return
		}
		member(c, key)
		if !c.take(',') {
			c.want('}')
			return
		}
	}
}

// array calls element for each value; element consumes it.
func (c *cursor) array(element func(c *cursor)) {
	c.want('[')
	if c.bad || c.take(']') {
		return
	}
	for !c.bad {
		element(c)
		if !c.take(',') {
			c.want(']')
			return
		}
	}
}

// chunk is the summary of a chunk's or an answer's JSON for a relay.
type chunk struct {
	choices  int  // entries of "choices"
	content  bool // some choice shows something
	abort    bool // some choice ended with "abort"
	finished int  // choices that carry a finish_reason
	failed   bool // "error" instead of an answer
	onFinish func(index int)

	index  int
	finish bool
	at     cursor // here and not on the stack: its address goes to callbacks
}

// read walks over data; false if it is no JSON object.
func (k *chunk) read(data []byte) bool {
	k.at = cursor{b: data}
	k.at.object(k.member)
	return !k.at.bad
}

func (k *chunk) member(c *cursor, key []byte) {
	switch string(key) {
	case "choices":
		if c.peek() == '[' {
			c.array(k.choice)
			return
		}
		c.skip()
	case "error":
		k.failed = c.skip() || k.failed
	case "object":
		if c.peek() == '"' {
			k.failed = string(c.str()) == "error" || k.failed
			return
		}
		c.skip()
	default:
		c.skip()
	}
}

func (k *chunk) choice(c *cursor) {
	k.choices++
	k.index, k.finish = 0, false
	if c.peek() != '{' {
		c.skip()
		return
	}
	c.object(k.choiceMember)
	if !k.finish {
		return
	}
	k.finished++
	if k.onFinish != nil {
		k.onFinish(k.index)
	}
}

func (k *chunk) choiceMember(c *cursor, key []byte) {
	switch string(key) {
	case "index":
		k.readIndex(c)
	case "finish_reason":
		k.readFinish(c)
	case "text", "token_ids":
		k.content = c.skip() || k.content
	case "delta":
		if c.peek() == '{' {
			c.object(k.deltaMember)
			return
		}
		c.skip()
	default:
		c.skip()
	}
}

// deltaMember counts every member but the role as content: text, reasoning, refusal, tool calls, and members
// of later engines.
func (k *chunk) deltaMember(c *cursor, key []byte) {
	filled := c.skip()
	k.content = k.content || filled && string(key) != "role"
}

func (k *chunk) readIndex(c *cursor) {
	if ch := c.peek(); ch < '0' || ch > '9' {
		c.skip()
		return
	}
	n, err := strconv.Atoi(string(c.word()))
	if err != nil {
		c.bad = true
		return
	}
	k.index = n
}

func (k *chunk) readFinish(c *cursor) {
	if c.peek() != '"' {
		k.finish = c.skip()
		return
	}
	reason := c.str()
	k.finish = len(reason) > 0
	k.abort = k.abort || string(reason) == "abort"
}
