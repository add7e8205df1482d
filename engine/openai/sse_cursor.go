package openai

import "bytes"

// cursor walks over JSON that an engine wrote. It does not validate: what it cannot read sets bad, and the
// walk ends. It never allocates, and it does not unescape: engines write their keys and finish reasons
// plainly.
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

// escaped says that the byte behind s is escaped: s ends in an odd number of backslashes.
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
