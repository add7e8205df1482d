package ingress

import (
	"context"
	"net/http"

	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// prompt is what a Router may ask of a request: how long its prompt is, whose it is, and its identity, which is what two
// prompts with an equal beginning share. It is read once per request by fromBody or fromTokens, before any lock, and turned
// into a routing.Request by appRouter.describeRequest: once per decision, because what ranks hold changes. Live requests, explanations and
// the router's own API all go this way, so they cannot differ. The memory is used again; the zero value is ready.
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

// promptMemory is what a prompt is read into. A request has it until its answer begins, then another request: see request.releaseBody.
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

// tokensOf is n in tokens, rounded down.
func (r ratio) tokensOf(n int) int {
	if r.per == 0 {
		return 0
	}
	return int(int64(n) * r.tokens / r.per)
}

const (
	// maxPooledPrompt is how many blocks or ids a prompt's memory keeps room for; larger memory is left to the garbage collector.
	maxPooledPrompt = 128 << 10
	// smallPrompt is how many entries or bytes of a prompt's memory are kept whatever they were used for.
	smallPrompt = 4 << 10
)

// reset forgets the request and keeps the memory.
func (p *prompt) reset() {
	m := &p.promptMemory
	*p = prompt{promptMemory: promptMemory{
		blocks: m.blocks[:0], matches: m.matches[:0], hits: m.hits[:0], ids: m.ids[:0], salt: m.salt[:0], salted: m.salted[:0], tokenizeBody: m.tokenizeBody[:0],
	}}
}

// giveMemory takes the memory out of p, for another prompt: the text and the blocks are no longer there. Blocks that an actor may
// still read are not used again, nor is memory that is too large to be kept.
func (p *prompt) giveMemory() promptMemory {
	m := p.promptMemory
	if p.shared {
		m.blocks = nil
	}
	p.text, p.promptMemory = nil, promptMemory{}
	return promptMemory{
		blocks: keepMemory(m.blocks, maxPooledPrompt), matches: keepMemory(m.matches, maxPooledPrompt), hits: keepMemory(m.hits, maxPooledPrompt),
		ids: keepMemory(m.ids, maxPooledPrompt), salt: keepMemory(m.salt, maxPooledBody), salted: keepMemory(m.salted, maxPooledBody), tokenizeBody: keepMemory(m.tokenizeBody, maxPooledBody),
	}
}

// keepMemory is s without content; nil if it is larger than most, or much larger than what it was used for.
func keepMemory[T any](s []T, most int) []T {
	if cap(s) > most || cap(s) > smallPrompt && cap(s) > 4*len(s) {
		return nil
	}
	return s[:0]
}

// promptContext is whose a prompt is, besides what its body says.
type promptContext struct {
	adapter   string // LoRA adapter, "" for none
	cacheSalt string
	session   string
}

// fromBody reads a request: its header, and its body as scanned. The failure is about a header that cannot be read. ctx ends
// the question to a tokenizer, if one is asked at all.
func (p *prompt) fromBody(ctx context.Context, ar *appRouter, route openai.Route, scan *openai.Body, body []byte, h http.Header) *failure {
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
		return nil // it computes no prompt, and leaves no trace in a rank's cache
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

// fromTokens reads a prompt given as token ids, outside of a request. ids are not kept.
func (p *prompt) fromTokens(ar *appRouter, ids []uint32, o promptContext) {
	p.reset()
	r := ar.inputs()
	p.tokens, p.adapter, p.session = len(ids), o.adapter, o.session
	p.salt = append(p.salt, o.cacheSalt...)
	if r.chains() {
		p.hashTokens(ar, ids)
	}
}

// describeRequest writes what p is into q, with what the ranks hold of it now. q's other fields (ID, Tried, Force, Override) are the
// caller's. q shares p's memory: it is good until p is read anew or described again.
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

// setText keeps the canonical text. Texts under different salts, adapters or tools share nothing, so their key goes in front.
func (p *prompt) setText(text []byte) {
	if len(text) == 0 || p.adapter == "" && len(p.salt) == 0 {
		p.text = text
		return
	}
	p.salted = append(append(append(append(p.salted[:0], p.adapter...), 0), p.salt...), 0)
	p.salted = append(p.salted, text...)
	p.text = p.salted
}
