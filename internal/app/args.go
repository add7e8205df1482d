package app

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/nearest"
	"github.com/dpserve/dpserve/internal/simflags"
)

// flag returns the name of the argument in kebab case. After a dot (nested settings) the engine's own
// spelling stays.
func (a Arg) flag() string {
	head, tail, nested := strings.Cut(a.Name, ".")
	head = strings.ReplaceAll(head, "_", "-")
	if nested {
		return head + "." + tail
	}
	return head
}

// Get returns the value of a flag by its name in kebab case. The file may use another spelling.
func (a Args) Get(flag string) (any, bool) {
	arg, ok := a.find(flag)
	return arg.Value, ok
}

func (a Args) find(flag string) (Arg, bool) {
	for _, arg := range a {
		if arg.flag() == flag {
			return arg, true
		}
	}
	return Arg{}, false
}

func (a Args) isOn(flag string) bool {
	v, ok := a.Get(flag)
	if text, isText := v.(string); isText {
		return strings.EqualFold(text, "true")
	}
	truth, isBool := v.(bool)
	return ok && isBool && truth
}

// MarshalJSON keeps whole floats different from integers.
func (a Arg) MarshalJSON() ([]byte, error) {
	out := append(appendJSON([]byte(`{"name":`), a.Name), `,"value":`...)
	return append(appendJSON(out, a.Value), '}'), nil
}

// UnmarshalJSON reads the result of MarshalJSON, with integers as int64 and other numbers as float64.
func (a *Arg) UnmarshalJSON(text []byte) error {
	var raw struct {
		Name  string          `json:"name"`
		Value json.RawMessage `json:"value"`
	}
	if err := json.Unmarshal(text, &raw); err != nil {
		return fmt.Errorf("read an engine argument: %w", err)
	}
	v, err := decodeExact(raw.Value)
	if err != nil {
		return fmt.Errorf("read engine argument %q: %w", raw.Name, err)
	}
	a.Name, a.Value = raw.Name, v
	return nil
}

// MarshalJSON keeps whole floats in Params different from integers.
func (r Routing) MarshalJSON() ([]byte, error) {
	type bare Routing
	b := struct {
		bare
		Params json.RawMessage `json:"params,omitempty"`
	}{bare: bare(r)}
	if len(r.Params) > 0 {
		b.Params = appendJSON(nil, r.Params)
	}
	return json.Marshal(b)
}

// UnmarshalJSON reads the result of MarshalJSON. Params have the types of Arg.Value.
func (r *Routing) UnmarshalJSON(text []byte) error {
	type bare Routing
	b := struct {
		*bare
		Params json.RawMessage `json:"params"`
	}{bare: (*bare)(r)}
	if err := json.Unmarshal(text, &b); err != nil {
		return fmt.Errorf("read routing: %w", err)
	}
	r.Params = nil
	if len(b.Params) == 0 {
		return nil
	}
	v, err := decodeExact(b.Params)
	if err != nil {
		return fmt.Errorf("read routing params: %w", err)
	}
	if m, ok := v.(map[string]any); ok && len(m) > 0 {
		r.Params = m
	}
	return nil
}

// decodeExact decodes one JSON value. Numbers become int64 or float64 by their spelling.
func decodeExact(text []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, err
	}
	return convertNumbers(v)
}

func convertNumbers(v any) (any, error) {
	var err error
	switch t := v.(type) {
	case json.Number:
		if !strings.ContainsAny(t.String(), ".eE") {
			return t.Int64()
		}
		return t.Float64()
	case []any:
		for i := range t {
			if t[i], err = convertNumbers(t[i]); err != nil {
				return nil, err
			}
		}
	case map[string]any:
		for k := range t {
			if t[k], err = convertNumbers(t[k]); err != nil {
				return nil, err
			}
		}
	}
	return v, nil
}

// appendJSON appends v as compact JSON with sorted keys and without HTML escapes. Floats always have a point
// or an exponent, so that they are read back as floats. v has only the types that cursor.value returns.
func appendJSON(b []byte, v any) []byte {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(keepFloats(v)); err != nil { // these types cannot fail
		return append(b, "null"...)
	}
	return append(b, bytes.TrimSuffix(buf.Bytes(), []byte{'\n'})...)
}

// keepFloats replaces whole floats by numbers with a point.
func keepFloats(v any) any {
	switch t := v.(type) {
	case float64:
		text := strconv.FormatFloat(t, 'g', -1, 64)
		if !strings.ContainsAny(text, ".e") {
			text += ".0"
		}
		return json.Number(text)
	case []any:
		out := make([]any, len(t))
		for i := range t {
			out[i] = keepFloats(t[i])
		}
		return out
	case map[string]any:
		out := make(map[string]any, len(t))
		for k := range t {
			out[k] = keepFloats(t[k])
		}
		return out
	default:
		return v
	}
}

// checkSim checks an argument of the simulated engine by the table that the engine reads its flags by. Flags
// of vLLM that the engine has no use for are accepted, so that a file for real engines runs with the
// simulated one.
func (a *draft) checkSim(arg Arg, path string) {
	name := arg.flag()
	flag, isOff, known := simflags.Find(name)
	if !known {
		a.checkUnknownSim(arg, path)
		return
	}
	values := []any{arg.Value}
	if list, ok := arg.Value.([]any); ok && strings.HasPrefix(name, "sim-") {
		values = list // the flag is repeated
	}
	for _, v := range values {
		_, isBool := v.(bool)
		text, isText := v.(string)
		if !isText {
			text = string(appendJSON(nil, v))
		}
		if flag.Switch && isBool && !isOff || !flag.Switch && !isBool && flag.Check(text) == nil {
			continue
		}
		hint := didYouMean(text, flag.Words)
		switch {
		case isOff:
			hint = "write " + strings.TrimPrefix(strings.TrimPrefix(arg.Name, "no_"), "no-") + ": false"
		case name == "sim-fail":
			mode, _, _ := strings.Cut(text, "@")
			mode, _, _ = strings.Cut(mode, "=")
			hint = didYouMean(mode, simflags.Modes())
		}
		a.d.unlike(path, string(appendJSON(nil, v)), flag.Wanted(), hint)
		return
	}
}

// typingError is how many edits make a name of another engine's flag a mistyped one of the simulated engine.
const typingError = 2

// checkUnknownSim refuses arguments that would be the simulated engine's own, and warns about those that are
// probably mistyped.
func (a *draft) checkUnknownSim(arg Arg, path string) {
	var names []string
	for _, name := range simflags.Names() {
		if _, isOwned := engineflags.FindOwned(name); !isOwned {
			names = append(names, strings.ReplaceAll(name, "-", "_"))
		}
	}
	if strings.HasPrefix(arg.flag(), "sim-") {
		hint := cmp.Or(didYouMean(arg.Name, names), "its arguments are in docs/app-yaml.md#simulated-engine")
		a.d.wrong(path, "the simulated engine has no argument "+strconv.Quote(arg.Name), hint)
		return
	}
	if meant := nearest.Within(typingError, arg.Name, names); meant != "" {
		a.d.warn(path, "the simulated engine ignores the argument "+strconv.Quote(arg.Name),
			"did you mean "+strconv.Quote(meant)+"?")
	}
}

// foreign is what a flag is called that the kind of engine does not have; "" for other flags. These are flags
// of another kind of engine, and vLLM's short ones, which it knows with one dash only.
func (k Kind) foreign(flag string) string {
	switch k {
	case KindVLLM:
		return map[string]string{
			"tp": "tensor_parallel_size", "tp-size": "tensor_parallel_size",
			"pp": "pipeline_parallel_size", "pp-size": "pipeline_parallel_size",
			"ep": "enable_expert_parallel", "ep-size": "enable_expert_parallel",
			"context-length": "max_model_len", "max-running-requests": "max_num_seqs",
			"mem-fraction-static": "gpu_memory_utilization", "page-size": "block_size",
			"enable-dp-attention": "data_parallel.coupling: lockstep",
		}[flag]
	case KindSGLang:
		return map[string]string{
			"max-model-len": "context_length", "max-num-seqs": "max_running_requests",
			"gpu-memory-utilization": "mem_fraction_static", "block-size": "page_size",
			"enable-expert-parallel": "ep_size", "no-enable-prefix-caching": "disable_radix_cache",
			"enforce-eager": "disable_cuda_graph",
		}[flag]
	case KindSim, KindAttach:
	}
	return ""
}

// settingOf names what a flag sets. Two flags of one name say the same thing twice, or contradict each other.
func (k Kind) settingOf(flag string) string {
	flag = strings.TrimPrefix(flag, "no-")
	if k != KindSGLang {
		return flag
	}
	switch flag {
	case "tp", "tp-size":
		return "tensor-parallel-size"
	case "pp", "pp-size":
		return "pipeline-parallel-size"
	case "ep", "ep-size":
		return "expert-parallel-size"
	}
	return flag
}

// checkReal checks an argument of a vLLM or SGLang engine as far as dpserve knows its flags.
func (a *draft) checkReal(arg Arg, path string) {
	flag, kind := arg.flag(), a.Engine.Kind
	if known := kind.foreign(flag); known != "" {
		a.d.warn(path, "engines of kind "+string(kind)+" have no flag --"+flag, "did you mean "+known+"?")
		return
	}
	if len(a.Engine.Command) > 0 || engineflags.Find(string(kind), flag) != engineflags.Unknown {
		return
	}
	// the engine may be newer than the table, so only a word that is near to a flag is worth a warning
	if near := nearest.Word(flag, engineflags.Names(string(kind))); near != "" {
		a.d.warn(path, "dpserve knows no flag --"+flag+" of "+string(kind),
			"did you mean "+strings.ReplaceAll(near, "-", "_")+"?")
	}
}

// ownedEnv says what to write instead of an environment variable that dpserve sets; "" if the user may set
// it.
func ownedEnv(name string) string {
	switch name {
	case "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES":
		return "write resources.gpus; dpserve picks the devices"
	case "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT":
		return "write data_parallel.dp_size; dpserve hands out the ranks"
	case "VLLM_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT", "SGLANG_GRPC_PORT":
		return "dpserve takes ports from the node's --port-range"
	case "VLLM_HOST_IP", "SGLANG_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST":
		return "every node has another address; dpserve writes the node's --advertise"
	case "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "SGLANG_TIMEOUT_KEEP_ALIVE":
		return "leave it out; it must outlive dpserve's idle connections"
	}
	return ""
}
