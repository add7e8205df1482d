package remote

import (
	"sync"
	"time"
)

// Wrong tokens that are looked up; each costs a round of consensus. A secret has 128 bits: the limits are for the log and the
// disks, not against guessing. A token that is known here is never held up by them.
const (
	wrongWindow    = time.Minute
	wrongPerSource = 10
	wrongTotal     = 60
)

// wrongTokens counts wrong tokens of the current window, by source. It never holds more than wrongTotal entries.
type wrongTokens struct {
	mu      sync.Mutex
	since   time.Time
	total   int
	sources map[string]int
}

// allows says whether a token that is not known here may be looked up, and counts it.
func (w *wrongTokens) allows(source string, now time.Time) bool {
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
