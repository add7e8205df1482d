package dpserver

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// eventHealth is the health of a rank's KV events.
type eventHealth struct {
	state      string
	isLive     bool // live
	isStarting bool // a subscription is being started
	failure    string

	silence         kvevents.Silence
	expectedEvents  uint64 // ended requests that must have stored a block
	checkedExpected uint64 // expectedEvents at the last check
	lastExpected    time.Time
	silentFor       time.Duration
	pastTotals      msg.EventStatus // counters of subscriptions that ended
}

// currentSubscription is the subscription with the current number; nil if there is none, or it has not
// started yet.
func (r *replica) currentSubscription() *eventSubscription {
	if h := r.subscriptions.current.Load(); h != nil && h.queue.subscriptionID == r.state.subscriptionID {
		return h
	}
	return nil
}

// eventStats are the subscription's counters; the zero value without one.
func (r *replica) eventStats() kvevents.Stats {
	if h := r.currentSubscription(); h != nil {
		return h.sub.Stats()
	}
	return kvevents.Stats{}
}

// checkEventHealth updates the health of the events: with every health tick, after events were applied, and
// when their subscription has changed.
func (r *replica) checkEventHealth() {
	if r.state.eventSource != nil {
		r.updateEventHealth()
	}
	r.updateKVStats()
}

func (r *replica) updateEventHealth() {
	st, now, was := r.eventStats(), time.Now(), r.eventHealth.state
	r.measureSilence(now, st.Batches)
	r.eventHealth.state = r.eventState(&st)
	r.eventHealth.isLive = r.eventHealth.state == msg.EventsLive
	if r.eventHealth.state != was {
		r.logEventState(was)
	}
	if st.Restarts > r.state.knownRestarts {
		r.state.knownRestarts = st.Restarts
		r.restartIncarnation("its kv events began anew", false)
	}
}

func (r *replica) eventState(st *kvevents.Stats) string {
	switch {
	case r.eventHealth.silentFor >= r.timers.Silence:
		return msg.EventsSilent
	case !st.Connected:
		return msg.EventsConnecting
	case !st.Synced:
		return msg.EventsWaiting
	case st.Partial || r.kv != nil && r.kv.isPartial:
		return msg.EventsPartial
	}
	return msg.EventsLive
}

// measureSilence measures how long requests have stored blocks without a batch of events. Time without such
// requests does not count.
func (r *replica) measureSilence(now time.Time, batches uint64) {
	p := &r.eventHealth
	if p.expectedEvents != p.checkedExpected {
		if now.Sub(p.lastExpected) > r.timers.Silence && p.state != msg.EventsSilent {
			p.silence = kvevents.Silence{}
			p.silence.Check(now, batches, p.checkedExpected)
		}
		p.checkedExpected, p.lastExpected = p.expectedEvents, now
	}
	if p.silentFor = p.silence.Check(now, batches, p.expectedEvents); r.state.facts.CachingOff {
		p.silentFor = 0
	}
}

// logEventState logs that the events fell silent or came again, and adapts the record of sent prompts.
func (r *replica) logEventState(was string) {
	switch {
	case r.eventHealth.state == msg.EventsSilent:
		r.log.Warn("no kv event comes though requests complete: routing goes by what the rank was sent",
			slog.Duration("for", r.eventHealth.silentFor))
	case was == msg.EventsSilent:
		r.log.Info("kv events come again")
	}
	r.refreshSentColumn()
}

// refreshSentColumn begins the record of sent prompts again if its blocks are to live for another time:
// longer when events fell silent, shorter when they are live.
func (r *replica) refreshSentColumn() {
	if l := r.kv; l != nil && l.columns[kvindex.Sent] != nil && l.sentOptions != r.sentOptions() {
		l.dropColumns(kvindex.Sent)
		r.armExpiry()
	}
}

// countExpectedEvents counts a request that must have caused an event: its prompt was computed, and filled a
// block that was not cached before. If the engine does not report cached tokens, every prompt of at least a
// block counts.
func (r *replica) countExpectedEvents(m *msg.Done) {
	if r.state.eventSource == nil || m.Outcome != msg.OK || m.PromptTokens == 0 {
		return
	}
	size := r.blockSizeOrDefault()
	// the last token was sampled, and is not in the cache
	filled := (m.PromptTokens + m.CompletionTokens - 1) / size
	if m.HasCached && filled <= m.CachedTokens/size || m.PromptTokens < size {
		return
	}
	r.eventHealth.expectedEvents++
}

// Messages of the event subscriptions.
type (
	eventsQueued struct{ queue *eventQueue } // events wait
	// a subscription has started, or failed to
	subscriptionResult struct { // a subscription was begun, or not
		id  uint64
		err error
	}
)

// restartSubscription starts a new subscription. The blocks that the one before reported are dropped.
func (r *replica) restartSubscription() {
	past := r.eventTotals()
	r.state.subscriptionID++
	r.state.knownRestarts = 0
	r.eventHealth = eventHealth{pastTotals: past, isStarting: r.eventHealth.isStarting}
	if r.kv != nil {
		r.kv.currentBatch, r.kv.isPartial = nil, false
		r.kv.dropEventColumns()
	}
	r.startSubscription()
}

// startSubscription starts the current subscription beside the actor.
func (r *replica) startSubscription() {
	src, s, life := r.state.eventSource, r.Server, r.state.subscriptionID
	if r.eventHealth.isStarting || src == nil && r.subscriptions.current.Load() == nil {
		return
	}
	r.eventHealth.isStarting = true
	r.runProbe(r.timers.CounterLimit, func(ctx context.Context) {
		s.box.Send(subscriptionResult{
			life,
			s.replaceSubscription(ctx, src, life),
		})
	})
}

// onSubscriptionResult notes how the start ended. A failed start is tried again with the next health tick.
func (r *replica) onSubscriptionResult(m subscriptionResult) {
	r.eventHealth.isStarting = false
	if m.id != r.state.subscriptionID {
		r.startSubscription()
		return
	}
	failed := r.eventHealth.failure
	if r.eventHealth.failure = ""; m.err != nil {
		r.eventHealth.failure = m.err.Error()
		if r.eventHealth.failure != failed {
			r.log.Warn("kv events of a rank cannot be followed", slog.String("err", m.err.Error()))
		}
	}
	r.checkEventHealth()
}

// onEventsQueued applies one step of the queued events and posts itself for the rest, so that an admission
// waits for one step at most.
func (r *replica) onEventsQueued(m eventsQueued) {
	if m.queue.subscriptionID != r.state.subscriptionID || r.state.phase == phaseEnded {
		return
	}
	l := r.ensureKVRecord()
	if l == nil {
		return
	}
	if l.currentBatch == nil {
		if l.currentBatch = m.queue.takeBatch(l.spareBatch); l.currentBatch == nil {
			r.boundSent()
			r.checkEventHealth()
			r.armExpiry()
			return
		}
		l.spareBatch = nil
	}
	b := l.currentBatch
	l.currentBatch = nil // a batch that panics is dropped
	l.applyBatch(b)
	r.endShownPrefills()
	if b.isEmpty() {
		b.clear()
		l.spareBatch = b
	} else {
		l.currentBatch = b
	}
	r.box.Send(m)
}

// liveSentTTL is how long a routed prompt counts as cached while events are live: until its own events must
// have come.
const liveSentTTL = 2 * time.Second

// sentOptions are the present options of the record of sent prompts. While events are live and count the same
// blocks, a prompt counts until its events must have come. Without events, or in blocks of text, it counts
// for as long as an engine may keep it.
func (r *replica) sentOptions() kvindex.Options {
	opt := kvindex.Options{
		Feed: kvindex.FromRecords, BlockSize: kvindex.DefaultTextBlock,
		TTL: kvindex.DefaultRecord,
	}
	if r.app.Routing.Identity == app.IdentityTokens {
		opt.BlockSize = 0
		if r.eventHealth.isLive {
			opt.TTL = liveSentTTL
		}
	}
	return opt
}

// recordSent records that the rank was sent a request.
func (r *replica) recordSent(t *ticket) {
	l := r.ensureKVRecord()
	if l == nil {
		return
	}
	l.seedAverage(t)
	now := l.advanceClock()
	if l.columns[kvindex.Sent] == nil {
		l.sentOptions = r.sentOptions()
	}
	if c := l.openColumn(kvindex.Sent, l.sentOptions); c != nil {
		c.SetCapacity(l.toBlocks(r.cacheCapacity()))
		t.recorded = c.Record(t.blocks, now)
	}
	l.flushRemovals()
	r.armExpiry()
}

// cacheCapacity is the tokens that the engine's KV cache holds; 0: not known.
func (r *replica) cacheCapacity() int64 {
	return int64(r.state.facts.Blocks) * int64(r.knownBlockSize())
}

// deviceBlocks is the most blocks that the engine's events can report at a time; 0: not known. An engine that
// counts its blocks in a larger size than its events has more blocks of the events' size.
func (r *replica) deviceBlocks() int {
	f := &r.state.facts
	size := r.eventBlockSize()
	if size == 0 || f.BlockSize <= size {
		return f.Blocks
	}
	return f.Blocks * ((f.BlockSize + size - 1) / size)
}

// correctSent adjusts the record after a request ends. Without a first token its blocks are withdrawn, unless
// another request shares them. Clearly fewer cached tokens than expected mean that the engine evicts faster
// than the record does.
func (r *replica) correctSent(t *ticket, m *msg.Done) {
	l := r.kv
	if l == nil || len(t.blocks) == 0 || l.columns[kvindex.Sent] == nil {
		return
	}
	c := l.columns[kvindex.Sent]
	if (m.Outcome != msg.OK || m.Cause == msg.CauseClientError) && !t.hasFirstToken() && m.FirstToken == 0 {
		c.Withdraw(t.blocks, max(t.recorded.Held, t.hitBlocks), t.recorded.At)
	} else {
		l.updateAverage(t, m.PromptTokens)
		if short := r.cacheShortfall(t, m); short > 0 {
			c.Trim(l.toBlocks(short))
		}
	}
	l.flushRemovals()
}

// cacheShortfall is how many tokens fewer were cached than expected; 0 within a block. An estimated prompt
// length is scaled to the reported one.
func (r *replica) cacheShortfall(t *ticket, m *msg.Done) int64 {
	if !m.HasCached || t.req.Tokens <= 0 {
		return 0
	}
	expected := float64(t.req.Hit)
	if m.PromptTokens > 0 {
		expected *= float64(m.PromptTokens) / float64(t.req.Tokens)
	}
	block := max(float64(r.blockSizeOrDefault()), r.kv.tokensPerBlock)
	if short := expected - float64(m.CachedTokens); short > block {
		return int64(short)
	}
	return 0
}

// blockSizeOrDefault is the engine's tokens per block, or the default.
func (r *replica) blockSizeOrDefault() int {
	return cmp.Or(r.knownBlockSize(), routing.DefaultBlockSize)
}

// boundSent keeps the record of sent prompts no larger than what the engine holds by its events, after they
// reported removals. Prompts without a first token are added, because their events are still to come.
func (r *replica) boundSent() {
	l := r.kv
	if !l.hasRemovals {
		return
	}
	l.hasRemovals = false
	if c := l.columns[kvindex.Sent]; c != nil && r.eventHealth.isLive && l.tokensPerBlock > 0 {
		held := int64(l.columnLen(kvindex.GPU))*int64(r.blockSizeOrDefault()) + int64(r.account.prefillTokens)
		c.Trim(c.Len() - l.toBlocks(held))
		l.flushRemovals()
	}
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
	if c.timer != nil {
		c.timer.Stop()
	}
	c.due = 0
}

// armExpiry sets the timer for the next expiry.
func (r *replica) armExpiry() {
	l := r.kv
	if l == nil {
		return
	}
	now := time.Since(l.startedAt)
	due, some := now+minExpiryInterval, l.needsSweep
	if c := l.columns[kvindex.Sent]; c != nil && !some {
		at, any := c.Expires()
		due, some = max(due, at), any
	}
	if !some || r.expiry.due > 0 && r.expiry.due <= due {
		return
	}
	r.expiry.stop()
	r.expiry.due, r.expiry.timer = due, r.sendAfter(due-now, expiryTick{l})
}

func (r *replica) onExpiryTick(m expiryTick) {
	if m.of != r.kv || r.kv == nil {
		return
	}
	r.expiry.stop()
	m.of.advanceClock()
	m.of.sweepStep()
	m.of.flushRemovals()
	r.armExpiry()
}

// eventTotals is the sum of the counters of all subscriptions so far.
func (r *replica) eventTotals() msg.EventStatus {
	e, h := r.eventHealth.pastTotals, r.currentSubscription()
	if h == nil {
		return e
	}
	st := h.sub.Stats()
	dropped, foreign := h.queue.lossCounts()
	e.Batches += st.Batches
	e.Gaps += st.Gaps + st.Overflows + dropped
	e.Restarts += st.Restarts
	e.Dropped += st.Malformed + st.Unknown + st.BadBatches + st.BadFrames + foreign
	return e
}

// updateKVStats copies what Status shows of the KV cache.
func (r *replica) updateKVStats() {
	uncached := r.askedUncached || r.state.facts.CachingOff && policyNeeds(r.app).Hits
	if r.kv == nil && r.state.eventSource == nil && !uncached {
		return
	}
	st := msg.KVStatus{
		BlockSize: r.knownBlockSize(), Capacity: r.cacheCapacity(),
		Usage: r.scrape.last.KVUsage, Note: r.kvNote(),
	}
	events := r.eventTotals()
	if l := r.kv; l != nil {
		index := l.index.Stats()
		for t := range l.columns {
			st.Blocks += l.columnLen(kvindex.Tier(t))
		}
		st.Bytes, st.Sent, st.Orphans, st.Evicted = index.Bytes, l.columnLen(kvindex.Sent), index.Orphans,
			index.Evicted
		events.Dropped += index.BadLength + index.BadBlockSize + index.SelfParent + index.Cycle +
			index.Conflict + index.AsideDropped
	}
	if r.state.eventSource != nil {
		events.State = r.eventHealth.state
		if events.State == "" {
			events.State = msg.EventsConnecting
		}
		if r.eventHealth.state == msg.EventsSilent {
			events.SilentFor = r.eventHealth.silentFor.Seconds()
		}
		st.Events = &events
	}
	r.stats.setKV(&st)
}

// kvNote is the note on the KV cache for people.
func (r *replica) kvNote() string {
	var notes []string
	if r.state.facts.CachingOff {
		notes = append(notes, "the engine runs without prefix caching: no prompt hits")
	}
	if r.eventHealth.failure != "" {
		notes = append(notes, "kv events cannot be followed: "+r.eventHealth.failure)
	}
	if r.eventHealth.state == msg.EventsSilent {
		notes = append(notes, fmt.Sprintf("no kv event for %s while requests complete: routing goes by what "+
			"the rank was sent; look at the engine's --kv-events-config",
			r.eventHealth.silentFor.Round(time.Second)))
	}
	told, seen, asked := r.state.facts.BlockSize, r.eventBlockSize(), engine.AskedBlockSize(r.spec.App)
	switch is := cmp.Or(seen, told); {
	case told > 0 && seen > 0 && told != seen:
		notes = append(notes, fmt.Sprintf("kv events come in blocks of %d tokens, the engine reported %d",
			seen, told))
	case asked > 0 && is > 0 && is != asked:
		notes = append(notes, fmt.Sprintf("the engine's kv blocks are of %d tokens, engine.args asks for %d",
			is, asked))
	}
	return strings.Join(notes, "; ")
}

// eventBlockSize is the tokens per block of the engine's events; 0: no event came.
func (r *replica) eventBlockSize() int {
	if r.kv == nil || r.kv.columns[kvindex.GPU] == nil {
		return 0
	}
	return r.kv.columns[kvindex.GPU].BlockSize()
}

// knownBlockSize is the engine's tokens per block: by its events, else by its own report; 0: not known.
func (r *replica) knownBlockSize() int { return cmp.Or(r.eventBlockSize(), r.state.facts.BlockSize) }

// predictPrefill predicts when the prefill of a ticket ends that was just admitted. The step law gives
// several prompts too much time both as one long prompt (their tokens do not attend to each other) and one
// after the other (they share steps). The shorter of both is nearer.
func (r *replica) predictPrefill(id uint64, t *ticket, whole bool) {
	if r.prefillTime == nil {
		return
	}
	r.account.addPrefillTime(t, r.prefillTime(t.uncachedTokens()))
	now := t.admittedAt
	t.prefillPredicted = min(r.prefillTime(r.account.uncachedWork), r.account.prefillSum)
	if !whole {
		return
	}
	takes := r.prefills.pace.scale(t.prefillPredicted)
	r.prefills.insert(wholePrefill{
		ticket: id, due: now.Add(takes), latest: now.Add(stallFactor * takes), isUnseen: len(t.blocks) > 0 &&
			!r.eventsShowPrompt(t),
	})
	r.armPrefillTimer(now)
}

// armPrefillTimer sets the timer to the first ticket that is due.
func (r *replica) armPrefillTimer(now time.Time) {
	p := &r.prefills
	if len(p.byDue) == 0 || !p.timerAt.IsZero() && !p.byDue[0].due.Before(p.timerAt) {
		return
	}
	p.timerAt = p.byDue[0].due
	if wait := p.timerAt.Sub(now); p.timer == nil {
		p.timer = r.sendAfter(wait, prefillTimer{})
	} else {
		p.timer.Reset(wait)
	}
}

func (r *replica) onPrefillTimer() {
	p, now := &r.prefills, time.Now()
	p.timerAt = time.Time{}
	for len(p.byDue) > 0 && !now.Before(p.byDue[0].due) {
		e := p.byDue[0]
		p.byDue = slices.Delete(p.byDue, 0, 1)
		if e.due.Before(e.latest) && r.awaitsPromptEvents(&e) {
			e.due = e.latest
			p.insert(e)
			continue
		}
		r.predictFirstToken(e.ticket, e.due)
	}
	r.armPrefillTimer(now)
}

// awaitsPromptEvents says whether the engine's events will show the end of the prompt, and have not yet.
func (r *replica) awaitsPromptEvents(e *wholePrefill) bool {
	t := r.account.tickets[e.ticket]
	return t != nil && e.isUnseen && r.eventHealth.isLive && r.app.Routing.Identity == app.IdentityTokens &&
		!r.eventsShowPrompt(t)
}

// eventsShowPrompt says whether the events report the last full block of the ticket's prompt on the GPU.
func (r *replica) eventsShowPrompt(t *ticket) bool {
	if r.kv == nil || len(t.blocks) == 0 {
		return false
	}
	c := r.kv.columns[kvindex.GPU]
	return c != nil && c.Holds(t.blocks[len(t.blocks)-1])
}

// endShownPrefills ends the prefills whose prompts the events show now.
func (r *replica) endShownPrefills() {
	p := &r.prefills
	for i := 0; i < len(p.byDue); {
		e := p.byDue[i]
		if t := r.account.tickets[e.ticket]; !e.isUnseen || t == nil || !r.eventsShowPrompt(t) {
			i++
			continue
		}
		p.byDue = slices.Delete(p.byDue, i, i+1)
		r.predictFirstToken(e.ticket, time.Now())
	}
}

// predictFirstToken emits that a ticket's prefill was over at an instant, by prediction: the engine has not
// shown it.
func (r *replica) predictFirstToken(id uint64, at time.Time) {
	if t, first := r.account.assumeDecoding(id); first {
		r.emitRequestRecord(msg.RecFirstToken, &t.req, msg.CausePredicted, at)
	}
}
