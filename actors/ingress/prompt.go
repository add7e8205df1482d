package ingress

import (
	"context"
	"encoding/binary"
	"net/http"
	"slices"
	"time"
	"unsafe"

	"github.com/dpserve/dpserve/internal/engine/openai"
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
	// the engines' name of the adapter, where the client has written another one; else ""
	engineName string
	session    string
	text       []byte // canonical, after a salt if there is one; nil if the policy does not read it

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

// fromBody fills the prompt from a request: its header, and its body as scanned. The failure is about an
// invalid header. adapter is the LoRA adapter that the request is for, "" for none. ctx ends the wait for a
// tokenizer.
func (p *prompt) fromBody(ctx context.Context, ar *appRouter, route openai.Route, adapter string,
	scan *openai.Body, body []byte, h http.Header,
) *failure {
	p.reset()
	if f := p.parse(h); f != nil {
		return f
	}
	p.tokens, p.estimated = scan.PromptTokens, false
	if scan.PromptTokens < 0 {
		p.tokens, p.estimated = ar.estimates.tokens[route].PromptTokens(scan), true
	}
	if p.adapter = adapter; adapter != "" {
		p.engineName = ar.revision.Load().engineName(p.adapter, string(scan.Model))
	}
	if !route.Computes() {
		p.tokens, p.estimated = 0, false
		return nil // it computes no prompt and changes no cache
	}
	r := ar.inputs()
	if r.needs.Session {
		p.session = sessionOf(h, scan.User)
	}
	if scan.IsHead || !route.Generates() {
		return nil // the prompt is not known, or leaves nothing in a cache
	}
	p.identify(ctx, ar, r, scan, body, h)
	if r.needs.Text {
		p.setText(scan.Text(body))
	}
	return nil
}

// fromTokens fills the prompt from token ids for a LoRA adapter ("": none), outside of a request. It does not
// keep ids.
func (p *prompt) fromTokens(ar *appRouter, ids []uint32, adapter string) {
	p.reset()
	p.tokens, p.adapter = len(ids), adapter
	if ar.inputs().chains() {
		p.hashTokens(ar, ids)
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

// identify salts the prompt and cuts it into blocks. The salt contains what decides the prompt's tokens
// beside its text. Token ids of the client are used whatever the application's identity is, because engines
// cache by them. A text is tokenized if the application asks for that and a tokenizer answers.
func (p *prompt) identify(ctx context.Context, ar *appRouter, r *policyInputs, scan *openai.Body, body []byte,
	h http.Header,
) {
	if !r.chains() && !r.needs.Text {
		return
	}
	p.salt = append(p.salt, scan.CacheSalt...)
	for _, m := range scan.Beside {
		p.saltWith(ar, body[m.Start:m.End])
	}
	switch {
	case r.chains() && scan.PromptTokens >= 0:
		p.clientTokens(ar, scan, body)
	case r.chains() && r.tokens != nil && r.tokens.identify(ctx, p, scan, body, h):
	default:
		p.saltTools(ar, scan, body)
		if r.chains() {
			p.hashText(ar, scan, body)
		}
	}
}

func (p *prompt) clientTokens(ar *appRouter, scan *openai.Body, body []byte) {
	var ok bool
	if p.ids, ok = scan.TokenIDs(p.ids[:0], body); ok {
		p.hashTokens(ar, p.ids)
	}
}

// saltTools distinguishes texts with different tools: an engine's template puts them in front of the
// messages.
func (p *prompt) saltTools(ar *appRouter, scan *openai.Body, body []byte) {
	if scan.Tools.End > 0 {
		p.saltWith(ar, body[scan.Tools.Start:scan.Tools.End])
	}
}

// saltWith distinguishes prompts that differ in a part of the body beside the prompt.
func (p *prompt) saltWith(ar *appRouter, part []byte) {
	p.salt = binary.LittleEndian.AppendUint64(append(p.salt, 0), ar.in.hash().Key(view(part)))
}

func (p *prompt) hashText(ar *appRouter, scan *openai.Body, body []byte) {
	p.unit, p.size = kvindex.Text, kvindex.DefaultTextBlock
	h := ar.in.hash()
	p.blocks = h.Text(p.blocks[:0], h.Root(p.rootSalt(ar)), scan.Text(body))
	p.perBlock = ratio{int64(p.tokens), int64(max(scan.PromptBytes, 1))}
}

// hashTokens cuts ids into blocks of the ranks' own size.
func (p *prompt) hashTokens(ar *appRouter, ids []uint32) {
	p.unit, p.size = kvindex.Tokens, ar.tokensPerBlock()
	h := ar.in.hash()
	p.blocks = h.Tokens(p.blocks[:0], h.Root(p.rootSalt(ar)), ids, p.size, nil)
	p.perBlock = ratio{int64(p.size), 1}
}

// rootSalt must equal the salt that a DPServer uses for the blocks of its engine's events.
func (p *prompt) rootSalt(ar *appRouter) kvindex.Salt {
	return kvindex.Salt{
		Unit: p.unit, BlockSize: p.size, Model: ar.modelID(), Adapter: p.adapter,
		CacheSalt: view(p.salt),
	}
}

// view is b as a string; it is valid as long as b does not change.
func view(b []byte) string {
	return unsafe.String(unsafe.SliceData(b), len(b)) //nolint:gosec // the callers only hash it, at once
}

// lookUp asks the index and groups its answer by rank, ascending.
func (p *prompt) lookUp(r *policyInputs, now time.Duration) {
	p.lookedUp = true
	p.hits = p.hits[:0]
	if len(p.blocks) == 0 {
		return
	}
	r.cache.touch(now)
	p.matches = slices.DeleteFunc(r.cache.index.Match(p.blocks, p.matches[:0]), func(h kvindex.Hit) bool {
		return h.Blocks == 0 || r.needs.Approximate && h.Tier != kvindex.Sent
	})
	if !slices.IsSortedFunc(p.matches, byRank) {
		slices.SortFunc(p.matches, byRank)
	}
	for i := 0; i < len(p.matches); {
		n := i + 1
		for n < len(p.matches) && p.matches[n].Rank == p.matches[i].Rank {
			n++
		}
		p.hits = append(p.hits, p.hitOf(p.matches[i:n]))
		i = n
	}
}

func byRank(a, b kvindex.Hit) int { return int(a.Rank) - int(b.Rank) }

// hitOf is one rank's hit by its tiers: blocks of prompts that were sent to the rank count as cached on its
// GPU, and a lower tier counts for the blocks that the tiers above do not hold.
func (p *prompt) hitOf(rows []kvindex.Hit) routing.Hit {
	var tiers [kvindex.Sent + 1]int
	for _, row := range rows {
		tiers[row.Tier] = int(row.Blocks)
	}
	device := p.hitTokens(max(tiers[kvindex.GPU], tiers[kvindex.Sent]))
	host := max(0, p.hitTokens(tiers[kvindex.CPU])-device)
	disk := max(0, p.hitTokens(tiers[kvindex.Disk])-device-host)
	return routing.Hit{
		Rank:   routing.RankID(rows[0].Rank),
		Tokens: int32(device),
		Host:   int32(host),
		Disk:   int32(disk),
	}
}

// hitTokens is the number of tokens that n leading blocks save an engine: it always computes the last token,
// and caches whole blocks of tokens.
func (p *prompt) hitTokens(n int) int {
	if p.unit == kvindex.Tokens {
		n = min(n, max(p.tokens-1, 0)/p.size)
	}
	return min(p.spanTokens(n), max(p.tokens-1, 0))
}

// spanTokens is the length of n leading blocks in tokens.
func (p *prompt) spanTokens(n int) int {
	if p.unit == kvindex.Text {
		n = kvindex.TextSpan(n)
	}
	return p.perBlock.tokensOf(n)
}

// cachedPrefix returns the number of leading blocks cached on the rank's GPU.
func (p *prompt) cachedPrefix(id routing.RankID) int {
	n := 0
	for _, row := range p.matches {
		if row.Rank == uint32(id) && (row.Tier == kvindex.GPU || row.Tier == kvindex.Sent) {
			n = max(n, int(row.Blocks))
		}
	}
	return n
}

// policyInputs is what an application's policy reads of a request and of the ranks' caches, and the sources
// of it. Immutable; replaced with the Router.
type policyInputs struct {
	needs    routing.Needs
	identity string     // of text prompts: app.IdentityText, app.IdentityTokens
	cache    *cache     // nil unless needs.Hits
	tokens   *tokenizer // nil unless identity is tokens and the policy needs chains
}

// chains reports whether prompts are cut into blocks and hashed.
func (r *policyInputs) chains() bool { return r.needs.Hits || r.needs.Blocks }

var noPolicyInputs = &policyInputs{}

const (
	tiers    = int(kvindex.Sent) + 1
	moreSets = 64 // beyond two of each, because a replaced block set counts until it is swept
)

// blockSetsFor is the number of block sets that the index of an application with so many ranks has room for.
func blockSetsFor(ranks int) int { return min(2*ranks*tiers+moreSets, kvindex.MaxSets) }

// words lists what the policy reads beyond load and prompt length.
func (r *policyInputs) words() []string {
	out := []string{}
	for _, n := range []struct {
		is   bool
		word string
	}{
		{r.needs.Hits, "hits"},
		{r.needs.Blocks, "blocks"},
		{r.needs.Text, "text"},
		{r.needs.Session, "session"},
	} {
		if n.is {
			out = append(out, n.word)
		}
	}
	return out
}
