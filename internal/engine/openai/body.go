// Package openai holds the shapes of the OpenAI inference API as vLLM and SGLang speak it: routes, request
// bodies, errors, usage and server-sent events. Bodies are scanned, never decoded and encoded again: bytes
// that dpserve does not have to change pass unchanged.
package openai

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strconv"

	"github.com/zeebo/xxh3"
)

// Span is a range of bytes in a body, End excluded.
type Span struct{ Start, End int }

// Body is the result of a Scan: the parts of a request body that dpserve needs. The zero value is ready.
// Reuse it, because Scan does not allocate once its buffers are warm.
type Body struct {
	Model       []byte // decoded; valid as long as the body is and until the next Scan
	HasModel    bool   // false if the field is absent or null
	Stream      bool
	N           int   // ≥ 1; absent, null and what only the engine can judge are 1
	Choices     int   // choices to expect: N × number of prompts
	MaxTokens   int64 // max_completion_tokens, else max_tokens; -1 if absent
	PromptBytes int   // length of the value of prompt, messages or tokens as written, 0 if absent
	// PromptBytes without media, plus the tools of a chat: the input of an Estimator
	TextBytes    int
	MediaParts   int  // pictures, sounds and the like in the messages, at most maxMediaParts
	PromptTokens int  // exact if the prompt is token ids, else -1
	IsHead       bool // ScanHead has read the beginning alone
	IsPlain      bool // ScanFree has found no JSON object: nothing is cut out and nothing put in
	Strip        Cuts // members that only dpserve may set; for Spliced
	Tools        Span // value of tools as written (chat), zero if absent or null
	// members that change the prompt's tokens and that an engine's /tokenize does not accept
	Beside    []Span
	User      []byte // user, decoded as Model is; nil if absent or no string
	CacheSalt []byte // cache_salt, likewise
	Previous  []byte // previous_response_id, likewise
	NotStored bool   // store is false: the engine keeps no response

	scanning
}

// scanning is what Scan keeps for itself and for the other methods of Body.
type scanning struct {
	route         Route
	first         Span   // the first prompt as written, with its quotes or brackets; zero if there is none
	rawModel      Span   // value of model as written
	template      []Span // members that decide with the prompt what its tokens are
	prompts       int
	opening       int    // bytes of the value that the prompt begins with, beside the prompt
	pinned        string // see WhyPinned; "" if no member says so
	maxCompletion bool   // MaxTokens is max_completion_tokens
	fields        []field
	decoded       []byte // decoded keys that had escapes
	model         []byte // decoded model that had escapes
}

// field is a top-level key that was seen, so that Scan can refuse a duplicate.
type field struct {
	hash uint64
	key  []byte
}

// keptDecoded is the largest buffer of decoded text that a Body keeps, in bytes.
const keptDecoded = 4 << 10

// Forget drops all pointers into the scanned body, so that its memory can be reused. Numbers, flags and spans
// stay.
func (b *Body) Forget() {
	b.Model, b.User, b.CacheSalt, b.Previous = nil, nil, nil, nil
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
		N: 1, MaxTokens: -1, PromptTokens: -1, Beside: b.Beside[:0],
		Strip: Cuts{Spans: b.Strip.Spans[:0], first: -1},
		scanning: scanning{
			route: route, prompts: 1, template: b.template[:0], fields: b.fields[:0],
			decoded: b.decoded[:0], model: b.model[:0],
		},
	}
}

// Scan reads body as a request on route. It accepts exactly the JSON objects (all of it is checked, numbers
// and strings too; only UTF-8 is left to the engine) that keep the limits of this package, have no top-level
// key twice, however it is written, and give the fields that dpserve must understand a type it understands.
// Otherwise the error is a *BodyError and b must not be used. The engine checks everything else.
func (b *Body) Scan(route Route, body []byte) error {
	b.reset(route)
	s := scanner{b: body}
	i, err := s.openObject()
	if err != nil {
		return err
	}
	if err := b.object(&s, i); err != nil {
		return err
	}
	b.Choices = b.N * max(b.prompts, 1)
	b.TextBytes = b.PromptBytes - s.media.bytes + b.opening
	b.MediaParts = min(s.media.parts, maxMediaParts)
	if routes[route].isDialog {
		b.TextBytes += b.Tools.End - b.Tools.Start // a chat template adds them to the prompt
	}
	if b.route.Generates() && b.Choices > maxSequences {
		return newBodyError([]byte("prompt"), "n × prompts must be at most %d", maxSequences)
	}
	return nil
}

// ScanHead reads the beginning of a chat's body whose rest is passed on unread. ok is true if the body ends
// within its messages, has model (unless mayLackModel) and stream before them, and no member that Spliced
// would cut. Then b is as after Scan of the members before the messages. The messages are not known: they
// count as one media part, because a body of that size holds pictures or films.
func (b *Body) ScanHead(head []byte, mayLackModel bool) (ok bool) {
	b.reset(Chat)
	s := scanner{b: head}
	i, err := s.openObject()
	if err != nil {
		return false
	}
	if b.object(&s, i) == nil || s.fault != faultCut || b.PromptBytes > 0 {
		return false
	}
	has := func(name string) bool {
		return slices.ContainsFunc(b.fields, func(f field) bool { return string(f.key) == name })
	}
	isInMessages := len(b.fields) > 0 && string(b.fields[len(b.fields)-1].key) == "messages"
	b.Strip.Close()
	b.IsHead, b.Choices, b.MediaParts = true, b.N, 1
	return isInMessages && has("stream") && (b.HasModel || mayLackModel) && len(b.Strip.Spans) == 0
}

// notObject returns the fault of a body that is no object: it is other JSON, or no JSON.
func notObject(s *scanner, i int) error {
	if end := s.value(i, 0, nil); end >= 0 {
		s.fail(faultNotObject, i)
		if end = s.space(end); end < len(s.b) {
			s.fail(faultAfter, end)
		}
	}
	return s.err(nil)
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
	b.Strip.Close()
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
	case len(key) > 0 && string(key) == routes[b.route].opening:
		b.Beside, b.opening = append(b.Beside, Span{i, end}), end-value
	case isBeside(key, s.b[value:end]):
		b.Beside = append(b.Beside, Span{i, end})
	}
	b.Strip.Member(Span{i, end}, Reserved(key))
	return end, nil
}

// decode keeps the unescaped form of a key for the rest of the scan.
func (b *Body) decode(key []byte) []byte {
	from := len(b.decoded)
	b.decoded = Unescape(b.decoded, key)
	return b.decoded[from:]
}

// note refuses a duplicate top-level key: engines use the last one, so a duplicate could smuggle in a value
// that dpserve did not check.
func (b *Body) note(s *scanner, key []byte) error {
	if len(b.fields) == maxFields {
		s.fail(faultTopKeys, 0)
		return s.err(nil)
	}
	hash := xxh3.Hash(key)
	for i := range b.fields {
		if f := &b.fields[i]; f.hash == hash && bytes.Equal(f.key, key) {
			return newBodyError(key, "field %q is there twice; send it once",
				key[:min(len(key), maxParam)])
		}
	}
	b.fields = append(b.fields, field{hash, key})
	return nil
}

// The value limits of a request body. Larger values are refused with 400; dpserve never lowers a value.
const (
	// maxN is the largest n: more choices than this is refused.
	maxN = 128
	// maxSequences is the largest product of n and the number of prompts: the sequences that an engine
	// computes for one request.
	maxSequences = 1024
	// maxMaxTokens is the largest max_tokens and max_completion_tokens that passes; the engine checks the
	// model's own limit.
	maxMaxTokens = 1 << 31
)

// read checks a top-level value and stores the parts that dpserve needs.
func (b *Body) read(s *scanner, key []byte, i int) (end int, err error) {
	if b.route.isPrompt(key) {
		end = b.prompt(s, i)
	} else {
		end = s.value(i, 1, nil)
	}
	if end < 0 {
		return 0, s.err(key)
	}
	switch string(key) {
	case "model":
		b.rawModel = Span{i, end}
		return end, b.readModel(s.b[i:end])
	case "tools":
		if s.b[i] != 'n' {
			b.Tools = Span{i, end}
		}
	}
	if b.route.Generates() {
		return end, b.readOption(key, s.b[i:end])
	}
	b.Stream = b.Stream || string(key) == "stream" && s.b[i] == 't'
	return end, nil
}

// readOption reads the fields of the generating routes.
func (b *Body) readOption(key, raw []byte) error {
	if why := whyPinned(key, raw); why != "" {
		b.pinned = why
	}
	switch string(key) {
	case "stream":
		return b.readStream(raw)
	case "n":
		return b.readN(raw)
	case "max_tokens", "max_completion_tokens", "max_output_tokens":
		return b.readMaxTokens(key, raw)
	case "user":
		b.User = b.text(raw)
	case "cache_salt":
		b.CacheSalt = b.text(raw)
	case "previous_response_id":
		b.Previous = b.text(raw)
	case "store":
		b.NotStored = raw[0] == 'f'
	case "vllm_xargs":
		return checkXargs(raw)
	}
	return nil
}

// checkXargs refuses what vLLM takes from vllm_xargs and a client may not set: kv_transfer_params feeds a KV
// connector, and kv_cache_report_mode makes the engine tell of blocks as stored that it has had for long.
func checkXargs(raw []byte) error {
	if raw[0] != '{' {
		return nil
	}
	s := scanner{b: raw}
	var buf [64]byte
	var err error
	s.members(0, 1, func(key []byte, escaped bool, _ Span) bool {
		if escaped {
			key = Unescape(buf[:0], key)
		}
		if k := string(key); k == "kv_cache_report_mode" || k == "kv_transfer_params" {
			err = newBodyError([]byte("vllm_xargs"), "vllm_xargs must not hold %s", k)
		}
		return err == nil
	})
	return err
}

// text is the unescaped content of a checked string; nil if raw is no string.
func (b *Body) text(raw []byte) []byte {
	if raw[0] != '"' {
		return nil
	}
	if raw = raw[1 : len(raw)-1]; bytes.IndexByte(raw, '\\') >= 0 {
		return b.decode(raw)
	}
	return raw
}

// prompt checks the prompt at i and counts prompts and token ids: a string, [string], [id] or [[id]];
// anything else is one prompt of unknown length.
func (b *Body) prompt(s *scanner, i int) (end int) {
	var inner tally
	outer := tally{inner: &inner}
	s.inPrompt = true
	end = s.value(i, 1, &outer)
	s.inPrompt = false
	if end < 0 {
		return end
	}
	b.PromptBytes, b.first = end-i, Span{i, end}
	switch {
	case routes[b.route].isDialog:
	case outer.numbers > 0 && outer.strings+outer.arrays+outer.others == 0:
		b.PromptTokens = outer.numbers
	case outer.strings+outer.arrays > 0 && outer.numbers+outer.others == 0:
		b.prompts = outer.strings + outer.arrays
		b.first = Span{s.space(i + 1), outer.first}
		if outer.strings+inner.strings+inner.arrays+inner.others == 0 {
			b.PromptTokens = inner.numbers
		}
	}
	return end
}

func (b *Body) readModel(raw []byte) error {
	switch raw[0] {
	case '"':
		b.HasModel, b.Model = true, raw[1:len(raw)-1]
		if bytes.IndexByte(b.Model, '\\') >= 0 {
			b.model = Unescape(b.model, b.Model)
			b.Model = b.model
		}
	case 'n':
	default:
		return newBodyError([]byte("model"), "model must be a string")
	}
	return nil
}

// readStream accepts true and false only: an engine may accept 1 or "yes" for true, and dpserve must know
// which kind of answer the engine sends.
func (b *Body) readStream(raw []byte) error {
	switch raw[0] {
	case 't':
		b.Stream = true
	case 'f', 'n':
	default:
		return newBodyError([]byte("stream"), "stream must be true or false")
	}
	return nil
}

func (b *Body) readN(raw []byte) error {
	n, ok := Number(raw)
	switch {
	case !ok:
	case n > maxN:
		return newBodyError([]byte("n"), "n must be at most %d", maxN)
	case n >= 1:
		b.N = int(n)
	}
	return nil
}

func (b *Body) readMaxTokens(key, raw []byte) error {
	n, ok := Number(raw)
	switch {
	case !ok:
	case n > maxMaxTokens:
		return newBodyError(key, "%s must be at most %d", key, int64(maxMaxTokens))
	case n >= 0 && (!b.maxCompletion || string(key) == "max_completion_tokens"):
		b.MaxTokens = int64(n)
	}
	b.maxCompletion = b.maxCompletion || ok && string(key) == "max_completion_tokens"
	return nil
}

// Number reads a checked JSON value as engines do: a number, or a string that holds one ("129" is 129 to
// them). Not a number ⇒ false. Numbers beyond 2^53 are rounded; all limits are far below.
func Number(raw []byte) (float64, bool) {
	switch c := raw[0]; {
	case c == '"':
		raw = Unescape(nil, raw[1:len(raw)-1])
		raw = bytes.ReplaceAll(bytes.TrimSpace(raw), []byte("_"), nil)
	case c != '-' && c-'0' > 9:
		return 0, false
	}
	if n, ok := smallInt(raw); ok {
		return float64(n), true
	}
	n, err := strconv.ParseFloat(string(raw), 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0, false
	}
	return n, !math.IsNaN(n)
}

// smallInt reads up to fifteen digits.
func smallInt(raw []byte) (n int64, ok bool) {
	if len(raw) == 0 || len(raw) > 15 {
		return 0, false
	}
	for _, c := range raw {
		if c-'0' > 9 {
			return 0, false
		}
		n = 10*n + int64(c-'0')
	}
	return n, true
}

// Reserved reports whether a top-level field belongs to dpserve, because it selects the rank or passes KV
// data to it. Spliced removes such a field of a client.
func Reserved(key []byte) bool {
	switch string(key) {
	case "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "kv_transfer_params",
		"ec_transfer_params":
		return true
	}
	return bytes.HasPrefix(key, []byte("bootstrap_"))
}

// Spliced is body, as last scanned, without the members in b.Strip and otherwise byte for byte. With nothing
// to strip it is body itself; else it is appended to dst, which must not overlap body.
func (b *Body) Spliced(dst, body []byte) []byte {
	if len(b.Strip.Spans) == 0 {
		return body
	}
	return AppendEdited(dst, body, b.Strip.Spans)
}

// AppendField appends body, an object that Scan accepted, to dst with one more member at its end. value is
// JSON; name must not be in the body (Scan refuses doubles, and reserved fields are stripped before they are
// set).
func AppendField(dst, body []byte, name string, value []byte) []byte {
	var buf [64]byte
	member := append(AppendString(buf[:0], name), ':')
	return AppendEdited(dst, body, nil, append(member, value...))
}

const (
	// MediaTokens is the estimate of tokens of a media part of a message, whatever its size: engines count by
	// pixels or duration, which do not follow from the number of bytes. A picture of 896 × 896 pixels is
	// 1,024 tokens to Qwen2.5-VL (one per 28 × 28 pixels), any picture 576 to LLaVA-1.5 and 256 to Gemma 3.
	MediaTokens = 1024
	// maxMediaParts bounds the media parts of an estimate: vLLM refuses more than 999 of a kind by default.
	maxMediaParts = 999
	// partDepth is how deep the members of a content part are: body, messages, message, content, part.
	partDepth = 5
)

// media counts the media parts of the messages and the bytes of their values.
type media struct{ parts, bytes int }

// isMedia reports whether a member of a content part holds media: image_url, video_url, audio_url,
// input_audio, image_embeds and the like. A key with escapes does not match, so its value counts as text.
func isMedia(key []byte) bool {
	return bytes.HasSuffix(key, []byte("_url")) || bytes.HasSuffix(key, []byte("_embeds")) ||
		string(key) == "input_audio" || string(key) == "image_pil"
}
