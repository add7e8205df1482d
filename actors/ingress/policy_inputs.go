package ingress

import (
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

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
	tiers       = int(kvindex.Sent) + 1
	moreColumns = 64 // beyond two of each, because a replaced column counts until it is swept
)

// columnsFor is the number of columns that the index of an application has room for.
func columnsFor(a *app.Application) int {
	n := 0
	for _, u := range a.Units() {
		n += len(u.Ranks)
	}
	return min(2*n*tiers+moreColumns, kvindex.MaxColumns)
}

// words lists what the policy reads beyond load and prompt length.
func (r *policyInputs) words() []string {
	out := []string{}
	for _, n := range []struct {
		is   bool
		word string
	}{{r.needs.Hits, "hits"}, {r.needs.Blocks, "blocks"}, {r.needs.Text, "text"},
		{r.needs.Session, "session"}} {
		if n.is {
			out = append(out, n.word)
		}
	}
	return out
}
