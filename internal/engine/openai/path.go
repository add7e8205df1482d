package openai

import "strings"

// Bounds of what is passed on, in bytes.
const (
	maxPath   = 2048
	MaxTarget = 4096 // path, question mark and query
)

// CleanPath returns a decoded path as dpserve looks it up and as it goes to an engine: doubled slashes are
// one, and a slash at the end is none, as if a client had followed vLLM's redirect. ok is false if the path
// could be another one to somebody who reads it later: it has a segment of dots, or a byte that a URL would
// encode (a percent sign too, so that nobody can decode it twice). So the path that an engine gets is byte
// for byte the one that IsDenied has seen.
func CleanPath(path string) (clean string, ok bool) {
	if path == "" || path[0] != '/' || len(path) > maxPath {
		return "", false
	}
	for i := range len(path) {
		if !isPlainInPath(path[i]) {
			return "", false
		}
	}
	if strings.Contains(path, "//") {
		path = "/" + strings.Join(strings.FieldsFunc(path, isSlash), "/")
	}
	if len(path) > 1 {
		path = strings.TrimSuffix(path, "/")
	}
	if strings.Contains(path, "/.") {
		for segment := range strings.SplitSeq(path, "/") {
			if segment == "." || segment == ".." {
				return "", false
			}
		}
	}
	return path, true
}

func isSlash(r rune) bool { return r == '/' }

// isPlainInPath reports whether a byte of a path is never encoded. The semicolon is not one: some servers cut
// a segment there.
func isPlainInPath(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	}
	return strings.IndexByte("/-._~$&+,=:@", c) >= 0
}

// denied are the control calls, and paths of other engines that steer them or show what only an operator
// should see, in lower case. A path below one of them is denied too.
var denied = func() map[string]bool {
	out := map[string]bool{}
	for i := range controlCalls {
		out[strings.TrimSuffix(controlCalls[i].Path, "/")] = true
	}
	for path := range strings.FieldsSeq(`
		/lora-adapters /models/load /models/unload /slots /props /shutdown /debug /admin
		/release_memory /resume_memory /set_trace_level /get_remote_instance_transfer_engine_info
		/metrics /perf_metrics /kv_cache_events`) {
		out[path] = true
	}
	return out
}()

// deniedBeginnings begin the names of such paths: engines add another one with nearly each version.
var deniedBeginnings = [...]string{
	"/update_weight", "/init_weight", "/load_", "/unload_", "/reset_", "/start_", "/stop_", "/dump_",
}

// IsDenied reports whether a clean path is one that steers an engine: clients do not reach it, whatever its
// case.
func IsDenied(path string) bool {
	path = strings.ToLower(path)
	for _, beginning := range deniedBeginnings {
		if strings.HasPrefix(path, beginning) {
			return true
		}
	}
	for end := len(path); end > 0; end = strings.LastIndexByte(path[:end], '/') {
		if denied[path[:end]] {
			return true
		}
	}
	return false
}
