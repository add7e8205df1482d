package openai

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/bits"
	"slices"

	"github.com/zeebo/xxh3"
)

// templated reports whether a top-level field changes the prompt's tokens and is accepted by an engine's
// /tokenize.
func templated(key []byte) bool {
	switch string(key) {
	case "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
		"add_special_tokens", "mm_processor_kwargs":
		return true
	}
	return false
}

// isBeside reports whether a top-level field changes the prompt's tokens and is not accepted by an engine's
// /tokenize.
func isBeside(key, value []byte) bool {
	switch string(key) {
	case "documents", "reasoning_effort", "truncate_prompt_tokens", "image_data", "video_data", "audio_data":
		return value[0] != 'n'
	case "tool_choice":
		return string(value) == `"none"` // the template may leave the tools out of the prompt
	}
	return false
}

// Text returns the first prompt of body, as last scanned, in a form that is a prefix of every prompt that
// continues it: messages and token ids without their closing bracket, a string without its quotes, all as
// written. It is nil if there is no prompt.
func (b *Body) Text(body []byte) []byte {
	raw := body[b.first.Start:b.first.End]
	if len(raw) < 2 {
		return nil
	}
	switch raw[0] {
	case '"':
		raw = raw[1 : len(raw)-1]
	case '[':
		if raw = bytes.TrimRight(raw[:len(raw)-1], " \t\r\n"); len(raw) == 1 {
			return nil
		}
	default:
		return nil
	}
	return raw
}

// TokenIDs appends the first prompt of body, as last scanned, to dst if it is given as token ids. ok is false
// if it is not, or if a number is no id of 32 bits.
func (b *Body) TokenIDs(dst []uint32, body []byte) (ids []uint32, ok bool) {
	if b.PromptTokens <= 0 {
		return dst, false
	}
	return appendIDs(slices.Grow(dst, b.PromptTokens), body[b.first.Start:b.first.End])
}

// appendIDs reads a checked list of numbers.
func appendIDs(dst []uint32, raw []byte) (ids []uint32, ok bool) {
	for i := 0; i < len(raw); {
		if id, n := shortID(raw[i:]); n > 0 {
			dst = append(dst, id)
			i += n
			continue
		}
		switch c := raw[i]; {
		case c-'0' <= 9:
			id, end := longID(raw, i)
			if end < 0 {
				return dst, false
			}
			dst, i = append(dst, id), end
		case c == ',' || c <= ' ' || c == '[' || c == ']':
			i++
		default:
			return dst, false
		}
	}
	return dst, true
}

// shortID reads one to seven digits and the comma behind them, eight bytes at a time; n is 0 if that is not
// what b begins with.
func shortID(b []byte) (id uint32, n int) {
	if len(b) < 8 {
		return 0, 0
	}
	w := binary.LittleEndian.Uint64(b) ^ ones*'0' // digits are 0 to 9 now
	other := ((w + ones*(0x80-10)) | w) & highs   // the lowest mark is exact
	n = bits.TrailingZeros64(other) / 8
	if n == 0 || n == 8 || b[n] != ',' {
		return 0, 0
	}
	w <<= 64 - 8*n                               // zeros in front
	w = w*10 + w>>8                              // pairs of digits, in every second byte
	w = (w & 0x00ff00ff00ff00ff) * (100<<16 + 1) // fours, in every fourth byte and the one above
	w = (w >> 16 & 0x0000ffff0000ffff) * (10000<<32 + 1) >> 32
	return uint32(w), n + 1
}

// longID reads the digits at i; end is -1 if they are more than an id holds.
func longID(raw []byte, i int) (id uint32, end int) {
	n := uint64(0)
	for ; i < len(raw) && raw[i]-'0' <= 9; i++ {
		if n = 10*n + uint64(raw[i]-'0'); n > math.MaxUint32 {
			return 0, -1
		}
	}
	return uint32(n), i
}

// Media reports whether the messages of body, as last scanned, may hold media parts: their tokens are not
// those of the text.
func (b *Body) Media(body []byte) bool {
	if b.route != Chat {
		return false
	}
	return HasMedia(body[b.first.Start:b.first.End])
}

// HasMedia reports whether messages of a chat, a checked value, may hold media parts.
func HasMedia(messages []byte) bool {
	// One pass by a byte that texts have seldom: a search for a mark that begins with a quote takes a
	// millisecond of a long prompt.
	for i := bytes.IndexByte(messages, '_'); i >= 0; {
		rest := messages[i:]
		for _, mark := range [...]string{`_url"`, `_embeds"`} {
			if bytes.HasPrefix(rest, []byte(mark)) {
				return true
			}
		}
		if hasMark(messages, i, `"input`, `_audio"`) || hasMark(messages, i, `"image`, `_pil"`) {
			return true
		}
		next := bytes.IndexByte(rest[1:], '_')
		if next < 0 {
			return false
		}
		i += 1 + next
	}
	return false
}

// hasMark reports whether before ends at i and after begins there.
func hasMark(text []byte, i int, before, after string) bool {
	return bytes.HasSuffix(text[:i], []byte(before)) && bytes.HasPrefix(text[i:], []byte(after))
}

// TokenizeBody appends to dst the body of a /tokenize request for the first prompt of body, as last scanned:
// model, prompt, and the fields that change its tokens, all as written. It appends nothing if there is no
// prompt.
func (b *Body) TokenizeBody(dst, body []byte) []byte {
	if b.first.End == 0 {
		return dst
	}
	dst = append(dst, '{')
	if b.HasModel {
		dst = append(append(append(dst, `"model":`...), body[b.rawModel.Start:b.rawModel.End]...), ',')
	}
	name := routes[b.route].prompts[0]
	if b.route == Generate {
		name = "prompt"
	}
	dst = append(append(AppendString(dst, name), ':'), body[b.first.Start:b.first.End]...)
	for _, m := range b.template {
		dst = append(append(dst, ','), body[m.Start:m.End]...)
	}
	return append(dst, '}')
}

// TokenizeKey is a hash of the body that TokenizeBody appends: equal requests have equal keys. hi and lo are
// 0 if there is no prompt, or if /tokenize would not return the prompt's tokens.
func (b *Body) TokenizeKey(body []byte, seed uint64) (hi, lo uint64) {
	if b.first.End == 0 || len(b.Beside) > 0 || !b.route.IsBasic() && b.route != Generate {
		return 0, 0
	}
	key := xxh3.Hash128Seed(body[b.first.Start:b.first.End], seed+uint64(b.route))
	for _, m := range b.template {
		key = xxh3.Hash128Seed(body[m.Start:m.End], key.Hi^bits.RotateLeft64(key.Lo, 32))
	}
	if b.HasModel {
		key = xxh3.Hash128Seed(b.Model, key.Hi^bits.RotateLeft64(key.Lo, 32))
	}
	return key.Hi | 1, key.Lo
}

// ParseTokenize appends the token ids of an answer of /tokenize to dst; false if there are none.
func ParseTokenize(dst []uint32, answer []byte) (ids []uint32, ok bool) {
	s := scanner{b: answer}
	i := s.space(0)
	if s.peek(i) != '{' {
		return dst, false
	}
	end := s.members(i, 1, func(key []byte, _ bool, v Span) bool {
		if raw := answer[v.Start:v.End]; string(key) == "tokens" && raw[0] == '[' && !ok {
			ids, ok = appendIDs(dst, raw)
		}
		return true
	})
	if end < 0 || !ok || s.space(end) < len(answer) {
		return dst, false
	}
	return ids, true
}
