package loadgen

import (
	"bytes"
	"encoding/json"
	"errors"
)

// errEventTooLong ends a stream whose event does not come to an end.
var errEventTooLong = errors.New("an event of the stream is longer than 4 MiB")

const maxEvent = 4 << 20

// splitter cuts a stream of server-sent events into its data lines, however the bytes are split over reads. A line may
// end in \n or \r\n; lines that are not data are skipped, and events of one data line are all that engines send.
type splitter struct {
	rest []byte // an unfinished line
}

// feed calls line for the data of each line that ends in p. data is valid during the call only.
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
		if data, ok := dataOf(whole); ok {
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

// dataOf is the payload of a data line.
func dataOf(line []byte) ([]byte, bool) {
	data, ok := bytes.CutPrefix(line, []byte("data:"))
	if !ok {
		return nil, false
	}
	return bytes.TrimSpace(data), true
}

// eventKind is what an event means for the measurement.
type eventKind uint8

const (
	tokenEvent  eventKind = iota // output, perhaps an empty delta (which is a token with nothing to show)
	roleEvent                    // opens an answer of the chat route before any token
	usageEvent                   // closes the stream with counts and no choice
	errorEvent                   // the request failed in mid-stream
	doneEvent                    // [DONE]: proves nothing by itself
	finishEvent                  // the last token of a choice, with its finish_reason
	abortEvent                   // the engine gave the request up
)

var (
	errorKey   = []byte(`"error"`)
	finishKey  = []byte(`"finish_reason"`)
	usageKey   = []byte(`"usage"`)
	choicesKey = []byte(`"choices"`)
	roleKey    = []byte(`"role"`)
	contentKey = []byte(`"content"`)
)

// classify looks at an event without decoding it, for the sake of speed at hundreds of thousands of events per second.
// Strings inside a delta have their quotes escaped, so the patterns match keys only; engines write JSON with spaces or without.
func classify(data []byte) eventKind {
	switch {
	case bytes.Equal(data, []byte("[DONE]")):
		return doneEvent
	case len(data) > 0 && data[0] == '{' && bytes.HasPrefix(bytes.TrimLeft(data[1:], " "), errorKey):
		return errorEvent
	case has(data, finishKey, `"`):
		if has(data, finishKey, `"abort"`) {
			return abortEvent
		}
		return finishEvent
	case has(data, usageKey, "{") && has(data, choicesKey, "[]"):
		return usageEvent
	case has(data, roleKey, `"`) && !hasContent(data):
		return roleEvent
	default:
		return tokenEvent
	}
}

// hasContent says whether a delta carries text.
func hasContent(data []byte) bool {
	value := valueOf(data, contentKey, `"`)
	return len(value) > 1 && value[1] != '"'
}

// has says whether some member key has a value that begins so.
func has(data, key []byte, beginning string) bool { return valueOf(data, key, beginning) != nil }

// valueOf is data from the first value of a member key on that begins so; nil if there is none.
func valueOf(data, key []byte, beginning string) []byte {
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

// deltaOf is the text that an event of the chat route adds to the first choice.
func deltaOf(data []byte) string {
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

// usage is what an answer says about its tokens.
type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Details    *struct {
		Cached *int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// usageOf decodes the usage of an answer or a chunk; the zero value if there is none.
func usageOf(data []byte) usage {
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
