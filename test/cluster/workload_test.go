package cluster_test

import (
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// workload is what people and engines do: deploys with expected revisions from several nodes, groups more and
// less, crashes, drains.
type workload struct {
	c       *cluster
	apps    []*shape
	served  map[string]int
	history map[string][]porcupine.Operation // by application
	values  int                              // of the registers: each is written once

	undecided []func() // changes whose clients had given up: at the end it is known what became of them
	over      bool     // nobody changes anything any more
}

// shape is an application of the workload, as its clients last wanted it. An application of pairs is its
// prefill pool, with the decode pool as its partner: the clients change both at once.
type shape struct {
	name      string
	pool      string // of an application of pairs
	partner   *shape
	coupling  app.Coupling
	dp        int
	groups    int
	source    int
	gpus      float64
	strategy  string
	revisions []uint64 // that each client saw last
}

// clients is how many change each application.
const clients = 3

func newWorkload(c *cluster) *workload {
	w := &workload{c: c, served: map[string]int{}, history: map[string][]porcupine.Operation{}}
	strategies := []string{app.StrategyPack, app.StrategySpread}
	for i, coupling := range []app.Coupling{app.Lockstep, app.Independent} {
		w.apps = append(w.apps, &shape{
			name: string(coupling), coupling: coupling, dp: 2 + c.IntN(2), groups: 1, gpus: float64(i) / 2,
			strategy:  strategies[c.IntN(2)],
			revisions: make([]uint64, clients),
		})
	}
	if c.cfg.pairs {
		w.pair(c.cfg.swapped)
	}
	for _, a := range w.apps {
		c.after(nil, c.span(2*time.Second, 3*time.Second), func() { w.put(a, 0) })
		for k := range clients {
			c.after(nil, c.span(5*time.Second, 8*time.Second), func() { w.client(a, k) })
		}
	}
	if !c.cfg.gentle && !c.cfg.steady {
		c.after(nil, c.span(6*time.Second, 10*time.Second), w.breaks)
		brief := &shape{
			name: briefName, coupling: app.Independent, dp: 1, groups: 1,
			strategy: app.StrategyPack,
		}
		if c.cfg.pairs {
			other := *brief
			brief.join(&other)
		}
		c.after(nil, c.span(4*time.Second, 10*time.Second), func() { w.passes(brief) })
	}
	return w
}

// pair makes the two applications the pools of one; swapped: the prefill pool is the independent one.
func (w *workload) pair(swapped bool) {
	prefill, decode := w.apps[0], w.apps[1]
	if swapped {
		prefill, decode = decode, prefill
	}
	prefill.name = pairName
	prefill.join(decode)
	w.apps = []*shape{prefill}
}

// join makes a the prefill pool and decode the decode pool of the application of a's name.
func (a *shape) join(decode *shape) {
	name := a.name
	a.pool, decode.pool, a.partner = app.PoolPrefill, app.PoolDecode, decode
	a.name, decode.name = app.PoolName(name, a.pool), app.PoolName(name, decode.pool)
}

// pairName is the application of pairs.
const pairName = "pairs"

// grace is what its streams get to end.
func (a *shape) grace() float64 {
	if name, _ := app.SplitPool(a.name); a.coupling == app.Independent && name != briefName {
		return stopGrace.Seconds()
	}
	return 1
}

// briefName is the application that is deleted and deployed all the time.
const briefName = "brief"

// spec is the application; value is what the register holds: something that starts nothing anew.
func (a *shape) spec(value int) *app.Application {
	name, _ := app.SplitPool(a.name)
	var apart *app.Disaggregation
	if a.pool != "" {
		apart = &app.Disaggregation{Transfer: "nixl", Decide: "isl", Fallback: app.FallbackLocal}
	}
	return &app.Application{
		Name: a.name, Pool: a.pool, Disaggregation: apart, RoutePrefix: "/" + name, Model: app.Model{
			ID:     name,
			Source: "v" + strconv.Itoa(a.source),
		}, Engine: app.Engine{Kind: app.KindVLLM},
		DataParallel: app.DataParallel{DPSize: a.dp, Coupling: a.coupling}, NumReplicas: a.dp * a.groups,
		NumGroups:              a.groups,
		PlacementGroupStrategy: a.strategy, GracefulShutdownTimeout: a.grace(),
		Resources: app.Resources{GPUs: a.gpus}, QueueBounds: app.QueueBounds{MaxQueuedRequests: value},
	}
}

// command deploys it, with its partner.
func (a *shape) command(value int, expect map[string]uint64) *state.PutApps {
	if a.partner == nil {
		return putOf(expect, a.spec(value))
	}
	return putOf(expect, a.spec(value), a.partner.spec(value))
}

// putOf deploys all pools of an application. Clients know a prefill pool neither by a model nor by a route.
func putOf(expect map[string]uint64, pools ...*app.Application) *state.PutApps {
	put := &state.PutApps{Expect: expect}
	for _, spec := range pools {
		raw, err := json.Marshal(spec)
		if err != nil {
			panic(err)
		}
		one := state.AppSpec{Name: spec.Name, Spec: raw}
		if spec.Pool != app.PoolPrefill {
			one.Names, one.Route = spec.Model.ServedNames(), spec.RoutePrefix
		}
		put.Apps = append(put.Apps, one)
	}
	return put
}

func readSpec(b []byte) *app.Application {
	a := new(app.Application)
	if err := json.Unmarshal(b, a); err != nil {
		panic(err)
	}
	return a
}

// client does one thing after the other.
func (w *workload) client(a *shape, k int) {
	if w.over {
		return
	}
	// a read is behind a barrier, so the leader writes
	if w.c.cfg.gentle || w.c.cfg.steady || w.c.IntN(3) == 0 {
		w.read(a, k)
	} else {
		w.change(a)
		if a.partner != nil {
			w.change(a.partner)
		}
		w.put(a, k)
	}
	w.c.after(nil, w.c.span(time.Second, 5*time.Second), func() { w.client(a, k) })
}

// change now and then wants something else to run.
func (w *workload) change(a *shape) {
	switch w.c.IntN(8) {
	case 0:
		a.groups = 1 + w.c.IntN(2)
	case 1:
		a.source++
	}
}

// entry is a machine that a client talks to, nil if it finds none.
func (w *workload) entry() *machine {
	m := w.c.machines[w.c.IntN(len(w.c.machines))]
	if !m.alive || m.removed || m.view.Cluster == "" {
		return nil
	}
	return m
}

// adminLimit is how long a client waits.
const adminLimit = 10 * time.Second

// atLeader takes a call of the admin API to the machine that leads, once. sent is false where nothing was
// done.
func (w *workload) atLeader(m *machine, ask func(l *shell, answer func(state.Result, error)),
	done func(r state.Result, sent bool, err error),
) {
	gen, over := m.gen, false
	finish := func(r state.Result, sent bool, err error) {
		if !over {
			over = true
			done(r, sent, err)
		}
	}
	w.c.after(nil, adminLimit+time.Second, func() { finish(state.Result{}, true, errLate) })
	w.c.arrive(m.process, 0, func() {
		to := m.leadsAs()
		switch {
		case gen != m.gen:
		case m.shell != nil:
			ask(m.shell, func(r state.Result, err error) { finish(r, true, err) })
		case to < 0 || to == m.i:
			finish(state.Result{}, false, errNotLeader)
		default:
			call(w.c, m, w.c.machines[to], adminLimit, false, func(answer func(state.Result, error)) {
				if l := w.c.machines[to].shell; l != nil {
					ask(l, answer)
					return
				}
				answer(state.Result{}, errNotLeader)
			}, func(r state.Result, err error) {
				sent := err != errNotLeader && err != errUnreachable //nolint:errorlint // never wrapped
				finish(r, sent, err)
			})
		}
	})
}

// put replaces an application that is at the revision the client saw last.
func (w *workload) put(a *shape, k int) {
	m := w.entry()
	if m == nil {
		return
	}
	w.values++
	op := revisionOp{app: a.name, put: true, expect: a.revisions[k], value: w.values}
	put := a.command(op.value, map[string]uint64{a.name: op.expect})
	call := w.c.now
	w.atLeader(m, func(l *shell, answer func(state.Result, error)) { l.deploy(put, answer) },
		func(r state.Result, sent bool, err error) {
			w.c.log("put", m.name, a.name, int(op.expect), err != nil, sent)
			committed, known := w.c.audit.puts[put]
			switch {
			case err == nil:
				a.revisions[k] = r.Apps[a.name]
				w.note(op, revisionOut{revision: r.Apps[a.name], value: op.value}, call, w.c.now)
			case errors.Is(err, state.ErrStaleRevision):
				w.note(op, revisionOut{stale: true}, call, w.c.now)
				a.revisions[k] = w.c.canon.now().Apps[a.name].Revision // it looks, and tries again
			case known:
				w.note(op, revisionOut{revision: op.expect + 1, value: op.value}, call, committed)
			case sent:
				w.undecided = append(w.undecided, func() { w.late(op, put, call) })
			}
			if err != nil && !w.over && w.c.canon.now().Apps[a.name] == nil && k == 0 {
				w.c.after(nil, time.Second, func() { w.put(a, k) })
			}
		})
}

// late notes a change that was committed after its client had given up.
func (w *workload) late(op revisionOp, put *state.PutApps, call time.Duration) {
	if at, known := w.c.audit.puts[put]; known {
		w.note(op, revisionOut{revision: op.expect + 1, value: op.value}, call, at)
	}
}

// read asks for an application, behind a barrier.
func (w *workload) read(a *shape, k int) {
	m := w.entry()
	if m == nil {
		return
	}
	call := w.c.now
	var out revisionOut
	w.atLeader(m, func(l *shell, answer func(state.Result, error)) {
		l.m.proposeHere(state.Command{Init: &state.Init{Cluster: "sim"}}, proposeLimit,
			func(r state.Result, err error) {
				if have := l.m.view.Apps[a.name]; have != nil {
					out = revisionOut{revision: have.Revision, value: readSpec(have.Spec).MaxQueuedRequests}
				}
				answer(r, err)
			})
	}, func(_ state.Result, _ bool, err error) {
		if err == nil {
			a.revisions[k] = out.revision
			w.note(revisionOp{app: a.name}, out, call, w.c.now)
		}
	})
}

func (w *workload) note(op revisionOp, out revisionOut, call, back time.Duration) {
	w.history[op.app] = append(w.history[op.app], porcupine.Operation{
		Input: op, Output: out,
		Call: int64(call), Return: int64(back),
	})
}

// breaks lets an engine die, or a person drain a node, now and then.
func (w *workload) breaks() {
	if w.over {
		return
	}
	m := w.c.machines[w.c.IntN(len(w.c.machines))]
	switch {
	case !m.alive || m.removed || !m.worker:
	case w.c.IntN(3) > 0:
		w.crash(m)
	default:
		w.drain(m)
	}
	w.c.after(nil, w.c.span(2*time.Second, 8*time.Second), w.breaks)
}

// crash ends an engine without an order to do so.
func (w *workload) crash(m *machine) {
	if len(m.host.engines) == 0 {
		return
	}
	e := m.host.engines[w.c.IntN(len(m.host.engines))]
	w.c.log("engine dies", m.name, e.unit, e.epoch)
	w.c.arrive(m.process, 0, func() {
		if u := m.host.units[e.unit]; u != nil && u.Order.Epoch == e.epoch {
			u.fail("signal: killed")
		}
	})
}

func (w *workload) drain(m *machine) {
	w.admin(state.Command{DrainNode: &state.DrainNode{Node: m.name}}, nil)
	w.c.after(nil, w.c.span(5*time.Second, 20*time.Second), func() { w.undrain(m) })
}

func (w *workload) undrain(m *machine) {
	if n := w.c.canon.now().Nodes[m.name]; n == nil || !n.Draining {
		return
	}
	w.admin(state.Command{DrainNode: &state.DrainNode{Node: m.name, Undo: true}}, func(err error) {
		if err != nil && problem.CodeOf(err) != problem.NotFound {
			w.c.after(nil, time.Second, func() { w.undrain(m) })
		}
	})
}

// admin proposes a command of a person from any machine.
func (w *workload) admin(cmd state.Command, done func(error)) {
	m := w.entry()
	if m == nil {
		if done != nil {
			done(errUnreachable)
		}
		return
	}
	w.atLeader(m, func(l *shell, answer func(state.Result, error)) {
		l.m.proposeHere(cmd, proposeLimit, answer)
	}, func(_ state.Result, _ bool, err error) {
		if done != nil {
			done(err)
		}
	})
}

// passes deletes an application and deploys it again, and so on: its epochs go on.
func (w *workload) passes(a *shape) {
	if w.over {
		return
	}
	if have := w.c.canon.now().Apps[a.name]; have != nil && !have.Deleting {
		w.admin(a.deletion(), nil)
	} else if m := w.entry(); m != nil {
		put := a.command(0, nil)
		w.atLeader(m, func(l *shell, answer func(state.Result, error)) { l.deploy(put, answer) },
			func(state.Result, bool, error) {})
	}
	w.c.after(nil, w.c.span(3*time.Second, 15*time.Second), func() { w.passes(a) })
}

// deletion ends an application: both pools of it, if it has two.
func (a *shape) deletion() state.Command {
	if a.partner == nil {
		return state.Command{DeleteApp: &state.DeleteApp{Name: a.name}}
	}
	return state.Command{PutApps: &state.PutApps{End: []string{a.name, a.partner.name}}}
}

// redeploy gives every application another chance, as a person does who sees that one has failed.
func (w *workload) redeploy(l *shell) {
	apps := w.c.canon.now().Apps
	for _, name := range sorted(apps) {
		owner, pool := app.SplitPool(name)
		if apps[name].Deleting || pool == app.PoolPrefill { // with its decode pool
			continue
		}
		w.values++
		pools := []*app.Application{readSpec(apps[name].Spec)}
		if pool != "" {
			pools = append(pools, readSpec(apps[app.PoolName(owner, app.PoolPrefill)].Spec))
		}
		for _, spec := range pools {
			spec.MaxQueuedRequests = w.values
		}
		l.deploy(putOf(nil, pools...), func(state.Result, error) {})
	}
}
