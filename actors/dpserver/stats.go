package dpserver

import (
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine"
)

// Windows of Status.
const (
	rateWindow = 10  // seconds of tokens per second
	timeWindow = 512 // requests of time to first token, and of time per token
	hitWindow  = 512 // requests of the hit rate
)

// stats is the part of a rank's account that others read. The actor writes it, Status reads it.
type stats struct {
	mu          sync.Mutex
	open        int
	openTokens  int // prompt and generated tokens of open requests
	prefill     int // prompt tokens of open requests without a first token
	maxOngoing  int
	incarnation uint64
	ejected     bool
	away        string
	adapters    []string
	requests    uint64
	tokens      uint64
	buckets     [rateWindow]secondTokens
	ttft, itl   times
	hits        hits
	kv          client.KVStatus
	hasKV       bool
	transfers   engine.Transfers
}

// times are the last times of one kind.
type times struct {
	window [timeWindow]time.Duration
	seen   uint64
}

// add adds a time; 0 is none.
func (t *times) add(d time.Duration) {
	if d > 0 {
		t.window[t.seen%timeWindow] = d
		t.seen++
	}
}

// copy returns the times without an order.
func (t *times) copy() []time.Duration { return slices.Clone(t.window[:min(t.seen, timeWindow)]) }

// hits is what engines reported of cached prompt tokens.
type hits struct {
	prompt, cached uint64 // tokens, of all requests
	window         [hitWindow]struct{ prompt, cached int }
	seen           uint64
}

// rate is cached over prompt tokens within the window.
func (h *hits) rate() float64 {
	prompt, cached := 0, 0
	for _, w := range h.window[:min(h.seen, hitWindow)] {
		prompt, cached = prompt+w.prompt, cached+w.cached
	}
	if prompt == 0 {
		return 0
	}
	return float64(cached) / float64(prompt)
}

// addCached counts a request whose engine reported cached tokens. More cached tokens than prompt tokens count
// as the prompt's.
func (s *stats) addCached(prompt, cached int) {
	if prompt <= 0 || cached < 0 {
		return
	}
	cached = min(cached, prompt)
	s.mu.Lock()
	defer s.mu.Unlock()
	h := &s.hits
	h.prompt, h.cached = h.prompt+uint64(prompt), h.cached+uint64(cached)
	h.window[h.seen%hitWindow] = struct{ prompt, cached int }{prompt, cached}
	h.seen++
}

func (s *stats) setKV(kv *client.KVStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kv, s.hasKV = *kv, true
}

func (s *stats) setTransfers(t engine.Transfers) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.transfers = t
}

// transferStatus converts what an engine counts; nil if it counts nothing.
func transferStatus(t *engine.Transfers) *client.TransferStatus {
	if !t.Seen {
		return nil
	}
	return &client.TransferStatus{
		Count: uint64(t.Count), TotalMs: 1000 * t.Seconds, Bytes: uint64(t.Bytes), Failed: uint64(t.Failed),
		Expired: uint64(t.Expired), LateReads: uint64(t.LateReads),
	}
}

// secondTokens is the tokens of one second.
type secondTokens struct {
	second int64
	tokens int
}

func (s *stats) setState(maxOngoing int, incarnation uint64, ejected bool, away string,
	adapters []string,
) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.maxOngoing, s.incarnation, s.ejected, s.away = maxOngoing, incarnation, ejected, away
	s.adapters = adapters // replaced as a whole
}

func (s *stats) setOpen(a *account) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open, s.openTokens, s.prefill = a.openCount(), a.tokens, a.prefillTokens
}

func (s *stats) openPrefill() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.prefill
}

// addGenerated counts tokens of a running request.
func (s *stats) addGenerated(now time.Time, tokens int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addTokens(now, tokens)
}

// addEnded counts an ended request. tokens are those that addGenerated has not counted; ttft 0 means that no
// first token was seen, itl, the mean time between its tokens, that there was no second one.
func (s *stats) addEnded(now time.Time, tokens int, ttft, itl time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests++
	s.addTokens(now, tokens)
	s.ttft.add(ttft)
	s.itl.add(itl)
}

func (s *stats) addTokens(now time.Time, tokens int) {
	if tokens <= 0 {
		return
	}
	s.tokens += uint64(tokens)
	b := &s.buckets[now.Unix()%rateWindow]
	if b.second != now.Unix() {
		*b = secondTokens{second: now.Unix()}
	}
	b.tokens += tokens
}

func (s *stats) status(now time.Time) client.RankStatus {
	s.mu.Lock()
	st := client.RankStatus{
		MaxOngoing: s.maxOngoing, InFlight: s.open, OpenTokens: s.openTokens, Requests: s.requests,
		Tokens: s.tokens, TokensPerS: s.rate(now),
		PromptTokens: s.hits.prompt, CachedTokens: s.hits.cached, HitRate: s.hits.rate(), Ejected: s.ejected,
		Away: s.away, Adapters: s.adapters,
	}
	if s.hasKV {
		kv := s.kv // setKV gets a new Events each time
		st.KV = &kv
	}
	st.Transfer = transferStatus(&s.transfers)
	if s.incarnation != 0 {
		st.Incarnation = formatIncarnation(s.incarnation)
	}
	first, between := s.ttft.copy(), s.itl.copy()
	s.mu.Unlock()
	slices.Sort(first)
	slices.Sort(between)
	st.TTFTp50Ms, st.TTFTp95Ms = quantile(first, 50), quantile(first, 95)
	st.ITLp50Ms, st.ITLp95Ms = quantile(between, 50), quantile(between, 95)
	return st
}

// rate is tokens per second over the window, the running second included.
func (s *stats) rate(now time.Time) float64 {
	sum := 0
	for _, b := range s.buckets {
		if now.Unix()-b.second < rateWindow {
			sum += b.tokens
		}
	}
	return float64(sum) / rateWindow
}

// quantile of sorted durations in milliseconds, nearest rank; 0 if there is none.
func quantile(sorted []time.Duration, percent int) float64 {
	if len(sorted) == 0 {
		return 0
	}
	at := (len(sorted)*percent + 99) / 100
	return float64(sorted[at-1]) / float64(time.Millisecond)
}
