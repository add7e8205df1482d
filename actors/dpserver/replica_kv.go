package dpserver

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"reflect"
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

// replicaKV is the replica's knowledge of its engine's KV cache: it follows the cache's events, and tells the
// recorder what the record depends on.
type replicaKV struct {
	r             *replica
	setsID        uint64           // of the stream's present KV block sets
	settings      recorderSettings // that the recorder has
	askedUncached bool             // a request asked for a KV record although the engine caches nothing
	health        eventHealth
}

// currentSubscription is the subscription with the current number; nil if there is none, or it has not
// started yet.
func (k *replicaKV) currentSubscription() *eventSubscription {
	if h := k.r.subscriptions.current.Load(); h != nil && h.queue.subscriptionID == k.r.state.subscriptionID {
		return h
	}
	return nil
}

// eventStats are the subscription's counters; the zero value without one.
func (k *replicaKV) eventStats() kvevents.Stats {
	if h := k.currentSubscription(); h != nil {
		return h.sub.Stats()
	}
	return kvevents.Stats{}
}

// checkEventHealth updates the health of the events: with every health tick, after events were applied, and
// when their subscription has changed.
func (k *replicaKV) checkEventHealth() {
	if k.r.state.eventSource != nil {
		k.updateEventHealth()
	}
	k.updateKVStats()
}

func (k *replicaKV) updateEventHealth() {
	st, now, was := k.eventStats(), time.Now(), k.health.state
	k.measureSilence(now, st.Batches)
	k.health.state = k.eventState(&st)
	k.health.isLive = k.health.state == client.EventsLive
	if k.health.state != was {
		k.logEventState(was)
	}
	if st.Restarts > k.r.state.knownRestarts {
		k.r.state.knownRestarts = st.Restarts
		k.r.restartIncarnation("its kv events began anew", false)
	}
}

func (k *replicaKV) eventState(st *kvevents.Stats) string {
	switch {
	case k.health.silentFor >= k.r.timers.Silence:
		return client.EventsSilent
	case !st.Connected:
		return client.EventsConnecting
	case !st.Synced:
		return client.EventsWaiting
	case st.Partial || k.kvReport().isPartial:
		return client.EventsPartial
	}
	return client.EventsLive
}

// measureSilence measures how long requests have stored blocks without a batch of events. Time without such
// requests does not count.
func (k *replicaKV) measureSilence(now time.Time, batches uint64) {
	p := &k.health
	if p.expectedEvents != p.checkedExpected {
		if now.Sub(p.lastExpected) > k.r.timers.Silence && p.state != client.EventsSilent {
			p.silence = kvevents.Silence{}
			p.silence.Check(now, batches, p.checkedExpected)
		}
		p.checkedExpected, p.lastExpected = p.expectedEvents, now
	}
	if p.silentFor = p.silence.Check(now, batches, p.expectedEvents); k.r.state.facts.CachingOff {
		p.silentFor = 0
	}
}

// logEventState logs that the events fell silent or came again, and adapts the record of sent prompts.
func (k *replicaKV) logEventState(was string) {
	switch {
	case k.health.state == client.EventsSilent:
		k.r.log.Warn("no kv event comes though requests complete: routing goes by what the rank was sent",
			slog.Duration("for", k.health.silentFor))
	case was == client.EventsSilent:
		k.r.log.Info("kv events come again")
	}
	k.sendSettings()
}

// countExpectedEvents counts a request that must have caused an event: its prompt was computed, and filled a
// block that was not cached before. If the engine does not report cached tokens, every prompt of at least a
// block counts.
func (k *replicaKV) countExpectedEvents(m *msg.Done) {
	if k.r.state.eventSource == nil || m.Outcome != msg.OK || m.PromptTokens == 0 {
		return
	}
	size := k.blockSizeOrDefault()
	// the last token was sampled, and is not in the cache
	filled := (m.PromptTokens + m.CompletionTokens - 1) / size
	if m.HasCached && filled <= m.CachedTokens/size || m.PromptTokens < size {
		return
	}
	k.health.expectedEvents++
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
// when the block sets begin again.
func (k *replicaKV) restartSubscription() {
	past := k.eventTotals()
	k.r.state.subscriptionID++
	k.r.state.knownRestarts = 0
	k.health = eventHealth{pastTotals: past, isStarting: k.health.isStarting}
	k.startSubscription()
}

// startSubscription starts the current subscription beside the actor.
func (k *replicaKV) startSubscription() {
	src, s, life := k.r.state.eventSource, k.r.Server, k.r.state.subscriptionID
	if k.health.isStarting || src == nil && k.r.subscriptions.current.Load() == nil {
		return
	}
	k.health.isStarting = true
	k.r.runCheck(k.r.timers.CounterLimit, func(ctx context.Context) {
		s.box.Send(subscriptionResult{life, s.replaceSubscription(ctx, src, life)})
	})
}

// onSubscriptionResult notes how the start ended. A failed start is tried again with the next health tick.
func (k *replicaKV) onSubscriptionResult(m subscriptionResult) {
	k.health.isStarting = false
	if m.id != k.r.state.subscriptionID {
		k.startSubscription()
		return
	}
	failed := k.health.failure
	if k.health.failure = ""; m.err != nil {
		k.health.failure = m.err.Error()
		if k.health.failure != failed {
			k.r.log.Warn("kv events of a rank cannot be followed", slog.String("err", m.err.Error()))
		}
	}
	k.checkEventHealth()
}

// liveSentTTL is how long a routed prompt counts as cached while events are live: until its own events must
// have come.
const liveSentTTL = 2 * time.Second

// sentOptions are the present options of the record of sent prompts. While events are live and count the same
// blocks, a prompt counts until its events must have come. Without events, or in blocks of text, it counts
// for as long as an engine may keep it.
func (k *replicaKV) sentOptions() kvindex.Options {
	opt := kvindex.Options{
		Feed: kvindex.FromRecords, BlockSize: kvindex.DefaultTextBlock, TTL: kvindex.DefaultRecord,
	}
	if k.r.app.Routing.Identity == app.IdentityTokens {
		opt.BlockSize = 0
		if k.health.isLive {
			opt.TTL = liveSentTTL
		}
	}
	return opt
}

// beginStream sends every sink a snapshot and lets the recorder begin the KV block sets behind it. isLost
// says that the content of the block sets is not certain any more.
func (k *replicaKV) beginStream(isLost bool) {
	k.setsID = k.r.stream.begin(k.r.state.incarnation, k.r.state.facts.Base, k.r.snapshot())
	k.settings = k.currentSettings()
	k.r.scrape.published = msg.Status{}
	k.r.recorder.box.Send(setsBegin{
		setsID: k.setsID, subscriptionID: k.r.state.subscriptionID, isLost: isLost,
		settings: k.settings,
	})
}

func (k *replicaKV) currentSettings() recorderSettings {
	facts := k.r.state.facts
	facts.Adapters = nil // the record does not depend on them
	return recorderSettings{facts: facts, sent: k.sentOptions(), isLive: k.health.isLive}
}

// sendSettings tells the recorder what the record depends on, if it has changed.
func (k *replicaKV) sendSettings() {
	if now := k.currentSettings(); !reflect.DeepEqual(now, k.settings) {
		k.settings = now
		k.r.recorder.box.Send(now)
	}
}

// kvReport is the recorder's newest report of the present block sets.
func (k *replicaKV) kvReport() kvReport {
	report := k.r.recorder.load()
	if report.setsID != k.setsID {
		return kvReport{exists: report.exists}
	}
	return report
}

// cacheCapacity is the tokens that the engine's KV cache holds; 0: not known.
func (k *replicaKV) cacheCapacity() int64 {
	return cacheCapacity(&k.r.state.facts, k.kvReport().blockSize)
}

// promptOf copies the prompt of an admission for the recorder; nil if there is nothing to record.
func (k *replicaKV) promptOf(m *msg.Admit, ticket uint64) *sentPrompt {
	if len(m.Blocks) == 0 {
		return nil
	}
	if k.r.state.facts.CachingOff {
		k.askedUncached = true
		return nil
	}
	p := k.r.recorder.prompts.get(m)
	p.ticket, p.isWatched = ticket, m.Whole && k.r.node.PrefillTime != nil
	return p
}

// endPrompt tells the recorder how the request of a recorded prompt ended. Fewer cached tokens than expected
// are missing; an estimated prompt length is scaled to the reported one.
func (k *replicaKV) endPrompt(t *ticket, m *msg.Done) {
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
	k.r.recorder.box.Send(promptEnd{t.prompt})
}

func (k *replicaKV) blockSizeOrDefault() int {
	return cmp.Or(k.knownBlockSize(), routing.DefaultBlockSize)
}

// eventTotals is the sum of the counters of all subscriptions so far.
func (k *replicaKV) eventTotals() client.EventStatus {
	e, h := k.health.pastTotals, k.currentSubscription()
	if h == nil {
		return e
	}
	st := h.sub.Stats()
	dropped, foreign := h.queue.lossCounts()
	e.Batches += st.Batches
	e.Gaps += st.Gaps + st.Overflows + dropped
	e.Restarts += st.Restarts
	e.UnknownMembers += st.UnknownMembers
	e.Dropped += st.Malformed + st.Unknown + st.BadBatches + st.BadFrames + foreign
	return e
}

func (k *replicaKV) updateKVStats() {
	uncached := k.askedUncached || k.r.state.facts.CachingOff && policyNeeds(k.r.app).Hits
	report := k.kvReport()
	if !report.exists && k.r.state.eventSource == nil && !uncached {
		return
	}
	index := &report.index
	st := client.KVStatus{
		BlockSize: k.knownBlockSize(), Capacity: k.cacheCapacity(), Blocks: report.blocks, Sent: report.sent,
		Bytes: index.Bytes, Orphans: index.Orphans, Evicted: index.Evicted,
		Usage: k.r.scrape.last.KVUsage, Note: k.kvNote(),
	}
	events := k.eventTotals()
	events.Dropped += index.BadLength + index.BadBlockSize + index.SelfParent + index.Cycle + index.Conflict +
		index.AsideDropped
	if k.r.state.eventSource != nil {
		events.State = k.health.state
		if events.State == "" {
			events.State = client.EventsConnecting
		}
		if k.health.state == client.EventsSilent {
			events.SilentFor = k.health.silentFor.Seconds()
		}
		st.Events = &events
	}
	k.r.stats.setKV(&st)
}

func (k *replicaKV) kvNote() string {
	var notes []string
	if k.r.state.facts.CachingOff {
		notes = append(notes, "the engine runs without prefix caching: no prompt hits")
	}
	if k.health.failure != "" {
		notes = append(notes, "kv events cannot be followed: "+k.health.failure)
	}
	if k.health.state == client.EventsSilent {
		notes = append(notes, fmt.Sprintf("no kv event for %s while requests complete: routing goes by what "+
			"the rank was sent; look at the engine's --kv-events-config",
			k.health.silentFor.Round(time.Second)))
	}
	told, seen, asked := k.r.state.facts.BlockSize, k.kvReport().blockSize,
		engine.AskedBlockSize(k.r.spec.App)
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
func (k *replicaKV) knownBlockSize() int {
	return cmp.Or(k.kvReport().blockSize, k.r.state.facts.BlockSize)
}
