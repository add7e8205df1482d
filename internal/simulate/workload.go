package simulate

import (
	"math"
	"math/rand/v2"
	"strconv"
	"time"
)

// BlockSize is the tokens of a block, in traces of Mooncake's format and in all workloads here.
const BlockSize = 512

// Request is one request of a workload.
type Request struct {
	At      time.Duration
	Prompt  int      // tokens
	Output  int      // tokens
	Blocks  []uint64 // the prompt's full blocks: equal values are equal prefixes
	Session string   // "" = none
}

// BlockHash implements enginemodel.Content. Blocks with parts of an answer are not shared.
func (r *Request) BlockHash(i int) (hash uint64, ok bool) {
	if i >= len(r.Blocks) {
		return 0, false
	}
	return r.Blocks[i], true
}

// Workload generates requests.
type Workload struct {
	Name string
	What string // and what a load is
	// returns at least one request, in the order of time
	Make func(load float64, seed uint64) []Request
}

// Workloads are those that the command knows by name.
func Workloads() []Workload {
	const agentSessions, chatRequests, bursts, burst, shared = 1500, 6000, 10, 512, 4
	const uniformSeconds, prompt, output = 300, 2048, 150
	burstsBehind := func(shared int) func(load float64, seed uint64) []Request {
		return func(load float64, seed uint64) []Request {
			return Bursts(bursts, max(1, int(burst*load)), shared, seed)
		}
	}
	return []Workload{
		{
			"agents", "1,500 sessions, whose every turn begins with all turns before it; sessions per second",
			func(load float64, seed uint64) []Request { return Agents(agentSessions, load, seed) },
		},
		{
			"chats", "6,000 requests as long as those of conversations; requests per second",
			func(load float64, seed uint64) []Request { return Chats(chatRequests, load, seed) },
		},
		{
			"uniform", "5 minutes of prompts of 2,048 tokens that share nothing; requests per second",
			func(load float64, seed uint64) []Request {
				return Uniform(max(1, int(load*uniformSeconds)), prompt, output, load, seed)
			},
		},
		{
			"bursts", "10 bursts of 512 requests behind 2,048 shared tokens; a factor on their size",
			burstsBehind(shared),
		},
		{"bursts-cold", "the same with nothing shared; a factor on their size", burstsBehind(0)},
	}
}

// Agents generates sessions whose every turn begins with all of the turns before it: 20 system prompts of 4
// to 23 blocks, of which few are popular; 1 + Exp(10) turns, of 1 + Exp(3) new blocks and an answer of 20 +
// Exp(250) tokens each; the next turn comes 1 s + 20 ms per token of the answer + Exp(6 s) later. No prompt
// is longer than 200 blocks. rate is sessions per second.
func Agents(sessions int, rate float64, seed uint64) []Request {
	const systems, leastSystem, skew, longest = 20, 4, 2.2, 200
	rnd := rand.New(rand.NewPCG(seed, 2))
	var out []Request
	began := 0.0 // seconds
	for s := range sessions {
		began += rnd.ExpFloat64() / rate
		system := int(systems * math.Pow(rnd.Float64(), skew))
		fixed := leastSystem + system
		length, at := fixed*BlockSize, began
		var blocks []uint64
		for i := range fixed {
			blocks = append(blocks, hashOf(uint64(system), uint64(i)))
		}
		for range 1 + int(10*rnd.ExpFloat64()) {
			length += BlockSize * (1 + int(3*rnd.ExpFloat64()))
			if length > longest*BlockSize {
				break
			}
			for i := len(blocks); i < length/BlockSize; i++ {
				blocks = append(blocks, hashOf(uint64(systems+s), uint64(i)))
			}
			answer := 20 + int(250*rnd.ExpFloat64())
			out = append(out, Request{
				At: seconds(at), Prompt: length, Output: answer, Blocks: blocks[:len(blocks):len(blocks)],
				Session: "session " + strconv.Itoa(s),
			})
			length += answer
			at += 1 + 0.02*float64(answer) + 6*rnd.ExpFloat64()
		}
	}
	sortByTime(out)
	return out
}

// Uniform generates n requests that share nothing, rate per second, at random instants.
func Uniform(n, prompt, output int, rate float64, seed uint64) []Request {
	rnd := rand.New(rand.NewPCG(seed, 3))
	out := make([]Request, n)
	at := 0.0
	for i := range out {
		at += rnd.ExpFloat64() / rate
		out[i] = Request{At: seconds(at), Prompt: prompt, Output: output}
		for k := range prompt / BlockSize {
			out[i].Blocks = append(out[i].Blocks, hashOf(uint64(i), uint64(k)))
		}
	}
	return out
}

// Chats generates n requests with the lengths of conversations, rate per second: half of the prompts have
// less than 7,000 tokens, some 60,000 and more, answers 20 + Exp(320). Every fourth prompt begins as one of
// the last 200 before it.
func Chats(n int, rate float64, seed uint64) []Request {
	rnd := rand.New(rand.NewPCG(seed, 9))
	out := Uniform(n, BlockSize, 1, rate, seed)
	for i := range out {
		r := &out[i]
		r.Prompt = chatPrompt(rnd)
		r.Output = 20 + int(320*rnd.ExpFloat64())
		var shared []uint64
		if before := i - 1 - rnd.IntN(200); rnd.IntN(4) == 0 && before >= 0 {
			shared = out[before].Blocks[:min(len(out[before].Blocks), r.Prompt/BlockSize)]
		}
		r.Blocks = append([]uint64(nil), shared...)
		for len(r.Blocks) < r.Prompt/BlockSize {
			r.Blocks = append(r.Blocks, rnd.Uint64())
		}
	}
	return out
}

func chatPrompt(rnd *rand.Rand) int {
	return int(min(7000*math.Exp(rnd.NormFloat64()), 126_000)) + BlockSize
}

// burstGap is the time between two bursts. Long answers of one are not done when the next comes, so the ranks
// then differ.
const burstGap = 10 * time.Second

// Bursts generates n bursts of size requests that come at one instant. A prompt has 1 to 4 blocks of its own
// behind shared ones that are the same in all prompts, an answer 20 + Exp(250) tokens.
func Bursts(n, size, shared int, seed uint64) []Request {
	rnd := rand.New(rand.NewPCG(seed, 4))
	var out []Request
	for i := range n * size {
		r := Request{At: time.Duration(i/size) * burstGap, Output: 20 + int(250*rnd.ExpFloat64())}
		for k := range shared {
			r.Blocks = append(r.Blocks, hashOf(0, uint64(k)))
		}
		for k := range 1 + rnd.IntN(4) {
			r.Blocks = append(r.Blocks, hashOf(uint64(i)+1, uint64(k)))
		}
		r.Prompt = len(r.Blocks)*BlockSize + 1
		out = append(out, r)
	}
	return out
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// hashOf names block i of a chain (SplitMix64 of both numbers).
func hashOf(chain, i uint64) uint64 {
	x := chain<<32 + i + 0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}
