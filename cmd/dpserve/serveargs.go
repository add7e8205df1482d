package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/problem"
)

// serveArgs are the flags of the command line that become engine.args, in their order.
type serveArgs struct {
	f    *serveFlags
	list []serveArg
}

type serveArg struct {
	name  string // in snake case
	value any
}

// MarshalJSON writes engine.args.
func (a *serveArgs) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	for i, arg := range a.list {
		value, err := json.Marshal(arg.value)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&b, "%c%s:%s", "{,"[min(i, 1)], quoteString(arg.name), value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// set sets an argument. As in the engine, the last of several values counts.
func (a *serveArgs) set(name string, value any) {
	i := slices.IndexFunc(a.list, func(arg serveArg) bool { return arg.name == name })
	if i < 0 {
		a.list = append(a.list, serveArg{name, value})
		return
	}
	a.list[i].value = value
}

func (a *serveArgs) isOn(name string) bool {
	return slices.Contains(a.list, serveArg{name, true})
}

// read reads the words behind --.
func (a *serveArgs) read(e *env, words []string) error {
	for len(words) > 0 {
		if !engineflags.IsFlag(words[0]) {
			return usageError("serve", "%q follows no flag of the engine", words[0])
		}
		var flag engineflags.Flag
		flag, words = engineflags.Next(a.f.engine, words)
		if owned, _ := engineflags.FindOwned(flag.Name); owned.LeftOut != "" {
			printMessage(e.io.Err, "%s is left out: %s", flag.Typed, owned.LeftOut)
			continue
		}
		if err := a.add(flag); err != nil {
			return err
		}
	}
	if a.f.lockstep && a.f.engine == engineflags.SGLang && !a.isOn("enable_dp_attention") {
		a.set("enable_dp_attention", true) // SGLang's ranks are a group only then
	}
	if a.f.prefill == 0 && a.f.transfer != "" {
		return usageError("serve", "--transfer is for --prefill")
	}
	return nil
}

// add adds a flag.
func (a *serveArgs) add(flag engineflags.Flag) error {
	if err := a.check(flag); err != nil {
		return err
	}
	head, key, isKey := strings.Cut(flag.Name, ".")
	if head == "kv-transfer-config" && !isKey && len(flag.Values) == 1 {
		return a.addTransfer(flag)
	}
	on, isOff := strings.CutPrefix(head, "no-")
	if isOff && len(flag.Values) == 0 {
		head = on
	}
	name := strings.ReplaceAll(head, "-", "_")
	if isKey {
		name += "." + key
	}
	isMany := engineflags.Find(a.f.engine, flag.Name) == engineflags.Many
	switch {
	case len(flag.Values) == 0:
		a.set(name, !isOff)
	case len(flag.Values) == 1:
		a.set(name, readValue(flag.Values[0], !isMany))
	default:
		var list []any
		for _, text := range flag.Values {
			list = append(list, readValue(text, false))
		}
		a.set(name, list)
	}
	return nil
}

// check refuses flags that cannot go to the engine.
func (a *serveArgs) check(flag engineflags.Flag) error {
	takes := engineflags.Find(a.f.engine, flag.Name)
	own := a.f.set.Lookup(flag.Name)
	owned, _ := engineflags.FindOwned(flag.Name)
	var message, hint string
	switch {
	case flag.Name == "" || !utf8.ValidString(flag.Typed+strings.Join(flag.Values, "")):
		message, hint = "wanted a flag, in UTF-8", "see `dpserve help serve`"
	case takes == engineflags.Unknown && own != nil:
		message, hint = "it is a flag of dpserve", "write it before --"
	case owned.OnServe != "":
		message, hint = "an engine that dpserve starts cannot have it", owned.OnServe
	case takes == engineflags.Unknown && flagOfOtherEngine(a.f.engine, flag.Name) != "":
		message, hint = a.f.engine+" has no such flag", flagOfOtherEngine(a.f.engine, flag.Name)
	case takes == engineflags.One && len(flag.Values) == 0:
		message, hint = "a value is missing", "write "+flag.Typed+" VALUE"
	case takes == engineflags.Switch && len(flag.Values) > 0:
		message, hint = "it takes no value", "write "+flag.Typed+", or leave it out"
	default:
		return nil
	}
	return problem.New(problem.InvalidArgument, "%s: %s", flag.Typed, message).WithHint("%s", hint)
}

// addTransfer adds vLLM's settings of KV transfers. With prefill ranks, dpserve writes connector and role.
func (a *serveArgs) addTransfer(flag engineflags.Flag) error {
	config := map[string]any{}
	dec := json.NewDecoder(strings.NewReader(flag.Values[0]))
	dec.UseNumber()
	err := dec.Decode(&config)
	switch role := config["kv_role"]; {
	case err != nil || dec.More():
		return usageError("serve", "%s %q: wanted a JSON map", flag.Typed, flag.Values[0])
	case a.f.prefill == 0 && (role == "kv_producer" || role == "kv_consumer"):
		return problem.New(problem.InvalidArgument, "%s: kv_role %v makes an engine one of a pair",
			flag.Typed, role).WithHint("write --prefill N for the prefill ranks; those of --dp-size decode")
	case a.f.prefill == 0:
		a.set("kv_transfer_config", readValue(flag.Values[0], true))
		return nil
	}
	name, _ := config["kv_connector"].(string)
	transfer := map[string]string{
		"NixlConnector": app.TransferNIXL, "NixlPushConnector": app.TransferNIXLPush,
		"MooncakeConnector": app.TransferMooncake, "": a.f.transfer,
	}[name]
	if transfer == "" && name != "" || a.f.transfer != "" && a.f.transfer != transfer {
		return problem.New(problem.InvalidArgument, "%s: kv_connector %s is not --transfer %s",
			flag.Typed, name, a.f.transfer).
			WithHint("dpserve knows NixlConnector, NixlPushConnector and MooncakeConnector")
	}
	a.f.transfer = transfer
	for _, ours := range []string{"kv_connector", "kv_role", "engine_id", "kv_rank", "kv_parallel_size"} {
		delete(config, ours)
	}
	if len(config) > 0 {
		a.set("kv_transfer_config", config)
	}
	return nil
}

// readValue returns a word of the command line as it stands in a file: a number or (if allowed) JSON where
// the engine gets exactly this text again or equal JSON, else the text.
func readValue(text string, allowJSON bool) any {
	if isPlainNumber(text) {
		return json.Number(text)
	}
	if !allowJSON || !strings.HasPrefix(text, "{") && !strings.HasPrefix(text, "[") {
		return text
	}
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	var v any
	if dec.Decode(&v) != nil || dec.More() || !isPlainJSON(v, maxJSONDepth) {
		return text
	}
	return v
}

// maxJSONDepth bounds maps and lists that are written out; files allow more.
const maxJSONDepth = 32

// isPlainNumber reports whether a number is written back as it is.
func isPlainNumber(text string) bool {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return strconv.FormatInt(n, 10) == text
	}
	x, err := strconv.ParseFloat(text, 64)
	return err == nil && strings.Contains(text, ".") && strconv.FormatFloat(x, 'f', -1, 64) == text
}

// isPlainJSON reports whether JSON is written back with the same numbers.
func isPlainJSON(v any, depth int) bool {
	switch v := v.(type) {
	case json.Number:
		return isPlainNumber(v.String())
	case []any:
		return depth > 0 && !slices.ContainsFunc(v, func(e any) bool { return !isPlainJSON(e, depth-1) })
	case map[string]any:
		for _, e := range v {
			if depth == 0 || !isPlainJSON(e, depth-1) {
				return false
			}
		}
		return depth > 0
	default:
		return v != nil // engine.args has no null
	}
}
