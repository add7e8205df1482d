// Package simflags is the command line of the simulated engine: which flags there are, and what they take.
// The engine reads its flags by this table, and engine.args of an application are checked by it before the
// engine starts.
package simflags

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Flag says what a flag takes. The zero value takes one text of any form.
type Flag struct {
	// Switch takes no value; --no-NAME is its opposite.
	Switch bool
	// Many takes several values behind each other.
	Many bool
	// Words are the only values.
	Words []string

	number    numberKind
	low, high float64
	isFault   bool
}

type numberKind uint8

const (
	noNumber numberKind = iota
	whole               // from low to high
	real                // from low to high
	above               // real, above low to high
)

// most bounds the counts that no other limit bounds.
const most = 1 << 40

// flags are all flags, by their names without the leading dashes.
var flags = map[string]Flag{
	// of vLLM
	"host": {}, "api-key": {}, "model": {}, "data-parallel-address": {}, "kv-events-config": {},
	"prefix-caching-hash-algo": {}, "kv-transfer-config": {},
	"served-model-name":       {Many: true},
	"runner":                  {Words: []string{"auto", "generate", "pooling"}},
	"port":                    wholes(0, 65535),
	"data-parallel-rpc-port":  wholes(0, 65535),
	"data-parallel-size":      wholes(0, 4096),
	"data-parallel-rank":      wholes(0, 4095),
	"tensor-parallel-size":    wholes(1, 1024),
	"dp-sync-interval":        wholes(1, 1<<20),
	"max-num-seqs":            wholes(1, 1<<20),
	"max-model-len":           wholes(1, 1<<30),
	"max-num-batched-tokens":  wholes(1, 1<<30),
	"block-size":              wholes(1, 1<<20),
	"num-gpu-blocks-override": wholes(1, 1<<30),
	"max-num-queued-reqs":     wholes(0, 1<<30),
	"max-num-queued-tokens":   wholes(0, most),
	"seed":                    wholes(0, 1<<53),
	"shutdown-timeout":        numbers(real), "distributed-timeout-seconds": numbers(real),
	"enable-auto-tool-choice": {Switch: true}, "enable-prefix-caching": {Switch: true},
	"enable-prompt-tokens-details": {Switch: true}, "enable-force-include-usage": {Switch: true},
	"enable-request-id-headers": {Switch: true}, "enable-expert-parallel": {Switch: true},

	// its own
	"sim-speed":             numbers(above),
	"sim-step-ms":           numbers(real),
	"sim-law":               {Words: []string{"qwen3-32b", "deepseek-v3"}},
	"sim-prompt-steps":      {Switch: true},
	"sim-startup-s":         numbers(real),
	"sim-internal-lb":       wholes(0, 1024),
	"sim-first-rank":        wholes(0, 4095),
	"sim-global-index":      {Switch: true},
	"sim-settle-block-size": wholes(0, 1<<20),
	"sim-death":             {Words: []string{"gloo", "nccl"}},
	"sim-kv-hash":           {Words: []string{"uint", "int", "bytes"}},
	"sim-kv-first-seq":      wholes(0, math.MaxUint32),
	"sim-kv-sliding-window": {Switch: true},
	"sim-watch-stdin":       {Switch: true},
	"sim-fail":              {isFault: true},

	"sim-transfer-token-bytes":     wholes(1, 1<<30),
	"sim-transfer-gbps":            numbers(above),
	"sim-transfer-first-contact-s": numbers(real),
	"sim-transfer-handshake-s":     numbers(above),
}

func wholes(low, high float64) Flag { return Flag{number: whole, low: low, high: high} }

func numbers(kind numberKind) Flag {
	return Flag{number: kind, high: 1e9}
}

// Find looks a flag up by its name without the leading dashes. A switch is also found as no-NAME; isOff says
// that it was.
func Find(name string) (f Flag, isOff, ok bool) {
	if f, ok = flags[name]; ok {
		return f, false, true
	}
	if on, cut := strings.CutPrefix(name, "no-"); cut {
		f = flags[on]
	}
	return f, f.Switch, f.Switch
}

// Names are the names of all flags, sorted.
func Names() []string { return slices.Sorted(maps.Keys(flags)) }

// Check says why the flag does not take value.
func (f Flag) Check(value string) error {
	if f.isFault {
		_, err := ParseFault(value)
		return err
	}
	if !f.takes(value) {
		return fmt.Errorf("want %s", f.Wanted())
	}
	return nil
}

func (f Flag) takes(value string) bool {
	switch {
	case f.Switch:
		return false
	case f.Words != nil:
		return slices.Contains(f.Words, value)
	case f.number == noNumber:
		return true
	case f.number == whole:
		n, err := strconv.ParseInt(value, 10, 64)
		return err == nil && float64(n) >= f.low && float64(n) <= f.high
	}
	x, err := strconv.ParseFloat(value, 64)
	return err == nil && (x > f.low || x == f.low && f.number == real) && x <= f.high
}

// Wanted says what the flag takes, in the words of a fault.
func (f Flag) Wanted() string {
	word := map[numberKind]string{
		noNumber: "a text", whole: "an integer from", real: "a number from", above: "a number above",
	}[f.number]
	switch {
	case f.Switch:
		return "true or false"
	case f.isFault:
		return "MODE, MODE=NUMBER or MODE@SECONDS, with a mode of docs/simulated-engine.md"
	case f.Words != nil:
		return strings.Join(f.Words, " | ")
	case f.number == noNumber:
		return word
	}
	return fmt.Sprintf("%s %s to %s", word, plain(f.low), plain(f.high))
}

func plain(x float64) string { return strconv.FormatFloat(x, 'f', -1, 64) }

// Fault is a value of --sim-fail: MODE[=ARGUMENT][@SECONDS][%RANK].
type Fault struct {
	Mode     string
	Argument string  // as written; "" = none
	AfterS   float64 // seconds after the start
	Rank     int     // of a lockstep group; -1 = every rank
}

// What a mode takes behind its =.
const (
	noArgument = iota
	numberArgument
	fileArgument
)

// modes are the failures that can be injected, with what they take.
var modes = map[string]int{
	"crash": numberArgument, "kill": noArgument, "orphan": numberArgument, "core-dead": noArgument,
	"hang": noArgument, "freeze": noArgument, "slow": numberArgument, "refuse": noArgument,
	"health-503": noArgument, "stopping": noArgument, "ignore-sigterm": noArgument,

	"http-500": noArgument, "http-503": noArgument, "busy": noArgument, "bare-done": noArgument,
	"cut": numberArgument, "no-done": numberArgument, "error-event": numberArgument, "abort": numberArgument,
	"stall": numberArgument,

	"kv-drop": numberArgument, "kv-duplicate": numberArgument, "kv-reorder": numberArgument,
	"kv-garbage": numberArgument, "kv-unknown": numberArgument,
	"kv-restart": noArgument, "kv-sleep": noArgument, "kv-no-replay": noArgument,
	"kv-short-replay": noArgument, "kv-slow-replay": noArgument,

	"transfer-fail": noArgument, "transfer-slow": numberArgument, "transfer-hang": noArgument,
	"transfer-null": noArgument, "transfer-lease": numberArgument,

	"start-exit": noArgument, "start-exit-once": fileArgument, "start-exit-while": fileArgument,
	"start-hang": noArgument,
}

// IsMode says whether there is a failure of that name.
func IsMode(name string) bool { _, ok := modes[name]; return ok }

// Modes are the names of the failures, sorted.
func Modes() []string { return slices.Sorted(maps.Keys(modes)) }

// ParseFault reads a value of --sim-fail.
func ParseFault(text string) (Fault, error) {
	f := Fault{Rank: -1}
	if at := strings.LastIndexByte(text, '%'); at >= 0 {
		if rank, err := strconv.Atoi(text[at+1:]); err == nil && rank >= 0 {
			text, f.Rank = text[:at], rank
		}
	}
	spec, after, isTimed := strings.Cut(text, "@")
	f.Mode, f.Argument, _ = strings.Cut(spec, "=")
	takes, known := modes[f.Mode]
	seconds := numbers(real)
	switch _, err := strconv.ParseFloat(f.Argument, 64); {
	case !known:
		return f, fmt.Errorf("unknown fault mode %q: the modes are in docs/simulated-engine.md", f.Mode)
	case takes == fileArgument && f.Argument == "":
		return f, fmt.Errorf("want %s=FILE", f.Mode)
	case takes == noArgument && f.Argument != "":
		return f, fmt.Errorf("mode %s takes no argument", f.Mode)
	case takes == numberArgument && f.Argument != "" && err != nil:
		return f, fmt.Errorf("the argument of %s is not a number", f.Mode)
	case isTimed && !seconds.takes(after):
		return f, fmt.Errorf("the time behind @ is not %s", seconds.Wanted())
	}
	f.AfterS, _ = strconv.ParseFloat(after, 64) // "" is 0
	return f, nil
}
