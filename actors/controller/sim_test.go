package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// world drives a core by hand: a replicated state, a clock that jumps, and nodes that do what the test says.
// Everything happens in order and is written to trace.
type world struct {
	t      testing.TB
	core   *Core
	state  *state.State
	index  uint64
	now    time.Time
	timers Timers
	hears  map[string]map[string]msg.UnitEvent // per node, the newest event of each unit
	starts uint64                              // incarnation of all nodes
	trace  []string
	number uint64
	inbox  []any // inputs that follow from effects
	auto   func(w *world, e Effect) bool
	lose   func(c state.Command) error // fails before the command is applied
	after  func(c state.Command) error // fails after the command is applied
}

func newWorld(t testing.TB, nodes ...state.Node) *world {
	if len(nodes) == 0 {
		nodes = []state.Node{node("a", 64)}
	}
	w := bareWorld(t, Timers{LeaseTTL: endlessLease}, nodes...)
	w.hello()
	w.takeTrace()
	return w
}

// endlessLease outlasts any test: the nodes of a plain world report only what the test has them report.
const endlessLease = 10000 * time.Hour

func bareWorld(t testing.TB, timers Timers, nodes ...state.Node) *world {
	w := &world{
		t: t, state: state.New(), now: start, timers: timers,
		hears: map[string]map[string]msg.UnitEvent{}, starts: 1,
	}
	w.core = NewCore(timers)
	for _, n := range nodes {
		_, err := w.apply(state.Command{PutNode: &state.PutNode{Node: n}})
		require.NoError(t, err)
	}
	w.inbox = nil
	w.step(StateSeen{w.state.Clone()})
	return w
}

func node(id string, slots int) state.Node {
	return state.Node{
		ID: id, UID: "uid-" + id, Roles: []state.Role{state.RoleControl, state.RoleWorker, state.RoleIngress},
		Resources: state.Resources{Slots: slots, PortLo: 20000, PortHi: 29999},
	}
}

// hello has every node renew its lease.
func (w *world) hello() {
	for _, id := range slices.Sorted(maps.Keys(w.state.Nodes)) {
		w.renews(id)
	}
}

// renews has a node report its units, with these events.
func (w *world) renews(id string, events ...msg.UnitEvent) {
	r := &msg.NodeReport{Node: *w.state.Nodes[id], Incarnation: w.starts, Events: events}
	for _, u := range slices.Sorted(maps.Keys(w.hears[id])) {
		r.Units = append(r.Units, w.hears[id][u])
	}
	w.step(NodeReported{r})
}

func sim(name string, dp int, coupling app.Coupling) *app.Application {
	return &app.Application{
		Name: name, RoutePrefix: "/", Model: app.Model{ID: name, Source: "m"},
		Engine:       app.Engine{Kind: app.KindSim},
		DataParallel: app.DataParallel{DPSize: dp, Coupling: coupling}, NumReplicas: dp, NumGroups: 1,
		PlacementGroupStrategy: "PACK", GracefulShutdownTimeout: 30,
	}
}

// step feeds one input, carries the effects out, and goes on until nothing follows.
func (w *world) step(in any) {
	w.inbox = append(w.inbox, in)
	for n := 0; len(w.inbox) > 0; n++ {
		require.Less(w.t, n, 10000, "no end in sight: %v", w.trace)
		next := w.inbox[0]
		w.inbox = w.inbox[1:]
		for _, e := range w.core.Step(w.now, next) {
			w.do(e)
		}
	}
}

func (w *world) log(format string, args ...any) {
	w.trace = append(w.trace, fmt.Sprintf(format, args...))
}

// takeTrace returns the trace and empties it.
func (w *world) takeTrace() []string {
	t := w.trace
	w.trace = nil
	return t
}

func (w *world) do(e Effect) {
	if w.auto != nil && w.auto(w, e) {
		return
	}
	switch e := e.(type) {
	case ChangeEffect:
		if e.Node != "" {
			return
		}
		w.log("%s%s: %s → %s", e.App, strings.TrimPrefix(e.Unit, e.App), e.From, e.To)
	case AssignEffect:
		w.inbox = append(w.inbox, GroupAssigned{w.assign(e.Request)})
	case ProposeEffect:
		w.log("%s %s", e.Command.Kind(), e.Unit)
		_, err := w.apply(e.Command)
		w.inbox = append(w.inbox, CommandDone{e.App, e.Unit, e.Node, err})
	case ReleaseEffect:
		w.log("release %s epoch %d", e.Release.Unit, e.Release.Epoch)
		_, err := w.apply(state.Command{Release: &state.UnitRef{
			Unit:  e.Release.Unit,
			Epoch: e.Release.Epoch,
		}})
		w.inbox = append(w.inbox, CommandDone{App: e.App, Unit: e.Release.Unit, Err: err})
	case StartEffect:
		w.log("start %s epoch %d on %s", e.Order.Unit, e.Order.Epoch, e.Node)
	case StopEffect:
		w.log("stop %s epoch %d on %s, grace %s", e.Order.Unit, e.Order.Epoch, e.Node, e.Order.Grace)
	case ForgetEffect:
		w.log("forget %s", e.Unit)
	}
}

// assign answers as the RankAssigner does.
func (w *world) assign(m *msg.AssignGroup) (out msg.GroupAssigned) {
	out.Grant, out.NoRoom = rankassigner.Place(w.state, m, nil)
	for i := range out.Grant.Units {
		u := &out.Grant.Units[i]
		w.log("grant %s attempt %d on %s", u.Unit, u.Attempt, places(u.Ranks))
	}
	if len(out.Grant.Units) > 0 {
		out.Result, out.Err = w.apply(state.Command{GrantGroup: &out.Grant})
	}
	return out
}

func places(ranks []state.RankGrant) string {
	var out []string
	for _, r := range ranks {
		out = append(out, fmt.Sprintf("%s:%d", r.Node, r.Slot))
	}
	return strings.Join(out, " ")
}

func (w *world) apply(c state.Command) (state.Result, error) {
	if w.lose != nil {
		if err := w.lose(c); err != nil {
			return state.Result{}, err
		}
	}
	b, err := state.EncodeCommand(&c)
	require.NoError(w.t, err)
	d, err := state.DecodeCommand(b)
	require.NoError(w.t, err)
	w.index++
	r, err := w.state.Apply(w.index, d)
	if err != nil {
		w.log("refused: %v", err)
		return r, err
	}
	if w.after != nil {
		if err := w.after(c); err != nil {
			r = state.Result{}
			w.inbox = append(w.inbox, StateSeen{w.state.Clone()})
			return r, err
		}
	}
	w.inbox = append(w.inbox, StateSeen{w.state.Clone()})
	return r, nil
}

func (w *world) deploy(apps ...*app.Application) {
	put := &state.PutApps{}
	var names []string
	for _, pools := range app.ByName(apps) {
		spec, err := encodeSpec(pools)
		require.NoError(w.t, err)
		put.Apps = append(put.Apps, spec)
		names = append(names, spec.Name)
	}
	_, err := w.apply(state.Command{PutApps: put})
	require.NoError(w.t, err)
	w.step(AppsRedeployed{Apps: names})
}

// planOf returns the plan of a deploy on a state.
func planOf(s *state.State, avoided avoidances, apps []*app.Application, prune bool) (client.Plan, error) {
	d, err := newDryRun(s, avoided, apps, prune)
	if err != nil {
		return client.Plan{}, err
	}
	return d.plan(), nil
}

func (w *world) delete(name string) {
	_, err := w.apply(state.Command{DeleteApp: &state.DeleteApp{Name: name}})
	require.NoError(w.t, err)
	w.step(TimerFired{})
}

// says posts a node's report of a unit at its current epoch.
func (w *world) says(node, unit string, kind msg.UnitEventKind, more ...func(*msg.UnitEvent)) {
	w.number++
	e := msg.UnitEvent{
		Node: node, Number: w.number, Unit: unit, Epoch: w.state.Epochs[unit], Kind: kind,
		Rank: -1,
	}
	for _, f := range more {
		f(&e)
	}
	if w.hears[node] == nil {
		w.hears[node] = map[string]msg.UnitEvent{}
	}
	if w.hears[node][unit].Epoch <= e.Epoch {
		w.hears[node][unit] = e
	}
	w.renews(node, e)
}

func because(reason string, tail ...string) func(*msg.UnitEvent) {
	return func(e *msg.UnitEvent) { e.Reason, e.LogTail = reason, tail }
}

func at(epoch uint64) func(*msg.UnitEvent) { return func(e *msg.UnitEvent) { e.Epoch = epoch } }

func wasReady(e *msg.UnitEvent) { e.WasReady = true }

// pass advances the time, with a tick at each due time.
func (w *world) pass(d time.Duration) {
	end := w.now.Add(d)
	for {
		due := w.core.Due()
		if due.IsZero() || due.After(end) {
			break
		}
		if due.After(w.now) {
			w.now = due
		}
		w.step(TimerFired{})
	}
	w.now = end
	w.step(TimerFired{})
}

func (w *world) up(units ...string) {
	for _, u := range units {
		w.says("a", u, msg.UnitStarted)
		w.says("a", u, msg.UnitReady)
	}
}

func (w *world) phase(unit string) state.Phase {
	if u := w.core.units[unit]; u != nil {
		return u.m.Phase
	}
	return ""
}

func (w *world) status(name string) string {
	for _, s := range (view{w.core}).Status() {
		if s.Name == name {
			return s.Status
		}
	}
	return ""
}

func (w *world) saw(prefix string) int {
	n := 0
	for _, l := range w.trace {
		if strings.HasPrefix(l, prefix) {
			n++
		}
	}
	return n
}

// reboot restarts all nodes: a new core on the old state, and nothing runs. Starts under way are refused,
// because the nodes have seen their epoch.
func (w *world) reboot() {
	w.core = NewCore(w.timers)
	w.number, w.hears = 0, map[string]map[string]msg.UnitEvent{}
	w.starts++
	was := w.state.Clone()
	w.step(StateSeen{was})
	w.hello()
	for _, id := range slices.Sorted(maps.Keys(was.Units)) {
		for _, r := range was.Units[id].Ranks {
			w.step(Refused{r.Node, id, was.Units[id].Epoch, errStaleOrder})
		}
	}
}

// quiet reports that no tick is due except for the leases.
func (w *world) quiet() bool { return w.core.Due().Sub(w.now) > endlessLease/8 }

// memStore is a Store and Proposer in memory.
type memStore struct {
	ch      chan struct{}
	lock    chan struct{}
	state   *state.State
	index   uint64
	refuses func(state.Command) error
}

func newMemStore() *memStore {
	return &memStore{ch: make(chan struct{}), lock: make(chan struct{}, 1), state: state.New()}
}

func (m *memStore) State() *state.State {
	m.lock <- struct{}{}
	defer func() { <-m.lock }()
	return m.state.Clone()
}

func (m *memStore) Changed() <-chan struct{} {
	m.lock <- struct{}{}
	defer func() { <-m.lock }()
	return m.ch
}

func (m *memStore) Propose(ctx context.Context, c state.Command) (state.Result, error) {
	if err := ctx.Err(); err != nil {
		return state.Result{}, err
	}
	m.lock <- struct{}{}
	defer func() { <-m.lock }()
	if m.refuses != nil {
		if err := m.refuses(c); err != nil {
			return state.Result{}, err
		}
	}
	m.index++
	r, err := m.state.Apply(m.index, &c)
	if err == nil {
		close(m.ch)
		m.ch = make(chan struct{})
	}
	return r, err
}

// AssignGroup implements Assigner.
func (m *memStore) AssignGroup(r *msg.AssignGroup, answer func(msg.GroupAssigned)) {
	var out msg.GroupAssigned
	out.Grant, out.NoRoom = rankassigner.Place(m.State(), r, nil)
	if len(out.Grant.Units) > 0 {
		out.Result, out.Err = m.Propose(context.Background(), state.Command{GrantGroup: &out.Grant})
	}
	answer(out)
}

// Release implements Assigner.
func (m *memStore) Release(r msg.ReleaseRank, answer func(error)) {
	_, err := m.Propose(context.Background(), state.Command{Release: &state.UnitRef{
		Unit: r.Unit, Epoch: r.Epoch,
		Reason: r.Reason,
	}})
	answer(err)
}

var errLost = errors.New("leadership was lost")
