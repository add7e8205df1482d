package continuation

import (
	"bytes"
	"errors"
	"strconv"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// defaultMaxTokens is how many tokens a completion has whose request does not say it, as the API defines.
const defaultMaxTokens = 16

// maxTokens bounds min_tokens.
const maxTokens = 1 << 30

var (
	errNoTokensLeft = errors.New("the answer has as many tokens as the request allows")
	errNoPlace      = errors.New("the request has no place for the beginning of its answer")
)

// AppendRequest appends the request for the rest of an answer: the text so far is the end of the prompt, or
// a last message of the assistant that the engine goes on with, and max_tokens and min_tokens are less the
// tokens so far. All other bytes stay. body is one that Scan accepted for the route, and not pinned. dst must
// not overlap body.
func AppendRequest(dst, body []byte, route openai.Route, text []byte, tokens int) ([]byte, error) {
	e := requestEdit{dst: dst, body: body, route: route, text: text, tokens: tokens}
	if err := openai.Members(body, e.member); err != nil {
		return nil, err
	}
	switch {
	case !e.hasPrompt:
		return nil, errNoPlace
	case route == openai.Completions && !e.hasMax:
		if tokens >= defaultMaxTokens {
			return nil, errNoTokensLeft
		}
		e.extra = append(e.extra, `,"max_tokens":`...)
		e.extra = strconv.AppendInt(e.extra, int64(defaultMaxTokens-tokens), 10)
	case route == openai.Chat && !e.continues:
		e.extra = append(e.extra, `,"continue_final_message":true`...)
	}
	if route == openai.Chat && !e.generates {
		e.extra = append(e.extra, `,"add_generation_prompt":false`...)
	}
	brace := bytes.LastIndexByte(body, '}')
	e.dst = append(append(e.dst, body[e.from:brace]...), e.extra...)
	return append(e.dst, body[brace:]...), nil
}

// requestEdit copies a body member by member and replaces the values that differ.
type requestEdit struct {
	dst, body []byte
	from      int // of body: what is not copied yet
	route     openai.Route
	text      []byte
	tokens    int
	extra     []byte // members at the end

	hasPrompt, hasMax, continues, generates bool
}

func (e *requestEdit) member(key []byte, _, value openai.Span) error {
	raw := e.body[value.Start:value.End]
	switch string(key) {
	case "messages":
		if e.route == openai.Chat {
			return e.appendMessage(value)
		}
	case "prompt":
		if e.route == openai.Completions {
			return e.appendPrompt(value)
		}
	case "continue_final_message":
		e.continues = true
		e.replace(value, "true")
	case "add_generation_prompt":
		e.generates = true
		e.replace(value, "false")
	case "max_tokens", "max_completion_tokens":
		n, ok := openai.Number(raw)
		if !ok {
			return nil
		}
		if e.hasMax = true; int(n) <= e.tokens {
			return errNoTokensLeft
		}
		e.replace(value, strconv.Itoa(int(n)-e.tokens))
	case "min_tokens":
		if n, ok := openai.Number(raw); ok {
			e.replace(value, strconv.Itoa(max(int(min(n, maxTokens))-e.tokens, 0)))
		}
	}
	return nil
}

// replace puts text in place of what stands at a position of the body.
func (e *requestEdit) replace(at openai.Span, text string) {
	e.dst = append(append(e.dst, e.body[e.from:at.Start]...), text...)
	e.from = at.End
}

// appendMessage appends the text as a message of the assistant.
func (e *requestEdit) appendMessage(list openai.Span) error {
	end := list.End - 1
	if e.body[list.Start] != '[' || len(bytes.TrimSpace(e.body[list.Start+1:end])) == 0 {
		return errNoPlace
	}
	e.replace(openai.Span{Start: end, End: end}, `,{"role":"assistant","content":`)
	e.dst = append(openai.AppendString(e.dst, string(e.text)), '}')
	e.hasPrompt = true
	return nil
}

// appendPrompt appends the text to a prompt that is a string, or a list of one.
func (e *requestEdit) appendPrompt(at openai.Span) error {
	if e.body[at.Start] == '[' {
		list, n := at, 0
		openai.Elements(e.body[list.Start:list.End], func(s openai.Span) bool {
			at = openai.Span{Start: list.Start + s.Start, End: list.Start + s.End}
			n++
			return n < 2
		})
		if n != 1 {
			return errNoPlace
		}
	}
	if e.body[at.Start] != '"' {
		return errNoPlace
	}
	end := at.End - 1
	e.replace(openai.Span{Start: end, End: end}, "")
	start := len(e.dst)
	e.dst = openai.AppendString(e.dst, string(e.text))
	copy(e.dst[start:], e.dst[start+1:]) // without its quotes: those of the prompt stay
	e.dst = e.dst[:len(e.dst)-2]
	e.hasPrompt = true
	return nil
}

// Stops are the stop strings of a request that Scan accepted.
func Stops(body []byte) (stops [][]byte) {
	note := func(raw []byte) {
		if raw[0] == '"' {
			stops = append(stops, openai.Unescape(nil, raw[1:len(raw)-1]))
		}
	}
	_ = openai.Members(body, func(key []byte, _, value openai.Span) error {
		if raw := body[value.Start:value.End]; string(key) == "stop" && raw[0] == '[' {
			openai.Elements(raw, func(s openai.Span) bool {
				note(raw[s.Start:s.End])
				return true
			})
		} else if string(key) == "stop" {
			note(raw)
		}
		return nil
	})
	return stops
}
