package main

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/nearest"
)

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
	"decode":     "write --dp-size for the decode ranks",
	"num-groups": "write an app.yaml: `dpserve serve ... --print` begins one",
	"detach":     "`dpserve start`, then `dpserve deploy` what `dpserve serve ... --print` prints",
	"file":       "`dpserve up FILE` runs a file",
}

// arrange changes a command line of serve or up, so that the flag parser can read it. Of one that begins with
// an unknown command only that word is left, so that the error is about it and not about flags behind it.
// Every other one stays as it is.
func arrange(root *cobra.Command, args []string) []string {
	cmd, words, err := root.Find(args)
	if cmd == root && len(args) > 0 && isUnknown(args[0]) {
		return args[:1]
	}
	if err != nil || cmd.Parent() != root {
		return args
	}
	switch cmd.Name() {
	case "up":
		return append([]string{cmd.Name()}, arrangeUp(words)...)
	case "serve":
		return append([]string{cmd.Name()}, arrangeServe(cmd, words)...)
	}
	return args
}

// isUnknown reports whether a word that names no command of the root is no flag, and none of the commands
// that cobra adds later.
func isUnknown(word string) bool {
	return word != "help" && !strings.HasPrefix(word, "-") && !strings.HasPrefix(word, "__")
}

// arrangeServe sorts the words of a command line of serve: the parser knows only flags of serve, so flags of
// engines go behind --, and those that serve has under its own name go before it.
func arrangeServe(cmd *cobra.Command, words []string) []string {
	cmd.InitDefaultHelpFlag()
	cmd.InheritedFlags() // adds the flags that all commands have
	a := arranger{flags: cmd.Flags(), engine: engineOf(words)}
	for len(words) > 0 {
		words = a.take(words)
	}
	out := slices.Concat(a.own, a.rest)
	if a.isBehind || len(a.behind) > 0 {
		out = slices.Concat(out, []string{"--"}, a.behind)
	}
	return out
}

// arrangeUp joins a URL of --prefill and the bootstrap port that follows it, as SGLang's router has them.
func arrangeUp(words []string) []string {
	var out []string
	for i := 0; i < len(words); i++ {
		word := words[i]
		if engineflags.IsFlag(word) {
			word = plainFlag(word)
		}
		if word == "--prefill" && i+1 < len(words) {
			i++
			word += "=" + words[i]
		}
		if strings.HasPrefix(word, "--prefill=") && i+1 < len(words) && isBootstrapPort(words[i+1]) {
			i++
			word += "," + words[i]
		}
		out = append(out, word)
	}
	return out
}

func isBootstrapPort(word string) bool {
	_, err := strconv.ParseUint(word, 10, 16)
	return err == nil || strings.EqualFold(word, noBootstrap)
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
	owned, _ := engineflags.FindOwned(flag.Name)
	switch as := owned.Flag; {
	case as != "":
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
