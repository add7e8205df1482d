// Package tracesim plays a trace of requests against simulated engines behind the real Router, on virtual time: what a
// routing policy is worth on a day of traffic, in seconds and without noise. The engines are enginemodel's, by the step law
// of steptime; the Router hears what an ingress would tell it. The same workload and seed give the same result.
package tracesim

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
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

// ErrTrace is a line that is no request of a trace.
var ErrTrace = errors.New("not a trace")

// maxLine bounds a line of a trace, in bytes.
const maxLine = 4 << 20

// ReadTrace reads a trace of Mooncake's format, one JSON object per line:
//
//	{"timestamp": 27000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
//
// in milliseconds, tokens, and chained ids of the prompt's blocks of BlockSize tokens.
func ReadTrace(r io.Reader) ([]Request, error) {
	var out []Request
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for n := 1; lines.Scan(); n++ {
		var row struct {
			Timestamp float64  `json:"timestamp"`
			Input     int      `json:"input_length"`
			Output    int      `json:"output_length"`
			Hashes    []uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			return nil, fmt.Errorf("%w: line %d: %w", ErrTrace, n, err)
		}
		if row.Input < 1 || row.Output < 0 || !(row.Timestamp >= 0) {
			return nil, fmt.Errorf("%w: line %d: timestamp %v, input_length %d, output_length %d", ErrTrace, n, row.Timestamp, row.Input, row.Output)
		}
		out = append(out, Request{
			At: time.Duration(row.Timestamp * float64(time.Millisecond)), Prompt: row.Input, Output: max(row.Output, 1),
			Blocks: row.Hashes[:min(len(row.Hashes), row.Input/BlockSize)],
		})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	slices.SortStableFunc(out, func(a, b Request) int { return int(a.At - b.At) })
	return out, nil
}

// Play is the trace at factor times its rate. Where many requests share a timestamp, the timestamps are rounded: each such
// request gets a drawn instant before the next timestamp, or bursts would come of the rounding.
func Play(trace []Request, factor float64, seed uint64) []Request {
	rnd := rand.New(rand.NewPCG(seed, 1))
	out := slices.Clone(trace)
	quantum := quantumOf(trace)
	for i := range out {
		at := float64(out[i].At)
		if quantum > 0 {
			at += rnd.Float64() * float64(quantum)
		}
		out[i].At = time.Duration(at / factor)
	}
	slices.SortStableFunc(out, func(a, b Request) int { return int(a.At - b.At) })
	return out
}

// quantumOf is what a trace's timestamps are rounded to; 0 if most differ.
func quantumOf(trace []Request) time.Duration {
	var gaps []time.Duration
	for i := 1; i < len(trace); i++ {
		if gap := trace[i].At - trace[i-1].At; gap > 0 {
			gaps = append(gaps, gap)
		}
	}
	if 2*len(gaps) > len(trace) || len(gaps) == 0 {
		return 0
	}
	slices.Sort(gaps)
	return gaps[len(gaps)/2]
}

// Agents generates sessions whose every turn begins with all of the turns before it: 20 system prompts of 4 to 23 blocks, of
// which few are popular; 1 + Exp(10) turns, of 1 + Exp(3) new blocks and an answer of 20 + Exp(250) tokens each; the next turn
// comes 1 s + 20 ms per token of the answer + Exp(6 s) later. No prompt is longer than 200 blocks. rate is sessions per second.
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
				At: seconds(at), Prompt: length, Output: answer, Blocks: blocks[:len(blocks):len(blocks)], Session: "session " + strconv.Itoa(s),
			})
			length += answer
			at += 1 + 0.02*float64(answer) + 6*rnd.ExpFloat64()
		}
	}
	slices.SortStableFunc(out, func(a, b Request) int { return int(a.At - b.At) })
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

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// hashOf names block i of a chain (SplitMix64 of both numbers).
func hashOf(chain, i uint64) uint64 {
	x := chain<<32 + i + 0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}
