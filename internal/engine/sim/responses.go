package sim

import (
	"encoding/json"
	"net/http"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// readResponses checks the body of /v1/responses.
func readResponses(f *fields, s *settings) (*plan, *apiError) {
	if !f.has("input") {
		f.refuse("input", msgRequired)
	}
	if f.has("previous_response_id") && f.fault == nil {
		f.fault = &apiError{
			status: http.StatusNotFound, kind: "NotFoundError", param: "previous_response_id",
			message: "the simulated engine stores no responses",
		}
	}
	chat := asChat(f, "instructions", "input", "max_tokens", "max_output_tokens")
	if f.fault != nil {
		return nil, f.fault
	}
	p, apiErr := readChat(chat, s)
	if p == nil {
		return nil, apiErr
	}
	p.form, p.reply.body = formResponses, f
	return p, apiErr
}

// reply is what the answer of /v1/responses repeats and counts.
type reply struct {
	body *fields
	item string // id of the message
	next int    // number of the next event
}

// responseJSON is the answer of /v1/responses.
type responseJSON struct {
	responseHead
	responseRest
}

type responseHead struct {
	ID           string          `json:"id"`
	Created      int64           `json:"created_at"`
	Incomplete   any             `json:"incomplete_details"`
	Instructions json.RawMessage `json:"instructions"`
	Metadata     json.RawMessage `json:"metadata"`
	Model        string          `json:"model"`
	Object       string          `json:"object"`
	Output       []responseItem  `json:"output"`
	Parallel     bool            `json:"parallel_tool_calls"`
	Temperature  json.RawMessage `json:"temperature"`
	ToolChoice   string          `json:"tool_choice"`
	Tools        []any           `json:"tools"`
	TopP         json.RawMessage `json:"top_p"`
	Background   bool            `json:"background"`
	MaxTokens    int             `json:"max_output_tokens"`
	MaxToolCalls any             `json:"max_tool_calls"`
	Previous     any             `json:"previous_response_id"`
}

type responseRest struct {
	Prompt      any             `json:"prompt"`
	Reasoning   any             `json:"reasoning"`
	Tier        string          `json:"service_tier"`
	Status      string          `json:"status"`
	Text        any             `json:"text"`
	TopLogprobs any             `json:"top_logprobs"`
	Truncation  string          `json:"truncation"`
	Usage       *responseUsage  `json:"usage"`
	User        json.RawMessage `json:"user"`
	Presence    json.RawMessage `json:"presence_penalty"`
	Frequency   json.RawMessage `json:"frequency_penalty"`
	KVTransfer  any             `json:"kv_transfer_params"`
	ECTransfer  any             `json:"ec_transfer_params"`
	InMessages  any             `json:"input_messages"`
	OutMessages any             `json:"output_messages"`
}

type responseItem struct {
	ID      string         `json:"id"`
	Content []responsePart `json:"content"`
	Role    string         `json:"role"`
	Status  string         `json:"status"`
	Type    string         `json:"type"`
	Phase   any            `json:"phase"`
}

type responsePart struct {
	Annotations []any  `json:"annotations"`
	Text        string `json:"text"`
	Type        string `json:"type"`
	Logprobs    any    `json:"logprobs"`
}

type responseUsage struct {
	Input        int                `json:"input_tokens"`
	InputDetails responseInDetails  `json:"input_tokens_details"`
	Output       int                `json:"output_tokens"`
	OutDetails   responseOutDetails `json:"output_tokens_details"`
	Total        int                `json:"total_tokens"`
}

type responseInDetails struct {
	Cached        int   `json:"cached_tokens"`
	Written       int   `json:"cache_write_tokens"`
	PerTurn       []int `json:"input_tokens_per_turn"`
	CachedPerTurn []int `json:"cached_tokens_per_turn"`
}

type responseOutDetails struct {
	Reasoning   int   `json:"reasoning_tokens"`
	Tools       int   `json:"tool_output_tokens"`
	PerTurn     []int `json:"output_tokens_per_turn"`
	ToolPerTurn []int `json:"tool_output_tokens_per_turn"`
}

// responder writes the answer of one call.
type responder struct {
	call   *call
	choice *choice // the only one
	plan   *plan
	set    *settings
}

func responseOf(c *call, s *settings) responder { return responder{c, &c.choices[0], c.plan, s} }

// given is a member of the request, or what the engine takes without it.
func (r responder) given(name, unset string) json.RawMessage {
	if f := r.plan.reply.body; f.has(name) {
		return f.members[name]
	}
	return json.RawMessage(unset)
}

// number is given for members that are numbers with a decimal place.
func (r responder) number(name string, unset float64) json.RawMessage {
	v, ok := r.plan.reply.body.float(name)
	if !ok {
		v = unset
	}
	return json.RawMessage(pythonFloat(v))
}

// itemID is the id of the message of the answer.
func (r responder) itemID() string {
	p := r.plan
	if p.reply.item == "" {
		p.reply.item = "msg_" + randomSuffix() + randomSuffix()
	}
	return p.reply.item
}

// begun is the document of an answer that has not ended.
func (r responder) begun() *responseJSON {
	p := r.plan
	return &responseJSON{
		responseHead{
			ID: p.id, Created: p.created, Model: p.model, Object: "response", Output: []responseItem{},
			Instructions: r.given("instructions", "null"), Metadata: r.given("metadata", "null"),
			Parallel: true, Temperature: r.number("temperature", 1), ToolChoice: "none", Tools: []any{},
			TopP:      r.number("top_p", 1),
			MaxTokens: p.room(&p.prompts[0], r.set.Model.MaxModelLen),
		},
		responseRest{
			Tier: "auto", Status: "in_progress", Truncation: "disabled", User: r.given("user", "null"),
			Presence: r.number("presence_penalty", 0), Frequency: r.number("frequency_penalty", 0),
		},
	}
}

// ended is the document of an answer that has ended.
func (r responder) ended() *responseJSON {
	d := r.begun()
	tokens, why := r.choice.progress()
	r.choice.settle()
	d.Output = append(d.Output, r.message("completed", r.part(tokens)))
	d.Status = "completed"
	if why == em.FinishLength {
		d.Status, d.Incomplete = "incomplete", map[string]string{"reason": "max_output_tokens"}
	}
	usage, cached := r.call.usage()
	d.Usage = &responseUsage{
		Input: usage.Prompt, Output: usage.Completion, Total: usage.Total,
		InputDetails: responseInDetails{Cached: cached, PerTurn: []int{}, CachedPerTurn: []int{}},
		OutDetails:   responseOutDetails{PerTurn: []int{}, ToolPerTurn: []int{}},
	}
	d.KVTransfer = r.call.legs.answer()
	return d
}

func (r responder) message(status string, parts ...responsePart) responseItem {
	return responseItem{
		ID: r.itemID(), Content: append([]responsePart{}, parts...), Role: "assistant", Status: status,
		Type: "message",
	}
}

// part is the text of the answer so far.
func (r responder) part(tokens int) responsePart {
	return responsePart{Annotations: []any{}, Text: string(r.choice.text(tokens)), Type: "output_text"}
}

// appendNamed appends an event with its members, its number and its kind, in the order of their names as the
// imitated engine sends them.
func (r responder) appendNamed(b []byte, kind string, members map[string]any) []byte {
	members["sequence_number"], members["type"] = r.plan.reply.next, kind
	r.plan.reply.next++
	return appendEvent(append(append(append(b, "event: "...), kind...), '\n'), members)
}

// appendPart appends an event about the one part of the one message.
func (r responder) appendPart(b []byte, kind, name string, value any) []byte {
	members := map[string]any{"content_index": 0, "item_id": r.itemID(), "output_index": 0, name: value}
	if name != "part" {
		members["logprobs"] = []any{}
	}
	return r.appendNamed(b, kind, members)
}

// appendNew writes the events of new tokens, behind those that begin the answer and before those that
// end it.
func (r responder) appendNew(b []byte, tokens int, why em.FinishReason) []byte {
	if r.plan.reply.next == 0 {
		b = r.appendBegin(b)
	}
	if text := r.choice.delta(tokens, why != em.FinishNone); len(text) > 0 {
		b = r.appendPart(b, "response.output_text.delta", "delta", string(text))
	}
	if why == em.FinishNone {
		return b
	}
	part := r.part(tokens)
	b = r.appendPart(b, "response.output_text.done", "text", part.Text)
	b = r.appendPart(b, "response.content_part.done", "part", part)
	b = r.appendNamed(b, "response.output_item.done", map[string]any{
		"item": r.message("completed", part), "output_index": 0,
	})
	return r.appendNamed(b, "response.completed", map[string]any{"response": r.ended()})
}

func (r responder) appendBegin(b []byte) []byte {
	for _, kind := range []string{"response.created", "response.in_progress"} {
		b = r.appendNamed(b, kind, map[string]any{"response": r.begun()})
	}
	b = r.appendNamed(b, "response.output_item.added", map[string]any{
		"item": r.message("in_progress"), "output_index": 0,
	})
	empty := responsePart{Annotations: []any{}, Type: "output_text", Logprobs: []any{}}
	return r.appendPart(b, "response.content_part.added", "part", empty)
}
