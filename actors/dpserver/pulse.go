package dpserver

import (
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine/kvevents"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// pulse is the health of a rank's events.
type pulse struct {
	state    string
	truth    bool // live
	starting bool // a subscription is being begun
	failure  string

	silence kvevents.Silence
	due     uint64 // completed requests that must have stored a block
	seen    uint64 // due at the last look
	lastDue time.Time
	quiet   time.Duration
	past    msg.EventStatus // counters of subscriptions that ended
}

// hearing is the subscription of the present life; nil if there is none, or not yet.
func (r *replica) hearing() *hearing {
	if h := r.listening.now.Load(); h != nil && h.in.life == r.vitals.life {
		return h
	}
	return nil
}

// eventStats are the subscription's counters; the zero value without one.
func (r *replica) eventStats() kvevents.Stats {
	if h := r.hearing(); h != nil {
		return h.sub.Stats()
	}
	return kvevents.Stats{}
}

// feelPulse looks at the events' health, and notes it: with every tick of the keeper, when events were applied, and when their
// subscription has changed.
func (r *replica) feelPulse() {
	if r.vitals.source != nil {
		r.judgeEvents()
	}
	r.noteKV()
}

func (r *replica) judgeEvents() {
	st, now, was := r.eventStats(), time.Now(), r.pulse.state
	r.listenForSilence(now, st.Batches)
	r.pulse.state = r.stateOf(&st)
	r.pulse.truth = r.pulse.state == msg.EventsLive
	if r.pulse.state != was {
		r.tellPulse(was)
	}
	if st.Restarts > r.vitals.restarts {
		r.vitals.restarts = st.Restarts
		r.restarted("its kv events began anew", false)
	}
}

func (r *replica) stateOf(st *kvevents.Stats) string {
	switch {
	case r.pulse.quiet >= r.timers.Silence:
		return msg.EventsSilent
	case !st.Connected:
		return msg.EventsConnecting
	case !st.Synced:
		return msg.EventsWaiting
	case st.Partial || r.kv != nil && r.kv.lost:
		return msg.EventsPartial
	}
	return msg.EventsLive
}

// listenForSilence measures how long requests have stored blocks without a batch. A stretch without such requests proves nothing.
func (r *replica) listenForSilence(now time.Time, batches uint64) {
	p := &r.pulse
	if p.due != p.seen {
		if now.Sub(p.lastDue) > r.timers.Silence && p.state != msg.EventsSilent {
			p.silence = kvevents.Silence{}
			p.silence.Check(now, batches, p.seen)
		}
		p.seen, p.lastDue = p.due, now
	}
	if p.quiet = p.silence.Check(now, batches, p.due); r.vitals.facts.CachingOff {
		p.quiet = 0
	}
}

func (r *replica) tellPulse(was string) {
	switch {
	case r.pulse.state == msg.EventsSilent:
		r.log.Warn("no kv event comes though requests complete: routing goes by what the rank was sent", slog.Duration("for", r.pulse.quiet))
	case was == msg.EventsSilent:
		r.log.Info("kv events come again")
	}
	r.refreshSent()
}

// refreshSent begins the record anew where its blocks are to live for another time from now on: longer, because events fell
// silent, or shorter, because they tell the truth.
func (r *replica) refreshSent() {
	if l := r.kv; l != nil && l.columns[kvindex.Sent] != nil && l.sentOpt != r.sentOptions() {
		l.drop(kvindex.Sent)
		r.keepTime()
	}
}

// countDue counts a request that must have shown in the events: it was computed, and with it a block was filled that was not
// cached before. Without a report of cached tokens every prompt of a block counts.
func (r *replica) countDue(m *msg.Done) {
	if r.vitals.source == nil || m.Outcome != msg.OK || m.PromptTokens == 0 {
		return
	}
	size := r.blockSize()
	filled := (m.PromptTokens + m.CompletionTokens - 1) / size // the last token was sampled, and never computed on
	if m.HasCached && filled <= m.CachedTokens/size || m.PromptTokens < size {
		return
	}
	r.pulse.due++
}
