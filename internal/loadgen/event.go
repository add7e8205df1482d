package loadgen

import (
	"bytes"
	"encoding/json"
	"errors"
)

// errEventTooLong ends a stream with an event over maxEvent bytes.
var errEventTooLong = errors.New("an event of the stream is longer than 4 MiB")

const maxEvent = 4 << 20

// splitter splits a stream of server-sent events into its data lines, independent of the boundaries of reads.
// A line ends in LF or CRLF. It skips lines without data, and expects one data line per event, as engines
// send them.
type splitter struct {
	rest []byte // the unfinished line
}

// feed calls line with the data of each line that ends in p. data is valid only during the call.
func (s *splitter) feed(p []byte, line func(data []byte)) error {
	for {
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			break
		}
		whole := p[:i]
		if len(s.rest) > 0 {
			s.rest = append(s.rest, whole...)
			whole = s.rest
		}
		if data, ok := parseDataLine(whole); ok {
			line(data)
		}
		s.rest = s.rest[:0]
		p = p[i+1:]
	}
	if len(s.rest)+len(p) > maxEvent {
		return errEventTooLong
	}
	s.rest = append(s.rest, p...)
	return nil
}

// parseDataLine returns the payload of a data line.
func parseDataLine(line []byte) ([]byte, bool) {
	data, ok := bytes.CutPrefix(line, []byte("data:"))
	if !ok {
		return nil, false
	}
	return bytes.TrimSpace(data), true
}

// eventKind classifies an event for the measurement.
type eventKind uint8

const (
	tokenEvent  eventKind = iota // output; an empty delta is a token without text
	roleEvent                    // opens an answer of the chat route before any token
	usageEvent                   // closes the stream with counts and no choice
	errorEvent                   // the request failed within the stream
	doneEvent                    // [DONE]; it does not prove that the answer is complete
	finishEvent                  // the last token of a choice, with its finish_reason
	abortEvent                   // the engine aborted the request
)

var (
	errorKey   = []byte(`"error"`)
	finishKey  = []byte(`"finish_reason"`)
	usageKey   = []byte(`"usage"`)
	choicesKey = []byte(`"choices"`)
	roleKey    = []byte(`"role"`)
	contentKey = []byte(`"content"`)
)

// classify classifies an event without decoding it, because a run has hundreds of thousands of events per
// second. Strings inside a delta have their quotes escaped, so the patterns match keys only. Engines write
// JSON with spaces or without.
func classify(data []byte) eventKind {
	switch {
	case bytes.Equal(data, []byte("[DONE]")):
		return doneEvent
	case len(data) > 0 && data[0] == '{' && bytes.HasPrefix(bytes.TrimLeft(data[1:], " "), errorKey):
		return errorEvent
	case hasMember(data, finishKey, `"`):
		if hasMember(data, finishKey, `"abort"`) {
			return abortEvent
		}
		return finishEvent
	case hasMember(data, usageKey, "{") && hasMember(data, choicesKey, "[]"):
		return usageEvent
	case hasMember(data, roleKey, `"`) && !hasContent(data):
		return roleEvent
	default:
		return tokenEvent
	}
}

// hasContent reports whether a delta has text.
func hasContent(data []byte) bool {
	value := findValue(data, contentKey, `"`)
	return len(value) > 1 && value[1] != '"'
}

// hasMember reports whether a member with this key has a value that starts with beginning.
func hasMember(data, key []byte, beginning string) bool {
	return findValue(data, key, beginning) != nil
}

// findValue returns data from the first value of a member with this key that starts with beginning; nil if
// there is none.
func findValue(data, key []byte, beginning string) []byte {
	for {
		i := bytes.Index(data, key)
		if i < 0 {
			return nil
		}
		data = data[i+len(key):]
		value, ok := bytes.CutPrefix(bytes.TrimLeft(data, " "), []byte(":"))
		if value = bytes.TrimLeft(value, " "); ok && bytes.HasPrefix(value, []byte(beginning)) {
			return value
		}
	}
}

// parseDelta returns the text that an event of the chat route adds to the first choice.
func parseDelta(data []byte) string {
	var body struct {
		Choices []struct {
			Index int `json:"index"`
			Delta struct {
				Content string `json:"content"`
			} `json:"delta"`
		} `json:"choices"`
	}
	if json.Unmarshal(data, &body) != nil || len(body.Choices) == 0 || body.Choices[0].Index != 0 {
		return ""
	}
	return body.Choices[0].Delta.Content
}

// usage is an answer's count of tokens.
type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Details    *struct {
		Cached *int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// parseUsage decodes the usage of an answer or a chunk; the zero value if there is none.
func parseUsage(data []byte) usage {
	var body struct {
		Usage *usage `json:"usage"`
	}
	if json.Unmarshal(data, &body) != nil || body.Usage == nil {
		return usage{}
	}
	return *body.Usage
}

func (u usage) cached() int {
	if u.Details == nil || u.Details.Cached == nil {
		return 0
	}
	return *u.Details.Cached
}
