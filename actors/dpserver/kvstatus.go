package dpserver

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine"
	"github.com/dpserve/dpserve/routing/kvindex"
)

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
	st := msg.KVStatus{BlockSize: r.knownBlockSize(), Capacity: r.cacheCapacity(),
		Usage: r.scrape.last.KVUsage, Note: r.kvNote()}
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
