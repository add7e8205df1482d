package engine

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/problem"
)

// DefaultMaxOngoing is max_ongoing_requests of a rank whose engine's max_num_seqs is not known.
const DefaultMaxOngoing = 256

// Flags renders engine.args as command line flags in file order: snake_case becomes kebab-case, true a bare
// flag, false --no-flag, a list or map one JSON argument. A list under a flag that takes several values gives
// these values. A list under a simulator flag (sim_…) repeats the flag: those are schedules.
func Flags(args app.Args) ([]string, error) {
	var out []string
	for _, a := range args {
		name := flagName(a.Name)
		if list, ok := a.Value.([]any); ok && strings.HasPrefix(name, "sim-") {
			for _, v := range list {
				out = append(out, "--"+name, fmt.Sprint(v))
			}
			continue
		}
		if list, ok := a.Value.([]any); ok && engineflags.Find(engineflags.Sim, name) == engineflags.Many {
			out = append(out, listFlag(name, list)...)
			continue
		}
		flags, err := flag(name, a.Value)
		if err != nil {
			return nil, err
		}
		out = append(out, flags...)
	}
	return out, nil
}

func flagName(name string) string { return strings.ReplaceAll(strings.TrimLeft(name, "-"), "_", "-") }

// listFlag is a flag with the items of a list as words of their own.
func listFlag(name string, list []any) []string {
	out := []string{"--" + name}
	for _, item := range list {
		out = append(out, fmt.Sprint(item))
	}
	return out
}

func flag(name string, value any) ([]string, error) {
	switch v := value.(type) {
	case nil:
		return nil, nil
	case bool:
		if v {
			return []string{"--" + name}, nil
		}
		return []string{"--no-" + name}, nil
	case string:
		return []string{"--" + name, v}, nil
	case float64: // also every number that came through JSON
		return []string{"--" + name, strconv.FormatFloat(v, 'f', -1, 64)}, nil
	case int, int64, uint64, json.Number:
		return []string{"--" + name, fmt.Sprint(v)}, nil
	}
	b, err := json.Marshal(value)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "engine.args.%s: cannot be written as JSON: %w",
			name, err)
	}
	return []string{"--" + name, string(b)}, nil
}

// shareFlags limits an engine that shares its device to its part of the memory. Without a limit the first one
// takes nearly all of it, and the second one cannot start.
func shareFlags(a *app.Application) []string {
	flag, value := app.MemoryOfShare(a)
	if flag == "" {
		return nil
	}
	return []string{"--" + flag, value}
}

// lookupArg looks up a value of engine.args by its flag name in kebab case.
func lookupArg(args app.Args, name string) (any, bool) {
	for _, a := range args {
		if flagName(a.Name) == name {
			return a.Value, true
		}
	}
	return nil, false
}

// MaxOngoing is the number of requests that a rank of a admits at once: max_ongoing_requests of the file,
// else the engine's max_num_seqs (SGLang: its share of max_running_requests) as it was given, else
// DefaultMaxOngoing. No engine reports it over HTTP.
func MaxOngoing(a *app.Application) int {
	if a.MaxOngoingRequests > 0 {
		return a.MaxOngoingRequests
	}
	flag, ranks := "max-num-seqs", 1.0
	if a.Engine.Kind == app.KindSGLang {
		flag = "max-running-requests"
		if a.DataParallel.Coupling == app.Lockstep { // SGLang divides it among the ranks of DP attention
			ranks = float64(max(1, a.DataParallel.DPSize))
		}
	}
	if v, ok := lookupArg(a.Engine.Args, flag); ok {
		n, err := strconv.ParseFloat(fmt.Sprint(v), 64)
		if n /= ranks; err == nil && n >= 1 && n <= 1<<20 {
			return int(n)
		}
	}
	return DefaultMaxOngoing
}

// APIKey is the key a launched engine asks for on its /v1 routes: engine.args api_key, else VLLM_API_KEY of
// engine.env, else "".
func APIKey(a *app.Application) string {
	if v, ok := lookupArg(a.Engine.Args, "api-key"); ok {
		switch v := v.(type) {
		case string:
			return v
		case []any: // any of them will do
			if s, isString := v[0].(string); isString {
				return s
			}
		}
	}
	return a.Engine.Env["VLLM_API_KEY"]
}
