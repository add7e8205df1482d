package openai

import "strconv"

// chunk is what a relay wants to know of a chunk's or an answer's JSON.
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

// deltaMember takes anything but the role as content: text, reasoning, refusal, tool calls, and what later
// engines add.
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
