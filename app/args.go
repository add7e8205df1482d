package app

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// flag is the name of the argument in kebab case; behind a dot (nested settings) the engine's own spelling stays.
func (a Arg) flag() string {
	head, tail, nested := strings.Cut(a.Name, ".")
	head = strings.ReplaceAll(head, "_", "-")
	if nested {
		return head + "." + tail
	}
	return head
}

// argv is the argument as words of a command line.
func (a Arg) argv() []string {
	flag := "--" + a.flag()
	var text string
	switch v := a.Value.(type) {
	case bool:
		if v {
			return []string{flag}
		}
		return []string{"--no-" + a.flag()}
	case string:
		text = v
	case int64:
		text = strconv.FormatInt(v, 10)
	case float64:
		text = strconv.FormatFloat(v, 'g', -1, 64)
	default:
		text = string(appendJSON(nil, v))
	}
	if strings.HasPrefix(text, "-") { // a word of its own would be taken for a flag
		return []string{flag + "=" + text}
	}
	return []string{flag, text}
}

// Argv is the arguments as words of a command line, in file order: --kebab-case value; true is the bare flag, false is
// --no-flag, lists and maps are JSON. Nothing passes through a shell.
func (a Args) Argv() []string {
	var out []string
	for _, arg := range a {
		out = append(out, arg.argv()...)
	}
	return out
}

// Get is the value of a flag, written in kebab case, however the file spells it.
func (a Args) Get(flag string) (any, bool) {
	for _, arg := range a {
		if arg.flag() == flag {
			return arg.Value, true
		}
	}
	return nil, false
}

// on says whether a boolean flag is set.
func (a Args) on(flag string) bool {
	v, ok := a.Get(flag)
	if text, isText := v.(string); isText {
		return strings.EqualFold(text, "true")
	}
	truth, isBool := v.(bool)
	return ok && isBool && truth
}

// MarshalJSON keeps whole floats apart from integers.
func (a Arg) MarshalJSON() ([]byte, error) {
	out := append(appendJSON([]byte(`{"name":`), a.Name), `,"value":`...)
	return append(appendJSON(out, a.Value), '}'), nil
}

// UnmarshalJSON reads what MarshalJSON wrote, with integers as int64 and other numbers as float64.
func (a *Arg) UnmarshalJSON(text []byte) error {
	var raw struct {
		Name  string          `json:"name"`
		Value json.RawMessage `json:"value"`
	}
	if err := json.Unmarshal(text, &raw); err != nil {
		return fmt.Errorf("read an engine argument: %w", err)
	}
	v, err := exact(raw.Value)
	if err != nil {
		return fmt.Errorf("read engine argument %q: %w", raw.Name, err)
	}
	a.Name, a.Value = raw.Name, v
	return nil
}

// MarshalJSON keeps whole floats in Params apart from integers.
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

// UnmarshalJSON reads what MarshalJSON wrote: Params hold the types that Arg lists.
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
	v, err := exact(b.Params)
	if err != nil {
		return fmt.Errorf("read routing params: %w", err)
	}
	if m, ok := v.(map[string]any); ok && len(m) > 0 {
		r.Params = m
	}
	return nil
}

// exact decodes one JSON value with int64 and float64 told apart by their spelling.
func exact(text []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, err
	}
	return settle(v)
}

// settle replaces the numbers below v.
func settle(v any) (any, error) {
	var err error
	switch t := v.(type) {
	case json.Number:
		if !strings.ContainsAny(t.String(), ".eE") {
			return t.Int64()
		}
		return t.Float64()
	case []any:
		for i := range t {
			if t[i], err = settle(t[i]); err != nil {
				return nil, err
			}
		}
	case map[string]any:
		for k := range t {
			if t[k], err = settle(t[k]); err != nil {
				return nil, err
			}
		}
	}
	return v, nil
}
