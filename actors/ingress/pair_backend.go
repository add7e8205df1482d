package ingress

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"

	"github.com/dpserve/dpserve/actors/pdproxy"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing"
)

// pairBackend is what the proxy of an application uses of the ingress. It outlives revisions.
type pairBackend struct {
	in      *Ingress
	name    string
	metrics *telemetry.Pair
	log     *slog.Logger
	peers   *peers
	current atomic.Pointer[pairApp]
	count   atomic.Pointer[pairCount] // nil: nothing is known yet
}

var _ pdproxy.Backend = (*pairBackend)(nil)

// pool is the appRouter of a side.
func (p *pairApp) pool(s pdproxy.Side) *appRouter {
	if s == pdproxy.Prefill {
		return p.prefill
	}
	return p.decode
}

// Ranks implements pdproxy.Backend. Where engines of pairs take no plain requests, ranks of role both are no
// part of a pair: their engines know nothing of transfers.
func (b *pairBackend) Ranks(dst []routing.RankRef, s pdproxy.Side) []routing.RankRef {
	p, n := b.current.Load(), len(dst)
	dst = p.pool(s).liveRefs(dst)
	switch {
	case s == pdproxy.Prefill:
		b.peers.keep(dst[n:])
	case !p.traits.TakesPlain:
		paired := slices.DeleteFunc(dst[n:], func(r routing.RankRef) bool {
			return !slices.Contains(p.splitOnly, r.ID)
		})
		dst = dst[:n+len(paired)]
	}
	return dst
}

// UpdateTable implements pdproxy.Backend.
func (b *pairBackend) UpdateTable(change func(t *routing.PairTable)) {
	b.current.Load().router.Update(change)
}

// CannotPair implements pdproxy.Backend. Engines refuse other differences in their handshake.
func (b *pairBackend) CannotPair(prefill, decode routing.RankRef) error {
	p := b.current.Load()
	x, y := p.prefill.factsOf(prefill), p.decode.factsOf(decode)
	if x.blockSize > 0 && y.blockSize > 0 && x.blockSize != y.blockSize {
		return fmt.Errorf("their KV blocks are of %d and %d tokens; start both engines with the same "+
			"--block-size", x.blockSize, y.blockSize)
	}
	return nil
}

// SetPairs implements pdproxy.Backend.
func (b *pairBackend) SetPairs(met, all int, why string) {
	old := b.count.Swap(&pairCount{met, all, why})
	b.metrics.Pairs(met, all)
	if all > 0 && met == all && (old == nil || old.met != met || old.all != all) {
		b.log.Info("all pairs of a prefill rank and a decode rank have met", slog.Int("pairs", all))
	}
}

// CountAlarm implements pdproxy.Backend.
func (b *pairBackend) CountAlarm() { b.metrics.Note("alarm") }

// ResetCache implements pdproxy.Backend.
func (b *pairBackend) ResetCache(ctx context.Context, decode routing.RankRef) error {
	rk := b.current.Load().decode.findRef(decode)
	if rk == nil {
		return nil // its cache went with it
	}
	return resetPrefixCache(ctx, rk)
}
