package ingress

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// RouterInfo describes an application's Router. Errors are *problem.Error.
func (in *Ingress) RouterInfo(app string) (msg.RouterInfo, error) {
	ar, router, err := in.routerOf(app)
	if err != nil {
		return msg.RouterInfo{}, err
	}
	a, view := ar.revision.Load().app, router.Snapshot()
	out := msg.RouterInfo{
		App: app, Policy: router.Policy(), Preset: a.Routing.Preset, Params: a.Routing.Params,
		Identity: a.Routing.Identity, Reads: ar.inputs().words(),
		BusyThreshold: a.Routing.BusyThreshold, CachingOff: view.PrefixCachingOff, Ranks: len(view.Ranks),
		Queued:       in.QueueLen(app),
		Reservations: ar.reservations.len(), Imbalance: router.MaxMean(), Index: in.Index(app),
	}
	for i := range view.Ranks {
		rk := &view.Ranks[i]
		if rk.Serves() {
			out.Ready++
		}
		if rk.Ready && rk.Tripped > 0 {
			out.Tripped++
		}
		if rk.LeftOut {
			out.LeftOut++
		}
	}
	out.Law = lawOf(router, &view, in.clock())
	return out, nil
}

// lawOf is the time model of a Router's engines, nil if its policy predicts nothing. view is a snapshot of
// the Router, and now the ingress's clock: a Router learns the time from events, and an idle application has
// none.
func lawOf(router *routing.Router, view *routing.View, now time.Duration) *msg.Law {
	info, ok := router.Law()
	if !ok {
		return nil
	}
	out := &msg.Law{
		Preset: info.Preset, Prefill: info.Prefill, Decode: info.Decode, PrefillSamples: info.PrefillSamples,
		DecodeSamples: info.DecodeSamples,
	}
	if info.PrefillSamples+info.DecodeSamples > 0 {
		out.AgeS, out.Error = max(0, info.Age+now-view.Now).Seconds(), info.Error
	}
	for i := range view.Ranks {
		if rk := &view.Ranks[i]; rk.Slow > 0 {
			out.Ranks = append(out.Ranks, msg.RankSpeed{
				Worker: rk.ID.String(), Slow: rk.Slow, LagMs: float64(rk.Lag) / float64(time.Millisecond)})
		}
	}
	return out
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

// ResetRouter drops the state of an application's policy, load that no rank has confirmed, and the index, and
// asks every rank for a snapshot. Requests in flight, the queue and reservations are not affected. Errors are
// *problem.Error.
func (in *Ingress) ResetRouter(app string) (msg.ResetResult, error) {
	ar, router, err := in.routerOf(app)
	if err != nil {
		return msg.ResetResult{}, err
	}
	router.Reset()
	n := ar.resetCaches()
	in.log.Info("router reset", slog.String("app", app), slog.String("policy", router.Policy()),
		slog.Int("ranks", n))
	return msg.ResetResult{App: app, Ranks: n}, nil
}

// resetCaches drops every column of the index and asks the ranks for snapshots; until they arrive, the caches
// count as empty. It returns the number of ranks.
func (ar *appRouter) resetCaches() int {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	for _, r := range ar.ranks {
		r.resyncing = true // the snapshot contains all records before it
		if c := ar.inputs().cache; c != nil {
			c.queue.push(kvOp{kind: opDrop, owner: r.columnOwner(0)}, nil)
		}
		ar.requestSnapshot(r)
	}
	return len(ar.ranks)
}

// Bounds of a dump.
const (
	maxDump  = 1 << 20 // blocks
	dumpRuns = 1024    // blocks per run
)

// tierNames are the tiers as a dump names them.
var tierNames = [...]string{kvindex.GPU: "gpu", kvindex.CPU: "cpu", kvindex.Disk: "disk",
	kvindex.Sent: "sent"}

// hex16 is a hash as a dump writes it.
func hex16(h uint64) string { return newRequestID(h) }

// blockRun is a sequence of blocks as the index has it.
type blockRun struct {
	owner  kvindex.Owner
	parent uint64
	hashes []uint64
}

// DumpEvents emits the index column by column, as runs of stored blocks; truncated: it holds more than
// maxDump. A run is valid during emit only. Errors are *problem.Error, emit's, and ctx's.
func (in *Ingress) DumpEvents(ctx context.Context, app string, emit func(*msg.KVRun) error) (
	truncated bool, err error) {
	ar, _, err := in.routerOf(app)
	if err != nil {
		return false, err
	}
	c := ar.inputs().cache
	if c == nil {
		return false, nil
	}
	var chains []blockRun
	if !c.inspect(ctx, func(held []*column) { chains, truncated = copyColumns(held) }) {
		return false, context.Cause(ctx)
	}
	run := msg.KVRun{}
	for _, ch := range chains {
		run.Worker, run.Tier, run.Parent = routing.RankID(ch.owner.Rank).String(), tierNames[ch.owner.Tier],
			""
		if ch.parent != 0 {
			run.Parent = hex16(ch.parent)
		}
		run.Blocks = run.Blocks[:0]
		for _, h := range ch.hashes {
			run.Blocks = append(run.Blocks, hex16(h))
		}
		if err := emit(&run); err != nil {
			return false, err
		}
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
	}
	return truncated, nil
}

// copyColumns copies the blocks of visible columns, at most maxDump. It runs on the index's writer, for some
// milliseconds at the bound.
func copyColumns(held []*column) (out []blockRun, truncated bool) {
	slices.SortFunc(held, func(a, b *column) int {
		x, y := a.Owner(), b.Owner()
		return cmp.Or(cmp.Compare(x.Rank, y.Rank), cmp.Compare(x.Tier, y.Tier))
	})
	left := maxDump
	for _, col := range held {
		if !col.Shown() {
			continue
		}
		if truncated = truncated || col.Len() > left; truncated {
			continue
		}
		left -= col.Len()
		col.Snapshot(dumpRuns, func(d kvindex.Delta) {
			out = append(out, blockRun{col.Owner(), d.Parent, append([]uint64(nil), d.Hashes...)})
		})
	}
	return out, truncated
}
