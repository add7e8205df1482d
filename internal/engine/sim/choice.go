package sim

import (
	"bytes"
	"strconv"
	"sync/atomic"
	"unicode/utf8"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// call is one HTTP request in the engine: its choices, and the channel that wakes its handler.
type call struct {
	plan    *plan
	choices []choice
	bell    chan struct{} // one slot: a ring while it is full is not lost, the handler looks at everything
	open    atomic.Int32  // choices that have not ended
}

// choice is one sequence of a call. The engine writes the atomics, the handler everything else.
type choice struct {
	req   em.Request
	call  *call
	index int
	from  *prompt

	produced atomic.Int32 // tokens so far
	ended    atomic.Uint32
	rejected atomic.Bool
	cached   atomic.Int32

	gen        *em.Generator
	textTokens int    // tokens that have text; the ones behind (end of sequence, stop token) have none
	textEnd    int    // where a stop string cuts the text, bytes
	holdBack   int    // bytes a stop string could still reach back to
	stopReason string // JSON

	sentTokens int
	sentBytes  int
	sentChars  int
	finished   bool
	head       []byte // constant beginning of its chunks
}

// newCall lays out the sequences of a checked plan.
func newCall(p *plan, s *settings, room func(*prompt) int) *call {
	c := &call{plan: p, choices: make([]choice, len(p.prompts)*p.n), bell: make(chan struct{}, 1)}
	c.open.Store(int32(len(c.choices))) //nolint:gosec // bounded by the body and maxN
	for i := range p.prompts {
		from := &p.prompts[i]
		limit := room(from)
		for k := range p.n {
			ch := &c.choices[i*p.n+k]
			ch.call, ch.index, ch.from = c, i*p.n+k, from
			ch.prepare(p, s, k, limit)
		}
	}
	return c
}

// prepare computes the length of the answer and how it ends, which are functions of the seed.
func (c *choice) prepare(p *plan, s *settings, k, limit int) {
	seed := em.TextSeed(s.seed^p.seed, c.from.ids, k)
	c.gen = em.NewGenerator(seed)
	c.req = em.Request{
		Prompt: len(c.from.ids), Output: limit, Ending: em.FinishLength, User: c,
		Content: em.NewTokenContent(c.from.ids, seed, s.blockSize, p.salt).Use(s.hashing),
	}
	c.stopReason, c.textTokens = "null", limit
	if n := max(em.AnswerLen(seed), p.minTokens+1); !p.ignoreEOS && n <= limit {
		c.end(n, n-1, "null")
	}
	c.textEnd = c.textTokens * em.BytesPerToken
	if len(p.stopIDs) > 0 {
		c.stopAtToken(p)
	}
	if len(p.stops) > 0 {
		c.stopAtText(p)
	}
}

// end makes the answer stop with its output-th token, of which textTokens have text.
func (c *choice) end(output, textTokens int, reason string) {
	c.req.Output, c.req.Ending = output, em.FinishStop
	c.textTokens, c.stopReason = textTokens, reason
	c.textEnd = textTokens * em.BytesPerToken
}

func (c *choice) stopAtToken(p *plan) {
	for i := p.minTokens; i < c.textTokens; i++ {
		id := int(c.gen.Token(i))
		if !p.stopIDs[id] {
			continue
		}
		textTokens := i
		if p.includeStop {
			textTokens++
		}
		c.end(i+1, textTokens, strconv.Itoa(id))
		return
	}
}

func (c *choice) stopAtText(p *plan) {
	text := c.gen.Bytes(c.textTokens)
	at, end, hit := 0, len(text)+1, ""
	for _, stop := range p.stops {
		if stop == "" {
			continue
		}
		c.holdBack = max(c.holdBack, len(stop)-1)
		from := max(0, p.minTokens*em.BytesPerToken-len(stop)+1)
		if i := bytes.Index(text[min(from, len(text)):], []byte(stop)); i >= 0 && from+i+len(stop) < end {
			at, end, hit = from+i, from+i+len(stop), stop
		}
	}
	if p.includeStop {
		c.holdBack = 0
	}
	if hit == "" {
		return
	}
	tokens := (end + em.BytesPerToken - 1) / em.BytesPerToken
	c.end(tokens, tokens, string(appendJSON(nil, hit)))
	if c.textEnd = at; p.includeStop {
		c.textEnd = end
	}
}

// progress is what the engine has done for c: tokens, and how it ended (FinishNone = not yet). The last token
// of an answer is seen together with its end only, so that they leave in one chunk.
func (c *choice) progress() (tokens int, why em.FinishReason) {
	why = em.FinishReason(c.ended.Load()) //nolint:gosec // stored from a FinishReason
	tokens = int(c.produced.Load())
	if why == em.FinishNone && tokens >= c.req.Output {
		tokens = c.req.Output - 1
	}
	return tokens, why
}

// delta is the text to send when tokens tokens are there, and moves the cursor behind it. While more may
// come, text whose last character is incomplete is kept back as a whole, and so is what a stop string might
// still take away.
func (c *choice) delta(tokens int, last bool) []byte {
	text := c.gen.Bytes(min(tokens, c.textTokens))
	end := min(len(text), c.textEnd)
	if !last {
		end = max(c.sentBytes, boundary(text, end-c.holdBack))
		if !wholeRunes(text[c.sentBytes:end]) {
			end = c.sentBytes
		}
	}
	out := text[c.sentBytes:end]
	c.sentBytes, c.sentTokens = end, tokens
	return out
}

// boundary moves at back to the beginning of a character, if something is held back in front of the end of
// text.
func boundary(text []byte, at int) int {
	if at >= len(text) || at <= 0 {
		return min(max(at, 0), len(text))
	}
	for at > 0 && !utf8.RuneStart(text[at]) {
		at--
	}
	return at
}

// wholeRunes reports that b does not end inside a character.
func wholeRunes(b []byte) bool {
	for i := 1; i <= min(len(b), utf8.UTFMax); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			return utf8.FullRune(b[len(b)-i:])
		}
	}
	return true
}

// text is the whole text of the answer so far.
func (c *choice) text(tokens int) []byte {
	text := c.gen.Bytes(min(tokens, c.textTokens))
	return text[:min(len(text), c.textEnd)]
}

// ids are the tokens [from, to) of the answer.
func (c *choice) ids(from, to int) []uint32 {
	out := make([]uint32, 0, to-from)
	for i := from; i < to; i++ {
		out = append(out, c.id(i))
	}
	return out
}

// id is token i of the answer; the one that ended it without text is the end-of-sequence token, unless a stop
// token did.
func (c *choice) id(i int) uint32 {
	if i >= c.textTokens && c.stopReason == "null" {
		return em.MarkerEnd
	}
	return c.gen.Token(i)
}

func (c *call) ring() {
	select {
	case c.bell <- struct{}{}:
	default:
	}
}

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
	b = append(b, `","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},`+
		`"logprobs":`...)
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
