package dpserver

import (
	"context"
	"encoding/binary"
	"sync"
	"sync/atomic"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// eventSubscription is one subscription to the events of a rank's engine.
type eventSubscription struct {
	sub   *kvevents.Subscriber
	queue *eventQueue
}

// subscriptions are a rank's subscriptions, one at a time: each new incarnation of the engine gets a new one,
// which asks for all events from the start. Starting and ending a subscription may wait for sockets and
// goroutines, so it is done outside the actors, which read only current.
type subscriptions struct {
	current atomic.Pointer[eventSubscription] // nil: none

	mu     sync.Mutex // one subscription starts or ends at a time
	newest uint64     // number of the newest subscription
	closed bool
}

// replaceSubscription replaces the subscription. It does nothing if a later one has started or the Server has
// ended. Errors: problem.InvalidArgument for endpoints that may not be used; a port that is taken.
func (s *Server) replaceSubscription(ctx context.Context, src *msg.EventSource, life uint64) error {
	l := &s.subscriptions
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || life < l.newest {
		return nil
	}
	l.newest = life
	l.closeCurrent()
	if src == nil {
		return nil
	}
	h, err := s.newSubscription(src, life)
	if err != nil {
		return err
	}
	l.current.Store(h)
	if err := h.sub.Start(ctx); err != nil {
		l.closeCurrent()
		return err
	}
	return nil
}

func (s *Server) newSubscription(src *msg.EventSource, life uint64) (*eventSubscription, error) {
	in := newEventQueue(life, s.hasher, s.spec.App.Model.ID,
		func(in *eventQueue) { s.recorder.box.Send(eventsQueued{in}) })
	hosts := kvevents.Hosts{Node: s.node.Address}
	if src.Host != "" {
		hosts.Peers = []string{src.Host}
	}
	sub, err := kvevents.New(kvevents.Config{
		Endpoints: kvevents.Endpoints{Connect: src.Connect, Bind: src.Bind, Replay: src.Replay}, Hosts: hosts,
		Topic: src.Topic, Sink: in, Changed: in.wake, Replays: s.node.Replays, Logger: s.log,
		Dial: s.node.DialEvents, Listen: s.node.ListenEvents,
	})
	return &eventSubscription{sub: sub, queue: in}, err
}

// closeCurrent closes the current subscription and waits for it. The caller holds mu.
func (l *subscriptions) closeCurrent() {
	if h := l.current.Swap(nil); h != nil {
		_ = h.sub.Close() // the socket is closed even if Close fails
	}
}

// close ends the last subscription.
func (l *subscriptions) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.closeCurrent()
}

// maxQueuedBytes is how many bytes of events may wait for the recorder: some 100,000 blocks of 16 tokens. The
// engine emits a few hundred blocks per step, so more than this means that the recorder does not run.
const maxQueuedBytes = 8 << 20

// eventsQueued says that events wait.
type eventsQueued struct{ queue *eventQueue }

// eventQueue takes events from their subscription's goroutine to the rank's recorder. It is bounded, and
// posts one message however many events there are. After an overflow it drops all queued events, and the
// recorder discards all known blocks: a dropped removal could leave stale entries.
type eventQueue struct {
	subscriptionID uint64 // of the subscription
	hasher         kvindex.Hasher
	model          string
	notify         func() // posts that events wait

	mu         sync.Mutex
	pending    *eventBatch
	isNotified bool   // the recorder has a message that events wait
	dropped    uint64 // overflows
	foreign    uint64 // events of media that are no tier of this rank
}

var _ kvevents.Sink = (*eventQueue)(nil)

func newEventQueue(life uint64, hasher kvindex.Hasher, model string, wake func(*eventQueue)) *eventQueue {
	in := &eventQueue{subscriptionID: life, hasher: hasher, model: model, pending: &eventBatch{}}
	in.notify = func() { wake(in) }
	return in
}

func (in *eventQueue) Stored(ev *kvevents.Stored) {
	in.addAt(ev.Medium, ev.Locality,
		func(t kvindex.Tier) { in.pending.addStored(t, in.hasher, in.model, ev) })
}

func (in *eventQueue) Removed(ev *kvevents.Removed) {
	in.addAt(ev.Medium, ev.Locality, func(t kvindex.Tier) { in.pending.addRemoved(t, ev) })
}

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

// enqueue lets add write and notifies the recorder once.
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

// wake makes the recorder read this queue, and then the replica the subscription's Stats.
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
// queue is empty: then the next event notifies the recorder again.
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
	mediumCPUTier   = "CPU_TIER1"
	mediumCPUPinned = "CPU_PINNED"
	mediumDisk      = "DISK"
	localityRemote  = "REMOTE"
)

// tierOf is the tier of a medium; false for a medium on another machine, or of a kind that no policy reads.
func tierOf(medium, locality string) (kvindex.Tier, bool) {
	if locality == localityRemote {
		return 0, false
	}
	switch medium {
	case "", kvevents.MediumGPU:
		return kvindex.GPU, true
	case kvevents.MediumCPU, mediumCPUTier, mediumCPUPinned:
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
		return kvindex.IntHandle(group, int64(v))
	}
	return kvindex.UintHandle(group, v)
}

// changeKind is the closed list of what an engine's events say.
type changeKind uint8

const (
	changeStored changeKind = iota
	changeRemoved
	changeCleared
	changeReset // the subscription begins again
	changeLost  // the queue dropped events
)

// change is one event. Its blocks, tokens and extras are the next ones of the batch.
type change struct {
	kind      changeKind
	tier      kvindex.Tier
	hasParent bool
	root      uint64
	parent    kvindex.Handle
	blockSize int
	group     int
	blocks    int
	tokens    int
	extras    int
}

// changeBytes is the memory of one change.
const changeBytes = 88

// eventBatch is copies of events in the engine's order. It is written, then read, then used again: in the
// steady state events cost no allocation.
type eventBatch struct {
	changes []change
	blocks  []kvindex.Handle
	tokens  []uint32
	extras  []kvindex.Extra
}

func (b *eventBatch) isEmpty() bool { return len(b.changes) == 0 }

func (b *eventBatch) bytes() int {
	return changeBytes*len(b.changes) + 8*len(b.blocks) + 4*len(b.tokens) + 16*len(b.extras)
}

func (b *eventBatch) clear() {
	*b = eventBatch{changes: b.changes[:0], blocks: b.blocks[:0], tokens: b.tokens[:0], extras: b.extras[:0]}
}

func (b *eventBatch) add(c change) { b.changes = append(b.changes, c) }

func (b *eventBatch) addStored(t kvindex.Tier, h kvindex.Hasher, model string, ev *kvevents.Stored) {
	c := change{
		kind: changeStored, tier: t, hasParent: !ev.Parent.IsZero(), blockSize: ev.BlockSize, group: ev.Group,
	}
	salt, extras := b.addExtras(h, ev)
	if c.hasParent {
		c.parent = handleOf(ev.Group, ev.Parent)
	} else {
		c.root = h.Root(kvindex.Salt{
			Unit: kvindex.Tokens, BlockSize: ev.BlockSize, Model: model,
			Adapter: ev.LoraName, CacheSalt: salt,
		})
	}
	for _, name := range ev.Hashes {
		b.blocks = append(b.blocks, handleOf(ev.Group, name))
	}
	b.tokens = append(b.tokens, ev.Tokens...)
	c.blocks, c.tokens, c.extras = len(ev.Hashes), len(ev.Tokens), extras
	b.add(c)
}

// addExtras returns what distinguishes an event's blocks beside their tokens: the cache_salt of their chain,
// and the number of extras it added, one per block with an image or the like. Such a block matches no text
// prompt, and another such block only if the engine reports the same extra.
func (b *eventBatch) addExtras(h kvindex.Hasher, ev *kvevents.Stored) (salt string, extras int) {
	salt, ok := ev.Salt()
	if ok {
		return salt, 0
	}
	one := kvevents.Stored{LoraName: ev.LoraName, Parent: ev.Parent, CacheSalt: ev.CacheSalt}
	salt = ev.CacheSalt
	for i := range min(len(ev.Extra), len(ev.Hashes)) {
		one.Extra = ev.Extra[i : i+1]
		text, plain := one.Salt()
		if plain && i == 0 {
			salt = text
		}
		if !plain {
			b.extras = append(b.extras, kvindex.Extra{Block: i, Key: h.Key(string(ev.Extra[i]))})
			extras++
		}
		one.Parent = ev.Hashes[i] // only the first block of a prompt has a salt
	}
	return salt, extras
}

func (b *eventBatch) addRemoved(t kvindex.Tier, ev *kvevents.Removed) {
	for _, name := range ev.Hashes {
		b.blocks = append(b.blocks, handleOf(ev.Group, name))
	}
	b.add(change{kind: changeRemoved, tier: t, group: ev.Group, blocks: len(ev.Hashes)})
}

// forEach passes every change to apply, in order. Both arguments are valid during the call.
func (b *eventBatch) forEach(apply func(c *change, ev *kvindex.StoredEvent)) {
	var ev kvindex.StoredEvent
	blocks, tokens, extras := b.blocks, b.tokens, b.extras
	for i := range b.changes {
		c := &b.changes[i]
		ev = kvindex.StoredEvent{
			Root: c.root, HasParent: c.hasParent, Parent: c.parent, BlockSize: c.blockSize, Group: c.group,
			Blocks: blocks[:c.blocks], Tokens: tokens[:c.tokens], Extras: extras[:c.extras],
		}
		apply(c, &ev)
		blocks, tokens, extras = blocks[c.blocks:], tokens[c.tokens:], extras[c.extras:]
	}
}
