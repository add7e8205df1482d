package dpserver

import (
	"cmp"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// recorderBound is how many prompts may wait for the recorder. It is above max_ongoing of any rank. A prompt
// that finds no room is not recorded: it counts as not cached.
const recorderBound = 4096

// Messages that the replica sends to the recorder.
type (
	// setsBegin begins the KV block sets of the stream again: a new incarnation, or after a panic.
	setsBegin struct {
		setsID         uint64
		subscriptionID uint64
		isLost         bool // the content is not certain any more
		settings       recorderSettings
	}
	// recorderSettings is what the record depends on, sent when it changes.
	recorderSettings struct {
		facts  msg.Facts
		sent   kvindex.Options // of the block set of sent prompts
		isLive bool            // the engine's events are live
	}
	// setsRequest asks for a snapshot for one sink, because the stream has KV block sets. done: see msg.List
	setsRequest struct {
		sink msg.Sink
		done chan struct{}
	}
	// promptEnd says that the request of a prompt has ended.
	promptEnd    struct{ prompt *sentPrompt }
	engineSlept  struct{} // the engine has freed its KV cache
	recorderStop struct{}
)

// sentPrompt is a prompt that the rank was sent. The replica writes the first part before it sends the
// prompt, and end before it sends promptEnd. Everything else belongs to the recorder.
type sentPrompt struct {
	ticket    uint64
	blocks    []uint64
	hitBlocks int  // leading blocks that the sender expected in the cache
	tokens    int  // of the prompt, as its sender estimated
	isWatched bool // promptShown is due when events show its last block

	end struct {
		isWithdrawn  bool    // it was not computed
		promptTokens int     // as the engine reported
		missing      float64 // tokens that were expected in the cache and were not there
	}

	recorded kvindex.Recorded // what the record holds because of this request
}

// kvReport is what others read of the KV record.
type kvReport struct {
	setsID    uint64
	exists    bool // a prompt or an event needed a record
	isPartial bool // events were dropped: the engine may hold blocks that are not known
	blockSize int  // tokens per block of the engine's events; 0: no event came
	blocks    int
	sent      int // of blocks: of sent prompts
	index     kvindex.Stats
}

// recorderHandle is what the replica and Status hold of the recorder.
type recorderHandle struct {
	box     *inbox.Inbox
	prompts promptPool

	mu     sync.Mutex
	report kvReport
}

func (p *recorderHandle) load() kvReport {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.report
}

func (p *recorderHandle) store(report *kvReport) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.report = *report
}

// recorder is the actor that owns the record of a rank's KV cache, beside the replica, so that no admission
// waits for it. It applies the engine's events and the prompts that the rank was sent, and writes each change
// to the rank's stream. It may wait for the replica; the replica never waits for it.
type recorder struct {
	*Server
	record         *kvRecord // nil until a prompt or an event needs it
	setsID         uint64
	subscriptionID uint64      // of the current subscription: older events are dropped
	early          *eventQueue // of a later subscription, whose events came before its block sets began
	settings       recorderSettings
	watched        []*sentPrompt // the events do not show their last block yet
	spareBatch     *eventBatch
	expiry         expiryTimer
}

// firstSubscription is the number of a rank's first subscription to KV events.
const firstSubscription = 1

// spawnRecorder starts the recorder. After a panic the replica begins the block sets again.
func spawnRecorder(s *Server, system *actor.ActorSystem) (*inbox.Inbox, error) {
	isRestart := false
	return inbox.Spawn(system, s.name()+"/kv", recorderBound, func() inbox.Receiver {
		k := &recorder{Server: s, subscriptionID: firstSubscription}
		if isRestart {
			s.log.Error("the record of a rank's kv cache was lost, it begins anew")
			k.subscriptionID = 0
			s.box.Send(recorderRestarted{})
		}
		isRestart = true
		return k
	})
}

// Receive implements inbox.Receiver.
func (k *recorder) Receive(m any) {
	switch m := m.(type) {
	case eventsQueued:
		k.applyEvents(m)
	case *sentPrompt:
		runtime.Gosched() // let the sender of the Admit, which its answer woke on this processor, run first
		k.recordSent(m)
	case promptEnd:
		k.correctSent(m.prompt)
	case recorderSettings:
		k.applySettings(m)
	case setsBegin:
		k.beginSets(m)
	case setsRequest:
		k.sendSnapshot(m)
	case engineSlept:
		if k.record != nil {
			k.record.clearEvents()
			k.record.dropSets(kvindex.Sent)
		}
	case expiryTick:
		k.expire(m)
	case recorderStop:
		k.expiry.stop()
		k.recorder.box.Halt()
		return
	}
	if k.record != nil {
		k.record.flushRemovals()
		k.armExpiry()
		k.storeReport()
	}
}

// ensureRecord returns the record and creates it at its first use. It returns nil if the engine caches
// nothing.
func (k *recorder) ensureRecord() *kvRecord {
	if k.record == nil && !k.settings.facts.CachingOff {
		l, err := newKVRecord(k.Server, k.emit, k.deviceBlocks)
		if err != nil {
			k.log.Error("a rank has no record of its kv cache", slog.String("err", err.Error()))
			return nil
		}
		k.record = l
	}
	return k.record
}

func (k *recorder) emit(kind msg.RecordKind, kv msg.KV) { k.stream.emitKV(k.setsID, kind, kv) }

// beginSets publishes the block sets again, as they are: without the prompts of the incarnation before, and
// without the events of a subscription that ended.
func (k *recorder) beginSets(m setsBegin) {
	if k.record != nil {
		k.record.flushRemovals()
		k.record.dropSets(kvindex.Sent)
		if m.subscriptionID != k.subscriptionID {
			k.record.dropEventSets()
			k.record.isPartial = false
		}
	}
	k.setsID, k.subscriptionID, k.settings, k.watched = m.setsID, m.subscriptionID, m.settings, nil
	current := k.subscriptions.current.Load()
	if m.isLost {
		k.expiry.stop()
		k.record = nil
		if current != nil && k.ensureRecord() != nil {
			k.record.isPartial = true
		}
	}
	if k.record != nil {
		k.record.publishSets()
		k.storeReport()
		k.box.Send(eventsApplied{})
	}
	if m.isLost && current != nil { // the recorder before may have panicked before it took the queued events
		k.applyEvents(eventsQueued{current.queue})
	} else if k.early != nil {
		k.recorder.box.Send(eventsQueued{k.early})
	}
	k.early = nil
}

// applySettings begins the record of sent prompts again if its blocks are to live for another time: longer
// when events fell silent, shorter when they are live.
func (k *recorder) applySettings(m recorderSettings) {
	k.settings = m
	if l := k.record; l != nil && l.sets[kvindex.Sent] != nil && l.sentOptions != m.sent {
		l.dropSets(kvindex.Sent)
	}
}

// sendSnapshot sends a sink the rank's snapshot and the block sets. The replica sends the first part. No
// other KV record is published meanwhile, because this actor publishes them.
func (k *recorder) sendSnapshot(m setsRequest) {
	if m.done != nil {
		defer close(m.done)
	}
	sent := make(chan struct{})
	k.box.Send(snapshotRequest{sink: m.sink, done: sent})
	select {
	case <-sent:
	case <-k.box.Stopped():
		return
	}
	if k.record != nil {
		k.record.flushRemovals()
		k.record.writeSnapshot(func(kind msg.RecordKind, kv msg.KV) {
			k.stream.sendSet(m.sink, k.setsID, kind, kv)
		})
	}
}

// applyEvents applies a batch of queued events and posts itself for those that came meanwhile.
func (k *recorder) applyEvents(m eventsQueued) {
	if m.queue.subscriptionID > k.subscriptionID { // setsBegin is on its way
		k.early = m.queue
		return
	}
	if m.queue.subscriptionID < k.subscriptionID {
		return
	}
	l := k.ensureRecord()
	if l == nil {
		return
	}
	b := m.queue.takeBatch(k.spareBatch)
	if b == nil {
		k.boundSent()
		k.storeReport()
		k.box.Send(eventsApplied{})
		return
	}
	k.spareBatch = nil // a batch that panics is dropped
	l.applyBatch(b)
	b.clear()
	k.spareBatch = b
	k.reportShown()
	k.recorder.box.Send(m)
}

// reportShown reports the prompts whose last full block the events show now.
func (k *recorder) reportShown() {
	k.watched = slices.DeleteFunc(k.watched, func(p *sentPrompt) bool {
		shown := k.eventsShow(p)
		if shown {
			k.box.Send(promptShown{ticket: p.ticket})
		}
		return shown
	})
}

// eventsShow says whether the events report the last full block of a prompt on the GPU.
func (k *recorder) eventsShow(p *sentPrompt) bool {
	c := k.record.sets[kvindex.GPU]
	return c != nil && c.Holds(p.blocks[len(p.blocks)-1])
}

func (k *recorder) recordSent(p *sentPrompt) {
	l := k.ensureRecord()
	if l == nil {
		return
	}
	if p.isWatched {
		if k.eventsShow(p) {
			k.box.Send(promptShown{ticket: p.ticket, wasBefore: true})
		} else {
			k.watched = append(k.watched, p)
		}
	}
	l.seedAverage(p)
	now := l.advanceClock()
	if l.sets[kvindex.Sent] == nil {
		l.sentOptions = k.settings.sent
	}
	if c := l.openSet(kvindex.Sent, l.sentOptions); c != nil {
		c.SetCapacity(l.toBlocks(cacheCapacity(&k.settings.facts, l.eventBlockSize())))
		p.recorded = c.Record(p.blocks, now)
	}
}

// correctSent adjusts the record after a request ends. Without a first token its blocks are withdrawn, unless
// another request shares them. Clearly fewer cached tokens than expected mean that the engine evicts faster
// than the record does.
func (k *recorder) correctSent(p *sentPrompt) {
	defer k.recorder.prompts.put(p)
	k.watched = slices.DeleteFunc(k.watched, func(o *sentPrompt) bool { return o == p })
	l := k.record
	if l == nil || l.sets[kvindex.Sent] == nil {
		return
	}
	c := l.sets[kvindex.Sent]
	if p.end.isWithdrawn {
		c.Withdraw(p.blocks, max(p.recorded.Held, p.hitBlocks), p.recorded.At)
		return
	}
	l.updateAverage(p)
	if p.end.missing > max(float64(k.blockSizeOrDefault()), l.tokensPerBlock) {
		c.Trim(l.toBlocks(int64(p.end.missing)))
	}
}

func (k *recorder) blockSizeOrDefault() int {
	return cmp.Or(k.record.eventBlockSize(), k.settings.facts.BlockSize, routing.DefaultBlockSize)
}

// boundSent keeps the record of sent prompts no larger than what the engine holds by its events, after they
// reported removals. Prompts without a first token are added, because their events are still to come.
func (k *recorder) boundSent() {
	l := k.record
	if !l.hasRemovals {
		return
	}
	l.hasRemovals = false
	if c := l.sets[kvindex.Sent]; c != nil && k.settings.isLive && l.tokensPerBlock > 0 {
		held := int64(l.blockSetLen(kvindex.GPU))*int64(k.blockSizeOrDefault()) + int64(k.stats.openPrefill())
		c.Trim(c.Len() - l.toBlocks(held))
	}
}

// deviceBlocks is the most blocks that the engine's events can report at a time; 0: not known. An engine that
// counts its blocks in a larger size than its events has more blocks of the events' size.
func (k *recorder) deviceBlocks() int {
	f := &k.settings.facts
	size := k.record.eventBlockSize()
	if size == 0 || f.BlockSize <= size {
		return f.Blocks
	}
	return f.Blocks * ((f.BlockSize + size - 1) / size)
}

// cacheCapacity is the tokens that an engine's KV cache holds; 0: not known.
func cacheCapacity(f *msg.Facts, eventBlockSize int) int64 {
	return int64(f.Blocks) * int64(cmp.Or(eventBlockSize, f.BlockSize))
}

func (k *recorder) storeReport() {
	l := k.record
	report := kvReport{
		setsID: k.setsID, exists: true, isPartial: l.isPartial, blockSize: l.eventBlockSize(),
		sent: l.blockSetLen(kvindex.Sent), index: l.index.Stats(),
	}
	for t := range l.sets {
		report.blocks += l.blockSetLen(kvindex.Tier(t))
	}
	k.recorder.store(&report)
}

// minExpiryInterval is the shortest time between two expiry ticks.
const minExpiryInterval = 250 * time.Millisecond

// expiryTick says that blocks of the KV record expire or are to be swept.
type expiryTick struct{ of *kvRecord }

// expiryTimer runs only while there is something to expire or to sweep.
type expiryTimer struct {
	timer *time.Timer
	due   time.Duration // on the record's clock; 0: the timer does not run
}

func (c *expiryTimer) stop() {
	stopTimer(c.timer)
	c.due = 0
}

func (k *recorder) armExpiry() {
	l := k.record
	now := time.Since(l.startedAt)
	due, some := now+minExpiryInterval, l.needsSweep
	if c := l.sets[kvindex.Sent]; c != nil && !some {
		at, any := c.Expires()
		due, some = max(due, at), any
	}
	if !some || k.expiry.due > 0 && k.expiry.due <= due {
		return
	}
	k.expiry.stop()
	k.expiry.due = due
	k.expiry.timer = time.AfterFunc(due-now, func() { k.recorder.box.Send(expiryTick{l}) })
}

func (k *recorder) expire(m expiryTick) {
	if m.of != k.record || k.record == nil {
		return
	}
	k.expiry.stop()
	m.of.advanceClock()
	if l := m.of; l.needsSweep { // one step: the next tick goes on
		l.needsSweep = l.index.Sweep(sweepSlots)
	}
}

// Bounds of a promptPool.
const (
	maxKeptBlocks  = 8192 // of one prompt: 512 KiB of text
	maxKeptPrompts = 256
)

// promptPool keeps ended prompts for re-use.
type promptPool struct {
	mu   sync.Mutex
	free []*sentPrompt
}

// get copies the prompt of an admission, whose blocks belong to the sender again with its reply.
func (l *promptPool) get(m *msg.Admit) *sentPrompt {
	l.mu.Lock()
	var p *sentPrompt
	if n := len(l.free); n > 0 {
		p, l.free = l.free[n-1], l.free[:n-1]
	} else {
		p = new(sentPrompt)
	}
	l.mu.Unlock()
	*p = sentPrompt{blocks: append(p.blocks[:0], m.Blocks...), hitBlocks: m.HitBlocks, tokens: m.Tokens}
	return p
}

func (l *promptPool) put(p *sentPrompt) {
	if cap(p.blocks) > maxKeptBlocks {
		p.blocks = nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.free) < maxKeptPrompts {
		l.free = append(l.free, p)
	}
}
