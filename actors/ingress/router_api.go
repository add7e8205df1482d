package ingress

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"slices"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/routerapi"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// RouterInfo describes an application's Router. Errors are *problem.Error.
func (in *Ingress) RouterInfo(app string) (client.Info, error) {
	ar, router, err := in.routerOf(app)
	if err != nil {
		return client.Info{}, err
	}
	out := routerInfo(ar, router)
	out.Streams = ar.revision.Load().streams()
	if p := in.findPair(app); p != nil {
		out.App, out.Pair = app, pairInfo(p)
	}
	return out, nil
}

// GroupQueues describes the queues of an application's lockstep groups, in their order; nil if it has none.
func (in *Ingress) GroupQueues(app string) []client.GroupQueue {
	if ar := in.findAppRouter(app); ar != nil && ar.groups.rule.Load() != nil {
		return ar.groups.state()
	}
	return nil
}

// routerInfo describes a Router.
func routerInfo(ar *appRouter, router *routing.Router) client.Info {
	in, a, view := ar.in, ar.revision.Load().app, router.Snapshot()
	out := client.Info{
		App: ar.name, Policy: router.Policy(), Preset: a.Routing.Preset, Params: a.Routing.Params,
		Identity: a.Routing.Identity, Reads: ar.inputs().words(),
		BusyThreshold: a.Routing.BusyThreshold, CachingOff: view.PrefixCachingOff, Ranks: len(view.Ranks),
		Queued:       in.QueueLen(ar.name),
		Reservations: ar.reservations.Len(), Imbalance: router.MaxMean(), Index: in.Index(ar.name),
	}
	for i := range view.Ranks {
		rk := &view.Ranks[i]
		if rk.Serves() {
			out.Ready++
		}
		if rk.Ready && rk.Ejected > 0 {
			out.Ejected++
		}
		if rk.LeftOut {
			out.LeftOut++
		}
	}
	out.CostModel, out.Groups = routerapi.CostModel(router, &view, in.clock()), in.GroupQueues(ar.name)
	ar.mu.Lock()
	defer ar.mu.Unlock()
	out.Away = ar.awayRanks()
	return out
}

// ResetRouter drops the state of an application's policy, load that no rank has confirmed, and the index, and
// has the ranks listed again. Requests in flight, the queue and reservations are not affected. Errors are
// *problem.Error.
func (in *Ingress) ResetRouter(app string) (client.ResetResult, error) {
	ar, router, err := in.routerOf(app)
	if err != nil {
		return client.ResetResult{}, err
	}
	router.Reset()
	n := ar.resetCache()
	if p := in.findPair(app); p != nil {
		p.prefill.router.Load().Reset()
		n += p.prefill.resetCache()
	}
	in.listRanks()
	in.log.Info("router reset", slog.String("app", app), slog.String("policy", router.Policy()),
		slog.Int("ranks", n))
	return client.ResetResult{App: app, Ranks: n}, nil
}

// Bounds of a dump.
const (
	maxDump  = 1 << 20 // blocks
	dumpRuns = 1024    // blocks per run
)

// tierNames are the tiers as a dump names them.
var tierNames = [...]string{
	kvindex.GPU: "gpu", kvindex.CPU: "cpu", kvindex.Disk: "disk",
	kvindex.Sent: "sent",
}

// blockRun is a sequence of blocks as the index has it.
type blockRun struct {
	owner  kvindex.Owner
	parent uint64
	hashes []uint64
}

// DumpEvents emits the index block set by block set, as runs of stored blocks; truncated: it holds more than
// maxDump. A run is valid during emit only. Errors are *problem.Error, emit's, and ctx's.
func (in *Ingress) DumpEvents(ctx context.Context, app string, emit func(*client.Run) error) (
	truncated bool, err error,
) {
	ar, _, err := in.routerOf(app)
	if err != nil {
		return false, err
	}
	c := ar.inputs().cache
	if c == nil {
		return false, nil
	}
	var chains []blockRun
	c.inspect(func(held []*kvindex.BlockSet) { chains, truncated = copySets(held) })
	run := client.Run{}
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

// copySets copies the blocks of visible block sets, at most maxDump, which takes some milliseconds.
func copySets(held []*kvindex.BlockSet) (out []blockRun, truncated bool) {
	slices.SortFunc(held, func(a, b *kvindex.BlockSet) int {
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

// BestWorker picks a rank for a prompt of token ids; of two pools, a rank of each where both have a part.
// With a request id, the ranks admit it like a request and it counts until Free, at most Timers.Reservation;
// without one nothing changes, and ties are drawn as for requests. It never waits in the queue. Errors are
// *problem.Error.
func (in *Ingress) BestWorker(ctx context.Context, app string, q *client.BestWorkerRequest) (client.Worker,
	error,
) {
	e, err := in.routeTo(app)
	if err != nil {
		return client.Worker{}, err
	}
	ask := newInquiry(ctx, e)
	if err := ask.readQuery(&client.Query{ //nolint:contextcheck // it is in ask.r
		TokenIDs: q.TokenIDs, Model: q.Model, Worker: q.Worker, Override: q.Override,
	}); err != nil {
		return client.Worker{}, err
	}
	if q.RequestID != "" {
		return reserve(ctx, ask, app, q.RequestID)
	}
	rk, f, _ := search{ask.request}.decide()
	switch s := ask.split; {
	case rk != nil && s.isRemote():
		return ask.worker(rk, s.rank), nil
	case rk != nil:
		return ask.worker(rk, nil), nil
	}
	return client.Worker{}, ask.notPicked(app, f)
}

// PotentialLoads is the load that each rank would have with a prompt; without ids, its load now. Errors are
// *problem.Error.
func (in *Ingress) PotentialLoads(app string, ids []uint32) ([]client.PotentialLoad, error) {
	ar, router, err := in.routerOf(app)
	if err != nil {
		return nil, err
	}
	var p prompt
	p.fromTokens(ar, ids, ar.adapterOf(nil))
	q := routing.Request{ID: in.nextID.Load() + 1}
	ar.describeRequest(&q, &p)
	loads := router.PotentialLoads(&q)
	out := make([]client.PotentialLoad, len(loads))
	for i, p := range loads {
		out[i] = client.PotentialLoad{
			Worker: p.Rank.String(), Group: p.Rank.Group(), DPRank: p.Rank.Rank(),
			PrefillTokens: p.PrefillTokens, DecodeBlocks: p.DecodeBlocks,
		}
	}
	return out, nil
}

// Index is the state of this ingress's picture of the ranks' caches for an application; nil if the
// application does not exist or its policy does not use the caches.
func (in *Ingress) Index(app string) *client.Index {
	ar := in.findAppRouter(app)
	if ar == nil || ar.inputs().cache == nil {
		return nil
	}
	return ar.inputs().cache.status()
}

// Identity is how text prompts of an application are identified: text or tokens; "" if its policy reads no
// blocks.
func (in *Ingress) Identity(app string) string {
	ar := in.findAppRouter(app)
	if ar == nil || !ar.inputs().chains() {
		return ""
	}
	return ar.inputs().identity
}

// ExplainRoute decides for rq with the code and state of live requests, explains the decision, and changes
// nothing. Errors are *problem.Error.
func (in *Ingress) ExplainRoute(ctx context.Context, app string, rq *client.Query) (
	*client.Explanation, error,
) {
	e, err := in.routeTo(app)
	if err != nil {
		return nil, err
	}
	q := newInquiry(ctx, e)
	q.makeExact()
	if rq.Replay == "" {
		if err := q.readQuery(rq); err != nil { //nolint:contextcheck // it is in q.r
			return nil, err
		}
		return explain(q), nil
	}
	old, err := findDecision(e.router, app, rq.Replay)
	if err != nil {
		return nil, err
	}
	q.recall(&old)
	if err := q.override(rq.Worker, rq.Override); err != nil {
		return nil, err
	}
	x := explain(q)
	x.Replay = old.toReplay(in.clockBase)
	x.Notes = append(x.Notes, old.notes(e.router)...)
	return x, nil
}

// Decisions lists the last decisions for an application's requests, the newest first. Errors are
// *problem.Error.
func (in *Ingress) Decisions(app string, most int) ([]client.Replay, error) {
	ar, _, err := in.routerOf(app)
	if err != nil {
		return nil, err
	}
	return ar.decisions.latest(most, in.clockBase), nil
}

// MarkPrefillComplete records that a reservation's request has its first token. Safe to call twice. Errors
// are *problem.Error.
func (in *Ingress) MarkPrefillComplete(app, id string) error {
	ar, _, err := in.routerOf(app)
	if err != nil {
		return err
	}
	return ar.reservations.MarkPrefillComplete(app, id)
}

// Free ends a reservation. Errors are *problem.Error: NotFound if it has ended.
func (in *Ingress) Free(app, id string) error {
	ar, _, err := in.routerOf(app)
	if err != nil {
		return err
	}
	return ar.reservations.Free(app, id)
}

// Generate sends a prompt of token ids through the inference handler as a streamed completion: queue,
// attempts, deadlines, account, metrics and log line are those of every request. emit gets the tokens as they
// arrive; its error ends the request. Errors are *problem.Error or emit's.
func (in *Ingress) Generate(ctx context.Context, app string, q *msg.Generate,
	emit func(*client.Part) error,
) error {
	e, err := in.routeTo(app)
	if err != nil {
		return err
	}
	req, override, err := newGeneration(ctx, e.router, q)
	if err != nil {
		return err
	}
	run, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer in.endWith(cancel)() //nolint:contextcheck // the ingress's end is no child of ctx
	w := routerapi.NewTokenWriter(emit)
	in.serveFor(w, req.WithContext(run), e, override) //nolint:contextcheck // it is in the request
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return w.Outcome()
}

// endWith cancels a request that has no client connection when the ingress closes; stop undoes that.
func (in *Ingress) endWith(cancel context.CancelCauseFunc) (stop func() bool) {
	closing := in.baseContext(nil)
	return context.AfterFunc(closing, func() { cancel(context.Cause(closing)) })
}

// serveFor is serve for one application, with what the router's own API may ask for beyond a header. A cut,
// which an HTTP client sees as a broken connection, sets w.Cut.
func (in *Ingress) serveFor(w *routerapi.TokenWriter, r *http.Request, e *appRoute, o *routing.Override) {
	defer func() {
		switch p := recover(); p {
		case nil:
		case http.ErrAbortHandler:
			w.Cut = true
		default:
			panic(p)
		}
	}()
	s := newRouteScope()
	s.add(e)
	in.serveWith(w, r, s, openai.Completions, "", func(req *request) {
		req.query.Override, req.timer.alive.isOff = o, true
	})
}

// PairStatus is what this ingress knows of an application's pairs; ok is false if the application has one
// pool.
func (in *Ingress) PairStatus(app string) (st client.PDStatus, ok bool) {
	p := in.findPair(app)
	if p == nil {
		return st, false
	}
	state, count := p.state()
	requests := p.metrics.Counts()
	return client.PDStatus{
		Transfer: p.traits.Name, Decide: p.rule, Fallback: pairFallback(p), Pairs: state, Met: count.met,
		All: count.all, Remote: requests.Remote, Local: requests.Local, Fallbacks: requests.Fallback,
	}, true
}

// routerOf returns the state and the Router of an application, for the router's own API; of two pools, those
// of the decode pool. The name of a pool is that pool alone.
func (in *Ingress) routerOf(app string) (*appRouter, *routing.Router, error) {
	ar := in.findAppRouter(app)
	if p := in.findPair(app); p != nil {
		ar = p.decode
	}
	if ar != nil && ar.revision.Load() != nil {
		if r := ar.router.Load(); r != nil {
			return ar, r, nil
		}
	}
	return nil, nil, problem.New(problem.NotFound, "%w %q", state.ErrUnknownApp, app).WithHint(
		"`dpserve status` lists the applications")
}

// routeTo is routerOf as a route for requests.
func (in *Ingress) routeTo(app string) (*appRoute, error) {
	ar, _, err := in.routerOf(app)
	if err != nil {
		return nil, err
	}
	return &appRoute{appRevision: ar.revision.Load(), router: ar, pair: in.findPair(app)}, nil
}

// QueueLen is the number of an application's requests that wait for a rank.
func (in *Ingress) QueueLen(app string) int {
	ar := in.findAppRouter(app)
	if ar == nil {
		return 0
	}
	n, _ := ar.queue.size()
	return n
}
