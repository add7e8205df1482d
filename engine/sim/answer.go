package sim

import (
	"strconv"

	em "github.com/dpserve/dpserve/enginemodel"
)

// usage counts the tokens of a call.
type usage struct{ prompt, completion, cached int }

func (c *call) usage() usage {
	var u usage
	for i := range c.choices {
		ch := &c.choices[i]
		tokens, _ := ch.progress()
		u.completion += tokens
		if i%c.plan.n == 0 {
			u.prompt += len(ch.from.ids)
			u.cached += int(ch.cached.Load())
		}
	}
	return u
}

func (u usage) append(dst []byte) []byte {
	dst = strconv.AppendInt(append(dst, `"usage":{"prompt_tokens":`...), int64(u.prompt), 10)
	dst = strconv.AppendInt(append(dst, `,"total_tokens":`...), int64(u.prompt+u.completion), 10)
	return strconv.AppendInt(append(dst, `,"completion_tokens":`...), int64(u.completion), 10)
}

// answer is the body of a finished call that does not stream.
func (c *call) answer(s *settings) []byte {
	p := c.plan
	b := make([]byte, 0, 768)
	b = p.appendStart(b, "text_completion", "chat.completion")
	for i := range c.choices {
		b = comma(b, i)
		if p.chat {
			b = c.choices[i].appendMessage(b, p)
		} else {
			b = c.choices[i].appendCompletion(b, p)
		}
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":`...)
	b = append(appendJSON(b, s.fingerprint), ',')
	b = c.appendUsage(b, s)
	if p.chat {
		b = append(b, `,"prompt_logprobs":`...)
		b = p.prompts[0].appendLogprobs(b, p.promptLogprobs)
		b = append(b, `,"prompt_token_ids":`...)
		b = appendIDsIf(b, p.prompts[0].ids, p.returnIDs)
		b = append(b, `,"prompt_text":null`...)
	}
	return append(b, `,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`...)
}

func (p *plan) appendStart(b []byte, completion, chat string) []byte {
	object := completion
	if p.chat {
		object = chat
	}
	b = appendJSON(append(b, `{"id":`...), p.id)
	b = append(append(append(b, `,"object":"`...), object...), `","created":`...)
	b = strconv.AppendInt(b, p.created, 10)
	b = appendJSON(append(b, `,"model":`...), p.model)
	return append(b, `,"choices":[`...)
}

func (c *call) appendUsage(b []byte, s *settings) []byte {
	u := c.usage()
	b = u.append(b)
	b = append(b, `,"prompt_tokens_details":`...)
	if !s.promptDetails {
		return append(b, `null,"completion_tokens_details":null}`...)
	}
	b = strconv.AppendInt(append(b, `{"cached_tokens":`...), int64(u.cached), 10)
	created := "null"
	if c.plan.chat {
		created = "0"
	}
	b = append(append(b, `,"created_cache_tokens":`...), created...)
	return append(b, `,"multimodal_tokens":null},"completion_tokens_details":null}`...)
}

// appendEnd writes finish_reason and stop_reason.
func (c *choice) appendEnd(b []byte, why em.FinishReason) []byte {
	b = appendStringOrNull(append(b, `,"finish_reason":`...), why.String())
	return append(append(b, `,"stop_reason":`...), c.reason(why)...)
}

// reason is the stop_reason, which only a stop of our own has.
func (c *choice) reason(why em.FinishReason) string {
	if why == em.FinishStop {
		return c.stopReason
	}
	return "null"
}

func (c *choice) appendCompletion(b []byte, p *plan) []byte {
	tokens, why := c.progress()
	b = strconv.AppendInt(append(b, `{"index":`...), int64(c.index), 10)
	b = append(b, `,"text":"`...)
	if p.echo {
		b = appendEscaped(b, em.Text(c.from.ids))
	}
	b = append(appendEscaped(b, c.text(tokens)), `","logprobs":`...)
	b = c.appendLogprobs(b, p, 0, tokens, p.echo)
	b = c.appendEnd(b, why)
	b = append(b, `,"token_ids":`...)
	b = appendIDsIf(b, c.ids(0, tokens), p.returnIDs)
	b = append(b, `,"prompt_logprobs":`...)
	b = c.from.appendLogprobs(b, p.promptLogprobs)
	b = append(b, `,"prompt_token_ids":`...)
	b = appendIDsIf(b, c.from.ids, p.returnIDs)
	return append(b, `,"routed_experts":null}`...)
}

func (c *choice) appendMessage(b []byte, p *plan) []byte {
	tokens, why := c.progress()
	b = strconv.AppendInt(append(b, `{"index":`...), int64(c.index), 10)
	b = append(b, `,"message":{"role":"assistant","content":"`...)
	b = appendEscaped(b, c.text(tokens))
	b = append(b, `","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":`...)
	b = c.appendLogprobs(b, p, 0, tokens, false)
	b = c.appendEnd(b, why)
	b = append(b, `,"token_ids":`...)
	b = appendIDsIf(b, c.ids(0, tokens), p.returnIDs)
	return append(b, `,"routed_experts":null}`...)
}

// appendLogprobs writes those of the answer's tokens [from, to), behind those of an echoed prompt.
func (c *choice) appendLogprobs(b []byte, p *plan, from, to int, echo bool) []byte {
	if p.logprobs < 0 {
		return append(b, "null"...)
	}
	ids := c.ids(from, to)
	if p.chat {
		return appendChatLogprobs(b, ids, p.logprobs)
	}
	if echo {
		ids = append(append([]uint32{}, c.from.ids...), ids...)
	}
	return appendCompletionLogprobs(b, ids, p.logprobs, c.sentChars, echo)
}

func (q *prompt) appendLogprobs(b []byte, top int) []byte {
	if top < 0 {
		return append(b, "null"...)
	}
	return appendPromptLogprobs(b, q.ids, top)
}

func appendIDsIf(b []byte, ids []uint32, wanted bool) []byte {
	if !wanted {
		return append(b, "null"...)
	}
	return appendIDList(b, ids)
}
