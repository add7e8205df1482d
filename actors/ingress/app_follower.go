package ingress

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// appFollower gives an ingress the applications of the replicated state: their routes, Routers and indexes.
type appFollower struct{ in *Ingress }

// follow rebuilds the route table whenever the replicated state or the leader's list of unplaced units
// changes.
func (f *appFollower) follow(ctx context.Context, changed <-chan struct{}) {
	defer close(f.in.followDone)
	lapse := time.NewTimer(time.Hour)
	defer lapse.Stop()
	for {
		lapse.Stop()
		if _, left := f.in.unplaced.current(); left > 0 {
			lapse.Reset(left)
		}
		select {
		case <-ctx.Done():
			return
		case <-f.in.unplaced.changed:
		case <-lapse.C:
		case <-changed:
			changed = f.in.store.Changed()
		}
		if f.rebuild(f.in.store.State()) {
			f.in.listRanks()
		}
	}
}

// rebuild makes a route table of the state. fresh says that a Router or an index is new and needs the ranks'
// snapshots.
func (f *appFollower) rebuild(st *state.State) (fresh bool) {
	t := newRouteTable()
	f.in.setSecret(st.Secret)
	waiting, _ := f.in.unplaced.current()
	before, current := f.in.table.Load().pairs, map[*appRouter]bool{}
	for name, a := range st.Apps {
		pools, isNew := f.applyPools(a)
		fresh = fresh || isNew
		for _, ar := range pools {
			current[ar] = true
			ar.setUnits(unitProgress(st, ar.revision.Load(), a.Deleting, waiting[ar.name]))
			ar.setOlderUnits(olderUnits(st, ar.revision.Load()))
		}
		if len(pools) == 2 {
			f.addPair(t, before[name], pools[0], pools[1])
		}
		if len(pools) > 0 && !a.Deleting {
			answers := pools[len(pools)-1]
			t.add(&appRoute{appRevision: answers.revision.Load(), router: answers, pair: t.pairs[name]})
		}
	}
	t.seal()
	f.in.table.Store(t)
	f.endPairs(before, t.pairs)
	f.removeDeleted(st, current)
	return fresh
}

// applyPools brings the pools of an application to its current revision and returns those that can be served,
// the one that answers requests last. fresh: one has a new Router. What cannot be read stays as it was.
func (f *appFollower) applyPools(a *state.App) (pools []*appRouter, fresh bool) {
	specs, err := a.Pools()
	if err != nil {
		for _, name := range []string{
			a.Name, app.PoolName(a.Name, app.PoolPrefill), app.PoolName(a.Name, app.PoolDecode),
		} {
			if ar := f.in.findAppRouter(name); ar != nil && ar.revision.Load() != nil {
				pools = append(pools, ar)
			}
		}
		f.logUnreadable(f.in.ensureAppRouter(a.Name), a, err)
		return pools, false
	}
	for _, spec := range specs {
		ar := f.in.ensureAppRouter(spec.PoolName())
		isNew, err := f.applyRevision(ar, a, spec)
		if err != nil {
			f.logUnreadable(ar, a, err)
		}
		if fresh = fresh || isNew; ar.revision.Load() != nil {
			pools = append(pools, ar)
		}
	}
	return pools, fresh
}

// applyRevision brings a pool to the current revision of its application. fresh: it has a new Router.
func (f *appFollower) applyRevision(ar *appRouter, a *state.App, pool *app.Application) (
	fresh bool, err error,
) {
	old := ar.revision.Load()
	if old != nil && old.revision == a.Revision {
		return false, nil
	}
	spec := newRevision(a, pool, old)
	policy, err := pool.Routing.NewPolicy()
	if err != nil {
		return false, fmt.Errorf("revision %d: %w", a.Revision, err)
	}
	if fresh, err = f.setPolicyInputs(ar, spec, policy); err != nil {
		return false, fmt.Errorf("revision %d: %w", a.Revision, err)
	}
	ar.setRevision(spec)
	defer ar.groups.configure(pool, policy)                             // with the Router
	if old != nil && reflect.DeepEqual(old.app.Routing, pool.Routing) { // the Router can be kept
		return fresh, nil
	}
	f.newRouter(ar, policy)
	return true, nil
}

// newRevision prepares a revision of a pool; old is the revision before, nil for none.
func newRevision(a *state.App, spec *app.Application, old *appRevision) *appRevision {
	s := &appRevision{
		app: spec, revision: a.Revision, created: time.Now().Unix(), names: a.Names,
		attempts:   spec.Retries.Attempts,
		queue:      app.Seconds(spec.Timeouts.QueueS),
		firstToken: app.Seconds(spec.Timeouts.FirstTokenS),
		between:    app.Seconds(spec.Timeouts.BetweenTokensS),
		keepalive:  app.Seconds(spec.Timeouts.KeepaliveS),
		continues:  continuesStreams(spec),
		goesOn:     &goesOn{},
	}
	if old != nil {
		s.created = old.created
	}
	s.adapters, s.nameValue = adaptersOf(&spec.Model), []string{spec.Name}
	for _, u := range spec.Units() {
		for _, n := range u.Ranks {
			s.ranks = append(s.ranks, routing.ID(u.Group, n))
		}
	}
	return s
}

// adaptersOf maps the names under which adapters are served (Model.ServedNames) to the adapters; nil without
// adapters.
func adaptersOf(m *app.Model) map[string]string {
	if len(m.Adapters) == 0 {
		return nil
	}
	out := make(map[string]string, 2*len(m.Adapters))
	for _, a := range m.Adapters {
		out[a.ID], out[m.ID+":"+a.ID] = a.ID, a.ID
	}
	return out
}

// newRouter gives an application a new Router.
func (f *appFollower) newRouter(ar *appRouter, policy routing.Policy) {
	router := routing.NewRouter(policy, mix(f.in.seed^f.in.nextID.Load()))
	router.OnRoom = func() {
		ar.queue.room()
		ar.groups.room()
	}
	metrics, goals := f.in.metrics.App(ar.name, policy.Name()), routing.GoalsOf(policy)
	metrics.SetGoals(goals.TTFT, goals.TPOT)
	ar.metrics.Store(metrics)
	ar.replaceRouter(router)
}

// setPolicyInputs provides what policy needs. It keeps the index if the policy still needs it and it is large
// enough. A new index needs snapshots, so fresh asks for a list.
func (f *appFollower) setPolicyInputs(ar *appRouter, spec *appRevision, policy routing.Policy) (
	fresh bool, err error,
) {
	old := ar.inputs()
	r := &policyInputs{needs: routing.NeedsOf(policy), identity: spec.app.Routing.Identity}
	if r.chains() && r.identity == app.IdentityTokens {
		if r.tokens = old.tokens; r.tokens == nil {
			r.tokens = newTokenizer(ar)
		}
	}
	if r.needs.Hits {
		r.cache = old.cache
		if n := blockSetsFor(len(spec.ranks)); r.cache == nil || r.cache.maxSets < n {
			if r.cache, err = newCache(ar, n); err != nil {
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

// logUnreadable writes one log line per revision that cannot be read.
func (f *appFollower) logUnreadable(ar *appRouter, a *state.App, err error) {
	if ar.unreadableRevision != a.Revision {
		ar.unreadableRevision = a.Revision
		f.in.log.Error("application cannot be served as deployed", slog.String("app", a.Name),
			slog.Any("err", err))
	}
}

// removeDeleted closes the pools that no application has any more, when their last unit has ended.
func (f *appFollower) removeDeleted(st *state.State, current map[*appRouter]bool) {
	left := map[string]bool{}
	for _, u := range st.Units {
		left[u.PoolName()] = true
	}
	f.in.appRoutersMu.Lock()
	var gone, ending []*appRouter
	for name, ar := range f.in.appRouters {
		switch {
		case current[ar] || ar.revision.Load() == nil:
		case left[name]:
			ending = append(ending, ar)
		default:
			gone = append(gone, ar)
			delete(f.in.appRouters, name)
		}
	}
	f.in.appRoutersMu.Unlock()
	for _, ar := range ending {
		ar.setUnits(unitProgress(st, ar.revision.Load(), true, nil))
	}
	for _, ar := range gone {
		ar.close()
		f.in.metrics.ForgetApp(ar.name)
	}
}

// unplacedApps are the applications whose units find no room, as the leader says with each renewal of the
// node's lease. The list is valid as long as the lease: without a leader, such units count as pending again.
// Safe for concurrent use.
type unplacedApps struct {
	changed chan struct{} // one slot: the list has changed

	mu    sync.Mutex
	apps  []msg.Waiting
	until time.Time
}

// replace stores a new list, valid for lasts.
func (w *unplacedApps) replace(said []msg.Waiting, lasts time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.until = time.Now().Add(lasts)
	if len(said) == len(w.apps) && (len(said) == 0 || reflect.DeepEqual(said, w.apps)) {
		return
	}
	w.apps = said
	signal(w.changed)
}

// current returns the valid list by application, and for how long it is valid; 0: the list is empty or
// expired.
func (w *unplacedApps) current() (apps map[string]*msg.Waiting, left time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if left = time.Until(w.until); left <= 0 || len(w.apps) == 0 {
		w.apps = nil
		return nil, 0
	}
	apps = make(map[string]*msg.Waiting, len(w.apps))
	for i := range w.apps {
		apps[w.apps[i].App] = &w.apps[i]
	}
	return apps, left
}

// hasNoRoom reports whether a unit waits for room. The leader's list does not apply to another revision,
// which was not placed yet, or to a unit that was granted meanwhile.
func hasNoRoom(st *state.State, w *msg.Waiting, revision uint64, unit string) bool {
	if w == nil || revision != w.Revision {
		return false
	}
	epoch, waits := w.Units[unit]
	return waits && st.Epochs[unit] == epoch
}

// unitProgress returns the pool's ready units with their epochs, and the wanted units that may still
// become ready, nil of one that was never granted. Units for which the leader finds no room, as w says, are
// neither; noRoom is the reason, "" if there are none.
func unitProgress(st *state.State, spec *appRevision, deleting bool, w *msg.Waiting) (
	ready map[string]uint64, coming map[string]*state.Unit, noRoom string,
) {
	ready, coming = map[string]uint64{}, map[string]*state.Unit{}
	for id, u := range st.Units {
		if u.PoolName() == spec.app.PoolName() && u.Phase == state.Ready && st.Epochs[id] <= u.Epoch &&
			!hasNoRoom(st, w, spec.revision, id) {
			ready[id] = u.Epoch
		}
	}
	if deleting {
		return ready, nil, ""
	}
	for _, u := range spec.app.Units() {
		have := st.Units[u.ID]
		switch {
		case hasNoRoom(st, w, spec.revision, u.ID):
			noRoom = w.Reason
		case have == nil || have.Phase != state.Ready && have.Phase != state.Failed:
			coming[u.ID] = have
		}
	}
	return ready, coming, noRoom
}

// olderUnits returns the units that a roll-out replaces next: those that were started otherwise than the
// newest one of their pool.
func olderUnits(st *state.State, spec *appRevision) map[string]bool {
	if spec.app.Engine.Kind == app.KindAttach {
		return nil // the units differ by their URLs
	}
	newest, out := st.NewestLaunch(spec.app.Name, spec.app.Pool), map[string]bool{}
	for id, u := range st.Units {
		if u.App == spec.app.Name && u.Pool == spec.app.Pool && u.Launch != newest {
			out[id] = true
		}
	}
	return out
}
