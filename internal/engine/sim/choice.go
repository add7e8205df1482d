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
	set     *settings
	choices []choice
	legs    *legs         // nil = nothing is transferred
	bell    chan struct{} // one slot: a ring while it is full is not lost, the handler looks at everything
	open    atomic.Int32  // choices that have not ended
}

// choice is one sequence of a call. The engine writes the atomics, the handler everything else.
type choice struct {
	req    em.Request
	call   *call
	index  int
	from   *prompt
	script *script // nil = prose

	produced atomic.Int32 // tokens so far
	ended    atomic.Uint32
	rejected atomic.Bool
	cached   atomic.Int32
	choiceKV

	prose      em.Prose // where the answer begins
	gen        *em.Generator
	textTokens int // tokens that have text; the ones behind (end of sequence, stop token) have none
	textEnd    int // where a stop string cuts the text, bytes
	holdBack   int // bytes a stop string could still reach back to
	stopReason any // nil, the stop string or the id of the stop token

	sentTokens int
	sentBytes  int
	sentChars  int
	finished   bool
	frame      [2][]byte // of an event that carries text and nothing else: what stands around the text
}

// choiceKV is the part of a choice that concerns blocks of other engines.
type choiceKV struct {
	load *load   // nil = the prompt is computed here
	kept []int32 // the blocks that wait for their reader; written before the end is

	wrong     atomic.Uint64 // what the KV under the answer got wrong; known with the first token
	isSettled bool          // wrong was heeded
}

// newCall lays out the sequences of a checked plan.
func newCall(p *plan, s *settings, room func(*prompt) int) *call {
	c := &call{plan: p, set: s, choices: make([]choice, len(p.prompts)*p.n), bell: make(chan struct{}, 1)}
	c.open.Store(int32(len(c.choices)))
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

// prepare computes the length of the answer and how it ends, which are functions of prompt and seed.
func (c *choice) prepare(p *plan, s *settings, k, limit int) {
	c.prose = em.ProseAfter(s.Seed^p.seed, c.from.ids, k)
	content := em.NewTokenContent(c.from.ids, c.prose, s.Model.BlockSize, p.salt).Use(s.Hashing)
	c.req = em.Request{
		Prompt: len(c.from.ids), Output: limit, Ending: em.FinishLength, User: c, Content: content,
	}
	left, hasEnd := max(c.prose.Left(), p.minTokens*em.BytesPerToken), !p.ignoreEOS
	if c.gen = em.NewGenerator(c.prose); len(p.scripts) > 0 {
		c.script = p.scripts[c.index%len(p.scripts)]
		c.gen = em.GivenText(c.script.text)
		content.Answer(c.script.text)
		left, hasEnd = len(c.script.text), true
	}
	c.setText(limit)
	if tokens := (left + em.BytesPerToken - 1) / em.BytesPerToken; hasEnd && tokens < limit {
		c.end(tokens+1, tokens, nil)
		c.textEnd = left
	}
	if len(p.stopIDs) > 0 {
		c.stopAtToken(p)
	}
	if len(p.stops) > 0 {
		c.stopAtText(p)
	}
}

// end makes the answer stop with its output-th token, of which textTokens have text.
func (c *choice) end(output, textTokens int, reason any) {
	c.req.Output, c.req.Ending = output, em.FinishStop
	c.stopReason = reason
	c.setText(textTokens)
}

// setText sets how many tokens have text.
func (c *choice) setText(tokens int) {
	c.textTokens, c.textEnd = tokens, tokens*em.BytesPerToken
	if c.script != nil {
		c.textEnd = min(c.textEnd, len(c.script.text))
	}
}

// owner is the name by which the calls of this choice get their ids.
func (c *choice) owner() string { return c.call.plan.id + " " + strconv.Itoa(c.index) }

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
		c.end(i+1, textTokens, id)
		return
	}
}

func (c *choice) stopAtText(p *plan) {
	text := c.gen.Bytes(c.textTokens)[:c.textEnd]
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
	c.end(tokens, tokens, hit)
	if c.textEnd = at; p.includeStop {
		c.textEnd = end
	}
}

// settle is called before the text of the first token is used: on wrong KV follows another text.
func (c *choice) settle() {
	if c.isSettled {
		return
	}
	c.isSettled = true
	if wrong := c.wrong.Load(); wrong != 0 {
		c.script = nil // a model that reads other words neither calls tools nor keeps to a schema
		c.gen = em.NewGenerator(c.prose.Misled(wrong))
		c.setText(c.textTokens)
	}
}

// engineName is the name of this sequence inside the engine, but for the suffix that makes it unique.
func (c *choice) engineName() string {
	p := c.call.plan
	name := p.id
	if !p.chat {
		name += "-" + strconv.Itoa(c.index/p.n)
	}
	if p.n > 1 {
		name = strconv.Itoa(c.index%p.n) + "_" + name
	}
	return name
}

// progress is what the engine has done for c: tokens, and how it ended (FinishNone = not yet). The last token
// of an answer is seen together with its end only, so that they leave in one chunk.
func (c *choice) progress() (tokens int, why em.FinishReason) {
	why = em.FinishReason(c.ended.Load())
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
	at = min(max(at, 0), len(text))
	for at > 0 && at < len(text) && !utf8.RuneStart(text[at]) {
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
	if i >= c.textTokens && c.stopReason == nil {
		return em.MarkerEnd
	}
	return c.gen.Token(i)
}

func (c *call) ring() { kick(c.bell) }

// appendNew writes the chunks of everything the engine has produced for c since the last call, as much of it
// as limit tokens; done = its finishing chunk was written.
func (c *choice) appendNew(b []byte, s *settings, limit int) (out []byte, done bool) {
	p := c.call.plan
	tokens, why := c.progress()
	if why == em.FinishError {
		why = em.FinishNone // the caller ends the whole stream with an error event
	}
	if tokens > 0 {
		c.settle()
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

// shortenToFault shortens the sequences of a call whose fault strikes after some tokens, so that the engine
// computes no more tokens. It returns the fault that is left for the end.
func (c *call) shortenToFault(f *Fault) *Fault {
	if f == nil || f.Mode != ModeAbort && (c.plan.stream || f.AfterTokens == 0) {
		return f
	}
	for i := range c.choices {
		ch := &c.choices[i]
		if n := max(1, f.AfterTokens); n < ch.req.Output || f.Mode == ModeAbort && n == ch.req.Output {
			ch.req.Output = n
			if f.Mode == ModeAbort {
				ch.req.Ending = em.FinishAbort
			}
		}
	}
	if f.Mode == ModeAbort {
		return nil
	}
	return f
}

// failure is the reason why the engine could not finish a call; nil = it finished.
func (c *call) failure() *apiError {
	for i := range c.choices {
		ch := &c.choices[i]
		switch {
		case ch.rejected.Load():
			return busyError()
		case em.FinishReason(ch.ended.Load()) == em.FinishError:
			if ch.req.LoadFailed() {
				return internalError(ch.load.text)
			}
			return internalError(msgEngineDead)
		}
	}
	return nil
}

// finish books the end of a sequence and wakes the handler: a stream at each end, a plain answer at the last
// one.
func (c *choice) finish(why em.FinishReason) {
	c.ended.Store(uint32(why))
	if c.call.open.Add(-1) == 0 || c.call.plan.stream {
		c.call.ring()
	}
}
