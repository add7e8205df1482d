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
	"github.com/dpserve/dpserve/client"
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
	pastTotals      client.EventStatus // counters of subscriptions that ended
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
	r.eventHealth.isLive = r.eventHealth.state == client.EventsLive
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
		return client.EventsSilent
	case !st.Connected:
		return client.EventsConnecting
	case !st.Synced:
		return client.EventsWaiting
	case st.Partial || r.kvReport().isPartial:
		return client.EventsPartial
	}
	return client.EventsLive
}

// measureSilence measures how long requests have stored blocks without a batch of events. Time without such
// requests does not count.
func (r *replica) measureSilence(now time.Time, batches uint64) {
	p := &r.eventHealth
	if p.expectedEvents != p.checkedExpected {
		if now.Sub(p.lastExpected) > r.timers.Silence && p.state != client.EventsSilent {
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
	case r.eventHealth.state == client.EventsSilent:
		r.log.Warn("no kv event comes though requests complete: routing goes by what the rank was sent",
			slog.Duration("for", r.eventHealth.silentFor))
	case was == client.EventsSilent:
		r.log.Info("kv events come again")
	}
	r.sendSettings()
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

// Messages of the event subscriptions and of the recorder.
type (
	subscriptionResult struct { // a subscription has started, or failed to
		id  uint64
		err error
	}
	eventsApplied struct{} // the recorder has applied events, or the subscription's Stats have changed
	promptShown   struct { // events show the last full block of a ticket's prompt
		ticket    uint64
		wasBefore bool // they did at its admission
	}
	recorderRestarted struct{} // the recorder has panicked
)

// restartSubscription starts a new subscription. The recorder drops the blocks that the one before reported
// when the columns begin again.
func (r *replica) restartSubscription() {
	past := r.eventTotals()
	r.state.subscriptionID++
	r.state.knownRestarts = 0
	r.eventHealth = eventHealth{pastTotals: past, isStarting: r.eventHealth.isStarting}
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

// beginStream sends every sink a snapshot and lets the recorder begin the KV columns behind it. isLost says
// that the content of the columns is not certain any more.
func (r *replica) beginStream(isLost bool) {
	r.columnsID = r.stream.begin(r.state.incarnation, r.snapshot())
	r.settings = r.currentSettings()
	r.scrape.published = msg.Status{}
	r.recorder.box.Send(columnsBegin{
		columnsID: r.columnsID, subscriptionID: r.state.subscriptionID, isLost: isLost, settings: r.settings,
	})
}

func (r *replica) currentSettings() recorderSettings {
	return recorderSettings{facts: r.state.facts, sent: r.sentOptions(), isLive: r.eventHealth.isLive}
}

// sendSettings tells the recorder what the record depends on, if it has changed.
func (r *replica) sendSettings() {
	if now := r.currentSettings(); now != r.settings {
		r.settings = now
		r.recorder.box.Send(now)
	}
}

// kvReport is the recorder's newest report of the present columns.
func (r *replica) kvReport() kvReport {
	report := r.recorder.load()
	if report.columnsID != r.columnsID {
		return kvReport{exists: report.exists}
	}
	return report
}

// cacheCapacity is the tokens that the engine's KV cache holds; 0: not known.
func (r *replica) cacheCapacity() int64 {
	return cacheCapacity(&r.state.facts, r.kvReport().blockSize)
}

// promptOf copies the prompt of an admission for the recorder; nil if there is nothing to record.
func (r *replica) promptOf(m *msg.Admit, ticket uint64) *sentPrompt {
	if len(m.Blocks) == 0 {
		return nil
	}
	if r.state.facts.CachingOff {
		r.askedUncached = true
		return nil
	}
	p := r.recorder.prompts.get(m)
	p.ticket, p.isWatched = ticket, m.Whole && r.prefillTime != nil
	return p
}

// endPrompt tells the recorder how the request of a recorded prompt ended. Fewer cached tokens than expected
// are missing; an estimated prompt length is scaled to the reported one.
func (r *replica) endPrompt(t *ticket, m *msg.Done) {
	if t.prompt == nil {
		return
	}
	end := &t.prompt.end
	end.isWithdrawn = (m.Outcome != msg.OK || m.Cause == msg.CauseClientError) && !t.hasFirstToken() &&
		m.FirstToken == 0
	end.promptTokens = m.PromptTokens
	if m.HasCached && t.req.Tokens > 0 {
		expected := float64(t.req.Hit)
		if m.PromptTokens > 0 {
			expected *= float64(m.PromptTokens) / float64(t.req.Tokens)
		}
		end.missing = expected - float64(m.CachedTokens)
	}
	r.recorder.box.Send(promptEnd{t.prompt})
}

// blockSizeOrDefault is the engine's tokens per block, or the default.
func (r *replica) blockSizeOrDefault() int {
	return cmp.Or(r.knownBlockSize(), routing.DefaultBlockSize)
}

// eventTotals is the sum of the counters of all subscriptions so far.
func (r *replica) eventTotals() client.EventStatus {
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
	report := r.kvReport()
	if !report.exists && r.state.eventSource == nil && !uncached {
		return
	}
	index := &report.index
	st := client.KVStatus{
		BlockSize: r.knownBlockSize(), Capacity: r.cacheCapacity(), Blocks: report.blocks, Sent: report.sent,
		Bytes: index.Bytes, Orphans: index.Orphans, Evicted: index.Evicted,
		Usage: r.scrape.last.KVUsage, Note: r.kvNote(),
	}
	events := r.eventTotals()
	events.Dropped += index.BadLength + index.BadBlockSize + index.SelfParent + index.Cycle + index.Conflict +
		index.AsideDropped
	if r.state.eventSource != nil {
		events.State = r.eventHealth.state
		if events.State == "" {
			events.State = client.EventsConnecting
		}
		if r.eventHealth.state == client.EventsSilent {
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
	if r.eventHealth.state == client.EventsSilent {
		notes = append(notes, fmt.Sprintf("no kv event for %s while requests complete: routing goes by what "+
			"the rank was sent; look at the engine's --kv-events-config",
			r.eventHealth.silentFor.Round(time.Second)))
	}
	told, seen, asked := r.state.facts.BlockSize, r.kvReport().blockSize, engine.AskedBlockSize(r.spec.App)
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

// knownBlockSize is the engine's tokens per block: by its events, else by its own report; 0: not known.
func (r *replica) knownBlockSize() int {
	return cmp.Or(r.kvReport().blockSize, r.state.facts.BlockSize)
}

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
		ticket: id, due: now.Add(takes), latest: now.Add(stallFactor * takes), isUnseen: t.prompt != nil,
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
	return r.account.tickets[e.ticket] != nil && e.isUnseen && r.eventHealth.isLive &&
		r.app.Routing.Identity == app.IdentityTokens
}

// onPromptShown ends the prefill of a prompt that the events show now. Events that showed it before say
// nothing about its prefill.
func (r *replica) onPromptShown(m promptShown) {
	p := &r.prefills
	i := slices.IndexFunc(p.byDue, func(e wholePrefill) bool { return e.ticket == m.ticket })
	switch {
	case i < 0:
	case m.wasBefore:
		p.byDue[i].isUnseen = false
	default:
		p.byDue = slices.Delete(p.byDue, i, i+1)
		r.predictFirstToken(m.ticket, time.Now())
	}
}

// predictFirstToken emits that a ticket's prefill was over at an instant, by prediction: the engine has not
// shown it.
func (r *replica) predictFirstToken(id uint64, at time.Time) {
	if t, first := r.account.assumeDecoding(id); first {
		r.emitRequestRecord(msg.RecFirstToken, &t.req, msg.CausePredicted, at)
	}
}
