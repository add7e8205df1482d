package openai

import (
	"bytes"
	"strconv"
)

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
