package continuation

import (
	"bytes"
	"strconv"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// chunk is one event of a stream, as far as it matters to an answer that goes on from another engine. Spans
// are those of values in its data; a zero one is not there.
type chunk struct {
	id, created, model openai.Span // as written
	role               openai.Span // the value
	roleMember         openai.Span // of the delta, without a comma
	content            openai.Span // of a delta's content, or of text; a string
	delta              openai.Span // an object
	usage              openai.Span // an object
	choices            int
	isFinished         bool
	isOther            bool // it shows something that is no text
}

// read reads the data of an event; false if that is no chunk.
func (k *chunk) read(data []byte) bool {
	*k = chunk{}
	err := openai.Members(data, func(key []byte, _, v openai.Span) error {
		raw := data[v.Start:v.End]
		switch string(key) {
		case "id":
			k.id = v
		case "created":
			k.created = v
		case "model":
			k.model = v
		case "usage":
			if raw[0] == '{' {
				k.usage = v
			}
		case "choices":
			if raw[0] == '[' {
				openai.Elements(raw, func(e openai.Span) bool {
					k.choices++
					k.readChoice(data, openai.Span{Start: v.Start + e.Start, End: v.Start + e.End})
					return true
				})
			}
		case "error", "prompt_token_ids":
			k.isOther = k.isOther || holds(raw)
		}
		return nil
	})
	return err == nil
}

func (k *chunk) readChoice(data []byte, at openai.Span) {
	if data[at.Start] != '{' {
		k.isOther = true
		return
	}
	readMembers(data, at, func(key []byte, _, v openai.Span) {
		switch raw := data[v.Start:v.End]; string(key) {
		case "finish_reason":
			k.isFinished = holds(raw)
		case "text":
			k.readContent(raw, v)
		case "logprobs", "token_ids", "prompt_token_ids":
			k.isOther = k.isOther || holds(raw)
		case "delta":
			if raw[0] == '{' {
				k.delta = v
				k.readDelta(data, v)
			}
		}
	})
}

func (k *chunk) readDelta(data []byte, at openai.Span) {
	readMembers(data, at, func(key []byte, member, v openai.Span) {
		switch raw := data[v.Start:v.End]; string(key) {
		case "role":
			if raw[0] == '"' {
				k.role, k.roleMember = v, member
			}
		case "content":
			k.readContent(raw, v)
		default: // reasoning, a tool call, a refusal, and what later engines show
			k.isOther = k.isOther || holds(raw)
		}
	})
}

// readMembers calls f for each member of an object in data that was checked, with positions in data.
func readMembers(data []byte, object openai.Span, f func(key []byte, member, value openai.Span)) {
	_ = openai.Members(data[object.Start:object.End], func(key []byte, member, value openai.Span) error {
		f(key, moved(member, object.Start), moved(value, object.Start))
		return nil
	})
}

func moved(s openai.Span, by int) openai.Span {
	return openai.Span{Start: s.Start + by, End: s.End + by}
}

// holds reports whether a checked value is not null, false, "", [] or {}.
func holds(raw []byte) bool {
	switch raw[0] {
	case 'n', 'f':
		return false
	case '"', '[', '{':
		return len(bytes.TrimSpace(raw[1:len(raw)-1])) > 0
	}
	return true
}

func (k *chunk) readContent(raw []byte, at openai.Span) {
	switch raw[0] {
	case '"':
		k.content = at
	case 'n':
	default: // parts
		k.isOther = true
	}
}

// hasToken reports whether a token stands behind the chunk: it has a choice, and more than a role in it.
func (k *chunk) hasToken() bool {
	return k.choices > 0 && (k.role == openai.Span{} || k.content.End-k.content.Start > len(`""`))
}

// edit replaces what stands at a position.
type edit struct {
	at   openai.Span
	with []byte
}

// editIdentity makes the chunk one of the stream with that identity: its role was sent before.
func (k *chunk) editIdentity(list []edit, data []byte, of *identity) []edit {
	for _, e := range [...]edit{{k.id, of.id}, {k.created, of.created}, {k.model, of.model}} {
		if e.at != (openai.Span{}) && len(e.with) > 0 {
			list = append(list, e)
		}
	}
	if k.role != (openai.Span{}) {
		list = append(list, edit{cutMember(data, k.roleMember), nil})
	}
	return list
}

// cutMember is the position of a member with a comma beside it.
func cutMember(data []byte, at openai.Span) openai.Span {
	behind := len(data) - len(bytes.TrimLeft(data[at.End:], jsonSpace))
	if data[behind] == ',' {
		return openai.Span{Start: at.Start, End: behind + 1}
	}
	if i := len(bytes.TrimRight(data[:at.Start], jsonSpace)); data[i-1] == ',' {
		at.Start = i - 1
	}
	return at
}

const jsonSpace = " \t\r\n"

// editUsage makes the usage that of the whole answer: to the second engine, the text so far was prompt.
func (a *Answer) editUsage(list []edit, data []byte, at openai.Span) []edit {
	u, ok := openai.ParseUsage(data)
	if !ok {
		return list
	}
	sum := u
	sum.PromptTokens = max(u.PromptTokens-a.seam.prompt, 0)
	sum.CompletionTokens = u.CompletionTokens + a.seam.tokens
	sum.TotalTokens = sum.PromptTokens + sum.CompletionTokens
	sum.CachedTokens = min(u.CachedTokens, sum.PromptTokens)
	a.Usage = sum
	readMembers(data, at, func(key []byte, _, v openai.Span) {
		switch string(key) {
		case "prompt_tokens":
			list = append(list, edit{v, strconv.AppendInt(nil, int64(sum.PromptTokens), 10)})
		case "completion_tokens":
			list = append(list, edit{v, strconv.AppendInt(nil, int64(sum.CompletionTokens), 10)})
		case "total_tokens":
			list = append(list, edit{v, strconv.AppendInt(nil, int64(sum.TotalTokens), 10)})
		}
	})
	return list
}
