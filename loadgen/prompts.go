package loadgen

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
)

// prompts makes request bodies: equal in shape, different in text from the first words on, so that no prefix cache helps,
// and equal for equal seeds.
type prompts struct {
	head, tail []byte
	text       []byte // random words, of which each prompt is a slice
	size       int
	seed       uint64
}

// textStream tells the random stream of the text from those of the single prompts, which are numbered from 1.
const textStream = 0

const spareText = 64 << 10 // how far slices of the text may be apart

func newPrompts(cfg Config) (*prompts, error) {
	fields := map[string]any{"model": cfg.Model, "max_tokens": cfg.MaxTokens, "stream": cfg.Stream}
	if cfg.Stream {
		fields["stream_options"] = map[string]any{"include_usage": true}
	}
	if cfg.IgnoreEOS {
		fields["ignore_eos"] = true
	}
	settings, err := json.Marshal(fields)
	if err != nil {
		return nil, fmt.Errorf("build the request: %w", err)
	}
	p := &prompts{head: []byte(`{"prompt":"`), size: cfg.PromptBytes, seed: cfg.Seed}
	p.tail = append([]byte(`",`), settings[1:]...)
	if cfg.Route == Chat {
		p.head = []byte(`{"messages":[{"role":"user","content":"`)
		p.tail = append([]byte(`"}],`), settings[1:]...)
	}
	p.text = words(rand.New(rand.NewPCG(cfg.Seed, textStream)), cfg.PromptBytes+spareText)
	return p, nil
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

// body is the whole body of request n.
func (p *prompts) body(n uint64) []byte {
	r := rand.New(rand.NewPCG(p.seed, n))
	tag := strconv.AppendUint(nil, r.Uint64()>>1, 36)
	tag = tag[:min(len(tag), p.size)]
	from := r.IntN(spareText)
	out := make([]byte, 0, len(p.head)+p.size+len(p.tail))
	out = append(append(out, p.head...), tag...)
	out = append(out, p.text[from:from+p.size-len(tag)]...)
	return append(out, p.tail...)
}
