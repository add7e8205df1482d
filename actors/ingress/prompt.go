package ingress

import (
	"context"
	"net/http"

	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// prompt is what a Router may ask of a request: the length of its prompt, its context, and its identity,
// which prompts with an equal beginning share. fromBody or fromTokens fills it once per request, before any
// lock. describeRequest turns it into a routing.Request for each decision, because the ranks' caches change
// in between. Live requests, explanations and the router's own API all use these functions, so they cannot
// differ. The memory is reused; the zero value is ready.
type prompt struct {
	routingHeaders
	promptMemory

	tokens    int
	estimated bool
	adapter   string
	session   string
	text      []byte // canonical, after a salt if there is one; nil if the policy does not read it

	unit     kvindex.Unit // of blocks; 0: there are none
	size     int          // of a block, in its unit; of a text's first blocks
	perBlock ratio        // tokens per block of tokens, or per byte of a text
	lookedUp bool         // lookUp was called
	shared   bool         // an Admit without a reply may still hold blocks
}

// promptMemory is the memory of a prompt. A request holds it until its answer begins, then another request
// gets it: see request.releaseBody.
type promptMemory struct {
	blocks       []uint64      // chain hashes of the full blocks
	matches      []kvindex.Hit // of the last look-up
	hits         []routing.Hit // of the last look-up, by rank
	ids          []uint32
	salt         []byte
	salted       []byte
	tokenizeBody []byte // request to a tokenizer
}

// ratio is a number of tokens without rounding.
type ratio struct{ tokens, per int64 }

// tokensOf is the number of tokens of n units, rounded down.
func (r ratio) tokensOf(n int) int {
	if r.per == 0 {
		return 0
	}
	return int(int64(n) * r.tokens / r.per)
}

const (
	// maxPooledPrompt is the number of blocks or ids for which a prompt's memory is kept; the garbage
	// collector frees larger memory.
	maxPooledPrompt = 128 << 10
	// smallPrompt is the number of entries or bytes of a prompt's memory that are always kept.
	smallPrompt = 4 << 10
)

// reset clears the prompt and keeps its memory.
func (p *prompt) reset() {
	m := &p.promptMemory
	*p = prompt{promptMemory: promptMemory{
		blocks: m.blocks[:0], matches: m.matches[:0], hits: m.hits[:0], ids: m.ids[:0], salt: m.salt[:0],
		salted: m.salted[:0], tokenizeBody: m.tokenizeBody[:0],
	}}
}

// giveMemory takes the memory out of p for another prompt; the text and the blocks are then gone. It drops
// blocks that an actor may still read, and memory that is too large to keep.
func (p *prompt) giveMemory() promptMemory {
	m := p.promptMemory
	if p.shared {
		m.blocks = nil
	}
	p.text, p.promptMemory = nil, promptMemory{}
	return promptMemory{
		blocks: keepMemory(m.blocks, maxPooledPrompt), matches: keepMemory(m.matches, maxPooledPrompt),
		hits: keepMemory(m.hits, maxPooledPrompt),
		ids:  keepMemory(m.ids, maxPooledPrompt), salt: keepMemory(m.salt, maxPooledBody),
		salted:       keepMemory(m.salted, maxPooledBody),
		tokenizeBody: keepMemory(m.tokenizeBody, maxPooledBody),
	}
}

// keepMemory is s without content; nil if s is larger than most, or much larger than its last content.
func keepMemory[T any](s []T, most int) []T {
	if cap(s) > most || cap(s) > smallPrompt && cap(s) > 4*len(s) {
		return nil
	}
	return s[:0]
}

// promptContext is request context that affects the prompt's hash or routing: adapter, cache salt, session.
type promptContext struct {
	adapter   string // LoRA adapter, "" for none
	cacheSalt string
	session   string
}

// fromBody fills the prompt from a request: its header, and its body as scanned. The failure is about an
// invalid header. ctx ends the wait for a tokenizer.
func (p *prompt) fromBody(ctx context.Context, ar *appRouter, route openai.Route, scan *openai.Body,
	body []byte, h http.Header) *failure {
	p.reset()
	if f := p.parse(h); f != nil {
		return f
	}
	p.tokens, p.estimated = scan.PromptTokens, false
	if scan.PromptTokens < 0 {
		p.tokens, p.estimated = ar.estimators[route].PromptTokens(scan), true
	}
	if !route.Generates() {
		p.tokens, p.estimated = 0, false
		return nil // it computes no prompt and changes no cache
	}
	r := ar.inputs()
	p.adapter = ar.adapterOf(scan.Model)
	if r.needs.Session {
		p.session = sessionOf(h, scan.User)
	}
	p.identify(ctx, ar, r, scan, body, h)
	if r.needs.Text {
		p.setText(scan.Text(body))
	}
	return nil
}

// fromTokens fills the prompt from token ids, outside of a request. It does not keep ids.
func (p *prompt) fromTokens(ar *appRouter, ids []uint32, o promptContext) {
	p.reset()
	r := ar.inputs()
	p.tokens, p.adapter, p.session = len(ids), o.adapter, o.session
	p.salt = append(p.salt, o.cacheSalt...)
	if r.chains() {
		p.hashTokens(ar, ids)
	}
}

// describeRequest writes p into q, with what the ranks' caches hold of it now. The caller sets q's other
// fields (ID, Tried, Force, Override). q shares p's memory and is valid until p is filled or described again.
func (ar *appRouter) describeRequest(q *routing.Request, p *prompt) {
	r := ar.inputs()
	q.Now = ar.in.clock()
	q.Tokens, q.Estimated = p.tokens, p.estimated
	q.Direct, q.HasDirect = p.direct, p.hasDirect
	q.Priority, q.TTFTms, q.TPOTms = p.priority, p.ttftMs, p.tpotMs
	q.Session, q.Adapter, q.Text = p.session, p.adapter, p.text
	q.Blocks, q.BlockSize, q.Hits = nil, 0, nil
	if len(p.blocks) > 0 {
		q.Blocks, q.BlockSize = p.blocks, max(p.spanTokens(1), 1)
	}
	if r.cache != nil && !ar.cachingOff.Load() {
		p.lookUp(r, ar.in.clock())
		q.Hits = p.hits
	}
}

// setText keeps the canonical text. Texts with different salts, adapters or tools share nothing in an
// engine's cache, so their key goes in front.
func (p *prompt) setText(text []byte) {
	if len(text) == 0 || p.adapter == "" && len(p.salt) == 0 {
		p.text = text
		return
	}
	p.salted = append(append(append(append(p.salted[:0], p.adapter...), 0), p.salt...), 0)
	p.salted = append(p.salted, text...)
	p.text = p.salted
}
