package openai

import "strings"

// maxPath is the longest path that is passed on, in bytes.
const maxPath = 2048

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

// denied are the paths of vLLM, SGLang, TensorRT-LLM and llama.cpp that steer an engine or show what only an
// operator should see, in lower case. A path below one of them is denied too.
var denied = func() map[string]bool {
	out := map[string]bool{}
	for path := range strings.FieldsSeq(`
		/v1/load_lora_adapter /v1/unload_lora_adapter /lora-adapters /models/load /models/unload
		/sleep /wake_up /pause /resume /abort_requests /abort_request
		/pause_generation /continue_generation /slow_down /shutdown
		/collective_rpc /flush_cache /clear_hicache_storage_backend /hicache
		/scale_elastic_ep /server_info /get_server_info /set_internal_state /get_internal_state
		/destroy_weights_update_group /finish_weight_update /send_weights_to_remote_instance
		/get_remote_instance_transfer_engine_info /get_weights_by_name /weights_checker
		/release_memory_occupation /resume_memory_occupation /release_memory /resume_memory
		/configure_logging /set_trace_level /freeze_gc /dumper /debug /admin /slots /props
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
