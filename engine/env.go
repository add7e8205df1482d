package engine

import (
	"sort"
	"strings"
)

// inherited are the variables of dpserve's own environment that a simulated engine gets: where programs,
// homes, temporary files and times are. Everything else stays here: tokens, proxies (prompts must not leave
// through one), and settings of other engines.
func inherited() []string {
	return []string{"PATH", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LC_ALL", "GOCOVERDIR"}
}

// stripped are prefixes of variables that no engine gets. vLLM reads its data-parallel rank from VLLM_DP_*,
// and dpserve assigns the ranks: an inherited value would name another rank.
func stripped() []string { return []string{"VLLM_DP_"} }

// Environment builds an engine's environment, sorted: the inherited part of environ, then own, then the app's
// engine.env, later ones winning.
func Environment(environ, own []string, extra map[string]string) []string {
	vars := map[string]string{}
	keep := map[string]bool{}
	for _, k := range inherited() {
		keep[k] = true
	}
	for _, kv := range environ {
		if k, v, ok := strings.Cut(kv, "="); ok && keep[k] {
			vars[k] = v
		}
	}
	for _, kv := range own {
		k, v, _ := strings.Cut(kv, "=")
		vars[k] = v
	}
	for k, v := range extra {
		vars[k] = v
	}
	return join(vars)
}

func join(vars map[string]string) []string {
	out := make([]string, 0, len(vars))
	for k, v := range vars {
		if !hasAnyPrefix(k, stripped()) {
			out = append(out, k+"="+v)
		}
	}
	sort.Strings(out)
	return out
}

func hasAnyPrefix(s string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}
