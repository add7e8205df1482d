package engine

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// The environment of a launched engine is, later ones winning: what it inherits of its node's environment,
// what dpserve sets, and engine.env of the application.
//
// A vLLM or SGLang engine inherits its node's environment as if it were started by hand there: caches and
// tokens of model hubs, proxies, library paths, settings of CUDA, NCCL and of the engine. It does not
// inherit:
//   - dpserve's own variables, which hold its secrets;
//   - what a service manager gives to dpserve alone;
//   - devices and ranks that another launcher has given out, because dpserve gives them out;
//   - VLLM_API_KEY, because dpserve sends the key of the application's file, and VLLM_PORT, from which all
//     engines of the node would search a free port (Kubernetes sets it to a URL for a service named vllm).
//
// A simulated engine inherits only paths of programs, home and temporary files, time zone and language.

// keptFromEngines are the variables that a vLLM or SGLang engine does not inherit.
func keptFromEngines() []string {
	return []string{
		"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID",
		"CREDENTIALS_DIRECTORY", "INVOCATION_ID", "JOURNAL_STREAM", "MAINPID", "MANAGERPID",
		"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
		"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
		"VLLM_API_KEY", "VLLM_PORT",
	}
}

// simInherited are the variables that a simulated engine inherits.
func simInherited() []string {
	return []string{"PATH", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LC_ALL", "GOCOVERDIR"}
}

// stripped begins the variables that no engine gets. vLLM reads its data-parallel rank from them, and dpserve
// assigns the ranks: an inherited value would name another rank.
const stripped = "VLLM_DP_"

// simEnvironment builds the environment of a simulated engine, sorted.
func simEnvironment(environ, own []string, extra map[string]string) []string {
	names := simInherited()
	return merge(environ, own, extra, func(name string) bool { return slices.Contains(names, name) })
}

// realEnvironment builds the environment of a vLLM or SGLang engine, sorted. Requests to hosts never go
// through a proxy.
func realEnvironment(environ, own []string, extra map[string]string, hosts ...string) []string {
	names := keptFromEngines()
	out := merge(environ, own, extra, func(name string) bool {
		return !strings.HasPrefix(name, "DPSERVE_") && !slices.Contains(names, name)
	})
	return excludeFromProxy(out, extra, hosts)
}

func merge(environ, own []string, extra map[string]string, inherits func(name string) bool) []string {
	vars := map[string]string{}
	for _, kv := range environ {
		if k, v, ok := strings.Cut(kv, "="); ok && inherits(k) {
			vars[k] = v
		}
	}
	for _, kv := range own {
		k, v, _ := strings.Cut(kv, "=")
		vars[k] = v
	}
	maps.Copy(vars, extra)
	out := make([]string, 0, len(vars))
	for k, v := range vars {
		if !strings.HasPrefix(k, stripped) {
			out = append(out, k+"="+v)
		}
	}
	slices.Sort(out)
	return out
}

// excludeFromProxy adds this machine and hosts to the exceptions of a proxy that the engine inherits: engines
// ask themselves and each other over HTTP, and those requests must not leave. An exception that the
// application's file names stays as it is.
func excludeFromProxy(env []string, extra map[string]string, hosts []string) []string {
	get := func(name string) string {
		for _, kv := range env {
			if k, v, _ := strings.Cut(kv, "="); k == name {
				return v
			}
		}
		return ""
	}
	names := []string{"http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
	isWritten := extra["no_proxy"] != "" || extra["NO_PROXY"] != ""
	if isWritten || !slices.ContainsFunc(names, func(n string) bool { return get(n) != "" }) {
		return env
	}
	var list []string
	if old := cmp.Or(get("no_proxy"), get("NO_PROXY")); old != "" {
		list = strings.Split(old, ",")
	}
	for _, h := range append([]string{"localhost", Loopback}, hosts...) {
		if h != "" && !slices.Contains(list, h) {
			list = append(list, h)
		}
	}
	value := strings.Join(list, ",")
	env = slices.DeleteFunc(env, func(kv string) bool {
		return strings.HasPrefix(kv, "no_proxy=") || strings.HasPrefix(kv, "NO_PROXY=")
	})
	env = append(env, "no_proxy="+value, "NO_PROXY="+value)
	slices.Sort(env)
	return env
}

// devices makes the engine see its devices only. Their numbers are those of nvidia-smi, which counts along
// the PCI bus; CUDA alone would count the fastest one first.
func devices(numbers []int) []string {
	if len(numbers) == 0 {
		return nil
	}
	words := make([]string, len(numbers))
	for i, n := range numbers {
		words[i] = strconv.Itoa(n)
	}
	return []string{"CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=" + strings.Join(words, ",")}
}
