package dpserver

import (
	"encoding/binary"
	"sync"

	"github.com/dpserve/dpserve/engine/kvevents"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// maxQueuedBytes is how many bytes of events may wait for the actor: some 100,000 blocks of 16 tokens. The
// engine emits a few hundred blocks per step, so more than this means that the actor does not run.
const maxQueuedBytes = 8 << 20

// eventQueue takes events from their subscription's goroutine to the rank's actor. It is bounded, and posts
// one message however many events there are. After an overflow it drops all queued events, and the actor
// discards all known blocks: a dropped removal could leave stale entries.
type eventQueue struct {
	subscriptionID uint64 // of the subscription
	hasher         kvindex.Hasher
	model          string
	notify         func() // posts that events wait

	mu         sync.Mutex
	pending    *eventBatch
	isNotified bool   // the actor has a message that events wait
	dropped    uint64 // overflows
	foreign    uint64 // events of media that are no tier of this rank
}

var _ kvevents.Sink = (*eventQueue)(nil)

func newEventQueue(life uint64, hasher kvindex.Hasher, model string, wake func(*eventQueue)) *eventQueue {
	in := &eventQueue{subscriptionID: life, hasher: hasher, model: model, pending: &eventBatch{}}
	in.notify = func() { wake(in) }
	return in
}

// Stored implements kvevents.Sink.
func (in *eventQueue) Stored(ev *kvevents.Stored) {
	in.addAt(ev.Medium, ev.Locality,
		func(t kvindex.Tier) { in.pending.addStored(t, in.hasher, in.model, ev) })
}

// Removed implements kvevents.Sink.
func (in *eventQueue) Removed(ev *kvevents.Removed) {
	in.addAt(ev.Medium, ev.Locality, func(t kvindex.Tier) { in.pending.addRemoved(t, ev) })
}

// Cleared implements kvevents.Sink.
func (in *eventQueue) Cleared() {
	in.enqueue(func() { in.pending.add(change{kind: changeCleared}) })
}

// Reset implements kvevents.Sink. The queued events are obsolete. The subscription's Stats say whether the
// rest is partial.
func (in *eventQueue) Reset(bool) {
	in.enqueue(func() {
		in.pending.clear()
		in.pending.add(change{kind: changeReset})
	})
}

// addAt adds an event of a tier of this rank.
func (in *eventQueue) addAt(medium, locality string, add func(t kvindex.Tier)) {
	t, ok := tierOf(medium, locality)
	in.enqueue(func() {
		if !ok {
			in.foreign++
			return
		}
		add(t)
	})
}

// enqueue lets add write and notifies the actor once.
func (in *eventQueue) enqueue(add func()) {
	in.mu.Lock()
	if add(); in.pending.bytes() > maxQueuedBytes {
		in.dropped++
		in.pending = &eventBatch{}
		in.pending.add(change{kind: changeLost})
	}
	empty := in.pending.isEmpty()
	in.mu.Unlock()
	if !empty {
		in.wake()
	}
}

// wake makes the actor read this queue, and then the subscription's Stats.
func (in *eventQueue) wake() {
	in.mu.Lock()
	wake := !in.isNotified
	in.isNotified = true
	in.mu.Unlock()
	if wake {
		in.notify()
	}
}

// takeBatch returns all queued events in exchange for spare, an empty batch or nil. It returns nil if the
// queue is empty: then the next event notifies the actor again.
func (in *eventQueue) takeBatch(spare *eventBatch) *eventBatch {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.pending.isEmpty() {
		in.isNotified = false
		return nil
	}
	if spare == nil {
		spare = &eventBatch{}
	}
	b := in.pending
	in.pending = spare
	return b
}

// lossCounts are the counts of events that this side could not use.
func (in *eventQueue) lossCounts() (dropped, foreign uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.dropped, in.foreign
}

// Spellings of media and localities beside those of kvevents.
const (
	mediumCPUTier  = "CPU_TIER1"
	mediumDisk     = "DISK"
	localityRemote = "REMOTE"
)

// tierOf is the tier of a medium; false for a medium on another machine, or of a kind that no policy reads.
func tierOf(medium, locality string) (kvindex.Tier, bool) {
	if locality == localityRemote {
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
