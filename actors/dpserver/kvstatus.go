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

// eventTotals is the counters of all subscriptions so far.
func (r *replica) eventTotals() msg.EventStatus {
	e, h := r.pulse.past, r.hearing()
	if h == nil {
		return e
	}
	st := h.sub.Stats()
	dropped, foreign := h.in.losses()
	e.Batches += st.Batches
	e.Gaps += st.Gaps + st.Overflows + dropped
	e.Restarts += st.Restarts
	e.Dropped += st.Malformed + st.Unknown + st.BadBatches + st.BadFrames + foreign
	return e
}

// noteKV copies what Status shows of the KV cache.
func (r *replica) noteKV() {
	uncached := r.uncached || r.vitals.facts.CachingOff && needsOf(r.app).Hits
	if r.kv == nil && r.vitals.source == nil && !uncached {
		return
	}
	st := msg.KVStatus{BlockSize: r.toldBlockSize(), Capacity: r.capacity(), Usage: r.scrape.last.KVUsage, Note: r.noteText()}
	events := r.eventTotals()
	if l := r.kv; l != nil {
		index := l.ix.Stats()
		for t := range l.columns {
			st.Blocks += l.len(kvindex.Tier(t))
		}
		st.Bytes, st.Sent, st.Orphans, st.Evicted = index.Bytes, l.len(kvindex.Sent), index.Orphans, index.Evicted
		events.Dropped += index.BadLength + index.BadBlockSize + index.SelfParent + index.Cycle + index.Conflict + index.AsideDropped
	}
	if r.vitals.source != nil {
		events.State = r.pulse.state
		if events.State == "" {
			events.State = msg.EventsConnecting
		}
		if r.pulse.state == msg.EventsSilent {
			events.SilentFor = r.pulse.quiet.Seconds()
		}
		st.Events = &events
	}
	r.stats.noteKV(&st)
}

// noteText is what a person should know.
func (r *replica) noteText() string {
	var notes []string
	if r.vitals.facts.CachingOff {
		notes = append(notes, "the engine runs without prefix caching: no prompt hits")
	}
	if r.pulse.failure != "" {
		notes = append(notes, "kv events cannot be followed: "+r.pulse.failure)
	}
	if r.pulse.state == msg.EventsSilent {
		notes = append(notes, fmt.Sprintf("no kv event for %s while requests complete: routing goes by what the rank was sent; look at the engine's --kv-events-config",
			r.pulse.quiet.Round(time.Second)))
	}
	told, seen, asked := r.vitals.facts.BlockSize, r.eventBlockSize(), engine.AskedBlockSize(r.spec.App)
	switch is := cmp.Or(seen, told); {
	case told > 0 && seen > 0 && told != seen:
		notes = append(notes, fmt.Sprintf("kv events come in blocks of %d tokens, the engine reported %d", seen, told))
	case asked > 0 && is > 0 && is != asked:
		notes = append(notes, fmt.Sprintf("the engine's kv blocks are of %d tokens, engine.args asks for %d", is, asked))
	}
	return strings.Join(notes, "; ")
}

// eventBlockSize is the tokens per block of the engine's events; 0 = none came.
func (r *replica) eventBlockSize() int {
	if r.kv == nil || r.kv.columns[kvindex.GPU] == nil {
		return 0
	}
	return r.kv.columns[kvindex.GPU].BlockSize()
}

// toldBlockSize is the engine's tokens per block: by its events, else by its own report; 0 = not known.
func (r *replica) toldBlockSize() int { return cmp.Or(r.eventBlockSize(), r.vitals.facts.BlockSize) }
