package continuation

import (
	"bytes"
	"errors"
)

// ErrAnotherAnswer says that an engine did not go on with the answer, but began another one.
var ErrAnotherAnswer = errors.New("the engine does not go on with the answer, but begins another one")

// seam is where the second engine's text meets the first one's.
type seam struct {
	isOpen bool
	expect []byte // the end of the text, which the engine generates again
	head   []byte // the beginning of the text: an engine that generates it does not go on
	held   []byte // of the second engine's text, while it is not known which of the two it is
	prompt int    // tokens of the text that is prompt to the second engine
	again  int    // tokens that it generates again
	tokens int    // those that it does not
}

// Bounds of what shows that an engine begins the answer anew, in bytes.
const (
	leastHead = 16
	mostHead  = 32
)

// begin begins the seam at a position of the text. In a text that repeats its beginning, that beginning shows
// nothing.
func (s *seam) begin(text []byte, at int) {
	s.isOpen, s.held, s.expect = true, s.held[:0], append(s.expect[:0], text[at:]...)
	head := text[:min(len(text), mostHead)]
	if s.head = s.head[:0]; len(head) >= leastHead && bytes.LastIndex(text, head) == 0 {
		s.head = append(s.head, head...)
	}
}

// pass returns what of the second engine's text is new to the client. isLast: no more text comes.
func (s *seam) pass(raw []byte, isLast bool) (fresh []byte, err error) {
	if !s.isOpen {
		return raw, nil
	}
	s.held = append(s.held, raw...)
	switch {
	case len(s.head) > 0 && bytes.HasPrefix(s.held, s.head):
		return nil, ErrAnotherAnswer
	case bytes.HasPrefix(s.head, s.held) && len(s.head) > 0 && !isLast:
		return nil, nil
	case bytes.HasPrefix(s.held, s.expect):
		s.isOpen = false
		return s.held[len(s.expect):], nil
	case bytes.HasPrefix(s.expect, s.held):
		s.isOpen = !isLast // the answer ends within what is generated again
		return nil, nil
	}
	n := 0
	for s.held[n] == s.expect[n] {
		n++
	}
	if len(bytes.TrimSpace(s.expect[n:])) > 0 {
		return nil, ErrAnotherAnswer
	}
	s.isOpen = false
	return s.held[n:], nil
}
