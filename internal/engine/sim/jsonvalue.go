package sim

import (
	"fmt"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// kind is the JSON type of a value.
type kind uint8

const (
	kindAbsent kind = iota
	kindNull
	kindBool
	kindNumber
	kindString
	kindArray
	kindObject
)

// value is one parsed JSON value. Own parser instead of encoding/json: errors need Python's words and
// positions, token id lists need to stay small, and numbers need to keep their literal.
type value struct {
	kind  kind
	flag  bool
	text  string   // string content, or a number's literal
	keys  []string // object: of items
	items []value  // array or object; empty where ints is used
	ints  []int64  // array of integers only
}

// len is the number of elements of an array or object.
func (v value) len() int { return max(len(v.items), len(v.ints)) }

// at is element i of an array.
func (v value) at(i int) value {
	if v.ints != nil {
		return value{kind: kindNumber, text: strconv.FormatInt(v.ints[i], 10)}
	}
	return v.items[i]
}

// get is the member of an object; the last one of a repeated key, as Python takes it.
func (v value) get(key string) value {
	for i := len(v.keys) - 1; i >= 0; i-- {
		if v.keys[i] == key {
			return v.items[i]
		}
	}
	return value{}
}

// present reports that the value is there and not null.
func (v value) present() bool { return v.kind > kindNull }

// maxDepth bounds nesting: a body is outside data, the parser recurses.
const maxDepth = 200

// syntaxError is a malformed body: what Python's json module says, and where (in characters).
type syntaxError struct {
	msg string
	pos int
}

func (e *syntaxError) Error() string { return fmt.Sprintf("%s at character %d", e.msg, e.pos) }

type parser struct {
	in  string
	pos int
}

// parseJSON parses a whole body. The error is a *syntaxError.
func parseJSON(in string) (value, error) {
	p := &parser{in: in}
	p.space()
	v, err := p.value(0)
	if err != nil {
		return value{}, err
	}
	p.space()
	if p.pos < len(p.in) {
		return value{}, p.fail("Extra data")
	}
	return v, nil
}

func (p *parser) fail(msg string) error { return p.failAt(msg, p.pos) }

func (p *parser) failAt(msg string, at int) error {
	return &syntaxError{msg: msg, pos: utf8.RuneCountInString(p.in[:min(at, len(p.in))])}
}

func (p *parser) space() {
	for p.pos < len(p.in) {
		switch p.in[p.pos] {
		case ' ', '\t', '\n', '\r':
			p.pos++
		default:
			return
		}
	}
}

func (p *parser) peek() byte {
	if p.pos < len(p.in) {
		return p.in[p.pos]
	}
	return 0
}

func (p *parser) value(depth int) (value, error) {
	if depth > maxDepth {
		return value{}, p.fail("Too many nested values")
	}
	switch c := p.peek(); {
	case c == '"':
		s, err := p.str()
		return value{kind: kindString, text: s}, err
	case c == '{':
		return p.object(depth)
	case c == '[':
		return p.array(depth)
	case c == '-' || c >= '0' && c <= '9':
		return p.number()
	case p.word("true"):
		return value{kind: kindBool, flag: true}, nil
	case p.word("false"):
		return value{kind: kindBool}, nil
	case p.word("null"):
		return value{kind: kindNull}, nil
	}
	return value{}, p.fail("Expecting value")
}

func (p *parser) word(w string) bool {
	if len(p.in)-p.pos >= len(w) && p.in[p.pos:p.pos+len(w)] == w {
		p.pos += len(w)
		return true
	}
	return false
}

func (p *parser) object(depth int) (value, error) {
	v := value{kind: kindObject}
	p.pos++
	p.space()
	if p.peek() == '}' {
		p.pos++
		return v, nil
	}
	for {
		if p.peek() != '"' {
			return value{}, p.fail("Expecting property name enclosed in double quotes")
		}
		key, err := p.str()
		if err != nil {
			return value{}, err
		}
		p.space()
		if p.peek() != ':' {
			return value{}, p.fail("Expecting ':' delimiter")
		}
		p.pos++
		p.space()
		item, err := p.value(depth + 1)
		if err != nil {
			return value{}, err
		}
		v.keys, v.items = append(v.keys, key), append(v.items, item)
		if done, err := p.comma('}'); done || err != nil {
			return v, err
		}
	}
}

// comma passes the separator behind a member or an element; done = the closing bracket came instead.
func (p *parser) comma(closing byte) (done bool, err error) {
	p.space()
	switch p.peek() {
	case closing:
		p.pos++
		return true, nil
	case ',':
		p.pos++
		p.space()
		return false, nil
	}
	return false, p.fail("Expecting ',' delimiter")
}

func (p *parser) array(depth int) (value, error) {
	v := value{kind: kindArray}
	p.pos++
	p.space()
	if p.peek() == ']' {
		p.pos++
		return v, nil
	}
	for {
		item, err := p.value(depth + 1)
		if err != nil {
			return value{}, err
		}
		v.push(&item)
		if done, err := p.comma(']'); done || err != nil {
			return v, err
		}
	}
}

// push appends an element: as a plain integer as long as all of them are.
func (v *value) push(item *value) {
	if len(v.items) == 0 && item.kind == kindNumber {
		if n, err := strconv.ParseInt(item.text, 10, 64); err == nil {
			v.ints = append(v.ints, n)
			return
		}
	}
	if v.ints != nil {
		for _, n := range v.ints {
			v.items = append(v.items, value{kind: kindNumber, text: strconv.FormatInt(n, 10)})
		}
		v.ints = nil
	}
	v.items = append(v.items, *item)
}

func (p *parser) digits() int {
	from := p.pos
	for c := p.peek(); c >= '0' && c <= '9'; c = p.peek() {
		p.pos++
	}
	return p.pos - from
}

func (p *parser) number() (value, error) {
	from := p.pos
	if p.peek() == '-' {
		p.pos++
	}
	if p.peek() == '0' {
		p.pos++
	} else if p.digits() == 0 {
		return value{}, p.failAt("Expecting value", from)
	}
	end := p.pos
	if p.peek() == '.' {
		p.pos++
		if p.digits() == 0 {
			p.pos = end // Python ends the number in front of a dangling point
			return value{kind: kindNumber, text: p.in[from:end]}, nil
		}
		end = p.pos
	}
	if c := p.peek(); c == 'e' || c == 'E' {
		p.pos++
		if c := p.peek(); c == '+' || c == '-' {
			p.pos++
		}
		if p.digits() == 0 {
			p.pos = end
		}
		end = p.pos
	}
	return value{kind: kindNumber, text: p.in[from:end]}, nil
}

func (p *parser) str() (string, error) {
	start := p.pos
	p.pos++
	from := p.pos
	for p.pos < len(p.in) {
		switch c := p.in[p.pos]; {
		case c == '"':
			s := p.in[from:p.pos]
			p.pos++
			return s, nil
		case c == '\\':
			return p.escaped(start, from)
		case c < 0x20:
			return "", p.fail("Invalid control character at")
		}
		p.pos++
	}
	return "", p.failAt("Unterminated string starting at", start)
}

// escaped goes on with a string at its first backslash.
func (p *parser) escaped(start, from int) (string, error) {
	out := []byte(p.in[from:p.pos])
	for p.pos < len(p.in) {
		switch c := p.in[p.pos]; {
		case c == '"':
			p.pos++
			return string(out), nil
		case c == '\\':
			var err error
			if out, err = p.escape(out, start); err != nil {
				return "", err
			}
		case c < 0x20:
			return "", p.fail("Invalid control character at")
		default:
			out = append(out, c)
			p.pos++
		}
	}
	return "", p.failAt("Unterminated string starting at", start)
}

func (p *parser) escape(out []byte, start int) ([]byte, error) {
	at := p.pos
	p.pos++
	if p.pos >= len(p.in) {
		return nil, p.failAt("Unterminated string starting at", start)
	}
	c := p.in[p.pos]
	p.pos++
	switch c {
	case '"', '\\', '/':
		return append(out, c), nil
	case 'b':
		return append(out, '\b'), nil
	case 'f':
		return append(out, '\f'), nil
	case 'n':
		return append(out, '\n'), nil
	case 'r':
		return append(out, '\r'), nil
	case 't':
		return append(out, '\t'), nil
	case 'u':
		r, ok := p.hex()
		if !ok {
			return nil, p.failAt("Invalid \\uXXXX escape", at+1)
		}
		return utf8.AppendRune(out, p.surrogate(r)), nil
	}
	return nil, p.failAt("Invalid \\escape", at)
}

func (p *parser) hex() (rune, bool) {
	if len(p.in)-p.pos < 4 {
		return 0, false
	}
	n, err := strconv.ParseUint(p.in[p.pos:p.pos+4], 16, 32)
	if err != nil {
		return 0, false
	}
	p.pos += 4
	return rune(n), true //nolint:gosec // four hex digits
}

// surrogate joins r with the low half behind it; a lone half becomes U+FFFD.
func (p *parser) surrogate(r rune) rune {
	if !utf16.IsSurrogate(r) {
		return r
	}
	back := p.pos
	if p.word(`\u`) {
		if low, ok := p.hex(); ok {
			if joined := utf16.DecodeRune(r, low); joined != utf8.RuneError {
				return joined
			}
		}
	}
	p.pos = back
	return utf8.RuneError
}

const hexDigits = "0123456789abcdef"

// appendJSON appends s as a JSON string with its quotes, spelled as the imitated server does: short escapes,
// everything above ASCII as it is, bytes that form no character as U+FFFD.
func appendJSON[S string | []byte](dst []byte, s S) []byte {
	dst = append(dst, '"')
	dst = appendEscaped(dst, s)
	return append(dst, '"')
}

func appendEscaped[S string | []byte](dst []byte, s S) []byte {
	from := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= utf8.RuneSelf {
			n := runeLen(s, i)
			if n == 0 {
				dst = append(append(dst, s[from:i]...), "\uFFFD"...)
				n = 1
				from = i + 1
			}
			i += n
			continue
		}
		if c >= 0x20 && c != '"' && c != '\\' {
			i++
			continue
		}
		dst = appendControl(append(dst, s[from:i]...), c)
		i++
		from = i
	}
	return append(dst, s[from:]...)
}

// runeLen is the length of the character at i, 0 if there is none.
func runeLen[S string | []byte](s S, i int) int {
	var buf [utf8.UTFMax]byte
	n := copy(buf[:], s[i:min(len(s), i+utf8.UTFMax)])
	r, size := utf8.DecodeRune(buf[:n])
	if r == utf8.RuneError && size <= 1 {
		return 0
	}
	return size
}

func appendControl(dst []byte, c byte) []byte {
	switch c {
	case '"', '\\':
		return append(dst, '\\', c)
	case '\n':
		return append(dst, '\\', 'n')
	case '\r':
		return append(dst, '\\', 'r')
	case '\t':
		return append(dst, '\\', 't')
	case '\b':
		return append(dst, '\\', 'b')
	case '\f':
		return append(dst, '\\', 'f')
	}
	return append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
}

func appendIDList(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}

// appendStringOrNull writes "" as null.
func appendStringOrNull(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return appendJSON(dst, s)
}
