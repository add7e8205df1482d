// Package engineflags knows the command lines of vLLM and SGLang: which flags there are, what each takes, and
// which flags of the two mean the same. It reads a command line as those programs do.
package engineflags

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/dpserve/dpserve/internal/simflags"
)

// The engines. The simulated engine knows the flags of both others: it takes any command line of theirs.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
	Sim    = "sim"
)

// Takes says what follows a flag.
type Takes uint8

// What follows a flag. A switch has the opposite --no-NAME.
const (
	Unknown Takes = iota
	Switch
	One
	Many
)

// Find returns what a flag of an engine takes. name is in kebab case without the leading dashes. NAME.KEY
// sets one key of a flag that takes JSON.
func Find(engine, name string) Takes {
	head, _, isKey := strings.Cut(name, ".")
	takes := flagsOf(engine)[head]
	switch {
	case isKey && takes == One:
		return One
	case isKey:
		return Unknown
	case takes != Unknown:
		return takes
	}
	if on, isOff := strings.CutPrefix(head, "no-"); isOff && engine != SGLang {
		if flagsOf(engine)[on] == Switch {
			return Switch
		}
	}
	return Unknown
}

// Names lists the flags of an engine, sorted.
func Names(engine string) []string { return slices.Sorted(maps.Keys(flagsOf(engine))) }

// flagsOf returns the flags of an engine. The tables are built once, by the first command line.
func flagsOf(engine string) map[string]Takes { return tables()[engine] }

var tables = sync.OnceValue(func() map[string]map[string]Takes {
	vllm := table(vllmSwitches, vllmOne, vllmMany)
	sglang := table(sglangSwitches, sglangOne, sglangMany)
	sim := maps.Clone(sglang)
	maps.Copy(sim, vllm)
	for _, name := range simflags.Names() {
		flag, _, _ := simflags.Find(name)
		switch {
		case flag.Switch:
			sim[name] = Switch
		case flag.Many:
			sim[name] = Many
		default:
			sim[name] = One
		}
	}
	return map[string]map[string]Takes{VLLM: vllm, SGLang: sglang, Sim: sim}
})

func table(switches, one, many string) map[string]Takes {
	out := map[string]Takes{}
	for takes, names := range map[Takes]string{Switch: switches, One: one, Many: many} {
		for _, name := range strings.Fields(names) {
			out[name] = takes
		}
	}
	return out
}

// shortNames are the flags of vLLM with one dash.
//
//nolint:gochecknoglobals // a constant table
var shortNames = map[string]string{
	"q": "quantization", "n": "nnodes", "r": "node-rank", "O": "optimization-level",
	"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "ep": "enable-expert-parallel",
	"dcp": "decode-context-parallel-size", "pcp": "prefill-context-parallel-size",
	"dp": "data-parallel-size", "dpn": "data-parallel-rank", "dpr": "data-parallel-start-rank",
	"dpl": "data-parallel-size-local", "dpa": "data-parallel-address", "dpp": "data-parallel-rpc-port",
	"dpb": "data-parallel-backend", "dph": "data-parallel-hybrid-lb", "dpe": "data-parallel-external-lb",
	"dpm": "data-parallel-multi-port-external-lb", "asc": "api-server-count",
	"sc": "speculative-config", "dc": "diffusion-config", "cc": "compilation-config",
	"ac": "attention-config",
}

// sameFlags are flags by their name in vLLM and in SGLang that mean the same. Ours first.
//
//nolint:gochecknoglobals // a constant table
var sameFlags = [][2]string{
	tensorSize, pipelineSize,
	{"data-parallel-size", "dp-size"},
	{"model", "model-path"},
	{"lora-modules", "lora-paths"},
	{"gpu-memory-utilization", "mem-fraction-static"},
	{"max-model-len", "context-length"},
	{"max-num-seqs", "max-running-requests"},
	{"max-num-batched-tokens", "chunked-prefill-size"},
	{"block-size", "page-size"},
	{"tokenizer", "tokenizer-path"},
	{"seed", "random-seed"},
	{"no-enable-prefix-caching", "disable-radix-cache"},
	{"enforce-eager", "disable-cuda-graph"},
	{"scheduling-policy", "schedule-policy"},
	{"hf-overrides", "json-model-override-args"},
	{"enable-expert-parallel", "ep-size"},
	{"max-num-queued-reqs", "max-queued-requests"},
	{"enable-sleep-mode", "enable-memory-saver"},
	{"uvicorn-log-level", "log-level-http"},
}

// Counterpart returns the flag of an engine that means what a flag of the other engine means, "" if none is
// known.
func Counterpart(engine, name string) string {
	of := map[string]int{VLLM: 0, Sim: 0, SGLang: 1}[engine]
	for _, same := range sameFlags {
		if same[1-of] == name {
			return same[of]
		}
	}
	return ""
}

// Sizes of parallelism have several names that are never confused, so each engine gets its own name of them.
//
//nolint:gochecknoglobals // a constant table
var (
	tensorSize   = [2]string{"tensor-parallel-size", "tp-size"} // in vLLM and in SGLang
	pipelineSize = [2]string{"pipeline-parallel-size", "pp-size"}
	sizes        = map[string][2]string{
		"tp": tensorSize, "tp-size": tensorSize, "tensor-parallel-size": tensorSize,
		"pp": pipelineSize, "pp-size": pipelineSize, "pipeline-parallel-size": pipelineSize,
	}
)

// Flag is one flag of a command line.
type Flag struct {
	Name   string   // in kebab case, without dashes; behind a dot as it is written
	Typed  string   // as it is written, for messages
	Values []string // nil if none follows
}

// IsFlag reports whether a word begins a flag. Negative numbers are values.
func IsFlag(word string) bool {
	return len(word) > 1 && word[0] == '-' && !negativeNumber.MatchString(word)
}

var negativeNumber = regexp.MustCompile(`^-(\d+|\d*\.\d+)$`)

// Next cuts one flag with its values off words; the first word begins a flag. A flag that the engine is not
// known to have takes the next word if that is no flag.
func Next(engine string, words []string) (f Flag, rest []string) {
	name, value, hasValue := strings.Cut(words[0], "=")
	f.Name, f.Typed, rest = plainName(engine, name), name, words[1:]
	if hasValue {
		f.Values = []string{value}
		return f, rest
	}
	if level, isLevel := strings.CutPrefix(name, "-O"); isLevel && level != "" && level[0] != '.' {
		f.Name, f.Values = shortNames["O"], []string{level} // -O3
		return f, rest
	}
	most := map[Takes]int{Switch: 0, One: 1, Unknown: 1, Many: len(rest)}[Find(engine, f.Name)]
	for len(f.Values) < most && len(rest) > 0 && !IsFlag(rest[0]) {
		f.Values, rest = append(f.Values, rest[0]), rest[1:]
	}
	return f, rest
}

// plainName returns the name of a flag in kebab case without dashes. Other spellings of a size get the
// engine's own one.
func plainName(engine, word string) string {
	name := strings.TrimLeft(word, "-")
	head, key, isKey := strings.Cut(name, ".")
	if long, isShort := shortNames[head]; isShort && !strings.HasPrefix(word, "--") {
		head = long
	}
	head = strings.ReplaceAll(head, "_", "-")
	if names, isSize := sizes[head]; isSize {
		head = names[0]
		if engine == SGLang {
			head = names[1]
		}
	}
	if isKey {
		return head + "." + key
	}
	return head
}
