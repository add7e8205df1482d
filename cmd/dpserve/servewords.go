package main

import (
	"cmp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/nearest"
)

// servedAs are the flags of engines that are flags of serve, by their names in engines.
//
//nolint:gochecknoglobals // a constant table
var servedAs = map[string]string{
	"data-parallel-size": "dp-size", "dp-size": "dp-size", "dp": "dp-size", "attn-dp-size": "dp-size",
	"attention-data-parallel-size": "dp-size",
	"model":                        "model", "model-path": "model", "served-model-name": "served-model-name",
	"lora-modules": "lora-modules", "lora-paths": "lora-modules", "host": "host", "port": "port",
	"shutdown-timeout": "shutdown-timeout",
}

// leftOut are the flags of engines that dpserve sets itself, with what a user reads about it.
//
//nolint:gochecknoglobals // a constant table
var leftOut = map[string]string{
	"kv-events-config":              "dpserve sets it where the routing policy reads KV events",
	"enable-prompt-tokens-details":  "dpserve always sets it",
	"enable-metrics":                "dpserve always sets it",
	"load-balance-method":           "dpserve picks the rank of a request; see --policy",
	"data-parallel-backend":         "each rank is a process of its own",
	"data-parallel-external-lb":     "dpserve is the load balancer",
	"data-parallel-hybrid-lb":       "dpserve is the load balancer",
	"data-parallel-address":         "dpserve hands out addresses",
	"data-parallel-rpc-port":        "dpserve hands out ports; see --port-range",
	"data-parallel-supervisor-port": "dpserve watches the engines",

	"disaggregation-bootstrap-port": "dpserve hands out ports; see --port-range",
	"nccl-port":                     "dpserve hands out ports; see --port-range",
	"dist-init-addr":                "dpserve hands out addresses",
	"nccl-init-addr":                "dpserve hands out addresses",
	"master-addr":                   "dpserve hands out addresses",
	"master-port":                   "dpserve hands out ports; see --port-range",
}

const (
	oneMachine = "`dpserve serve` runs all ranks on this machine: leave it out; `dpserve start`, `join` " +
		"and `deploy` run them on several"
	plainHTTP = "dpserve speaks HTTP with its engines, on 127.0.0.1: leave it out; TLS belongs in front of " +
		"the endpoint"
	ownDevices = "dpserve gives each rank its devices: write --gpus with those of this machine"
)

// refusedFlags are the flags of engines that dpserve cannot pass on, with what to write instead.
//
//nolint:gochecknoglobals // a constant table
var refusedFlags = map[string]string{
	"data-parallel-rank":                   "dpserve hands out the ranks: leave it out",
	"data-parallel-start-rank":             "dpserve hands out the ranks: leave it out",
	"data-parallel-size-local":             oneMachine,
	"data-parallel-multi-port-external-lb": "dpserve starts the ranks itself: leave it out",
	"headless":                             oneMachine, "nnodes": oneMachine, "node-rank": oneMachine,
	"disaggregation-mode": "write --prefill N for the prefill ranks; those of --dp-size decode",
	"uds":                 "write --host and --port",
	"grpc":                plainHTTP, "grpc-mode": plainHTTP,
	"ssl-keyfile": plainHTTP, "ssl-certfile": plainHTTP, "ssl-ca-certs": plainHTTP,
	"device-ids": ownDevices, "base-gpu-id": ownDevices, "gpu-id-step": ownDevices,
}

// otherWords are words that users of dpserve or of other programs know, with what they are called here.
//
//nolint:gochecknoglobals // a constant table
var otherWords = map[string]string{
	"attach":              "engines that run already: `dpserve up --attach URL`",
	"enable-dp-attention": "write --lockstep; --enable-expert-parallel spreads the experts over the ranks",
	"coupling":            "write --lockstep, or leave it out for independent ranks",
	"kind":                "write --engine", "backend": "write --engine",
	"replicas": "write --dp-size", "num-replicas": "write --dp-size",
	"num-gpus":  "write --gpus for the devices of this machine, or --gpus-per-rank",
	"http-bind": "write --host and --port", "bind": "write --host and --port",
	"source":   "write MODEL; --served-model-name is what clients send",
	"model-id": "write --served-model-name",
	"alias":    "write --served-model-name once more", "aliases": "write --served-model-name once more",
	"router": "write --policy", "routing": "write --policy", "routing-policy": "write --policy",
	"router-policy": "write --policy",
	"decode":        "write --dp-size for the decode ranks", "pd-disaggregation": "write --prefill N",
	"num-groups": "write an app.yaml: `dpserve serve ... --print` begins one",
	"detach":     "`dpserve start`, then `dpserve deploy` what `dpserve serve ... --print` prints",
	"file":       "`dpserve up FILE` runs a file",
}

// arrangeServe sorts the words of a command line of serve, so that the flag parser, which knows only flags of
// serve, can read it: flags of engines go behind --, and those that serve has under its own name go before
// it. Every other command line stays as it is.
func arrangeServe(root *cobra.Command, args []string) []string {
	cmd, words, err := root.Find(args)
	if err != nil || cmd.Name() != "serve" || cmd.Parent() != root {
		return args
	}
	cmd.InitDefaultHelpFlag()
	cmd.InheritedFlags() // adds the flags that all commands have
	a := arranger{flags: cmd.Flags(), engine: engineOf(words)}
	for len(words) > 0 {
		words = a.take(words)
	}
	out := slices.Concat([]string{cmd.Name()}, a.own, a.rest)
	if a.isBehind || len(a.behind) > 0 {
		out = slices.Concat(out, []string{"--"}, a.behind)
	}
	return out
}

// engineOf returns the engine whose flags a command line has.
func engineOf(words []string) string {
	for i, word := range words {
		value, isEngine := strings.CutPrefix(word, "--engine=")
		if word == "--engine" && i+1 < len(words) {
			value, isEngine = words[i+1], true
		}
		if isEngine && len(engineflags.Names(value)) > 0 {
			return value
		}
		if word == "--" {
			break
		}
	}
	return engineflags.VLLM
}

// arranger collects the words of a command line.
type arranger struct {
	flags    *pflag.FlagSet
	engine   string
	own      []string // flags of serve
	rest     []string // MODEL, and flags that nobody knows
	behind   []string // what goes behind --
	isBehind bool     // the words come from behind --
}

// take sorts the first word, with its values, and returns the others.
func (a *arranger) take(words []string) []string {
	word := words[0]
	switch {
	case word == "--" && !a.isBehind:
		a.isBehind = true
		return words[1:]
	case !engineflags.IsFlag(word) && a.isBehind:
		a.behind = append(a.behind, word)
		return words[1:]
	case !engineflags.IsFlag(word):
		a.rest = append(a.rest, word)
		return words[1:]
	}
	flag, rest := engineflags.Next(a.engine, words)
	typed := words[:len(words)-len(rest)]
	n := a.countOwn(words)
	switch as, isOurs := servedAs[flag.Name]; {
	case isOurs:
		for _, value := range flag.Values {
			a.own = append(a.own, "--"+as+"="+value)
		}
		if len(flag.Values) == 0 {
			a.own = append(a.own, "--"+as)
		}
		if strings.HasPrefix(flag.Name, "att") {
			a.behind = append(a.behind, "--enable-dp-attention")
		}
	case n > 0 && !a.isBehind:
		a.own = append(append(a.own, plainFlag(word)), words[1:n]...)
		return words[n:]
	case a.isBehind || engineflags.Find(a.engine, flag.Name) != engineflags.Unknown:
		a.behind = append(a.behind, typed...)
	default:
		a.rest = append(a.rest, typed...)
	}
	return rest
}

// plainFlag writes a flag of serve with dashes inside.
func plainFlag(word string) string {
	name, value, hasValue := strings.Cut(word, "=")
	if name = strings.ReplaceAll(name, "_", "-"); hasValue {
		return name + "=" + value
	}
	return name
}

// countOwn returns how many words a flag of serve takes, with its own; 0 if the first word is no such flag.
func (a *arranger) countOwn(words []string) int {
	name, _, hasValue := strings.Cut(words[0], "=")
	long, isLong := strings.CutPrefix(name, "--")
	var f *pflag.Flag
	switch {
	case isLong:
		f = a.flags.Lookup(strings.ReplaceAll(long, "_", "-"))
	case len(name) == 2 || strings.HasPrefix(name, "-o"): // -o json, -ojson
		f = a.flags.ShorthandLookup(name[1:2])
		hasValue = hasValue || len(name) > 2
	}
	switch {
	case f == nil:
		return 0
	case hasValue || f.NoOptDefVal != "":
		return 1
	default:
		return min(2, len(words))
	}
}

// suggestServe says what a word that is no flag of serve and none of the engine would be called. It returns
// "" if nothing is near.
func suggestServe(flags *pflag.FlagSet, engine, name string) string {
	name = strings.ReplaceAll(name, "_", "-")
	if hint := otherWords[name]; hint != "" {
		return hint
	}
	if hint := flagOfOtherEngine(engine, name); hint != "" {
		return hint
	}
	words := engineflags.Names(engine)
	flags.VisitAll(func(flag *pflag.Flag) { words = append(words, flag.Name) })
	if near := nearest.Word(name, words); near != "" {
		return "did you mean --" + near + "?"
	}
	return ""
}

// flagOfOtherEngine says what a flag of another engine is called in this one.
func flagOfOtherEngine(engine, name string) string {
	other := map[string]string{
		engineflags.VLLM: engineflags.SGLang, engineflags.SGLang: engineflags.VLLM,
	}[engine]
	head, _, _ := strings.Cut(name, ".")
	if engineflags.Find(engine, head) != engineflags.Unknown ||
		engineflags.Find(other, head) == engineflags.Unknown {
		return ""
	}
	same := engineflags.Counterpart(engine, head)
	return "it is a flag of " + other + "; " + cmp.Or(
		map[bool]string{true: engine + " calls it --" + same}[same != ""],
		engine+" has none like it: leave it out, or write --engine "+other)
}
