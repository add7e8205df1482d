package sim

import (
	"encoding/json"
	"net/http"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// asResponse is the form of /v1/responses.
type asResponse struct {
	request *fields
	next    int // number of the next event
}

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
	p, apiErr := readChat(asChat(f, "instructions", "input", "max_tokens", "max_output_tokens"), s)
	if p != nil {
		p.form = &asResponse{request: f}
	}
	return p, apiErr
}

// given is a member of the request, or what the engine takes without it.
func (r *asResponse) given(name, unset string) json.RawMessage {
	if r.request.has(name) {
		return r.request.members[name]
	}
	return json.RawMessage(unset)
}

// document is the answer; its output and its usage are known when it has ended.
func (r *asResponse) document(c *call, status string) map[string]any {
	p := c.plan
	return map[string]any{
		"id": p.id, "object": "response", "created_at": p.created, "model": p.model, "status": status,
		"output": []any{}, "usage": nil, "error": nil, "incomplete_details": nil, "background": false,
		"instructions": r.given("instructions", "null"), "metadata": r.given("metadata", "{}"),
		"temperature": r.given("temperature", "1.0"), "top_p": r.given("top_p", "1.0"),
		"max_output_tokens": r.given("max_output_tokens", "null"), "previous_response_id": nil,
		"parallel_tool_calls": true, "tool_choice": r.given("tool_choice", `"auto"`),
		"tools": r.given("tools", "[]"), "text": r.given("text", "null"), "truncation": "disabled",
		"service_tier": "auto",
	}
}

func (r *asResponse) ended(c *call) map[string]any {
	ch := &c.choices[0]
	tokens, why := ch.progress()
	ch.settle()
	d := r.document(c, "completed")
	if why == em.FinishLength {
		d["status"], d["incomplete_details"] = "incomplete", map[string]string{"reason": "max_output_tokens"}
	}
	d["output"] = []any{r.message(c, "completed", textPart(string(ch.text(tokens))))}
	usage, cached := c.usage()
	d["usage"] = map[string]any{
		"input_tokens": usage.Prompt, "output_tokens": usage.Completion, "total_tokens": usage.Total,
		"input_tokens_details":  map[string]int{"cached_tokens": cached},
		"output_tokens_details": map[string]int{"reasoning_tokens": 0},
	}
	return d
}

func (r *asResponse) whole(c *call) []byte { return mustMarshal(r.ended(c)) }

func itemID(c *call) string { return "msg_" + c.plan.id }

func (r *asResponse) message(c *call, status string, parts ...any) map[string]any {
	return map[string]any{
		"id": itemID(c), "type": "message", "role": "assistant", "status": status,
		"content": append([]any{}, parts...),
	}
}

func textPart(text string) map[string]any {
	return map[string]any{"type": "output_text", "text": text, "annotations": []any{}, "logprobs": []any{}}
}

func (r *asResponse) append(b []byte, kind string, members map[string]any) []byte {
	members["sequence_number"] = r.next
	r.next++
	return appendNamed(b, kind, members)
}

// appendPart appends an event about the one part of the one message.
func (r *asResponse) appendPart(b []byte, c *call, kind, name string, value any) []byte {
	return r.append(b, kind, map[string]any{
		"content_index": 0, "item_id": itemID(c), "output_index": 0, "logprobs": []any{}, name: value,
	})
}

func (r *asResponse) appendNew(b []byte, ch *choice, text string, why em.FinishReason) []byte {
	c := ch.call
	if r.next == 0 {
		b = r.append(b, "response.created", map[string]any{"response": r.document(c, "in_progress")})
		b = r.append(b, "response.in_progress", map[string]any{"response": r.document(c, "in_progress")})
		b = r.append(b, "response.output_item.added", map[string]any{
			"item": r.message(c, "in_progress"), "output_index": 0,
		})
		b = r.appendPart(b, c, "response.content_part.added", "part", textPart(""))
	}
	if text != "" {
		b = r.appendPart(b, c, "response.output_text.delta", "delta", text)
	}
	if why == em.FinishNone {
		return b
	}
	tokens, _ := ch.progress()
	whole := string(ch.text(tokens))
	b = r.appendPart(b, c, "response.output_text.done", "text", whole)
	b = r.appendPart(b, c, "response.content_part.done", "part", textPart(whole))
	b = r.append(b, "response.output_item.done", map[string]any{
		"item": r.message(c, "completed", textPart(whole)), "output_index": 0,
	})
	d := r.ended(c)
	status, _ := d["status"].(string)
	return r.append(b, "response."+status, map[string]any{"response": d})
}
