package dpserver

import (
	"encoding/binary"
	"sync"

	"github.com/dpserve/dpserve/engine/kvevents"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// maxWaiting is how many bytes of events wait for the actor at most: some 100,000 blocks of 16 tokens. The engine emits a few
// hundred per step; more than this means that the actor stands still.
const maxWaiting = 8 << 20

// inlet takes events from their subscription's goroutine to the rank's actor: bounded, and with one message however many events.
// What does not fit is dropped with all that waits, and the rank's events begin anew, partial: nothing is believed that a lost
// removal could have ended.
type inlet struct {
	life   uint64 // of the subscription
	hasher kvindex.Hasher
	model  string
	wake   func() // posts that there is something

	mu      sync.Mutex
	waiting *batch
	woken   bool   // the actor knows that there is something
	dropped uint64 // times that all was dropped
	foreign uint64 // events of places that are no tier of this rank
}

var _ kvevents.Sink = (*inlet)(nil)

func newInlet(life uint64, hasher kvindex.Hasher, model string, wake func(*inlet)) *inlet {
	in := &inlet{life: life, hasher: hasher, model: model, waiting: &batch{}}
	in.wake = func() { wake(in) }
	return in
}

// Stored implements kvevents.Sink.
func (in *inlet) Stored(ev *kvevents.Stored) {
	in.at(ev.Medium, ev.Locality, func(t kvindex.Tier) { in.waiting.stored(t, in.hasher, in.model, ev) })
}

// Removed implements kvevents.Sink.
func (in *inlet) Removed(ev *kvevents.Removed) {
	in.at(ev.Medium, ev.Locality, func(t kvindex.Tier) { in.waiting.removed(t, ev) })
}

// Cleared implements kvevents.Sink.
func (in *inlet) Cleared() {
	in.put(func() { in.waiting.add(change{kind: cleared}) })
}

// Reset implements kvevents.Sink. What waits is of no use any more. Whether the rest is partial is in the subscription's Stats.
func (in *inlet) Reset(bool) {
	in.put(func() {
		in.waiting.clear()
		in.waiting.add(change{kind: reset})
	})
}

// at puts an event of a tier of this rank.
func (in *inlet) at(medium, locality string, add func(t kvindex.Tier)) {
	t, ok := tierOf(medium, locality)
	in.put(func() {
		if !ok {
			in.foreign++
			return
		}
		add(t)
	})
}

// put lets add write and wakes the actor once.
func (in *inlet) put(add func()) {
	in.mu.Lock()
	if add(); in.waiting.bytes() > maxWaiting {
		in.dropped++
		in.waiting = &batch{}
		in.waiting.add(change{kind: lost})
	}
	empty := in.waiting.empty()
	in.mu.Unlock()
	if !empty {
		in.stir()
	}
}

// stir makes the actor look here: at what waits, and then at the subscription's Stats.
func (in *inlet) stir() {
	in.mu.Lock()
	wake := !in.woken
	in.woken = true
	in.mu.Unlock()
	if wake {
		in.wake()
	}
}

// take is everything that waits, in exchange for spare, an empty batch or nil. nil says that nothing waits: the next event wakes the
// actor again.
func (in *inlet) take(spare *batch) *batch {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.waiting.empty() {
		in.woken = false
		return nil
	}
	if spare == nil {
		spare = &batch{}
	}
	b := in.waiting
	in.waiting = spare
	return b
}

// losses are what this side could not use.
func (in *inlet) losses() (dropped, foreign uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.dropped, in.foreign
}

// Spellings of places beside those of kvevents.
const (
	mediumCPUTier = "CPU_TIER1"
	mediumDisk    = "DISK"
	remote        = "REMOTE"
)

// tierOf is the tier of a medium; false for what is not on the rank's own machine, or of a kind that nobody asks for.
func tierOf(medium, locality string) (kvindex.Tier, bool) {
	if locality == remote {
		return 0, false
	}
	switch medium {
	case "", kvevents.MediumGPU:
		return kvindex.GPU, true
	case kvevents.MediumCPU, mediumCPUTier:
		return kvindex.CPU, true
	case kvevents.MediumStorage, mediumDisk:
		return kvindex.Disk, true
	}
	return 0, false
}

// handleOf names a block of a group as the index does.
func handleOf(group int, h kvevents.Hash) kvindex.Handle {
	if h.Kind == kvevents.HashBytes {
		return kvindex.BytesHandle(group, h.Data[:h.Len])
	}
	v := binary.BigEndian.Uint64(h.Data[:])
	if h.Kind == kvevents.HashInt {
		return kvindex.IntHandle(group, int64(v)) //nolint:gosec // the bit pattern is the name
	}
	return kvindex.UintHandle(group, v)
}
