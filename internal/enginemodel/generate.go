package enginemodel

import (
	"encoding/binary"
	"slices"

	"github.com/zeebo/xxh3"
)

// An answer that neither max_tokens nor a stop string cuts ends by itself after AnswerMin to
// AnswerMin+AnswerSpan-1 tokens, the end-of-sequence token included: long enough to watch, short enough for a
// curl without max_tokens.
const (
	AnswerMin  = 128
	AnswerSpan = 256
)

// vocabulary is what answers are made of. The non-ASCII words make characters span tokens, as real byte-level
// tokenizers do.
var vocabulary = [...]string{ //nolint:gochecknoglobals // a constant table
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
	h := mix(seed ^ uint64(choice)*0x9E3779B97F4A7C15) //nolint:gosec // choice is never negative
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
