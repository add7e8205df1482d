package controller

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// lossy is a cluster on a network that delays, repeats, reorders and loses messages. Nodes are cut off and
// come back with what they ran, or restart. Leaders change.
type lossy struct {
	*fleet
	r       *rand.Rand
	bag     []parcel
	granted map[string]uint64            // highest epoch ever granted, per unit
	where   map[string][]state.RankGrant // per "unit@epoch"
	lost    map[string]bool              // "unit@epoch on node" that was given up with its node
	calm    bool
}

// parcel is a message to or from a node.
type parcel struct {
	node    string
	sent    time.Time
	deliver func()
}

// reportLife is the deadline of a renewal; older reports are never delivered.
const reportLife = time.Second

func newLossy(t testing.TB, seed uint64) *lossy {
	l := &lossy{
		r: rand.New(rand.NewPCG(seed, seed)), granted: map[string]uint64{},
		where: map[string][]state.RankGrant{}, lost: map[string]bool{},
	}
	l.fleet = newFleet(t, newHost("a", 6), newHost("b", 6), newHost("c", 6))
	l.auto = l.carry
	l.after = l.note
	return l
}

// note checks every grant against all earlier ones: epochs are granted once, in rising order, over deletes
// too. Nothing is released, or granted anew, while a node that is not lost has it.
func (l *lossy) note(c state.Command) error {
	if c.Release != nil {
		l.over(c.Release.Unit, c.Release.Epoch)
	}
	if c.NodeLost != nil {
		for id, rec := range l.state.Units {
			l.lost[fmt.Sprint(id, "@", rec.Epoch, " on ", c.NodeLost.Node)] = true
		}
	}
	if c.GrantGroup == nil {
		return nil
	}
	for _, u := range c.GrantGroup.Units {
		epoch := l.state.Epochs[u.Unit]
		l.over(u.Unit, epoch-1)
		require.Greater(l.t, epoch, l.granted[u.Unit], "epoch of %s repeated", u.Unit)
		l.granted[u.Unit] = epoch
		l.where[fmt.Sprint(u.Unit, "@", epoch)] = u.Ranks
	}
	if !l.calm && l.r.IntN(10) == 0 {
		return errLost // applied, but the answer is lost
	}
	return nil
}

// over checks that only lost nodes run an epoch that has ended.
func (l *lossy) over(unit string, epoch uint64) {
	for _, id := range l.ids() {
		if l.hosts[id].runs[unit] == epoch && epoch > 0 {
			require.True(l.t, l.lost[fmt.Sprint(unit, "@", epoch, " on ", id)],
				"%s still runs %s at epoch %d", id, unit, epoch)
		}
	}
}

// carry puts orders into the bag.
func (l *lossy) carry(_ *world, e Effect) bool {
	switch e := e.(type) {
	case StartEffect:
		l.post(e.Node, func() {
			if err := l.hosts[e.Node].start(e.Order); err != nil {
				l.post(e.Node, func() { l.step(Refused{e.Node, e.Order.Unit, e.Order.Epoch, err}) })
			}
		})
	case StopEffect:
		l.post(e.Node, func() { l.hosts[e.Node].stop(e.Order) })
	case RenewEffect:
		l.lease[e.Node] = e
	default:
		return false
	}
	return true
}

func (l *lossy) post(node string, f func()) { l.bag = append(l.bag, parcel{node, l.now, f}) }

// report puts a renewal into the bag. Its answer may be lost.
func (l *lossy) report(id string) {
	h := l.hosts[id]
	r, process := h.report(l.now), h.process
	sent, leader := l.now, l.core
	l.post(id, func() {
		if l.now.Sub(sent) > reportLife || l.core != leader {
			return
		}
		again := *r
		again.Events, again.Units = slices.Clone(r.Events), slices.Clone(r.Units)
		l.step(NodeReported{&again})
		if a := l.lease[id]; a.Err == nil && h.process == process && (l.calm || l.r.IntN(4) > 0) {
			h.taken(a.Lease.Acked)
		}
	})
}

// deliver takes one parcel out of the bag. Sometimes it loses it or leaves a copy.
func (l *lossy) deliver() {
	if len(l.bag) == 0 {
		return
	}
	i := l.r.IntN(len(l.bag))
	p := l.bag[i]
	if l.hosts[p.node].cut {
		return
	}
	if l.calm || l.r.IntN(8) > 0 {
		l.bag = slices.Delete(l.bag, i, i+1)
	}
	if l.calm || l.r.IntN(20) > 0 {
		p.deliver()
	}
}

// check verifies the invariant: (rank, epoch) runs only where it was granted, so in at most one place, and
// ingresses accept at most one incarnation of a rank.
func (l *lossy) check() {
	accepted := map[string]string{}
	for _, id := range l.ids() {
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
			require.True(l.t, slices.ContainsFunc(seats,
				func(s state.RankGrant) bool { return s.Node == id }), "%s was not granted %s", id, unit)
		}
	}
}

// chance does one random action.
func (l *lossy) chance() {
	names, id := []string{"x", "y"}, l.ids()[l.r.IntN(3)]
	h := l.hosts[id]
	switch n := l.r.IntN(100); {
	case n < 4:
		l.tryDeploy(names[l.r.IntN(2)])
	case n < 6:
		if name := names[l.r.IntN(2)]; l.state.Apps[name] != nil {
			l.delete(name)
		}
	case n < 8:
		l.newLeader()
	case n < 10:
		h.cut = !h.cut
	case n < 11:
		h.restart()
	case n < 12:
		_, err := l.apply(state.Command{DrainNode: &state.DrainNode{
			Node: id,
			Undo: l.state.Nodes[id].Draining,
		}})
		require.NoError(l.t, err)
		l.step(TimerFired{})
	case n < 16:
		h.crash([]string{"x/0", "y/0", "x/0/0", "y/0/1"}[l.r.IntN(4)])
	case n < 20 && !h.cut:
		h.follow(l.state)
		for unit, epoch := range h.runs {
			require.False(l.t, l.state.Epochs[unit] > epoch || l.state.Units[unit] == nil,
				"%s serves %s at epoch %d on beside its successor", id, unit, epoch)
		}
	case n < 26:
		l.pass(time.Duration(l.r.IntN(1500)) * time.Millisecond)
	case n < 40:
		l.report(id)
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

// settle heals the network and advances the time until nothing is left to do.
func (l *lossy) settle() {
	l.calm = true
	for _, id := range l.ids() {
		l.hosts[id].cut = false
		_, err := l.apply(state.Command{DrainNode: &state.DrainNode{Node: id, Undo: true}})
		require.NoError(l.t, err)
	}
	l.step(TimerFired{})
	for quiet, rounds := 0, 0; quiet < 15 && rounds < 300; rounds++ {
		for _, id := range l.ids() {
			l.hosts[id].follow(l.state)
			l.report(id)
		}
		for len(l.bag) > 0 {
			l.deliver()
			l.check()
		}
		before := len(l.trace)
		l.pass(time.Second)
		if quiet++; len(l.trace) > before || l.unsettled() != "" {
			quiet = 0
		}
	}
}

// unsettled describes a difference from the wanted state; "" = none.
func (l *lossy) unsettled() string {
	for _, id := range l.ids() {
		h := l.hosts[id]
		for unit, epoch := range h.runs {
			if rec := l.state.Units[unit]; rec == nil || rec.Epoch != epoch || !rec.Holds() {
				return fmt.Sprint(id, " still runs ", unit, " at epoch ", epoch)
			}
		}
		if len(h.events) > 0 {
			return id + " has events that nobody took"
		}
	}
	for _, s := range (view{l.core}).Status() {
		if s.Status != "RUNNING" && s.Status != "DEPLOY_FAILED" {
			return s.Name + " is " + s.Status + ": " + s.Message
		}
	}
	for id, rec := range l.state.Units {
		for _, r := range rec.Ranks {
			if rec.Holds() && l.hosts[r.Node].runs[id] != rec.Epoch {
				return fmt.Sprint(id, " is ", rec.Phase, ", and ", r.Node, " does not run it")
			}
		}
	}
	return ""
}

// RG3, SK7: Whatever the network, the nodes and the leaders do: never two accepted holders of (rank, epoch),
// no epoch twice, and in the end what runs is what is granted.
func TestRG3OldIncarnationReturns(t *testing.T) {
	seeds := uint64(200)
	if testing.Short() {
		seeds = 50
	}
	if text, set := os.LookupEnv("DPSERVE_SEEDS"); set { // .ci/run plays 1,000
		var err error
		seeds, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
	}
	for seed := range seeds {
		l := newLossy(t, seed)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			l.t = t
			for range 400 {
				l.chance()
				l.check()
			}
			l.settle()
			require.Empty(t, l.unsettled())
		})
	}
}
