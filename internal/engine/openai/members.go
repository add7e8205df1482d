package openai

import (
	"bytes"
	"slices"
)

// Members checks that body is one JSON object that keeps the limits of this package, and calls f for each of
// its members in their order, with the decoded key and the positions of the member and of its value. The key
// is valid during the call. Members ends with the first error of f. A fault of body is a *BodyError. It does
// not refuse a key that comes twice.
func Members(body []byte, f func(key []byte, member, value Span) error) error {
	s := scanner{b: body}
	i := s.space(0)
	if i == len(body) {
		s.fail(faultEmpty, i)
		return s.err(nil)
	}
	if body[i] != '{' {
		return notObject(&s, i)
	}
	var buf [64]byte
	var err error
	i = s.members(i, 1, func(key []byte, escaped bool, value Span) bool {
		if escaped {
			key = unescape(buf[:0], key)
		}
		err = f(key, Span{s.member, value.End}, value)
		return err == nil
	})
	switch {
	case err != nil:
		return err
	case i < 0:
		return s.err(nil)
	}
	if i = s.space(i); i < len(body) {
		s.fail(faultAfter, i)
		return s.err(nil)
	}
	return nil
}

// Elements calls f for each element of list, a JSON array that a scan has checked, in their order, until f
// returns false.
func Elements(list []byte, f func(element Span) bool) {
	s := scanner{b: list}
	i := s.space(1)
	if s.peek(i) == ']' {
		return
	}
	for {
		end := s.value(i, 1, nil)
		if end < 0 || !f(Span{i, end}) {
			return
		}
		if i = s.space(end); s.peek(i) != ',' {
			return
		}
		i = s.space(i + 1)
	}
}

// Prompts is the number of prompts in value, the checked value of a field prompt: the length of a list of
// strings or of lists of token ids, otherwise 1.
func Prompts(value []byte) int {
	if value[0] != '[' {
		return 1
	}
	var t tally
	s := scanner{b: value}
	s.array(0, 1, &t)
	if t.numbers+t.others > 0 {
		return 1
	}
	return max(t.strings+t.arrays, 1)
}

// Cuts collects members of one object that a copy leaves out, each with one comma, so that the rest is an
// object again. Reset begins it, Close ends it.
type Cuts struct {
	Spans []Span // for AppendEdited
	run   run
}

// Reset forgets all members.
func (c *Cuts) Reset() { c.Spans, c.run = c.Spans[:0], run{first: -1} }

// Member notes the next member of the object and whether it is cut.
func (c *Cuts) Member(member Span, isCut bool) { c.Spans = c.run.member(c.Spans, member, isCut) }

// Close is called after the last member.
func (c *Cuts) Close() { c.Spans = c.run.close(c.Spans) }

// AppendEdited appends the checked object body to dst without cuts and with members at its end; all other
// bytes stay as they are. Each of members is one or more members as JSON text, with commas between them; an
// empty one counts for nothing. dst must not overlap body.
func AppendEdited(dst, body []byte, cuts []Span, members ...[]byte) []byte {
	start, size := len(dst), len(body)
	for _, m := range members {
		size += len(m) + 1
	}
	dst = slices.Grow(dst, size)
	from, brace := 0, bytes.LastIndexByte(body, '}')
	for _, cut := range cuts {
		dst = append(dst, body[from:cut.Start]...)
		from = cut.End
	}
	dst = append(dst, body[from:brace]...)
	for _, m := range members {
		if len(m) == 0 {
			continue
		}
		dst = dst[:start+len(bytes.TrimRight(dst[start:], " \t\r\n"))]
		if dst[len(dst)-1] != '{' {
			dst = append(dst, ',')
		}
		dst = append(dst, m...)
	}
	return append(dst, body[brace:]...)
}
