package openai

import "bytes"

// Follow tells the watcher, after Reset, the route of the stream.
func (w *Watcher) Follow(r Route) {
	if m := &routes[r].events; m.isBlind {
		w.marks = m
	}
}

var (
	typeKey   = []byte(`"type"`)
	errorWord = []byte(`"error"`)
)

// isTypedError reports that data begins `{"type":"error"`.
func isTypedError(data []byte) bool {
	c := cursor{b: data}
	if !c.take('{') || c.peek() != '"' || !bytes.HasPrefix(data[c.i:], typeKey) {
		return false
	}
	c.i += len(typeKey)
	return c.take(':') && c.peek() == '"' && bytes.HasPrefix(data[c.i:], errorWord)
}

// marked classifies an event of a stream without choices.
func (w *Watcher) marked(data []byte) EventKind {
	if isTypedError(data) {
		return EventError
	}
	for _, mark := range w.marks.last {
		if bytes.Contains(data, []byte(mark)) {
			w.isOver = true
			return EventFinish
		}
	}
	if bytes.Contains(data, []byte(w.marks.content)) {
		return EventContent
	}
	return EventOther
}

// ParseResponseID finds the id of a response in an answer of Responses, or in the first event of its stream;
// nil if there is none.
func ParseResponseID(data []byte) (id []byte) {
	s := scanner{b: data}
	i := s.space(0)
	if s.peek(i) != '{' {
		return nil
	}
	s.members(i, 1, func(key []byte, _ bool, v Span) bool {
		raw := data[v.Start:v.End]
		switch {
		case string(key) == "id" && raw[0] == '"':
			id = raw[1 : len(raw)-1]
		case string(key) == "response" && raw[0] == '{':
			id = ParseResponseID(raw)
		}
		return len(id) == 0
	})
	return id
}
