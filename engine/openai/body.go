// Package openai holds the shapes of the OpenAI inference API as vLLM and SGLang speak it: routes, request
// bodies, errors, usage and server-sent events. Bodies are scanned, never decoded and encoded again: what
// dpserve does not have to change passes byte for byte.
package openai

import (
	"bytes"

	"github.com/zeebo/xxh3"
)

// Span is a range of bytes in a body, End excluded.
type Span struct{ Start, End int }

// Body is what dpserve reads of a request body. The zero value is ready; reuse it, Scan does not allocate
// once its buffers are warm.
type Body struct {
	Model        []byte // decoded; valid as long as the body is and until the next Scan
	HasModel     bool   // false if the field is absent or null
	Stream       bool
	IncludeUsage bool   // stream_options.include_usage
	N            int    // ≥ 1; absent, null and what only the engine can judge are 1
	Choices      int    // choices to expect: N × number of prompts
	MaxTokens    int64  // max_completion_tokens, else max_tokens; -1 if absent
	PromptBytes  int    // length of the value of prompt, messages or tokens as written, 0 if absent
	// of PromptBytes those that are no media, and the tools of a chat: what an Estimator takes
	TextBytes    int
	MediaParts   int    // pictures, sounds and the like in the messages, at most maxMediaParts
	PromptTokens int    // exact if the prompt is token ids, else -1
	Strip        []Span // members that only dpserve may set, commas included; for Spliced
	Tools        Span   // value of tools as written (chat), zero if absent or null
	// members that decide with the prompt what its tokens are, and that an engine's /tokenize does not take
	Beside       []Span
	User         []byte // user, decoded as Model is; nil if absent or no string
	CacheSalt    []byte // cache_salt, likewise

	route         Route
	first         Span   // the first prompt as written, with its quotes or brackets; zero if there is none
	rawModel      Span   // value of model as written
	template      []Span // members that decide with the prompt what its tokens are
	prompts       int
	maxCompletion bool // MaxTokens is max_completion_tokens
	fields        []field
	decoded       []byte // decoded keys that had escapes
	model         []byte // decoded model that had escapes
	run           run
}

// field is a top-level key that was seen, to refuse its double.
type field struct {
	hash uint64
	key  []byte
}

// keptDecoded is how many bytes of decoded text a Body keeps the memory of.
const keptDecoded = 4 << 10

// Forget drops what points into the scanned body, so that its memory can be used for other things. Numbers,
// flags and spans stay.
func (b *Body) Forget() {
	b.Model, b.User, b.CacheSalt = nil, nil, nil
	clear(b.fields)
	b.fields = b.fields[:0]
	if cap(b.decoded) > keptDecoded {
		b.decoded = nil
	}
	if cap(b.model) > keptDecoded {
		b.model = nil
	}
}

func (b *Body) reset(route Route) {
	*b = Body{
		N: 1, MaxTokens: -1, PromptTokens: -1, Strip: b.Strip[:0], Beside: b.Beside[:0],
		route: route, prompts: 1, template: b.template[:0], fields: b.fields[:0], decoded: b.decoded[:0],
			model: b.model[:0], run: run{first: -1},
	}
}

// Scan reads body as a request on route. It accepts exactly the JSON objects (all of it is checked, numbers
// and strings too; only UTF-8 is left to the engine) that keep the limits of this package, have no top-level
// key twice, however it is written, and give the fields that dpserve must understand a type it understands.
// Otherwise the error is a *BodyError and b must not be used. Everything else is the engine's to judge.
func (b *Body) Scan(route Route, body []byte) error {
	b.reset(route)
	s := scanner{b: body}
	i := s.space(0)
	if i == len(body) {
		s.fail(faultEmpty, i)
		return s.err(nil)
	}
	if body[i] != '{' {
		return notObject(&s, i)
	}
	if err := b.object(&s, i); err != nil {
		return err
	}
	b.Choices = b.N * max(b.prompts, 1)
	b.TextBytes = b.PromptBytes - s.media.bytes
	b.MediaParts = min(s.media.parts, maxMediaParts)
	if route == Chat {
		b.TextBytes += b.Tools.End - b.Tools.Start // a template writes them out
	}
	if b.route.Generates() && b.Choices > MaxSequences {
		return newBodyError(faultTooLarge, []byte("prompt"), "n × prompts must be at most %d", MaxSequences)
	}
	return nil
}

// notObject tells a body that is JSON, but no object, from one that is not JSON.
func notObject(s *scanner, i int) error {
	if end := s.value(i, 0, nil); end >= 0 {
		s.fail(faultNotObject, i)
		if end = s.space(end); end < len(s.b) {
			s.fail(faultAfter, end)
		}
	}
	return s.err(nil)
}

// err is the scanner's fault as an error; key is the top-level field it is in.
func (s *scanner) err(key []byte) error {
	return newBodyError(s.fault, key, "%s", s.fault.text(s.at))
}

// object reads the top-level object at body[i] to the end of the body.
func (b *Body) object(s *scanner, i int) error {
	if i = s.space(i + 1); s.peek(i) == '}' {
		return b.end(s, i)
	}
	for {
		end, err := b.member(s, i)
		if err != nil {
			return err
		}
		switch i = s.space(end); s.peek(i) {
		case ',':
			i = s.space(i + 1)
		case '}':
			return b.end(s, i)
		default:
			s.unexpected(i)
			return s.err(nil)
		}
	}
}

// end checks that nothing follows the closing brace at i.
func (b *Body) end(s *scanner, i int) error {
	b.Strip = b.run.close(b.Strip)
	if i = s.space(i + 1); i < len(s.b) {
		s.fail(faultAfter, i)
		return s.err(nil)
	}
	return nil
}

// member reads one top-level member whose key begins at i.
func (b *Body) member(s *scanner, i int) (end int, err error) {
	key, value := s.key(i)
	if value < 0 {
		return 0, s.err(nil)
	}
	if s.escaped {
		key = b.decode(key)
	}
	if err := b.note(s, key); err != nil {
		return 0, err
	}
	if end, err = b.read(s, key, value); err != nil {
		return 0, err
	}
	switch {
	case templated(key):
		b.template = append(b.template, Span{i, end})
	case isBeside(key, s.b[value:end]):
		b.Beside = append(b.Beside, Span{i, end})
	}
	b.Strip = b.run.member(b.Strip, Span{i, end}, reserved(key))
	return end, nil
}

// decode keeps the meaning of an escaped key for the rest of the scan.
func (b *Body) decode(key []byte) []byte {
	from := len(b.decoded)
	b.decoded = unescape(b.decoded, key)
	return b.decoded[from:]
}

// note refuses a top-level key that was there before: engines take the last one, so a double smuggles.
func (b *Body) note(s *scanner, key []byte) error {
	if len(b.fields) == MaxFields {
		s.fail(faultTopKeys, 0)
		return s.err(nil)
	}
	hash := xxh3.Hash(key)
	for i := range b.fields {
		if f := &b.fields[i]; f.hash == hash && bytes.Equal(f.key, key) {
			return newBodyError(faultDuplicate, key, "field %q is there twice; send it once",
				key[:min(len(key), maxParam)])
		}
	}
	b.fields = append(b.fields, field{hash, key})
	return nil
}
