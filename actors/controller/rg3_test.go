package controller

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/placement"
	"github.com/dpserve/dpserve/state"
)

// lossy is a cluster on a network that delays, repeats and reorders: orders and reports lie in a bag and come out in any
// order, some of them twice; nodes are cut off and come back with what they ran.
type lossy struct {
	*world
	r       *rand.Rand
	bag     []parcel
	hosts   map[string]*host
	granted map[string]uint64            // highest epoch ever granted, per unit
	where   map[string][]state.RankGrant // per "unit@epoch"
	cut     map[string]bool
	calm    bool
}

// parcel is an order for a node or a report from one.
type parcel struct {
	node    string
	deliver func()
}

// host is a node as CONTRACTS 1 wants it: it keeps the highest epoch seen per unit and refuses what is below.
type host struct {
	id   string
	high map[string]uint64
	runs map[string]uint64 // unit → epoch of its instance
	n    uint64
}

var errStaleOrder = errors.New("stale epoch")

func newLossy(t testing.TB, seed uint64) *lossy {
	l := &lossy{
		r: rand.New(rand.NewPCG(seed, seed)), hosts: map[string]*host{}, granted: map[string]uint64{},
		where: map[string][]state.RankGrant{}, cut: map[string]bool{},
	}
	l.world = newWorld(t, node("a", 6), node("b", 6), node("c", 6))
	for _, id := range []string{"a", "b", "c"} {
		l.hosts[id] = &host{id: id, high: map[string]uint64{}, runs: map[string]uint64{}}
	}
	l.auto = l.carry
	l.after = l.note
	return l
}

// note checks every grant against all that went before: an epoch is granted once, in rising order, over deletes too.
func (l *lossy) note(c state.Command) error {
	if c.GrantGroup == nil {
		return nil
	}
	for _, u := range c.GrantGroup.Units {
		epoch := l.state.Epochs[u.Unit]
		require.Greater(l.t, epoch, l.granted[u.Unit], "epoch of %s repeated", u.Unit)
		l.granted[u.Unit] = epoch
		l.where[fmt.Sprint(u.Unit, "@", epoch)] = u.Ranks
	}
	if !l.calm && l.r.IntN(10) == 0 {
		return errLost // applied, and nobody hears of it
	}
	return nil
}

// carry puts orders into the bag.
func (l *lossy) carry(_ *world, e Effect) bool {
	switch e := e.(type) {
	case StartEffect:
		l.post(e.Node, func() { l.hosts[e.Node].start(l, e.Order) })
	case StopEffect:
		l.post(e.Node, func() { l.hosts[e.Node].stop(l, e.Order) })
	default:
		return false
	}
	return true
}

func (l *lossy) post(node string, f func()) { l.bag = append(l.bag, parcel{node, f}) }

func (h *host) tell(l *lossy, unit string, epoch uint64, kind msg.UnitEventKind, ready bool) {
	h.n++
	e := msg.UnitEvent{Node: h.id, Number: h.n, Unit: unit, Epoch: epoch, Kind: kind, WasReady: ready}
	l.post(h.id, func() { l.step(Reported{e}) })
}

func (h *host) start(l *lossy, o *msg.StartRank) {
	if o.Epoch < h.high[o.Unit] {
		l.post(h.id, func() { l.step(Refused{h.id, o.Unit, o.Epoch, errStaleOrder}) })
		return
	}
	h.high[o.Unit], h.runs[o.Unit] = o.Epoch, o.Epoch // an older instance is killed first
	h.tell(l, o.Unit, o.Epoch, msg.UnitStarted, false)
	h.tell(l, o.Unit, o.Epoch, msg.UnitReady, false)
}

func (h *host) stop(l *lossy, o *msg.StopRank) {
	if o.Epoch < h.high[o.Unit] {
		return
	}
	h.high[o.Unit] = o.Epoch
	delete(h.runs, o.Unit)
	h.tell(l, o.Unit, o.Epoch, msg.UnitGone, false)
}

// crash ends an instance of the node.
func (h *host) crash(l *lossy) {
	for _, u := range slices.Sorted(maps.Keys(h.runs)) {
		epoch := h.runs[u]
		delete(h.runs, u)
		h.tell(l, u, epoch, msg.UnitFenced, true)
		h.tell(l, u, epoch, msg.UnitGone, true)
		return
	}
}

// deliver takes one parcel out of the bag, now and then leaving it in for a second time.
func (l *lossy) deliver() {
	if len(l.bag) == 0 {
		return
	}
	i := l.r.IntN(len(l.bag))
	p := l.bag[i]
	if l.cut[p.node] {
		return
	}
	if l.calm || l.r.IntN(8) > 0 {
		l.bag = slices.Delete(l.bag, i, i+1)
	}
	p.deliver()
}

// check is the invariant: (rank, epoch) runs only where it was granted, so in at most one place, and at most one of all
// incarnations of a rank is the one that ingresses accept.
func (l *lossy) check() {
	accepted := map[string]string{}
	for _, id := range []string{"a", "b", "c"} {
		for unit, epoch := range l.hosts[id].runs {
			seats, ok := l.where[fmt.Sprint(unit, "@", epoch)]
			require.True(l.t, ok, "%s runs %s at epoch %d, which nobody granted", id, unit, epoch)
			for _, s := range seats {
				if s.Node != id || epoch != l.state.Epochs[unit] || l.state.Units[unit] == nil {
					continue
				}
				rank := fmt.Sprint(unit, "#", s.Rank)
				require.Empty(l.t, accepted[rank], "two accepted holders of %s at epoch %d", rank, epoch)
				accepted[rank] = id
			}
			require.True(l.t, slices.ContainsFunc(seats, func(s state.RankGrant) bool { return s.Node == id }), "%s was not granted %s", id, unit)
		}
	}
}

// chance does one random thing.
func (l *lossy) chance() {
	names := []string{"x", "y"}
	switch n := l.r.IntN(100); {
	case n < 4:
		l.tryDeploy(names[l.r.IntN(2)])
	case n < 6:
		if name := names[l.r.IntN(2)]; l.state.Apps[name] != nil {
			l.delete(name)
		}
	case n < 8:
		l.nodes = l.someNodes()
		l.reboot()
	case n < 12:
		id := []string{"a", "b", "c"}[l.r.IntN(3)]
		l.cut[id] = !l.cut[id]
	case n < 16:
		l.hosts[[]string{"a", "b", "c"}[l.r.IntN(3)]].crash(l)
	case n < 24:
		l.pass(time.Duration(l.r.IntN(3000)) * time.Millisecond)
	default:
		l.deliver()
	}
}

func (l *lossy) tryDeploy(name string) {
	if a := l.state.Apps[name]; a != nil && a.Deleting {
		return
	}
	coupling := app.Independent
	if l.r.IntN(2) == 0 {
		coupling = app.Lockstep
	}
	a := sim(name, 1+l.r.IntN(4), coupling)
	a.PlacementGroupStrategy = []string{"PACK", "SPREAD"}[l.r.IntN(2)]
	a.Model.Source = fmt.Sprint(l.r.IntN(2))
	l.deploy(a)
}

func (l *lossy) someNodes() []placement.Node {
	all := []placement.Node{node("a", 6), node("b", 6), node("c", 6)}
	out := slices.DeleteFunc(slices.Clone(all), func(n placement.Node) bool { return l.cut[n.ID] })
	if len(out) == 0 {
		return all
	}
	return out
}

// settle heals the network and waits until nothing is left to do.
func (l *lossy) settle() {
	l.calm = true
	l.cut = map[string]bool{}
	l.nodes = l.someNodes()
	l.step(Ticked{}) // the inventory has changed
	for range 2000 {
		for len(l.bag) > 0 {
			l.deliver()
			l.check()
		}
		due := l.core.Due()
		if due.IsZero() && !l.renew() {
			return
		}
		if !due.IsZero() {
			l.pass(max(0, due.Sub(l.now)))
		}
	}
	l.t.Fatal("does not settle")
}

// renew has every node say what it runs, as it does with each renewal of its lease; true if any of it is not granted.
func (l *lossy) renew() bool {
	old := false
	for _, id := range []string{"a", "b", "c"} {
		h := l.hosts[id]
		for _, unit := range slices.Sorted(maps.Keys(h.runs)) {
			if rec := l.state.Units[unit]; rec == nil || rec.Epoch != h.runs[unit] {
				h.tell(l, unit, h.runs[unit], msg.UnitStarted, false)
				old = true
			}
		}
	}
	return old
}

// TestRG3OldIncarnationReturns: whatever the network does, never two accepted holders of (rank, epoch), no epoch twice, and in
// the end only what is granted runs.
func TestRG3OldIncarnationReturns(t *testing.T) {
	seeds := uint64(1000)
	if testing.Short() {
		seeds = 50
	}
	for seed := range seeds {
		l := newLossy(t, seed)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			l.t = t
			for range 300 {
				l.chance()
				l.check()
			}
			l.settle()
			for _, h := range l.hosts {
				for unit, epoch := range h.runs {
					rec := l.state.Units[unit]
					require.NotNil(t, rec, "%s still runs %s", h.id, unit)
					require.Equal(t, rec.Epoch, epoch, "%s runs an old incarnation of %s", h.id, unit)
				}
			}
			for _, s := range l.core.status() {
				require.Contains(t, []string{"RUNNING", "DEPLOY_FAILED"}, s.Status, s.Message)
			}
		})
	}
}
