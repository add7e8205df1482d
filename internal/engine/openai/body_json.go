package openai

import (
	"bytes"
	"slices"
)

// The shape limits of a request body. A body that exceeds one is refused with 400.
const (
	// maxDepth is how deep objects and arrays may nest, the body's own braces included.
	maxDepth = 64
	// maxKeys bounds the keys of all objects together: a logit_bias over a whole vocabulary fits, a body made
	// of keys does not.
	maxKeys = 1 << 18
	// maxFields bounds the top-level fields; each is compared with all before it. The APIs have about a
	// hundred.
	maxFields = 1024
)

// scanner checks JSON in one pass and allocates nothing. Its methods take an index and return the one behind
// what they read, -1 after fail.
type scanner struct {
	b       []byte
	keys    int   // seen so far, all objects
	fault   fault // why a method returned -1
	at      int   // where
	escaped bool  // the last string held a backslash
	member  int   // start of the member that a callback of members is called for

	inPrompt bool  // reads the value of prompt or messages
	media    media // of that value
}

func (s *scanner) fail(f fault, at int) int {
	s.fault, s.at = f, at
	return -1
}

// unexpected fails at i: the end of input is a cut, not a wrong character.
func (s *scanner) unexpected(i int) int {
	if i >= len(s.b) {
		return s.fail(faultCut, len(s.b))
	}
	return s.fail(faultByte, i)
}

// space is the index of the first byte from i on that is not white.
func (s *scanner) space(i int) int {
	for i < len(s.b) && (s.b[i] == ' ' || s.b[i] == '\n' || s.b[i] == '\t' || s.b[i] == '\r') {
		i++
	}
	return i
}

// peek is the byte at i, 0 at the end.
func (s *scanner) peek(i int) byte {
	if i < len(s.b) {
		return s.b[i]
	}
	return 0
}

// tally counts the elements of an array by kind; inner, if set, those of all arrays directly in it.
type tally struct {
	strings, numbers, arrays, others int
	first                            int // end of the first element that is no plain number
	inner                            *tally
}

// value checks one value at b[i] (no white space before it). depth is that of the container around it.
func (s *scanner) value(i, depth int, t *tally) int {
	switch c := s.peek(i); {
	case c == '"':
		return s.str(i)
	case c == '-' || '0' <= c && c <= '9':
		return s.number(i)
	case c == '[':
		return s.array(i, depth+1, t)
	case c == '{':
		return s.object(i, depth+1)
	default:
		return s.word(i, c)
	}
}

// word checks true, false and null.
func (s *scanner) word(i int, first byte) int {
	switch first {
	case 't':
		return s.literal(i, "true")
	case 'f':
		return s.literal(i, "false")
	case 'n':
		return s.literal(i, "null")
	case 'N', 'I':
		return s.fail(faultNotFinite, i)
	}
	return s.unexpected(i)
}

func (s *scanner) literal(i int, word string) int {
	got := s.b[i:min(i+len(word), len(s.b))]
	switch {
	case string(got) == word:
		return i + len(word)
	case string(got) == word[:len(got)] && i+len(got) == len(s.b):
		return s.fail(faultCut, len(s.b))
	}
	return s.fail(faultLiteral, i)
}

// digits skips at least one digit.
func (s *scanner) digits(i int) int {
	from := i
	for i < len(s.b) && s.b[i]-'0' <= 9 {
		i++
	}
	switch {
	case i > from:
		return i
	case i >= len(s.b):
		return s.fail(faultCut, i)
	}
	return s.fail(faultNumber, i)
}

// number checks a number; the JSON grammar has no leading zeros, no "+", no bare point.
func (s *scanner) number(i int) int {
	if s.b[i] == '-' {
		if i++; s.peek(i) == 'I' {
			return s.fail(faultNotFinite, i)
		}
	}
	zero := s.peek(i) == '0'
	from := i
	if i = s.digits(i); i < 0 {
		return -1
	}
	if zero && i > from+1 {
		return s.fail(faultNumber, from)
	}
	if s.peek(i) == '.' {
		if i = s.digits(i + 1); i < 0 {
			return -1
		}
	}
	if c := s.peek(i); c == 'e' || c == 'E' {
		return s.exponent(i + 1)
	}
	return i
}

func (s *scanner) exponent(i int) int {
	if c := s.peek(i); c == '+' || c == '-' {
		i++
	}
	return s.digits(i)
}

// array checks an array at b[i] and counts its elements in t, if there is one.
func (s *scanner) array(i, depth int, t *tally) int {
	if depth > maxDepth {
		return s.fail(faultDepth, i)
	}
	var ignored tally
	if t == nil {
		t = &ignored
	}
	if i = s.space(i + 1); s.peek(i) == ']' {
		return i + 1
	}
	for {
		i = s.ids(i, t)
		t.count(s.peek(i))
		if i = s.value(i, depth, t.inner); i < 0 {
			return -1
		}
		if t.first == 0 {
			t.first = i
		}
		switch i = s.space(i); s.peek(i) {
		case ',':
			i = s.space(i + 1)
		case ']':
			return i + 1
		default:
			return s.unexpected(i)
		}
	}
}

// ids skips plain positive numbers followed by a comma, the form of a prompt of token ids. It stops at the
// first other element; the last element is one, as it has no comma.
func (s *scanner) ids(i int, t *tally) int {
	for {
		j := i
		for j < len(s.b) && s.b[j]-'0' <= 9 {
			j++
		}
		if j == i || j >= len(s.b) || s.b[j] != ',' || s.b[i] == '0' {
			return i
		}
		t.numbers++
		i = s.space(j + 1)
	}
}

// count counts an element by its first byte.
func (t *tally) count(first byte) {
	switch {
	case first == '"':
		t.strings++
	case first == '[':
		t.arrays++
	case first == '-' || '0' <= first && first <= '9':
		t.numbers++
	default:
		t.others++
	}
}

// object checks an object at b[i].
func (s *scanner) object(i, depth int) int {
	return s.members(i, depth, nil)
}

// member is called for every member of an object, with its key as written between the quotes, whether the key
// has escapes, and the position of its value. It reports whether to go on.
type member func(key []byte, escaped bool, value Span) bool

// members checks the object at b[i] and calls f, if it is not nil, for each member. If f stops it, the index
// behind the last value is returned and the rest is not checked.
func (s *scanner) members(i, depth int, f member) int {
	if depth > maxDepth {
		return s.fail(faultDepth, i)
	}
	if i = s.space(i + 1); s.peek(i) == '}' {
		return i + 1
	}
	for {
		start := i
		key, value := s.key(i)
		if value < 0 {
			return -1
		}
		escaped := s.escaped
		if i = s.value(value, depth, nil); i < 0 {
			return -1
		}
		if depth == partDepth && s.inPrompt && isMedia(key) && s.b[value] != 'n' {
			s.media.parts, s.media.bytes = s.media.parts+1, s.media.bytes+i-value
		}
		if s.member = start; f != nil && !f(key, escaped, Span{value, i}) {
			return i
		}
		switch i = s.space(i); s.peek(i) {
		case ',':
			i = s.space(i + 1)
		case '}':
			return i + 1
		default:
			return s.unexpected(i)
		}
	}
}

// key checks a key and its colon; the index is that of the value.
func (s *scanner) key(i int) (key []byte, value int) {
	if s.peek(i) != '"' {
		return nil, s.unexpected(i)
	}
	if s.keys++; s.keys > maxKeys {
		return nil, s.fail(faultKeys, i)
	}
	end := s.str(i)
	if end < 0 {
		return nil, -1
	}
	colon := s.space(end)
	if s.peek(colon) != ':' {
		return nil, s.unexpected(colon)
	}
	return s.b[i+1 : end-1], s.space(colon + 1)
}

// err is the scanner's fault as an error; key is the top-level field it is in.
func (s *scanner) err(key []byte) error {
	return newBodyError(key, "%s", s.fault.text(s.at))
}

// openObject returns where the object begins that a body has to be.
func (s *scanner) openObject() (int, error) {
	i := s.space(0)
	switch {
	case i == len(s.b):
		s.fail(faultEmpty, i)
		return i, s.err(nil)
	case s.b[i] != '{':
		return i, notObject(s, i)
	}
	return i, nil
}

// Members checks that body is one JSON object that keeps the limits of this package, and calls f for each of
// its members in their order, with the decoded key and the positions of the member and of its value. The key
// is valid during the call. Members ends with the first error of f. A fault of body is a *BodyError. It does
// not refuse a key that comes twice.
func Members(body []byte, f func(key []byte, member, value Span) error) error {
	s := scanner{b: body}
	i, err := s.openObject()
	if err != nil {
		return err
	}
	var buf [64]byte
	i = s.members(i, 1, func(key []byte, escaped bool, value Span) bool {
		if escaped {
			key = Unescape(buf[:0], key)
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

// Cuts collects members of one object that a copy leaves out, so that the rest is an object again: a run of
// them is cut with the comma behind it, the last run with the comma before it. Reset begins it, Close ends
// it.
type Cuts struct {
	Spans []Span // for AppendEdited

	first   int // start of the run, -1 outside one
	last    int // end of its last member
	kept    int // end of the last member that stays
	anyKept bool
}

// Reset forgets all members.
func (c *Cuts) Reset() { *c = Cuts{Spans: c.Spans[:0], first: -1} }

// Member notes the next member of the object and whether it is cut.
func (c *Cuts) Member(m Span, isCut bool) {
	switch {
	case isCut && c.first < 0:
		c.first, c.last = m.Start, m.End
	case isCut:
		c.last = m.End
	default:
		if c.first >= 0 {
			c.Spans = append(c.Spans, Span{c.first, m.Start})
		}
		c.first, c.kept, c.anyKept = -1, m.End, true
	}
}

// Close is called after the last member.
func (c *Cuts) Close() {
	if c.first < 0 {
		return
	}
	if c.anyKept {
		c.first = c.kept
	}
	c.Spans = append(c.Spans, Span{c.first, c.last})
}

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
