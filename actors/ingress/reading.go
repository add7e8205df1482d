package ingress

import (
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// reading is what an application's policy reads of a request and of the ranks' caches, and where that comes from. Immutable;
// replaced with the Router.
type reading struct {
	needs    routing.Needs
	identity string     // of text prompts: app.IdentityText, app.IdentityTokens
	cache    *cache     // nil unless needs.Hits
	tokens   *tokenizer // nil unless identity is tokens, and chains are needed
}

// chains says that prompts are cut into blocks and hashed.
func (r *reading) chains() bool { return r.needs.Hits || r.needs.Blocks }

var readsNothing = &reading{}

// reads is what the lane's policy reads; nothing before the table has seen the application.
func (l *lane) reads() *reading {
	if r := l.reading.Load(); r != nil {
		return r
	}
	return readsNothing
}

// read makes the lane read what policy needs. The index stays if it is still needed and large enough; a new one waits for its
// snapshots, so fresh asks for a new subscription.
func (in *Ingress) read(l *lane, spec *served, policy routing.Policy) (fresh bool, err error) {
	old := l.reads()
	r := &reading{needs: routing.NeedsOf(policy), identity: spec.app.Routing.Identity}
	if r.chains() && r.identity == app.IdentityTokens {
		if r.tokens = old.tokens; r.tokens == nil {
			r.tokens = newTokenizer(l)
		}
	}
	if r.needs.Hits {
		r.cache = old.cache
		if n := columnsFor(spec.app); r.cache == nil || r.cache.columns < n {
			if r.cache, err = in.newCache(l, n); err != nil {
				return false, err
			}
			fresh = true
		}
	}
	l.reading.Store(r)
	if old.cache != nil && old.cache != r.cache {
		old.cache.close()
	}
	return fresh, nil
}

const (
	tiers       = int(kvindex.Sent) + 1
	moreColumns = 64 // beyond two of each: one that was replaced counts until it is swept
)

// columnsFor is how many columns the index of an application has room for.
func columnsFor(a *app.Application) int {
	n := 0
	for _, u := range a.Units() {
		n += len(u.Ranks)
	}
	return min(2*n*tiers+moreColumns, kvindex.MaxColumns)
}
