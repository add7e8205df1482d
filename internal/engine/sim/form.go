package sim

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"maps"
	"math"
	"net/http"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// form writes the answers of a route that are not those of completions and chats.
type form interface {
	// whole is the body of a finished answer.
	whole(c *call) []byte
	// appendNew appends the events of new text. why is not FinishNone with the last of it.
	appendNew(b []byte, c *choice, text string, why em.FinishReason) []byte
}

func (s api) responses(w http.ResponseWriter, r *http.Request) {
	s.generate(w, r, readResponses, "resp_")
}

func (s api) messages(w http.ResponseWriter, r *http.Request) { s.generate(w, r, readMessages, "msg_") }

func (s api) embeddings(w http.ResponseWriter, r *http.Request) {
	s.generate(w, r, readEmbeddings, "embd-")
}

// countTokens answers /v1/messages/count_tokens.
func (s api) countTokens(w http.ResponseWriter, r *http.Request) {
	body, apiErr := s.body(r)
	if apiErr != nil {
		s.fail(w, r, apiErr)
		return
	}
	chat := asChat(body, "system", "messages", "stop", "stop_sequences")
	chat.members["max_tokens"] = json.RawMessage("1")
	p, apiErr := readChat(chat, s.set)
	if apiErr != nil {
		s.fail(w, r, apiErr)
		return
	}
	s.writeJSON(w, http.StatusOK, mustMarshal(map[string]int{"input_tokens": len(p.prompts[0].ids)}))
}

// asChat returns the body of another route as that of a chat, with messages: those of the member name, which
// may be one text, behind a system message that stands in another member. The chat's member to is called from
// here.
func asChat(f *fields, system, name, to, from string) *fields {
	type message struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	}
	var list []json.RawMessage
	if raw := f.members[name]; len(raw) > 0 && raw[0] == '"' {
		list = append(list, mustMarshal(message{"user", raw}))
	} else {
		f.read(name, &list)
	}
	if f.has(system) {
		list = append([]json.RawMessage{mustMarshal(message{"system", f.members[system]})}, list...)
	}
	out := &fields{members: maps.Clone(f.members), fault: f.fault}
	out.members["messages"] = mustMarshal(list)
	out.members[to] = f.members[from]
	for _, other := range []string{"tools", "tool_choice", "n"} { // of another form here, or unknown
		delete(out.members, other)
	}
	return out
}

// appendNamed appends an event with its name in front, which stands in it as well.
func appendNamed(b []byte, kind string, members map[string]any) []byte {
	members["type"] = kind
	return appendEvent(append(append(append(b, "event: "...), kind...), '\n'), members)
}

// asMessages is the form of /v1/messages.
type asMessages struct{ isOpen bool }

func readMessages(f *fields, s *settings) (*plan, *apiError) {
	if !f.has("max_tokens") {
		f.refuse("max_tokens", msgRequired)
	}
	p, apiErr := readChat(asChat(f, "system", "messages", "stop", "stop_sequences"), s)
	if p != nil {
		p.form = &asMessages{}
	}
	return p, apiErr
}

type messagesUsage struct {
	Input   int `json:"input_tokens"`
	Output  int `json:"output_tokens"`
	Created int `json:"cache_creation_input_tokens"`
	Read    int `json:"cache_read_input_tokens"`
}

func (*asMessages) usage(c *call) messagesUsage {
	usage, cached := c.usage()
	return messagesUsage{Input: usage.Prompt, Output: usage.Completion, Read: cached}
}

func (*asMessages) stopReason(c *choice, why em.FinishReason) string {
	switch {
	case why == em.FinishLength:
		return "max_tokens"
	case c.stopReason != nil:
		return "stop_sequence"
	}
	return "end_turn"
}

func (m *asMessages) document(c *call) map[string]any {
	return map[string]any{
		"id": c.plan.id, "type": "message", "role": "assistant", "model": c.plan.model, "content": []any{},
		"stop_reason": nil, "stop_sequence": nil, "usage": m.usage(c),
	}
}

func (m *asMessages) whole(c *call) []byte {
	ch := &c.choices[0]
	tokens, why := ch.progress()
	ch.settle()
	d := m.document(c)
	d["content"] = []any{map[string]string{"type": "text", "text": string(ch.text(tokens))}}
	if d["stop_reason"] = m.stopReason(ch, why); ch.stopReason != nil {
		d["stop_sequence"] = ch.stopReason
	}
	return mustMarshal(d)
}

func (m *asMessages) appendNew(b []byte, c *choice, text string, why em.FinishReason) []byte {
	if !m.isOpen {
		m.isOpen = true
		b = appendNamed(b, "message_start", map[string]any{"message": m.document(c.call)})
		b = appendNamed(b, "content_block_start", map[string]any{
			"index": 0, "content_block": map[string]string{"type": "text", "text": ""},
		})
	}
	if text != "" {
		b = appendNamed(b, "content_block_delta", map[string]any{
			"index": 0, "delta": map[string]string{"type": "text_delta", "text": text},
		})
	}
	if why == em.FinishNone {
		return b
	}
	b = appendNamed(b, "content_block_stop", map[string]any{"index": 0})
	b = appendNamed(b, "message_delta", map[string]any{
		"delta": map[string]any{"stop_reason": m.stopReason(c, why), "stop_sequence": c.stopReason},
		"usage": m.usage(c.call),
	})
	return appendNamed(b, "message_stop", map[string]any{})
}

// asEmbeddings is the form of /v1/embeddings: vectors of length 1 that depend on seed and text.
type asEmbeddings struct {
	size     int
	isBase64 bool
}

// The numbers in a vector.
const (
	embeddingSize    = 32 // as far as a request names none
	maxEmbeddingSize = 4096
)

func readEmbeddings(f *fields, s *settings) (*plan, *apiError) {
	out := &asEmbeddings{
		size: f.numOr("dimensions", embeddingSize), isBase64: f.str("encoding_format") == "base64",
	}
	if f.fault == nil && (out.size < 1 || out.size > maxEmbeddingSize) {
		f.fault = badRequest("dimensions", "dimensions must be from 1 to %d, got %d", maxEmbeddingSize,
			out.size)
	}
	inner := &fields{fault: f.fault, members: map[string]json.RawMessage{
		"model": f.members["model"], "prompt": f.members["input"], "max_tokens": json.RawMessage("1"),
	}}
	p, apiErr := readCompletion(inner, s)
	if p != nil {
		p.form = out
	}
	return p, apiErr
}

func (e *asEmbeddings) whole(c *call) []byte {
	type entry struct {
		Index  int    `json:"index"`
		Object string `json:"object"`
		Vector any    `json:"embedding"`
	}
	list := []entry{}
	for i := range c.choices {
		list = append(list, entry{i, "embedding", e.vector(c.choices[i].prose)})
	}
	usage, _ := c.usage()
	return mustMarshal(map[string]any{
		"id": c.plan.id, "object": "list", "created": c.plan.created, "model": c.plan.model, "data": list,
		"usage": map[string]int{"prompt_tokens": usage.Prompt, "total_tokens": usage.Prompt},
	})
}

func (e *asEmbeddings) vector(at em.Prose) any {
	numbers, sum := make([]float32, e.size), 0.0
	for i := range numbers {
		x := float64(int32(at.Misled(uint64(i)+1).ID())) / math.MaxInt32
		numbers[i], sum = float32(x), sum+x*x
	}
	for i := range numbers {
		numbers[i] /= float32(math.Sqrt(sum))
	}
	if !e.isBase64 {
		return numbers
	}
	var raw bytes.Buffer
	_ = binary.Write(&raw, binary.LittleEndian, numbers)
	return base64.StdEncoding.EncodeToString(raw.Bytes())
}

// appendNew implements form: vectors do not stream.
func (*asEmbeddings) appendNew(b []byte, _ *choice, _ string, _ em.FinishReason) []byte { return b }
