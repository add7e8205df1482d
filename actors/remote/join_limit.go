package remote

import (
	"sync"
	"time"
)

// Bounds of lookups of unknown tokens, each of which costs a round of consensus. A secret has 128 bits: the
// limits protect the log and the disks, not against guessing. They never delay a token that this node knows.
const (
	wrongWindow    = time.Minute
	wrongPerSource = 10
	wrongTotal     = 60
)

// tokenLimiter counts unknown tokens of the current window, by source. It never holds more than wrongTotal
// entries.
type tokenLimiter struct {
	mu      sync.Mutex
	since   time.Time
	total   int
	sources map[string]int
}

// allow says whether an unknown token may be looked up, and counts it.
func (w *tokenLimiter) allow(source string, now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now.Sub(w.since) >= wrongWindow || now.Before(w.since) {
		w.since, w.total, w.sources = now, 0, map[string]int{}
	}
	if w.total >= wrongTotal || w.sources[source] >= wrongPerSource {
		return false
	}
	w.total++
	w.sources[source]++
	return true
}
