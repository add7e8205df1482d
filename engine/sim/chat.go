package sim

import (
	"strconv"
	"strings"

	em "github.com/dpserve/dpserve/enginemodel"
)

// readChat checks the body of /v1/chat/completions.
func readChat(body value, s *settings) (*plan, *fields, *apiError) {
	p, f := &plan{chat: true, logprobs: -1}, &fields{body: body}
	p.common(f)
	if f.flag("logprobs") {
		p.logprobs, _ = f.num("top_logprobs")
	}
	given := p.maxTokens(f, "max_completion_tokens", "max_tokens")
	messages := f.messages()
	if err := f.err(); err != nil {
		return nil, nil, err
	}
	if err := p.streamOptions(f); err != nil {
		return nil, nil, err
	}
	if err := s.knows(p); err != nil {
		return nil, nil, err
	}
	if err := toolChoice(body); err != nil {
		return nil, nil, err
	}
	if len(messages) == 0 {
		return nil, nil, badRequest("",
			"Cannot apply chat template to an empty conversation. Provide at least one message.")
	}
	p.prompts = []prompt{{ids: em.AppendChat(nil, messages, true)}}
	return p, f, p.finishCheck(f, s, given)
}

func toolChoice(body value) *apiError {
	tools, choice := body.get("tools"), body.get("tool_choice")
	if tools.len() > 0 && (!choice.present() || choice.text == "auto") {
		return badRequest("",
			`"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set`)
	}
	return nil
}

// messages reads the conversation; texts of several parts are joined.
func (f *fields) messages() []em.Message {
	v := f.body.get("messages")
	switch {
	case v.kind == kindAbsent:
		f.missing("messages")
		return nil
	case v.kind != kindArray:
		f.complain("list_type", "messages", "Input should be a valid list", &v)
		return nil
	}
	var out []em.Message
	for i := range v.len() {
		item := v.at(i)
		out = append(out, f.message(&item, "messages."+strconv.Itoa(i)))
	}
	return out
}

func (f *fields) message(v *value, loc string) em.Message {
	if v.kind != kindObject {
		f.complain("dict_type", loc, "Input should be a valid dictionary", v)
		return em.Message{}
	}
	role := v.get("role")
	if role.kind != kindString {
		f.faults = append(f.faults, fieldError{
			kind: "missing", loc: "body." + loc + ".role",
			msg: "Field required", input: describe(v),
		})
		return em.Message{}
	}
	return em.Message{Role: role.text, Content: f.content(v.get("content"), loc+".content")}
}

func (f *fields) content(v value, loc string) string {
	switch v.kind {
	case kindAbsent, kindNull:
		return ""
	case kindString:
		return v.text
	case kindArray:
		var parts []string
		for i := range v.len() {
			part := v.at(i)
			text := part.get("text")
			if part.kind != kindObject || text.kind != kindString {
				f.complain("string_type", loc+"."+strconv.Itoa(i),
					"Input should be a text part: this model reads no other media", &part)
				continue
			}
			parts = append(parts, text.text)
		}
		return strings.Join(parts, "\n")
	case kindBool, kindNumber, kindObject:
	}
	f.complain("string_type", loc, "Input should be a valid string", &v)
	return ""
}
