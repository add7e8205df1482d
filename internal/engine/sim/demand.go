package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/engine/sim/schema"
	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// demand is what the answers of a request have to be in the place of prose: calls of tools, or a text that
// follows a rule. The engine imitates one that was started with --enable-auto-tool-choice and
// --tool-call-parser hermes.
type demand struct {
	tools  []*tool // that may be called; none = the rule decides
	named  bool    // tool_choice names the tool: the text is its arguments
	isAuto bool    // the engine was free to call a tool or not
	single bool    // one call at most
	first  string  // the tool to prefer
	rule   rule    // nil = prose
	param  string  // where the rule is in the request
}

// rule writes a text that response_format or structured_outputs demands: the same one for the same seed.
type rule func(seed uint64) ([]byte, error)

// tool is a function that an answer may call.
type tool struct {
	name       string
	parameters json.RawMessage
	parsed     *schema.Schema // nil until it is called for the first time
}

// arguments writes arguments of a call.
func (t *tool) arguments(seed uint64) ([]byte, error) {
	if t.parsed == nil {
		parsed, err := schema.ParseObject(t.parameters)
		if err != nil {
			return nil, err
		}
		t.parsed = parsed
	}
	return t.parsed.Write(seed)
}

// tools reads the functions of a chat request.
func (f *fields) tools() []*tool {
	var list []struct {
		Type     *string `json:"type"`
		Function *struct {
			Name       *string         `json:"name"`
			Parameters json.RawMessage `json:"parameters"`
		} `json:"function"`
	}
	f.read("tools", &list)
	var out []*tool
	for i, one := range list {
		at := "tools." + strconv.Itoa(i)
		switch {
		case one.Type != nil && *one.Type != "function":
			f.refuse(at+".type", "Input should be 'function'")
		case one.Function == nil:
			f.refuse(at+".function", msgRequired)
		case one.Function.Name == nil:
			f.refuse(at+".function.name", msgRequired)
		default:
			t := &tool{name: *one.Function.Name, parameters: one.Function.Parameters}
			switch {
			case len(t.parameters) == 0 || t.parameters[0] == 'n':
				t.parameters = json.RawMessage(`{}`)
			case t.parameters[0] != '{':
				f.refuse(at+".function.parameters", "Input should be a valid dictionary")
			}
			out = append(out, t)
		}
	}
	return out
}

// toolChoice says how tools are to be called: none, auto, required, or named with the name of a tool.
func (f *fields) toolChoice(tools []*tool) (choice, name string, e *apiError) {
	raw, given := f.members["tool_choice"]
	switch {
	case f.has("tools") && len(tools) == 0 && f.fault == nil:
		return "", "", badRequest("tools", "`tools` must not be an empty array. Either provide at least one "+
			"tool or omit the field entirely.")
	case !f.has("tool_choice") && len(tools) == 0, string(raw) == `"none"`:
		return "none", "", nil
	case !given:
		return "auto", "", nil
	case raw[0] == 'n':
		return "null", "", nil // auto where that is switched on, else none
	case !f.has("tools"):
		return "", "", badRequest("tool_choice", "When using `tool_choice`, `tools` must be set.")
	case string(raw) == `"auto"`, string(raw) == `"required"`:
		return string(raw[1 : len(raw)-1]), "", nil
	case raw[0] != '{':
		return "", "", badRequest("tool_choice", "Invalid value for `tool_choice`: %.100s! "+
			`Only named tools, "none", "auto" or "required" are supported.`, raw)
	}
	const usage = "Correct usage: `{\"type\": \"function\", \"function\": {\"name\": \"my_function\"}}`"
	function := f.object("tool_choice").object("function")
	if name = function.str("name"); name == "" || function.fault != nil {
		return "", "", badRequest("tool_choice.function.name",
			"Expected field `name` in `function` in `tool_choice`! "+usage)
	}
	if slices.ContainsFunc(tools, func(t *tool) bool { return t.name == name }) {
		return "named", name, nil
	}
	return "", "", badRequest("tool_choice",
		"The tool specified in `tool_choice` does not match any of the specified `tools`")
}

// readTools reads the tools of a chat and how they are to be called.
func (d *demand) readTools(f *fields, s *settings, messages []em.Message) *apiError {
	tools := f.tools()
	choice, name, e := f.toolChoice(tools)
	switch {
	case e != nil:
		return e
	case f.fault != nil:
		return f.fault
	case choice == "named" && f.has("structured_outputs"):
		return badRequest("", msgNotBoth)
	case choice == "none" || choice == "null" && !s.AutoToolChoice:
		return nil
	case choice == "auto" && !s.AutoToolChoice:
		return badRequest("", `"auto" tool choice requires --enable-auto-tool-choice and `+
			`--tool-call-parser to be set`)
	case !s.AutoToolChoice && choice == "named":
		return badRequest("", "tool_choice=function %q requires --tool-call-parser to be set", name)
	case !s.AutoToolChoice:
		return badRequest("", "tool_choice=%q requires --tool-call-parser to be set", choice)
	}
	d.named, d.isAuto = choice == "named", choice == "auto" || choice == "null"
	d.single = f.has("parallel_tool_calls") && !f.flag("parallel_tool_calls")
	if d.isAuto && len(messages) > 0 && !isQuestion(messages[len(messages)-1].Role) {
		return nil // a tool has answered: now the user gets an answer
	}
	for _, t := range tools {
		if !d.named || t.name == name {
			d.tools = append(d.tools, t)
		}
		if len(messages) > 0 && d.first == "" && t.name != "" &&
			strings.Contains(messages[len(messages)-1].Content, t.name) {
			d.first = t.name
		}
	}
	return nil
}

// isQuestion says that a model may call a tool behind a message of this role.
func isQuestion(role string) bool { return role != "tool" && role != "function" && role != "assistant" }

// Texts of the imitated engine about rules.
const (
	msgNotBoth = "You can only either use constraints for structured outputs or tools, not both."
	msgOneRule = "You can only use one kind of constraints for structured outputs ('json', 'regex' or " +
		"'choice')."
	msgNoRule = "You must use one kind of structured outputs constraint but none are specified"
)

// anyObject is what response_format json_object gets: an object that is easy to tell from others.
const anyObject = `{"type":"object","properties":{"answer":{"type":"string"}},"required":["answer"]}`

// readRule reads response_format and structured_outputs.
func (d *demand) readRule(f *fields) *apiError {
	count := 0
	add := func(param string, r rule, err error) *apiError {
		if err != nil {
			return ruleFault(param, err)
		}
		if count++; count > 1 {
			return badRequest("", msgOneRule)
		}
		d.rule, d.param = r, param
		return nil
	}
	if f.has("response_format") {
		format := f.object("response_format")
		switch kind := format.str("type"); {
		case f.fault != nil || format.fault != nil:
		case kind == "text":
		case kind == "json_object":
			r, err := schemaRule([]byte(anyObject))
			if e := add("response_format", r, err); e != nil {
				return e
			}
		case kind == "json_schema" && !format.has("json_schema"):
			return badRequest("response_format", "When response_format type is 'json_schema', the "+
				"'json_schema' field must be provided.")
		case kind == "json_schema":
			inner := format.object("json_schema")
			if !inner.has("name") {
				format.refuse("json_schema.name", msgRequired)
				break
			}
			if !inner.has("schema") {
				return badRequest("", msgNoRule)
			}
			r, err := schemaRule(inner.members["schema"])
			if e := add("response_format", r, err); e != nil {
				return e
			}
		case kind == "structural_tag":
			return ruleFault("response_format", errors.New("the simulated engine has no structural_tag"))
		default:
			format.refuse("type", "Input should be 'text', 'json_object' or 'json_schema'")
		}
		f.adopt(format)
	}
	if f.has("structured_outputs") {
		params := f.object("structured_outputs")
		for _, kind := range []string{"json", "regex", "choice", "grammar", "json_object", "structural_tag"} {
			if params.fault == nil && params.has(kind) {
				r, err := params.rule(kind)
				if e := add("structured_outputs", r, err); e != nil {
					return e
				}
			}
		}
		if f.adopt(params); count == 0 && f.fault == nil {
			return badRequest("", msgNoRule)
		}
	}
	return nil
}

// rule reads one member of structured_outputs.
func (f *fields) rule(kind string) (rule, error) {
	switch kind {
	case "json_object":
		return schemaRule([]byte(anyObject))
	case "json":
		raw := f.members[kind]
		if raw[0] == '"' {
			raw = []byte(f.str(kind))
		}
		return schemaRule(raw)
	case "regex":
		pattern := f.str(kind)
		return func(seed uint64) ([]byte, error) {
			text, err := schema.FromPattern(pattern, seed)
			return []byte(text), err
		}, nil
	case "choice":
		var list []string
		if f.read(kind, &list); len(list) == 0 && f.fault == nil {
			return nil, errors.New("choice is an empty list")
		}
		return func(seed uint64) ([]byte, error) { return []byte(list[seed%uint64(len(list))]), nil }, nil
	}
	return nil, errors.New("the simulated engine has no " + kind)
}

// schemaRule is the rule to write JSON by a schema, which has to be an object.
func schemaRule(text []byte) (rule, error) {
	if text = bytes.TrimSpace(text); len(text) == 0 || text[0] != '{' {
		return nil, errors.New("the schema is not an object")
	}
	parsed, err := schema.Parse(text)
	return parsed.Write, err
}

// ruleFault is the answer to a rule that no text can follow, as far as the engine knows.
func ruleFault(param string, err error) *apiError {
	return badRequest(param, "The constraint in %s cannot be met: %v.", param, err)
}

// script decides the text of an answer by its seed; nil = it is prose.
func (d *demand) script(seed uint64) (*script, *apiError) {
	if len(d.tools) == 0 {
		if d.rule == nil {
			return nil, nil
		}
		text, err := d.rule(seed)
		if err != nil {
			return nil, ruleFault(d.param, err)
		}
		return &script{text: text}, nil
	}
	out, wanted, fault := &script{named: d.named, isAuto: d.isAuto}, 1, error(nil)
	if !d.single && len(d.tools) > 1 {
		wanted += int(seed >> 32 & 1)
	}
	first := int(seed % uint64(len(d.tools)))
	for i, t := range d.tools {
		if t.name == d.first {
			first = i
		}
	}
	for i := 0; i < len(d.tools) && len(out.calls) < wanted; i++ {
		t := d.tools[(first+i)%len(d.tools)]
		arguments, err := t.arguments(seed + uint64(i))
		if err != nil { // another tool may have a schema that is understood
			fault = fmt.Errorf("the parameters of %q: %w", t.name, err)
			continue
		}
		out.call(t.name, arguments)
	}
	if len(out.calls) == 0 {
		return nil, badRequest("tools", "No call can be written: %v.", fault)
	}
	return out, nil
}

// maxScripts bounds the texts that a request decides; further choices repeat them.
const maxScripts = 16

// scripts decides the texts of the answers to a request; none if they are prose.
func (d *demand) scripts(p *plan, s *settings) (out []*script, e *apiError) {
	for i := range min(len(p.prompts)*p.n, maxScripts) {
		one, e := d.script(em.ProseAfter(s.Seed^p.seed, p.prompts[i/p.n].ids, i%p.n).ID())
		if one == nil || e != nil {
			return nil, e
		}
		out = append(out, one)
	}
	return out, nil
}

// script is an answer whose text is decided before the engine computes it: calls of tools as a model writes
// them, or a text that follows a rule. The server reads the calls out of the text as it comes.
type script struct {
	text   []byte
	calls  []scriptedCall
	named  bool // the text is the arguments of the one call
	isAuto bool
}

// scriptedCall is where a call is in the text.
type scriptedCall struct {
	name     string
	known    int // bytes of the text after which the name is known
	from, to int // the arguments
}

// The form in which models of the hermes family write calls.
const (
	callOpen  = "<tool_call>\n"
	callClose = "\n</tool_call>"
)

// appendCall writes a call as a model does.
func appendCall(b []byte, name string, arguments []byte) (_ []byte, c scriptedCall) {
	if len(b) > 0 {
		b = append(b, '\n')
	}
	b = schema.AppendString(append(b, callOpen+`{"name": `...), name)
	c.name, c.known = name, len(b)
	b = append(b, `, "arguments": `...)
	c.from = len(b)
	b = append(b, arguments...)
	c.to = len(b)
	return append(b, "}"+callClose...), c
}

// call adds a call at the end of the text.
func (s *script) call(name string, arguments []byte) {
	c := scriptedCall{name: name, to: len(arguments)}
	if s.named {
		s.text = arguments
	} else {
		s.text, c = appendCall(s.text, name, arguments)
	}
	s.calls = append(s.calls, c)
}

// callsTools says that the text is calls.
func (s *script) callsTools() bool { return s != nil && len(s.calls) > 0 }

// toolCallJSON is a call in an answer, or a part of one in an event.
type toolCallJSON struct {
	ID       string `json:"id,omitempty"`
	Type     string `json:"type,omitempty"`
	Index    any    `json:"index,omitempty"`
	Function struct {
		Name      string `json:"name,omitempty"`
		Arguments any    `json:"arguments,omitempty"`
	} `json:"function"`
}

// delta is the delta of an event that carries the bytes [from, to) of the text; nil = they tell a client
// nothing. isFirst marks the first event, owner the choice.
func (s *script) delta(from, to int, isFirst bool, owner string) *deltaJSON {
	out := &deltaJSON{}
	for i, call := range s.calls {
		head, more := toolCallJSON{Index: i}, toolCallJSON{Index: i}
		text := s.text[min(max(from, call.from), call.to):min(max(to, call.from), call.to)]
		isNew := from < call.known && call.known <= to || s.named && isFirst
		if isNew {
			head.ID, head.Type, head.Function.Name = callID(owner, i), "function", call.name
		}
		if s.named { // name and arguments go together, and every event has some, even if they are empty
			head.Function.Arguments = string(text)
		}
		if isNew || s.named {
			out.Calls = append(out.Calls, head)
		}
		if len(text) > 0 && !s.named {
			more.Function.Arguments = string(text)
			out.Calls = append(out.Calls, more)
		}
	}
	if len(out.Calls) == 0 {
		return nil
	}
	if !s.named {
		out.Content = jsonNull
	}
	return out
}

// message is the message of an answer with the text as far as the engine came.
func (s *script) message(text, owner string) *messageJSON {
	out := &messageJSON{Role: "assistant", Content: text}
	if !s.named && len(text) <= s.calls[len(s.calls)-1].to {
		return out // calls that are cut off are no calls
	}
	out.Content = ""
	if s.isAuto {
		out.Content = jsonNull
	}
	for i, call := range s.calls {
		one := toolCallJSON{ID: callID(owner, i), Type: "function"}
		one.Function.Name = call.name
		one.Function.Arguments = text[call.from:min(call.to, len(text))]
		out.Calls = append(out.Calls, one)
	}
	return out
}

// callID names call i of a choice: otherwise in every answer.
func callID(owner string, i int) string {
	h := fnv.New64a()
	_, _ = fmt.Fprint(h, owner, " ", i)
	return fmt.Sprintf("chatcmpl-tool-%016x", h.Sum64())
}
