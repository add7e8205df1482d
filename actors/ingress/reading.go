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

// inputs is what the application's policy reads; nothing before the route table has the application.
func (ar *appRouter) inputs() *policyInputs {
	if r := ar.policyInputs.Load(); r != nil {
		return r
	}
	return noPolicyInputs
}

// setPolicyInputs provides what policy needs. It keeps the index if the policy still needs it and it is large
// enough. A new index needs snapshots, so fresh asks for a new subscription.
func (in *Ingress) setPolicyInputs(ar *appRouter, spec *appRevision, policy routing.Policy) (
	fresh bool, err error) {
	old := ar.inputs()
	r := &policyInputs{needs: routing.NeedsOf(policy), identity: spec.app.Routing.Identity}
	if r.chains() && r.identity == app.IdentityTokens {
		if r.tokens = old.tokens; r.tokens == nil {
			r.tokens = newTokenizer(ar)
		}
	}
	if r.needs.Hits {
		r.cache = old.cache
		if n := columnsFor(spec.app); r.cache == nil || r.cache.maxColumns < n {
			if r.cache, err = in.newCache(ar, n); err != nil {
				return false, err
			}
			fresh = true
		}
	}
	ar.policyInputs.Store(r)
	if old.cache != nil && old.cache != r.cache {
		old.cache.close()
	}
	return fresh, nil
}

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
