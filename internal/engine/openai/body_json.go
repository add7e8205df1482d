package openai

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
	return newBodyError(s.fault, key, "%s", s.fault.text(s.at))
}
