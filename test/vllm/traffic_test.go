package vllm

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dpserve/dpserve/test/harness"
)

// Tokens of the tiny model: 0 to 2 are its own marks.
const (
	firstToken = 3
	vocabulary = 369
)

func randomIDs(rng *rand.Rand, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = firstToken + rng.Uint32N(vocabulary-firstToken)
	}
	return out
}

// request is one prompt of a stream of requests.
type request struct {
	ids       []uint32
	salt      string
	maxTokens int
}

// families draws prompts that share prefixes in every way there is: the same again, longer than before, a
// part of one before, one that goes on where an answer ended, and forks inside a block.
type families struct {
	rng  *rand.Rand
	past []request
}

const (
	maxPast   = 40
	maxPrompt = 900
	freshOdds = 0.12
	saltOdds  = 0.1
)

func newFamilies(seed uint64) *families {
	return &families{rng: rand.New(rand.NewPCG(seed, 1))}
}

func (f *families) next() request {
	rng := f.rng
	var q request
	if len(f.past) == 0 || rng.Float64() < freshOdds {
		q.ids = randomIDs(rng, 20+rng.IntN(400))
		if rng.Float64() < saltOdds {
			q.salt = fmt.Sprintf("tenant-%d", rng.IntN(3))
		}
	} else {
		q = f.past[rng.IntN(len(f.past))]
		q.ids = slices.Clone(q.ids)
		switch rng.IntN(4) {
		case 0: // the same again
		case 1: // a part of it, then something else
			q.ids = append(q.ids[:1+rng.IntN(len(q.ids))], randomIDs(rng, rng.IntN(40))...)
		default:
			q.ids = append(q.ids, randomIDs(rng, 1+rng.IntN(60))...)
		}
		if rng.Float64() < saltOdds { // equal content under another salt shares nothing
			q.salt = fmt.Sprintf("tenant-%d", rng.IntN(3))
		}
	}
	q.ids = q.ids[:min(len(q.ids), maxPrompt)]
	q.maxTokens = 1 + rng.IntN(24)
	return q
}

// answered remembers a prompt with its answer: later ones may go on from there.
func (f *families) answered(q request, out []uint32) {
	q.ids = append(slices.Clone(q.ids), out...)
	if f.past = append(f.past, q); len(f.past) > maxPast {
		f.past = f.past[1:]
	}
}

// look is the time between two looks at something that changes by itself.
const look = 2 * time.Millisecond

// eventually polls until ok.
func eventually(ctx context.Context, ok func() bool) bool {
	for deadline := time.Now().Add(harness.Patience); time.Now().Before(deadline) &&
		ctx.Err() == nil; sleep(ctx, look) {
		if ok() {
			return true
		}
	}
	return false
}
