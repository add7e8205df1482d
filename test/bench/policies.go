//go:build linux

package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/loadgen"
)

// routed is a setting of `routing`.
type routed struct {
	name   string // of the row
	policy string
	preset string // empty = documented
	params string // flow map without its braces
}

// yaml is the key of an application; empty for the default policy.
func (r routed) yaml() string {
	if r.policy == "" {
		return ""
	}
	line := "policy: " + r.policy
	if r.preset != "" {
		line += ", preset: " + r.preset
	}
	if r.params != "" {
		line += ", params: {" + r.params + "}"
	}
	return "    routing: {" + line + "}\n"
}

// settings are the rows of the comparison. The first is what the others are compared with.
func settings() []routed {
	const tuned = "tuned"
	return []routed{
		{name: "round-robin", policy: "round-robin"},
		{name: "power-of-two", policy: "power-of-two"},
		{name: "least-loaded", policy: "least-loaded"},
		{name: "least-kv", policy: "least-kv"},
		{name: "scoring", policy: "scoring"},
		{name: "scoring-locality", policy: "scoring", params: "profile: locality"},
		{name: "cache-aware", policy: "cache-aware"},
		{name: "cache-aware-tuned", policy: "cache-aware", preset: tuned},
		{name: "prefix-aware", policy: "prefix-aware"},
		{name: "prefix-aware-tuned", policy: "prefix-aware", preset: tuned},
		{name: "kv", policy: "kv"},
		{name: "kv-tuned", policy: "kv", preset: tuned},
		{name: "lmetric-1", policy: "lmetric-1"},
		{name: "lpwl", policy: "lpwl"},
		{name: "mex", policy: "mex"},
		{name: "mex-latency", policy: "mex", params: "goal: latency"},
		{name: "session-affinity", policy: "session-affinity"},
	}
}

// The simulated ranks of the comparison: the reference model of steptime at real speed, with room for 262,144
// tokens, so that the working set of a traffic fits in all ranks together and not in one.
const (
	simRanks     = 4
	simBlocks    = 16384
	simBlockSize = 16
)

// traffic is one kind of load. Its rate makes the ranks compute about 70 % of the prefill they can do: under
// round-robin, or with warm caches where it says so. Column "load %" counts tokens alone; attention adds a
// tenth to a half of it.
type traffic struct {
	name   string
	what   string
	warmup time.Duration // not measured: until as many sessions end as begin, and caches are full
	rate   float64       // sessions per second
	tokens int           // answer
	talk   loadgen.Conversation
}

func traffics() []traffic {
	const many = 1 << 20 // sessions: the measurement ends before
	return []traffic{
		{
			name: "chat", what: "multi-turn sessions with shared system prompts; 70 % load under round-robin",
			warmup: 24 * time.Second, rate: 2.3, tokens: 64,
			talk: loadgen.Conversation{
				Sessions: many, Turns: 8, SystemPrompts: 8, SystemTokens: 4000,
				TurnTokens: 1000, Think: time.Second,
			},
		},
		{
			name: "agents",
			what: "the same with longer messages; 70 % of what warm ranks can do, " +
				"which is more than blind routing can",
			warmup: 20 * time.Second, rate: 3, tokens: 32,
			talk: loadgen.Conversation{
				Sessions: many, Turns: 6, SystemPrompts: 8, SystemTokens: 4000,
				TurnTokens: 2000, Think: time.Second,
			},
		},
		{
			name: "single", what: "single turns that share nothing; 70 % load",
			warmup: 5 * time.Second, rate: 19, tokens: 32,
			talk: loadgen.Conversation{Sessions: many, Turns: 1, TurnTokens: 3000},
		},
		{
			name: "hot",
			what: "three long system prompts, of which one has 61 % of the traffic; " +
				"70 % of what warm ranks can do",
			warmup: 5 * time.Second, rate: 40, tokens: 16,
			talk: loadgen.Conversation{
				Sessions: many, Turns: 1, SystemPrompts: 3, SystemTokens: 12_000,
				TurnTokens: 1000,
			},
		},
		{
			name: "documents",
			what: "questions about 48 documents of 8,000 tokens, more than a rank holds; " +
				"70 % load under round-robin",
			warmup: 10 * time.Second, rate: 15, tokens: 32,
			talk: loadgen.Conversation{
				Sessions: many, Turns: 1, SystemPrompts: 48, SystemTokens: 8000,
				TurnTokens: 300,
			},
		},
		{
			name: "mixed", what: "short questions, one in ten with 16,000 tokens of its own; 70 % load",
			warmup: 5 * time.Second, rate: 20, tokens: 32,
			talk: loadgen.Conversation{
				Sessions: many, Turns: 1, SystemPrompts: 4, SystemTokens: 500,
				TurnTokens: 500, LongShare: 0.1, LongTokens: 16_000,
			},
		},
	}
}

// chosen keeps what a list of names asks for, in the order of all; an empty list asks for everything.
func chosen[T any](all []T, list string, name func(T) string) ([]T, error) {
	if list == "" {
		return all, nil
	}
	want := strings.Split(list, ",")
	var known []string
	out := slices.DeleteFunc(slices.Clone(all), func(x T) bool {
		known = append(known, name(x))
		return !slices.Contains(want, name(x))
	})
	for _, w := range want {
		if !slices.Contains(known, w) {
			return nil, fmt.Errorf("%w: no row %q: there are %s", errUnexpected, w, strings.Join(known, ", "))
		}
	}
	return out, nil
}
