package openai

import (
	"bytes"
	"errors"
	"strconv"
)

// whyPinned names the reason why a member of a request body keeps its answer with the engine that began it;
// "" if the member does not. An answer that another engine goes on with begins there as a prompt: whatever
// looks at the output, or shapes it from its beginning, would begin anew.
func whyPinned(key, raw []byte) string {
	switch string(key) {
	case "tools", "functions":
		return unless(!holds(raw), "tools")
	case "response_format":
		return unless(!holds(raw) || isPlainText(raw), "response_format")
	case "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
		"structured_outputs", "structural_tag", "regex", "json_schema", "ebnf", "grammar":
		return unless(!holds(raw), "grammar")
	case "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids":
		return unless(!holds(raw), "logprobs")
	case "echo":
		return unless(!holds(raw), "echo")
	case "suffix":
		return unless(!holds(raw), "suffix")
	case "use_beam_search":
		return unless(!holds(raw), "beam_search")
	case "best_of":
		return unless(isNumber(raw, 1), "several choices")
	case "presence_penalty", "frequency_penalty":
		return unless(isNumber(raw, 0), "penalties")
	case "repetition_penalty":
		return unless(isNumber(raw, 1), "penalties")
	case "bad_words", "no_repeat_ngram_size", "logits_processors", "vllm_xargs", "custom_logit_processor":
		return unless(!holds(raw) || isNumber(raw, 0), "bad_words")
	case "continue_final_message":
		return unless(!holds(raw), "continues already")
	case "add_generation_prompt":
		return unless(raw[0] != 'f', "continues already")
	case "prompt_embeds":
		return unless(!holds(raw), "embeddings")
	}
	return ""
}

func unless(is bool, why string) string {
	if is {
		return ""
	}
	return why
}

// holds reports whether a checked value is not null, false, "", [] or {}.
func holds(raw []byte) bool {
	c := cursor{b: raw}
	return c.skip()
}

// isNumber reports whether a checked value is null or the number n.
func isNumber(raw []byte, n float64) bool {
	if raw[0] == 'n' {
		return true
	}
	got, ok := Number(raw)
	return ok && got == n
}

// isPlainText reports whether a response_format asks for text of any form.
func isPlainText(raw []byte) bool {
	isText := false
	c := cursor{b: raw}
	c.object(func(c *cursor, key []byte) {
		if string(key) == "type" && c.peek() == '"' {
			isText = string(c.str()) == "text"
			return
		}
		c.skip()
	})
	return isText && !c.bad
}

// WhyPinned names the reason why only the engine that began to stream the answer can finish it; "" if another
// one may go on.
func (b *Body) WhyPinned() string {
	switch {
	case b.route != Chat && b.route != Completions:
		return "route"
	case b.IsHead:
		return "size"
	case b.pinned != "":
		return b.pinned
	case b.Choices != 1:
		return "several choices"
	case b.MediaParts > 0:
		return "images"
	case b.route == Completions && b.PromptTokens >= 0:
		return "token ids"
	}
	return ""
}

// defaultMaxTokens is how many tokens a completion has whose request does not say it, as the API defines.
const defaultMaxTokens = 16

var (
	errNoTokensLeft = errors.New("the answer has as many tokens as the request allows")
	errNoPlace      = errors.New("the request has no place for the beginning of its answer")
)

// AppendContinued appends the request for the rest of an answer: the text so far is the end of the prompt, or
// a last message of the assistant that the engine goes on with, and max_tokens and min_tokens are less the
// tokens so far. All other bytes stay. body is one that Scan accepted for the route, and not pinned. dst must
// not overlap body.
func AppendContinued(dst, body []byte, route Route, text []byte, tokens int) ([]byte, error) {
	e := continuedEdit{dst: dst, body: body, route: route, text: text, tokens: tokens}
	if err := Members(body, e.member); err != nil {
		return nil, err
	}
	switch {
	case !e.hasPrompt:
		return nil, errNoPlace
	case route == Completions && !e.hasMax:
		if tokens >= defaultMaxTokens {
			return nil, errNoTokensLeft
		}
		e.extra = append(e.extra, `,"max_tokens":`...)
		e.extra = strconv.AppendInt(e.extra, int64(defaultMaxTokens-tokens), 10)
	case route == Chat && !e.continues:
		e.extra = append(e.extra, `,"continue_final_message":true`...)
	}
	if route == Chat && !e.generates {
		e.extra = append(e.extra, `,"add_generation_prompt":false`...)
	}
	brace := bytes.LastIndexByte(body, '}')
	e.dst = append(append(e.dst, body[e.from:brace]...), e.extra...)
	return append(e.dst, body[brace:]...), nil
}

// continuedEdit copies a body member by member and replaces the values that differ.
type continuedEdit struct {
	dst, body []byte
	from      int // of body: what is not copied yet
	route     Route
	text      []byte
	tokens    int
	extra     []byte // members at the end

	hasPrompt, hasMax, continues, generates bool
}

func (e *continuedEdit) member(key []byte, _, value Span) error {
	raw := e.body[value.Start:value.End]
	switch string(key) {
	case "messages":
		if e.route == Chat {
			return e.appendMessage(value)
		}
	case "prompt":
		if e.route == Completions {
			return e.appendPrompt(value)
		}
	case "continue_final_message":
		e.continues = true
		e.replace(value, "true")
	case "add_generation_prompt":
		e.generates = true
		e.replace(value, "false")
	case "max_tokens", "max_completion_tokens":
		n, ok := Number(raw)
		if !ok {
			return nil
		}
		if e.hasMax = true; int(n) <= e.tokens {
			return errNoTokensLeft
		}
		e.replace(value, strconv.Itoa(int(n)-e.tokens))
	case "min_tokens":
		if n, ok := Number(raw); ok {
			e.replace(value, strconv.Itoa(max(int(min(n, maxMaxTokens))-e.tokens, 0)))
		}
	}
	return nil
}

// replace puts text in place of what stands at a position of the body.
func (e *continuedEdit) replace(at Span, text string) {
	e.dst = append(append(e.dst, e.body[e.from:at.Start]...), text...)
	e.from = at.End
}

// appendMessage appends the text as a message of the assistant.
func (e *continuedEdit) appendMessage(list Span) error {
	end := list.End - 1
	if e.body[list.Start] != '[' || len(bytes.TrimSpace(e.body[list.Start+1:end])) == 0 {
		return errNoPlace
	}
	e.replace(Span{end, end}, `,{"role":"assistant","content":`)
	e.dst = append(AppendString(e.dst, string(e.text)), '}')
	e.hasPrompt = true
	return nil
}

// appendPrompt appends the text to a prompt that is a string, or a list of one.
func (e *continuedEdit) appendPrompt(at Span) error {
	if e.body[at.Start] == '[' {
		list, n := at, 0
		Elements(e.body[list.Start:list.End], func(s Span) bool {
			at = Span{list.Start + s.Start, list.Start + s.End}
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
	e.replace(Span{end, end}, "")
	start := len(e.dst)
	e.dst = AppendString(e.dst, string(e.text))
	copy(e.dst[start:], e.dst[start+1:]) // without its quotes: those of the prompt stay
	e.dst = e.dst[:len(e.dst)-2]
	e.hasPrompt = true
	return nil
}

// Stops are the stop strings of a request that Scan accepted.
func Stops(body []byte) (stops [][]byte) {
	note := func(raw []byte) {
		if raw[0] == '"' {
			stops = append(stops, unescape(nil, raw[1:len(raw)-1]))
		}
	}
	_ = Members(body, func(key []byte, _, value Span) error {
		if raw := body[value.Start:value.End]; string(key) == "stop" && raw[0] == '[' {
			Elements(raw, func(s Span) bool {
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
