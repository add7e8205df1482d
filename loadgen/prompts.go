package loadgen

import (
	"math/rand/v2"
	"strconv"
)

// prompts makes request bodies: equal in shape, different in text from the first words on, so that no prefix cache helps,
// and equal for equal seeds.
type prompts struct {
	head, tail []byte
	texts      texts
	size       int
	seed       uint64
}

func newPrompts(cfg Config) (*prompts, error) {
	settings, err := settingsOf(cfg)
	if err != nil {
		return nil, err
	}
	p := &prompts{head: []byte(`{"prompt":"`), size: cfg.PromptBytes, seed: cfg.Seed}
	p.tail = append([]byte(`",`), settings[1:]...)
	if cfg.Route == Chat {
		p.head = []byte(`{"messages":[{"role":"user","content":"`)
		p.tail = append([]byte(`"}],`), settings[1:]...)
	}
	p.texts = newTexts(cfg.Seed, cfg.PromptBytes)
	return p, nil
}

// body is the whole body of request n.
func (p *prompts) body(n uint64) []byte {
	out := make([]byte, 0, len(p.head)+p.size+len(p.tail))
	out = p.texts.append(append(out, p.head...), rand.New(rand.NewPCG(p.seed, n)), p.size)
	return append(out, p.tail...)
}

// textStream tells the random stream of the text from those of the single prompts, which are numbered from 1.
const textStream = 0

const spareText = 64 << 10 // how far slices of the text may be apart

// texts are words for prompts: a tag that is drawn, then a slice of random words.
type texts struct{ words []byte }

// newTexts has texts of up to longest bytes.
func newTexts(seed uint64, longest int) texts {
	return texts{words(rand.New(rand.NewPCG(seed, textStream)), longest+spareText)}
}

// append appends a text of size bytes that r draws. Texts of different draws differ from their first bytes on.
func (t texts) append(dst []byte, r *rand.Rand, size int) []byte {
	tag := strconv.AppendUint(nil, r.Uint64()>>1, 36)
	tag = tag[:min(len(tag), size)]
	from := r.IntN(spareText)
	return append(append(dst, tag...), t.words[from:from+size-len(tag)]...)
}

// words is n bytes of lower-case words.
func words(r *rand.Rand, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte('a' + r.IntN(26)) //nolint:gosec // below 128
		if r.IntN(6) == 0 {
			out[i] = ' '
		}
	}
	return out
}
