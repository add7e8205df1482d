package pdproxy

import (
	"cmp"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/routing"
)

// proxyState is the actor of a Proxy. It outlives a panic: what it knows of pairs and leases stays.
type proxyState struct {
	p         *Proxy
	timer     *time.Timer          // of the next tick; nil before the first
	ranks     [2][]routing.RankRef // that serve now, by side
	scratch   []routing.RankRef
	pairs     map[warmKey]*warming // of these ranks
	running   int                  // prewarm legs
	busy      map[routing.RankRef]bool
	leases    []leaseMessage                  // that outlive their tickets, by a lease at most
	resets    map[routing.RankRef]*cacheReset // that run or were refused, by decode rank
	met       int
	reported  pairsReport
	isClosing bool
}

type warmKey struct{ prefill, decode routing.RankRef }

// warming is what is known of a pair that may be used.
type warming struct {
	hasMet  bool
	isBad   bool // CannotPair
	isBusy  bool // a prewarm leg runs
	dueAt   time.Duration
	backoff time.Duration
	why     string // it has not met
}

// cacheReset is a reset of a decode rank's prefix cache.
type cacheReset struct {
	again string // why it must be done once more; "": it need not
}

type pairsReport struct {
	met, all int
	why      string
}

func newProxyState(p *Proxy) *proxyState {
	return &proxyState{
		p: p, pairs: map[warmKey]*warming{}, busy: map[routing.RankRef]bool{},
		resets: map[routing.RankRef]*cacheReset{}, reported: pairsReport{met: -1},
	}
}

// Receive implements inbox.Receiver.
func (s *proxyState) Receive(m any) {
	switch m := m.(type) {
	case tickMessage:
		defer s.rearm() // also after a panic
		s.tick()
	case prewarmed:
		s.onPrewarmed(m)
	case pairFailed:
		s.onPairFailed(warmKey(m))
	case alarmMessage:
		s.onAlarm(m)
	case wasReset:
		s.onReset(m)
	case leaseMessage:
		s.leases = append(s.leases, m)
	case closeMessage:
		s.isClosing = true
		s.haltIfIdle()
	}
}

// haltIfIdle ends the actor of an application that is gone when its last flight has ended.
func (s *proxyState) haltIfIdle() (halted bool) {
	if !s.isClosing || len(s.p.flights.all()) > 0 {
		return false
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	s.p.box.Halt()
	return true
}

// rearm sets the timer of the next tick.
func (s *proxyState) rearm() {
	switch {
	case s.haltIfIdle():
	case s.timer == nil:
		s.timer = time.AfterFunc(dispatch.WatchPeriod, func() { s.p.box.Send(tickMessage{}) })
	default:
		s.timer.Reset(dispatch.WatchPeriod)
	}
}

// tick calls the Watch, tells flights that their time is over, and looks after ranks and leases.
func (s *proxyState) tick() {
	at := s.p.clock.Now()
	for _, f := range s.p.flights.all() {
		f.tick(at)
	}
	s.endLeases(at.Now)
	if !s.isClosing {
		s.refreshRanks(at.Now)
		s.startPrewarms(at.Now)
		s.report()
	}
}

// endLeases releases what prefill ranks hold no longer.
func (s *proxyState) endLeases(now time.Duration) {
	isOver := func(l leaseMessage) bool { return now >= l.until || s.isClosing }
	if !slices.ContainsFunc(s.leases, isOver) {
		return
	}
	s.p.backend.UpdateTable(func(t *routing.PairTable) {
		s.leases = slices.DeleteFunc(s.leases, func(l leaseMessage) bool {
			if !isOver(l) {
				return false
			}
			t.Release(l.prefill, l.tokens)
			return true
		})
	})
}

// refreshRanks compares the ranks that serve with those that are known. A rank that does not serve for a
// moment keeps its pairs; another incarnation has none.
func (s *proxyState) refreshRanks(now time.Duration) {
	isChanged := false
	for side := dispatch.Prefill; side <= dispatch.Decode; side++ {
		s.scratch = s.p.backend.Ranks(s.scratch[:0], side)
		slices.SortFunc(s.scratch, compareRefs)
		if slices.Equal(s.scratch, s.ranks[side]) {
			continue
		}
		for _, old := range s.ranks[side] {
			if _, is := slices.BinarySearchFunc(s.scratch, old, compareRefs); !is {
				s.forget(side, old)
			}
		}
		s.ranks[side] = append(s.ranks[side][:0], s.scratch...)
		isChanged = true
	}
	if !isChanged {
		return
	}
	for _, prefill := range s.ranks[dispatch.Prefill] {
		for _, decode := range s.ranks[dispatch.Decode] {
			if key := (warmKey{prefill, decode}); s.pairs[key] == nil {
				s.addPair(key, now)
			}
		}
	}
}

func compareRefs(a, b routing.RankRef) int {
	return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Incarnation, b.Incarnation))
}

// addPair begins the prewarming of a pair, if its engines fit.
func (s *proxyState) addPair(key warmKey, now time.Duration) {
	w := &warming{dueAt: now, backoff: firstBackoff}
	s.pairs[key] = w
	if err := s.p.backend.CannotPair(key.prefill, key.decode); err != nil {
		w.isBad, w.why = true, err.Error()
		s.p.log.Warn("two ranks are not used as a pair", slog.String("prefill", key.prefill.ID.String()),
			slog.String("decode", key.decode.ID.String()), slog.Any("err", err))
	}
}

// forget drops the pairs of an incarnation that serves no longer.
func (s *proxyState) forget(side dispatch.Side, ref routing.RankRef) {
	for key, w := range s.pairs {
		if side == dispatch.Prefill && key.prefill == ref || side == dispatch.Decode && key.decode == ref {
			if w.hasMet {
				s.met--
			}
			delete(s.pairs, key)
		}
	}
	delete(s.resets, ref)
	s.p.backend.UpdateTable(func(t *routing.PairTable) {
		if side == dispatch.Prefill {
			t.ForgetPrefill(ref)
		} else {
			t.ForgetDecode(ref)
		}
	})
}

// startPrewarms starts the prewarm legs that are due, a few at once and one per decode rank: the handshakes
// of an engine wait for each other anyway.
func (s *proxyState) startPrewarms(now time.Duration) {
	if s.met == len(s.pairs) {
		return
	}
	for _, decode := range s.ranks[dispatch.Decode] {
		for _, prefill := range s.ranks[dispatch.Prefill] {
			key := warmKey{prefill, decode}
			w := s.pairs[key]
			if s.running >= prewarmsAtOnce {
				return
			}
			if w.hasMet || w.isBad || w.isBusy || s.busy[decode] || now < w.dueAt {
				continue
			}
			w.isBusy, s.busy[decode] = true, true
			s.running++
			s.p.prewarm(key)
		}
	}
}

// onPrewarmed notes that a pair has met, or when it is tried again.
func (s *proxyState) onPrewarmed(m prewarmed) {
	s.running--
	delete(s.busy, m.pair.decode)
	w := s.pairs[m.pair]
	if w == nil { // one of the ranks is gone
		return
	}
	w.isBusy = false
	if m.err == nil {
		w.hasMet, w.why = true, ""
		s.met++
		s.p.backend.UpdateTable(func(t *routing.PairTable) { t.SetMet(m.pair.prefill, m.pair.decode) })
		s.report()
		return
	}
	if w.why == "" { // one line, not one for each attempt
		s.p.log.Warn("a prefill rank and a decode rank did not meet; they are tried again",
			slog.String("prefill", m.pair.prefill.ID.String()),
			slog.String("decode", m.pair.decode.ID.String()), slog.Any("err", m.err))
	}
	w.why = m.err.Error()
	w.dueAt = s.p.clock.Now().Now + w.backoff
	w.backoff = min(2*w.backoff, maxBackoff)
}

// onPairFailed lets a pair meet again, later each time.
func (s *proxyState) onPairFailed(key warmKey) {
	w := s.pairs[key]
	if w == nil || !w.hasMet {
		return
	}
	w.hasMet, w.why = false, "prompts failed on their way between them"
	s.met--
	w.dueAt = s.p.clock.Now().Now + w.backoff
	w.backoff = min(2*w.backoff, maxBackoff)
	s.p.log.Warn("prompts failed between a prefill rank and a decode rank; they have to meet again",
		slog.String("prefill", key.prefill.ID.String()), slog.String("decode", key.decode.ID.String()))
	s.report()
}

// onAlarm resets the cache of the decode ranks concerned.
func (s *proxyState) onAlarm(m alarmMessage) {
	if m.decode != (routing.RankRef{}) {
		s.resetCache(m.decode, "parameters may have been read too late")
		return
	}
	for key, w := range s.pairs {
		if key.prefill == m.prefill && w.hasMet {
			s.resetCache(key.decode, "prefill rank "+m.prefill.ID.String()+
				" heard of blocks after the end of their lease")
		}
	}
}

// resetCache resets a decode rank's cache, again if a reset of it runs: that one may have come too early.
func (s *proxyState) resetCache(decode routing.RankRef, why string) {
	if r := s.resets[decode]; r != nil {
		r.again = why
		return
	}
	s.resets[decode] = &cacheReset{}
	s.p.backend.CountAlarm()
	s.p.log.Warn("the prefix cache of a decode rank may hold wrong blocks and is reset",
		slog.String("decode", decode.ID.String()), slog.String("cause", why))
	s.p.reset(decode)
}

// onReset notes the end of a reset. One that failed is repeated for as long as the rank lives.
func (s *proxyState) onReset(m wasReset) {
	r := s.resets[m.decode] // nil: the rank is gone
	delete(s.resets, m.decode)
	switch {
	case errors.Is(m.err, ErrNoReset):
		if r != nil {
			s.resets[m.decode] = &cacheReset{} // said once in the rank's life
		}
		s.p.log.Warn("a prefix cache that may hold wrong blocks stays: restart the engine, or start it so "+
			"that it allows resets (vLLM: VLLM_SERVER_DEV_MODE=1)",
			slog.String("decode", m.decode.ID.String()))
	case s.p.ctx.Err() != nil || r == nil:
	case m.err != nil:
		s.p.log.Warn("the reset of a prefix cache failed", slog.String("decode", m.decode.ID.String()),
			slog.Any("err", m.err))
		s.resetCache(m.decode, "the reset before failed")
	case r.again != "":
		s.resetCache(m.decode, r.again)
	}
}

// report tells the ingress how many pairs have met.
func (s *proxyState) report() {
	now := pairsReport{met: s.met, all: len(s.pairs)}
	if now.met < now.all {
		// in a fixed order, so that the text does not alternate
		for _, decode := range s.ranks[dispatch.Decode] {
			for _, prefill := range s.ranks[dispatch.Prefill] {
				if w := s.pairs[warmKey{prefill, decode}]; w != nil && w.why != "" && now.why == "" {
					now.why = "prefill " + prefill.ID.String() + " and decode " + decode.ID.String() + ": " +
						w.why
				}
			}
		}
	}
	if now == s.reported {
		return
	}
	s.reported = now
	s.p.backend.SetPairs(now.met, now.all, now.why)
}
