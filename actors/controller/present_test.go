package controller

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/state"
)

// hearPresent makes the newest event of a unit one of an unknown kind.
func (w *world) hearPresent(node, unit string) {
	e := w.hears[node][unit]
	e.Kind, e.Number = msg.UnitPresent, e.Number+10
	w.hears[node][unit] = e
}

// Neither this leader nor the next one takes a unit for gone because its node reports an event kind of a
// later version.
func TestUnitWithNewsOfALaterVersionStaysReady(t *testing.T) {
	w := newWorld(t, node("a", 4))
	// used by the rule under test; the leases of this world outlast it
	w.core.timers.LeaseTTL = 10 * time.Second
	w.deploy(sim("chat", 1, app.Independent))
	w.up("chat/0/0")
	w.hearPresent("a", "chat/0/0")
	w.takeTrace()
	renews := func() {
		for range 10 {
			w.now = w.now.Add(2 * time.Second)
			w.renews("a")
		}
		assert.Equal(t, state.Ready, w.phase("chat/0/0"))
		assert.Equal(t, uint64(1), w.state.Epochs["chat/0/0"])
		assert.Empty(t, w.takeTrace(), "no order, no command")
	}
	renews()

	w.core = NewCore(w.timers) // another leader
	w.step(StateSeen{w.state.Clone()})
	w.core.timers.LeaseTTL = 10 * time.Second
	w.takeTrace()
	renews()
	assert.False(t, w.core.units["chat/0/0"].hasUnreportedPart(), "the node has spoken of it")

	w.hears["a"]["chat/0/0"] = msg.UnitEvent{Unit: "chat/0/0", Epoch: 1, Kind: msg.UnitGone, WasReady: true,
		Number: 1000}
	w.renews("a")
	assert.NotEqual(t, state.Ready, w.phase("chat/0/0"), "what this version knows counts as before")
}

// The ready event of a unit may arrive after a report with an unknown kind.
func TestEarlierNewsStillCountsBehindALaterVersions(t *testing.T) {
	w := newWorld(t, node("a", 4))
	w.deploy(sim("chat", 1, app.Independent))
	w.says("a", "chat/0/0", msg.UnitStarted)
	ready := w.hears["a"]["chat/0/0"]
	ready.Kind, ready.Number = msg.UnitReady, ready.Number+1
	w.hearPresent("a", "chat/0/0")
	w.renews("a")
	assert.Equal(t, state.Starting, w.phase("chat/0/0"), "its phase is not touched")
	w.renews("a", ready)
	assert.Equal(t, state.Ready, w.phase("chat/0/0"))
}
