package controller

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

func attachedTo(urls ...string) *app.Application {
	a := sim("ext", len(urls), app.Independent)
	a.Engine.Kind = app.KindAttach
	for _, u := range urls {
		a.Engine.Ranks = append(a.Engine.Ranks, app.AttachRank{URL: u})
	}
	return a
}

// reshape commits another list of ranks as Reshape does, without retrying failed units.
func (w *world) reshape(a *app.Application) {
	spec, err := encodeSpec([]*app.Application{a})
	require.NoError(w.t, err)
	_, err = w.apply(state.Command{PutApps: &state.PutApps{Apps: []state.AppSpec{spec}}})
	require.NoError(w.t, err)
	w.step(AppsRedeployed{})
}

func TestARemovedRankDrainsAndTheOthersDoNotNotice(t *testing.T) {
	w := newWorld(t)
	a := attachedTo("http://a", "http://b", "http://c")
	w.deploy(a)
	w.up("ext/0/0", "ext/0/1", "ext/0/2")
	w.takeTrace()
	b, gone, err := a.WithoutRank(app.RankRef{URL: "http://b"})
	require.NoError(t, err)
	require.Equal(t, 1, *gone.Number)
	w.reshape(b)
	assert.Equal(t, []string{
		"ext/0/1: ready → draining", "stop ext/0/1 epoch 1 on a, grace 30s", "mark_good ",
	}, w.takeTrace())
	assert.Equal(t, "RUNNING", w.status("ext"))
	require.Len(t, view{w.core}.Status()[0].Units, 3, "who drains is still shown")

	c, n, err := b.WithRank(app.AttachRank{URL: "http://d"},
		func(r int) bool { return w.state.Units[fmt.Sprint("ext/0/", r)] != nil })
	require.NoError(t, err)
	require.Equal(t, 3, n, "the number is held until the release")
	w.reshape(c)
	assert.Equal(t, []string{
		"ext/0/3:  → pending", "grant ext/0/3 attempt 1 on a:-1", "ext: RUNNING → DEPLOYING",
		"ext/0/3: pending → starting", "start ext/0/3 epoch 1 on a",
	}, w.takeTrace())
	w.says("a", "ext/0/1", msg.UnitGone)
	assert.Equal(t, []string{"ext/0/1: draining → gone", "release ext/0/1 epoch 1", "forget ext/0/1"},
		w.takeTrace())

	d, n, err := c.WithRank(app.AttachRank{URL: "http://e"},
		func(r int) bool { return w.state.Units[fmt.Sprint("ext/0/", r)] != nil })
	require.NoError(t, err)
	require.Equal(t, 1, n, "and used again then")
	w.reshape(d)
	assert.Equal(t, uint64(2), w.state.Epochs["ext/0/1"], "under the next epoch")
	w.up("ext/0/1", "ext/0/3")
	assert.Equal(t, "RUNNING", w.status("ext"))
	assert.Equal(t, uint64(1), w.state.Epochs["ext/0/0"])
	assert.Equal(t, uint64(1), w.state.Epochs["ext/0/2"])
}

// Gaps between rank numbers survive too.
func TestRankChangesSurviveARestart(t *testing.T) {
	w := newWorld(t)
	a := attachedTo("http://a", "http://b", "http://c")
	w.deploy(a)
	w.up("ext/0/0", "ext/0/1", "ext/0/2")
	b, _, err := a.WithoutRank(app.RankRef{URL: "http://a"})
	require.NoError(t, err)
	w.reshape(b)
	w.says("a", "ext/0/0", msg.UnitGone)
	w.reboot()
	assert.Equal(t, []string{"ext/0/1", "ext/0/2"}, slices.Sorted(maps.Keys(w.state.Units)))
	w.up("ext/0/1", "ext/0/2")
	s := view{w.core}.Status()[0]
	assert.Equal(t, "RUNNING", s.Status)
	assert.Equal(t, 2, s.DPSize)
	assert.Equal(t, 2, s.Desired)
	assert.Equal(t, 2, s.Ready)
	assert.Equal(t, "http://c", w.core.apps["ext"].spec().Engine.Rank(0, 2).URL)
}

// The hash of a rank does not depend on the other ranks.
func TestLaunchHashOfARankIgnoresTheOthers(t *testing.T) {
	a := attachedTo("http://a", "http://b", "http://c")
	b, _, err := a.WithoutRank(app.RankRef{URL: "http://a"})
	require.NoError(t, err)
	for _, n := range []int{1, 2} {
		u := app.Unit{ID: fmt.Sprint("ext/0/", n), App: "ext", Ranks: []int{n}}
		before, err := launchHash(a, &u)
		require.NoError(t, err)
		after, err := launchHash(b, &u)
		require.NoError(t, err)
		assert.Equal(t, before, after)
	}
}

// rankWorld is an attached application with changing ranks, and what must not change meanwhile.
type rankWorld struct {
	*world
	app    *app.Application
	epochs map[string]uint64 // of the granted ranks, by URL
	names  map[string]string // URL → unit
	t      *rapid.T
}

// Over any adds, removes, fences, slow drains and lost answers, every rank that stays keeps its first epoch,
// and only removed ranks are told to stop.
func TestRankChangesNeverTouchTheOthers(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := &rankWorld{
			world: newWorld(t), app: attachedTo("http://0", "http://1"),
			epochs: map[string]uint64{}, names: map[string]string{}, t: rt,
		}
		w.deploy(w.app)
		w.came("http://0", 0)
		w.came("http://1", 1)
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			w.chance()
			w.check()
		}
		w.settle()
	})
}

func (w *rankWorld) came(url string, number int) {
	w.names[url] = fmt.Sprint("ext/0/", number)
	w.check()
}

func (w *rankWorld) chance() {
	url := fmt.Sprint("http://", rapid.IntRange(0, 6).Draw(w.t, "engine"))
	unit, there := w.names[url]
	switch rapid.SampledFrom([]string{"add", "remove", "ready", "fence", "gone", "pass", "lose"}).Draw(w.t,
		"what") {
	case "add":
		next, n, err := w.app.WithRank(app.AttachRank{URL: url},
			func(r int) bool { return w.state.Units[fmt.Sprint("ext/0/", r)] != nil })
		if err == nil {
			w.app = next
			w.reshape(next)
			w.came(url, n)
		}
	case "remove":
		if next, _, err := w.app.WithoutRank(app.RankRef{URL: url}); err == nil {
			w.app = next
			delete(w.names, url)
			delete(w.epochs, url)
			w.takeTrace()
			w.reshape(next)
			for _, l := range w.takeTrace() {
				require.NotContains(w.t, l, "release", "a rank drains before it is released")
			}
		}
	case "ready":
		if there {
			w.says("a", unit, msg.UnitReady)
		}
	case "fence":
		if there && w.phase(unit) == state.Ready {
			w.says("a", unit, msg.UnitFenced, because("no answer"))
		}
	case "gone":
		w.drained()
	case "pass":
		w.pass(time.Duration(rapid.IntRange(0, 5000).Draw(w.t, "ms")) * time.Millisecond)
	case "lose":
		lost := false
		w.lose = func(c state.Command) error {
			if lost || c.PutApps != nil {
				return nil
			}
			lost = true
			return errLost
		}
	}
}

// drained ends the drain of unwanted ranks.
func (w *rankWorld) drained() {
	for _, id := range w.core.unitIDs() {
		if w.core.units[id].m.Stopping {
			w.says("a", id, msg.UnitGone)
			return
		}
	}
}

// check verifies that a granted rank stays granted under its epoch. Before that its grant may have been lost.
func (w *rankWorld) check() {
	for url, unit := range w.names {
		rec := w.state.Units[unit]
		epoch, granted := w.epochs[url]
		if !granted && rec != nil {
			w.epochs[url] = rec.Epoch
			continue
		}
		if granted {
			require.NotNil(w.t, rec, "%s has lost its rank %s", url, unit)
			require.Equal(w.t, epoch, rec.Epoch, "%s was started anew", url)
		}
		require.False(w.t, w.core.units[unit].m.Stopping, "%s is being stopped", url)
	}
}

// settle verifies that in the end exactly the ranks that were not removed are there.
func (w *rankWorld) settle() {
	w.lose = nil
	for range 40 {
		w.drained()
		w.pass(3 * time.Second)
		for _, unit := range w.names {
			w.says("a", unit, msg.UnitReady)
		}
	}
	require.ElementsMatch(w.t, slices.Collect(maps.Values(w.names)), slices.Collect(maps.Keys(w.state.Units)))
	s := view{w.core}.Status()[0]
	require.Equal(w.t, "RUNNING", s.Status)
	require.Equal(w.t, len(w.names), s.Desired)
	require.Equal(w.t, len(w.names), s.Ready)
	require.Len(w.t, s.Units, len(w.names))
}
