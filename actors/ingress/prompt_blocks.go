package ingress

import (
	"context"
	"encoding/binary"
	"net/http"
	"slices"
	"time"
	"unsafe"

	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// identify salts the prompt and cuts it into blocks. The salt contains what decides the prompt's tokens
// beside its text. Token ids of the client are used whatever the application's identity is, because engines
// cache by them. A text is tokenized if the application asks for that and a tokenizer answers.
func (p *prompt) identify(ctx context.Context, ar *appRouter, r *policyInputs, scan *openai.Body, body []byte,
	h http.Header) {
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
	p.blocks = textBlocks(p.blocks[:0], h, h.Root(p.rootSalt(ar)), scan.Text(body))
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
	return kvindex.Salt{Unit: p.unit, BlockSize: p.size, Model: ar.modelID(), Adapter: p.adapter,
		CacheSalt: view(p.salt)}
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
	return routing.Hit{Rank: routing.RankID(rows[0].Rank), Tokens: int32(device), Host: int32(host),
		Disk: int32(disk)} //nolint:gosec // tokens of a body of at most MaxBody bytes
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
		n = textSpan(n)
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
