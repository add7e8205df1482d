package enginemodel

import (
	"encoding/binary"
	"slices"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// BytesPerToken is how much text one token holds at most.
const BytesPerToken = 4

// Marker tokens stand for what has no text. No UTF-8 text holds a byte 0xFF, so no text token can collide
// with them.
const (
	MarkerSystem    uint32 = 0xFFFFFF00
	MarkerUser      uint32 = 0xFFFFFF01
	MarkerAssistant uint32 = 0xFFFFFF02
	MarkerTool      uint32 = 0xFFFFFF03
	MarkerDeveloper uint32 = 0xFFFFFF04
	MarkerOther     uint32 = 0xFFFFFF05
	MarkerEnd       uint32 = 0xFFFFFF10 // end of a chat message, and the end-of-sequence token of an answer
	MarkerNUL       uint32 = 0xFFFFFF11 // one NUL byte: as part of a text token its zero would be lost
	firstMarker     uint32 = 0xFFFFFF00
)

// AppendTokens appends the tokens of text to dst. A token is the next up to BytesPerToken bytes, its id these
// bytes as a little-endian number. It is reversible, and prefix-stable but for the last token: appending to a
// text changes no earlier token.
func AppendTokens(dst []uint32, text string) []uint32 {
	for len(text) > 0 {
		n, id := cut(text)
		dst = append(dst, id)
		text = text[n:]
	}
	return dst
}

func cut(text string) (n int, id uint32) {
	if text[0] == 0 {
		return 1, MarkerNUL
	}
	for n < len(text) && n < BytesPerToken && text[n] != 0 {
		id |= uint32(text[n]) << (8 * n)
		n++
	}
	return n, id
}

// AppendText appends the bytes of a token to dst: nothing for a marker, and perhaps only a part of a
// character.
func AppendText(dst []byte, id uint32) []byte {
	if id == MarkerNUL {
		return append(dst, 0)
	}
	if id >= firstMarker {
		return dst
	}
	for ; id != 0; id >>= 8 {
		dst = append(dst, byte(id))
	}
	return dst
}

// Text is the text of tokens; bytes that form no character become U+FFFD.
func Text(tokens []uint32) string {
	var raw []byte
	for _, id := range tokens {
		raw = AppendText(raw, id)
	}
	return ValidText(raw)
}

// ValidText is raw as text, each run of bytes that form no character as one U+FFFD.
func ValidText(raw []byte) string {
	if utf8.Valid(raw) {
		return string(raw)
	}
	return string([]rune(string(raw)))
}

// Message is one chat message as the template sees it.
type Message struct {
	Role    string
	Content string
}

// AppendChat appends the chat template of messages to dst: per message role marker, content, end; then, if
// generate is set, the assistant's marker, behind which the answer begins. The next turn's prompt thus begins
// with this turn's tokens.
func AppendChat(dst []uint32, messages []Message, generate bool) []uint32 {
	for _, m := range messages {
		dst = append(dst, roleMarker(m.Role))
		dst = AppendTokens(dst, m.Content)
		dst = append(dst, MarkerEnd)
	}
	if generate {
		dst = append(dst, MarkerAssistant)
	}
	return dst
}

func roleMarker(role string) uint32 {
	switch role {
	case "system":
		return MarkerSystem
	case "user":
		return MarkerUser
	case "assistant":
		return MarkerAssistant
	case "tool":
		return MarkerTool
	case "developer":
		return MarkerDeveloper
	default:
		return MarkerOther
	}
}

// appendIDs appends tokens as little-endian bytes: the form that is hashed.
func appendIDs(dst []byte, tokens []uint32) []byte {
	for _, id := range tokens {
		dst = binary.LittleEndian.AppendUint32(dst, id)
	}
	return dst
}

// An answer that neither max_tokens nor a stop string cuts ends by itself after AnswerMin to
// AnswerMin+AnswerSpan-1 tokens, the end-of-sequence token included: long enough to watch, short enough for a
// curl without max_tokens.
const (
	AnswerMin  = 128
	AnswerSpan = 256
)

// vocabulary is what answers are made of. The non-ASCII words make characters span tokens, as real byte-level
// tokenizers do.
var vocabulary = [...]string{
	"the", "rank", "token", "batch", "a", "block", "of", "cache", "and", "queue", "step", "prefix", "to",
	"router", "group", "is",
	"in", "stream", "wave", "every", "slot", "memory", "over", "engine", "decode", "with", "prompt", "one",
	"expert", "layer", "as", "warm",
	"request", "on", "from", "replica", "naïve", "until", "head", "tail", "node", "by", "answer", "under",
	"load", "café", "then", "epoch",
	"lease", "it", "waits", "runs", "when", "quiet", "depth", "moves", "größe", "early", "late", "small",
	"wide", "日本語", "fresh", "🚀",
}

// TextSeed identifies an answer: equal engine seed, prompt and choice give the equal text, on every rank and
// in every run.
func TextSeed(seed uint64, prompt []uint32, choice int) uint64 {
	var scratch [1024]byte
	h := mix(seed ^ uint64(choice)*0x9E3779B97F4A7C15)
	for len(prompt) > 0 {
		n := min(len(prompt), len(scratch)/4)
		h = xxh3.HashSeed(appendIDs(scratch[:0], prompt[:n]), h)
		prompt = prompt[n:]
	}
	return h
}

// AnswerLen is the number of tokens after which the answer of this seed ends by itself.
func AnswerLen(seed uint64) int {
	return AnswerMin + int(mix(seed^0xA5A5A5A5)%AnswerSpan)
}

// Generator writes an answer. It is a pure function of its seed, made piece by piece; not safe for concurrent
// use.
type Generator struct {
	state   uint64
	words   int
	buf     []byte
	isGiven bool // buf is the whole text
}

// NewGenerator begins the answer of seed (TextSeed).
func NewGenerator(seed uint64) *Generator { return &Generator{state: seed} }

// GivenText writes an answer whose text is decided. NUL bytes follow it, so that its tokens are those that
// AppendTokens makes of it.
func GivenText(text []byte) *Generator { return &Generator{buf: slices.Clip(text), isGiven: true} }

// Bytes is the text of the first n tokens: exactly BytesPerToken*n bytes, the last character perhaps
// incomplete. The result is valid until the next call.
func (g *Generator) Bytes(n int) []byte {
	want := n * BytesPerToken
	for len(g.buf) < want {
		if g.isGiven {
			g.buf = append(g.buf, make([]byte, want-len(g.buf))...)
			break
		}
		g.word()
	}
	return g.buf[:want]
}

// Token is the id of the i-th token, from 0.
func (g *Generator) Token(i int) uint32 {
	return binary.LittleEndian.Uint32(g.Bytes(i + 1)[i*BytesPerToken:])
}

func (g *Generator) word() {
	g.state += 0x9E3779B97F4A7C15
	r := mix(g.state)
	if g.words > 0 {
		if r>>32%11 == 0 {
			g.buf = append(g.buf, '.')
		}
		g.buf = append(g.buf, ' ')
	}
	g.words++
	g.buf = append(g.buf, vocabulary[r%uint64(len(vocabulary))]...)
}

// mix is the finalizer of splitmix64: every input bit moves every output bit.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}
