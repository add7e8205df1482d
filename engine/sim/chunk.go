package sim

import (
	"strconv"
	"unicode/utf8"

	em "github.com/dpserve/dpserve/enginemodel"
)

const doneEvent = "data: [DONE]\n\n"

// appendNew writes the chunks of everything the engine has produced for c since the last call, as much of it
// as limit tokens; done = its finishing chunk was written.
func (c *choice) appendNew(b []byte, s *settings, limit int) (out []byte, done bool) {
	p := c.call.plan
	tokens, why := c.progress()
	if why == em.FinishError {
		why = em.FinishNone // the caller ends the whole stream with an error event
	}
	if tokens-c.sentTokens > limit {
		tokens, why = c.sentTokens+limit, em.FinishNone
	}
	for c.sentTokens < tokens {
		next := c.sentTokens + p.interval
		if c.sentTokens == 0 {
			next = 1
		}
		last := why != em.FinishNone && next >= tokens
		if next > tokens && !last {
			break
		}
		if last {
			b = c.appendChunk(b, s, tokens, why)
			c.finished = true
			return b, true
		}
		b = c.appendChunk(b, s, next, em.FinishNone)
	}
	if why != em.FinishNone && !c.finished {
		c.finished = true
		return c.appendChunk(b, s, tokens, why), true
	}
	return b, false
}

// appendChunk writes one event: the text up to tokens, and the end if there is one.
func (c *choice) appendChunk(b []byte, s *settings, tokens int, why em.FinishReason) []byte {
	p := c.call.plan
	from := c.sentTokens
	if c.head == nil {
		c.head = c.makeHead()
	}
	b = append(b, c.head...)
	echo := p.echo && from == 0
	if echo {
		b = appendEscaped(b, em.Text(c.from.ids))
	}
	text := c.delta(tokens, why != em.FinishNone)
	b = append(appendEscaped(b, text), '"')
	if p.chat {
		b = append(b, '}')
	}
	b = append(b, `,"logprobs":`...)
	b = c.appendLogprobs(b, p, from, tokens, echo)
	if p.logprobs >= 0 {
		c.sentChars += utf8.RuneCount(text)
	}
	b = c.appendChunkEnd(b, why, from, tokens)
	return c.appendTrailer(b, s, usage{prompt: len(c.from.ids), completion: tokens}, why != em.FinishNone)
}

func (c *choice) makeHead() []byte {
	p := c.call.plan
	b := p.appendStart([]byte("data: "), "text_completion", "chat.completion.chunk")
	b = strconv.AppendInt(append(b, `{"index":`...), int64(c.index), 10)
	if p.chat {
		return append(b, `,"delta":{"content":"`...)
	}
	return append(b, `,"text":"`...)
}

func (c *choice) appendChunkEnd(b []byte, why em.FinishReason, from, tokens int) []byte {
	p := c.call.plan
	b = appendStringOrNull(append(b, `,"finish_reason":`...), why.String())
	if !p.chat || why != em.FinishNone {
		b = append(append(b, `,"stop_reason":`...), c.reason(why)...)
	}
	if !p.chat {
		b = append(b, `,"prompt_token_ids":`...)
		b = appendIDsIf(b, c.from.ids, from == 0 && tokens > 0 && (p.returnIDs || p.echo))
	}
	b = append(b, `,"token_ids":`...)
	if !p.returnIDs {
		return append(b, "null}]"...)
	}
	return append(appendIDList(b, c.ids(from, tokens)), "}]"...)
}

// appendTrailer ends an event that carries a choice.
func (c *choice) appendTrailer(b []byte, s *settings, u usage, last bool) []byte {
	p := c.call.plan
	if p.contUsage {
		b = u.append(append(b, ','))
		if p.chat {
			b = append(b, `,"completion_tokens_details":null`...)
		}
		b = append(b, '}')
	}
	if last && !p.includeUsage {
		b = appendJSON(append(b, `,"system_fingerprint":`...), s.fingerprint)
	}
	return append(b, "}\n\n"...)
}

// appendRole writes the first event of a chat choice.
func (c *choice) appendRole(b []byte) []byte {
	p := c.call.plan
	b = p.appendStart(append(b, "data: "...), "", "chat.completion.chunk")
	b = strconv.AppendInt(append(b, `{"index":`...), int64(c.index), 10)
	b = append(b, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
	if p.contUsage {
		b = usage{prompt: len(c.from.ids)}.append(append(b, ','))
		b = append(b, `,"completion_tokens_details":null}`...)
	}
	b = append(b, `,"prompt_token_ids":`...)
	b = appendIDsIf(b, c.from.ids, p.returnIDs)
	return append(b, `,"prompt_text":null}`+"\n\n"...)
}

// appendUsageEvent writes the event behind the last choice.
func (c *call) appendUsageEvent(b []byte, s *settings) []byte {
	p, u := c.plan, c.usage()
	b = p.appendStart(append(b, "data: "...), "text_completion", "chat.completion.chunk")
	b = u.append(append(b, "],"...))
	if s.promptDetails {
		b = strconv.AppendInt(append(b, `,"prompt_tokens_details":{"cached_tokens":`...), int64(u.cached), 10)
		if p.chat {
			b = append(b, `,"created_cache_tokens":0`...)
		}
		b = append(b, '}')
	}
	b = appendJSON(append(b, `},"system_fingerprint":`...), s.fingerprint)
	return append(b, "}\n\n"...)
}
