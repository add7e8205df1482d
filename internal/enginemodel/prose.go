package enginemodel

import (
	"bytes"
	"encoding/binary"
	"slices"
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

// units are the words with what follows them: a space, or the end of a sentence and a space.
var units = func() (out [2][len(vocabulary)]string) {
	for i, word := range vocabulary {
		out[0][i], out[1][i] = word+" ", word+". "
	}
	return out
}()

// Prose is a place in a text, and decides how the text goes on. Each next byte depends on the seed and on
// all bytes before it and on nothing else, as under the greedy sampling of a real model: a prompt that is
// followed by the first part of its answer is answered by the other part.
//
// A word is chosen by a hash of everything before it. A text that ends inside of the word that would have
// been chosen goes on with the rest of that word; behind any other word comes a space.
type Prose struct {
	seed  uint64
	hash  uint64 // of everything before this place
	rest  string // of the word in which this place is
	start uint64 // the hash where the answer began: from there on each word is the one that is chosen
	done  int    // bytes from there to here
}

// maxTail is how many tokens at the end of a prompt are searched for the beginning of an answer: all that an
// answer can have, and one more word.
const maxTail = AnswerMin + AnswerSpan + 4

// ProseAfter is the place behind a prompt. Equal engine seed, prompt and choice give the equal answer, on
// every rank and in every run.
func ProseAfter(seed uint64, prompt []uint32, choice int) Prose {
	p := Prose{seed: mix(seed ^ uint64(choice)*0x9E3779B97F4A7C15)}
	tail := len(prompt)
	for tail > 0 && tail > len(prompt)-maxTail && isText(prompt[tail-1]) {
		tail--
	}
	for _, id := range prompt[:tail] {
		p.hash = hashToken(p.hash, id)
	}
	var scratch [maxTail * BytesPerToken]byte
	text := scratch[:0]
	for _, id := range prompt[tail:] {
		text = AppendText(text, id)
	}
	p.read(text, tail == 0 || !isText(prompt[tail-1]))
	return p
}

// isText reports that a token is a part of a text. All others stand between texts: the markers, and the ids
// that AppendTokens makes of no text.
func isText(id uint32) bool {
	if id >= firstMarker {
		return id == MarkerNUL
	}
	for ; id > 0xFF; id >>= 8 {
		if id&0xFF == 0 {
			return false
		}
	}
	return id != 0
}

// The hash of a text is a polynomial of its bytes, so that it does not depend on how they are cut into
// tokens.
const (
	base    = 0x9E3779B97F4A7C15
	modulus = 1 << 64
	base2   = base * base % modulus
	base3   = base * base2 % modulus
	base4   = base * base3 % modulus
	noText  = 0x1000 // is added to tokens that are no text: no byte has such a number
)

func hashToken(h uint64, id uint32) uint64 {
	switch {
	case id == MarkerNUL:
		return hashByte(h, 0)
	case !isText(id):
		return h*base + noText + uint64(id)
	case id > 0xFFFFFF:
		return h*base4 + uint64(id&0xFF+1)*base3 + uint64(id>>8&0xFF+1)*base2 +
			uint64(id>>16&0xFF+1)*base + uint64(id>>24+1)
	}
	for ; id != 0; id >>= 8 {
		h = hashByte(h, byte(id))
	}
	return h
}

func hashByte(h uint64, b byte) uint64 { return h*base + uint64(b) + 1 }

// read goes on to the end of text, the last text of a prompt. isWhole says that it begins with a word, not
// within one.
func (p *Prose) read(text []byte, isWhole bool) {
	p.start = p.hash
	for len(text) > 0 {
		unit := p.unit()
		n := min(len(unit), len(text))
		if isWhole && string(text[:n]) == unit[:n] {
			p.pass(unit[:n])
			p.done += n
			p.rest = unit[n:]
		} else {
			n = p.passOther(text)
		}
		text, isWhole = text[n:], true
	}
}

// passOther goes behind the first word of text, which was not chosen: an answer begins behind it.
func (p *Prose) passOther(text []byte) int {
	n := bytes.IndexByte(text, ' ')
	if n < 0 {
		n = len(text)
	}
	p.pass(string(text[:n]))
	if p.start, p.done = p.hash, 0; n == len(text) {
		p.rest = " "
		return n
	}
	p.pass(" ")
	p.done = 1
	return n + 1
}

func (p *Prose) pass(text string) {
	for i := range len(text) {
		p.hash = hashByte(p.hash, text[i])
	}
}

// unit is the word that comes here, and what follows it.
func (p *Prose) unit() string {
	r := mix(p.hash ^ p.seed)
	end := 0
	if r>>32%11 == 0 {
		end = 1
	}
	return units[end][r%uint64(len(vocabulary))]
}

// next writes on: the rest of the word, or one more.
func (p *Prose) next(dst []byte) []byte {
	text := p.rest
	if p.rest = ""; text == "" {
		text = p.unit()
	}
	p.pass(text)
	return append(dst, text...)
}

// ID is another number for another answer.
func (p Prose) ID() uint64 { return mix(p.hash ^ p.seed) }

// Left is how many bytes are left of the answer until it ends by itself.
func (p Prose) Left() int {
	tokens := AnswerMin + int(mix(p.start^p.seed^0xA5A5A5A5)%AnswerSpan)
	return max(0, (tokens-1)*BytesPerToken-p.done)
}

// Misled is the answer that wrong KV leads to.
func (p Prose) Misled(wrong uint64) Prose {
	p.seed = mix(p.seed ^ mix(wrong))
	return p
}

// Generator writes an answer piece by piece; not safe for concurrent use.
type Generator struct {
	prose   Prose
	buf     []byte
	isGiven bool // buf is the whole text
}

// NewGenerator begins the answer at p.
func NewGenerator(p Prose) *Generator { return &Generator{prose: p} }

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
		g.buf = g.prose.next(g.buf)
	}
	return g.buf[:want]
}

// Token is the id of the i-th token, from 0.
func (g *Generator) Token(i int) uint32 {
	return binary.LittleEndian.Uint32(g.Bytes(i + 1)[i*BytesPerToken:])
}

// mix is the finalizer of splitmix64: every input bit moves every output bit.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}
