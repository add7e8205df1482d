package ingress

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/pdproxy"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing"
)

// pairApp is an application with a prefill pool and a decode pool, at one revision of both and with their
// present Routers. It is immutable: the follower makes another one when something of it changes.
type pairApp struct {
	in                      *Ingress
	name                    string // of the application, without a pool
	prefill, decode         *appRouter
	prefillSpec, decodeSpec *appRevision
	router                  *routing.PairRouter
	rule                    string // by which prefill ranks are used, as the file writes it
	transfer                transfer.Transfer
	traits                  *transfer.Traits
	config                  dispatch.Config  // without the limits that depend on the request
	splitOnly               []routing.RankID // decode ranks that answer only requests with a prefill rank
	plainOnly               []routing.RankID // where there are such: the others, which are no part of a pair
	*pairLife
}

// pairLife is what an application with two pools keeps across revisions.
type pairLife struct {
	proxy   *pdproxy.Proxy
	metrics *telemetry.Pair
	backend *pairBackend
}

// pairSystem starts the proxies of an ingress.
type pairSystem struct {
	mu        sync.Mutex
	actors    *actor.ActorSystem // of the node; or an own one, if the node has given none
	isOwn     bool
	requests  sync.Pool // *split
	bootstrap *http.Client
}

// system is the actor system of the proxies.
func (s *pairSystem) system(log *slog.Logger) *actor.ActorSystem {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.actors == nil {
		s.actors, s.isOwn = inbox.NewSystem(log), true
	}
	return s.actors
}

// close ends an own actor system, when all proxies have ended.
func (s *pairSystem) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isOwn {
		s.actors.Shutdown()
		s.actors, s.isOwn = nil, false
	}
}

// isOn reports whether requests may be split: the application has prefill ranks. Whether one of them is ready
// is part of each decision.
func (p *pairApp) isOn() bool { return p.prefillSpec.app.NumReplicas > 0 }

// failsWithoutPrefill reports whether a request that should have had a prefill rank is refused.
func (p *pairApp) failsWithoutPrefill() bool { return p.config.FallbackFails }

// newPairApp makes the pairs of an application from its pools. old is what the application had before, nil
// for nothing; it is returned if nothing has changed.
func (f *appFollower) newPairApp(old *pairApp, name string, prefill, decode *appRouter) (*pairApp, error) {
	ps, ds := prefill.revision.Load(), decode.revision.Load()
	pr, dr := prefill.router.Load(), decode.router.Load()
	if old != nil && old.prefillSpec == ps && old.decodeSpec == ds {
		if p, d := old.router.Routers(); p == pr && d == dr {
			return old, nil
		}
	}
	dis := ds.app.Disaggregation
	rule, err := routing.ParsePairRule(dis.Decide)
	if err != nil {
		return nil, err
	}
	t, ok := transfer.Named(dis.Transfer)
	if !ok {
		t, _ = transfer.Named(transfer.NixlName) // the parser lets no other name pass
	}
	p := &pairApp{
		in: f.in, name: name, prefill: prefill, decode: decode, prefillSpec: ps, decodeSpec: ds,
		rule: dis.Decide, transfer: t, traits: t.Traits(),
	}
	if !p.traits.TakesPlain {
		p.splitOnly, p.plainOnly = pairedRanks(ds)
		if len(p.plainOnly) == 0 {
			rule.Decider, p.rule = routing.DecideAlways, app.DecideAlways // no rank computes a prompt alone
		}
	}
	p.config = dispatch.Config{
		Order:         p.traits.Order,
		FallbackFails: dis.Fallback == app.FallbackFail || !p.traits.TakesPlain && len(p.plainOnly) == 0,
		Lease:         cmp.Or(engine.TransferLease(ps.app), p.traits.Lease),
		PrefillLimit:  ps.firstToken, DecodeLimit: ds.firstToken,
		LocalLimit: ds.firstToken, Attempts: ds.attempts, Refusals: maxRefusals,
	}
	rule.NeedsMet = p.config.FallbackFails
	seed := mix(f.in.seed ^ f.in.nextID.Load())
	if old != nil {
		p.pairLife, p.router = old.pairLife, old.router.Next(pr, dr, rule, seed)
	} else {
		p.router = routing.NewPairRouter(pr, dr, rule, true, seed)
		if p.pairLife, err = f.newPairLife(p); err != nil {
			return nil, err
		}
	}
	p.backend.current.Store(p)
	return p, nil
}

// pairedRanks are the ranks of a decode pool of role decode, and the others.
func pairedRanks(spec *appRevision) (paired, others []routing.RankID) {
	for _, id := range spec.ranks {
		if r := spec.app.Engine.Rank(id.Group(), id.Rank()); r == nil || r.Role == app.RoleDecode {
			paired = append(paired, id)
		} else {
			others = append(others, id)
		}
	}
	return paired, others
}

// newPairLife starts the proxy of an application.
func (f *appFollower) newPairLife(p *pairApp) (*pairLife, error) {
	in := f.in
	log := in.log.With(slog.String("app", p.name))
	l := &pairLife{metrics: in.metrics.Pair(p.name)}
	l.backend = &pairBackend{in: in, name: p.name, metrics: l.metrics, log: log, peers: newPeers()}
	l.backend.current.Store(p)
	// a proxy of the same name may still wait for its last requests
	name := p.name + "/" + strconv.FormatUint(in.requestID(), 10)
	var err error
	l.proxy, err = pdproxy.NewProxy(in.pairs.system(in.log), name, l.backend, log)
	return l, err
}

// addPair makes the pairs of an application with two pools, for the next route table.
func (f *appFollower) addPair(t *routeTable, old *pairApp, prefill, decode *appRouter) {
	spec := decode.revision.Load().app
	if spec.Disaggregation == nil {
		return
	}
	p, err := f.newPairApp(old, spec.Name, prefill, decode)
	if err != nil {
		f.in.log.Error("an application's prefill ranks cannot be used", slog.String("app", spec.Name),
			slog.Any("err", err))
		return
	}
	t.pairs[spec.Name] = p
}

// endPairs ends what the applications of before had that the table does not have any more.
func (f *appFollower) endPairs(before, now map[string]*pairApp) {
	for name, p := range before {
		if now[name] == nil {
			p.end()
		}
	}
}

// end ends the proxy when its last request has ended.
func (p *pairApp) end() {
	p.in.background.Go(p.proxy.Close)
	p.in.metrics.ForgetPair(p.name)
}

// pairCount is how many pairs have met, of how many, and what keeps the others.
type pairCount struct {
	met, all int
	why      string
}

// state is the words of a status: "on", or "off: " and why.
func (p *pairApp) state() (text string, count pairCount) {
	if c := p.backend.count.Load(); c != nil {
		count = *c
	}
	switch {
	case !p.isOn():
		return "off: there is no prefill rank", count
	case !p.prefill.canServe():
		return "off: no prefill rank is ready", count
	case !p.decode.canServe():
		return "off: no decode rank is ready", count
	case count.met == 0 && count.why != "":
		return "off: no pair is connected: " + count.why, count
	case count.met == 0:
		return "off: no pair is connected yet", count
	}
	return "on", count
}

// peers are what transfers must know of prefill ranks before a request. Safe for concurrent use.
type peers struct {
	mu    sync.Mutex
	known map[routing.RankRef]transfer.Peer
}

func newPeers() *peers { return &peers{known: map[routing.RankRef]transfer.Peer{}} }

func (p *peers) get(ref routing.RankRef) (transfer.Peer, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	peer, ok := p.known[ref]
	return peer, ok
}

func (p *peers) set(ref routing.RankRef, peer transfer.Peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[ref] = peer
}

// keep drops the ranks that are not in refs.
func (p *peers) keep(refs []routing.RankRef) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for ref := range p.known {
		if !slices.Contains(refs, ref) {
			delete(p.known, ref)
		}
	}
}

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
func (p *pairApp) pool(s dispatch.Side) *appRouter {
	if s == dispatch.Prefill {
		return p.prefill
	}
	return p.decode
}

// Ranks implements pdproxy.Backend. Where engines of pairs take no plain requests, ranks of role both are no
// part of a pair: their engines know nothing of transfers.
func (b *pairBackend) Ranks(dst []routing.RankRef, s dispatch.Side) []routing.RankRef {
	p, n := b.current.Load(), len(dst)
	dst = p.pool(s).liveRefs(dst)
	switch {
	case s == dispatch.Prefill:
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
		b.log.Info("all pairs of a prefill rank and a decode rank are connected", slog.Int("pairs", all))
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
