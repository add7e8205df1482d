package dpserver

import (
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine/kvevents"
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
