package sim

import (
	"fmt"
	"hash/fnv"

	"github.com/dpserve/dpserve/internal/engine/sim/schema"
	em "github.com/dpserve/dpserve/internal/enginemodel"
)

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

// tokens is how many tokens the text has.
func (s *script) tokens() int { return (len(s.text) + em.BytesPerToken - 1) / em.BytesPerToken }

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
