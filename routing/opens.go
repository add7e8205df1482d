package routing

import (
	"math"
	"math/bits"
	"time"
)

// phase is where an open request stands. The zero value marks a free cell of the table.
type phase uint8

const (
	free     phase = iota
	bumped         // own dispatch without a ticket or a record
	ticketed       // own dispatch, admitted as number seq; lives until the stream is at seq
	admitted       // in the replica's account, prefill not known to be done
	decoding       // in the replica's account, first token seen
	held           // own dispatch whose caller reported the end of its prefill
)

// open is one request on one rank. It keeps what the request adds to the rank's Load, so that subtracting it
// is exact.
type open struct {
	key    uint64
	seq    uint64        // ticketed: the ticket's stream number
	sent   time.Duration // own: when it was dispatched
	tokens int32         // prompt
	out    int32         // output so far
	hit    int32         // prompt tokens that were cached
	slot   int32         // its place in the rank's prefills, 0 if it has none
	took   uint32        // µs: own: from the dispatch to the ticket; 0 = it is not there yet
	phase  phase
	mine   bool // dispatched by this router
}

// own reports whether the entry is a bump of this Router and not an entry of the replica's account.
func (o *open) own() bool { return o.phase == bumped || o.phase == ticketed || o.phase == held }

// isBump reports whether it is an own dispatch that waits for its prefill and that the rank's records have
// not named.
func (o *open) isBump() bool { return o.phase == bumped || o.phase == ticketed }

// ticketAt records the time of the ticket.
func (o *open) ticketAt(now time.Duration) {
	o.took = uint32(min(max((now-o.sent).Microseconds(), 1), math.MaxUint32))
}

// admittedBy is the latest instant at which the rank can have admitted it.
func (o *open) admittedBy(now time.Duration) time.Duration {
	if o.took == 0 {
		return now
	}
	return min(now, o.sent+time.Duration(o.took)*time.Microsecond)
}

// hasPrefill reports whether the prompt is still to be computed, as far as the Router knows.
func (o *open) hasPrefill() bool { return o.phase != decoding && o.phase != held }

// uncached is the number of prompt tokens that the prefill computes.
func (o *open) uncached() int64 { return int64(o.tokens - o.hit) }

// pairs is twice the attention pairs of its prefill.
func (o *open) pairs() int64 { return attention(o.uncached(), int64(o.hit)) }

// longestPrompt is how long a prompt counts whose pairs are added up, in tokens: sums stay far inside 63
// bits.
const longestPrompt = 1 << 24

// attention is twice the attention pairs of u tokens behind hit cached ones: u² + 2·u·hit.
func attention(u, hit int64) int64 {
	u, hit = min(u, longestPrompt), min(hit, longestPrompt)
	return u*u + 2*u*hit
}

// opens is a hash table of open requests by key: linear probing, no tombstones (deletion shifts back), so
// that a full day of adds and removes neither allocates nor slows down. A built-in map would regrow from time
// to time.
type opens struct {
	cells []open // length is a power of two
	n     int
	shift uint
}

const (
	minCells = 16
	// fibonacci is 2^64 / golden ratio: it spreads keys over the high bits.
	fibonacci = 0x9E3779B97F4A7C15
)

func (t *opens) home(key uint64) int {
	return int(key * fibonacci >> t.shift)
}

// get finds an entry, nil if there is none. The pointer is valid until the next add or remove.
func (t *opens) get(key uint64) *open {
	if t.n == 0 {
		return nil
	}
	for i := t.home(key); ; i = (i + 1) & (len(t.cells) - 1) {
		if t.cells[i].phase == free {
			return nil
		}
		if t.cells[i].key == key {
			return &t.cells[i]
		}
	}
}

// add stores o unless its key is there already, and reports whether it did.
func (t *opens) add(o open) bool {
	if 2*(t.n+1) > len(t.cells) {
		t.grow()
	}
	i := t.home(o.key)
	for t.cells[i].phase != free {
		if t.cells[i].key == o.key {
			return false
		}
		i = (i + 1) & (len(t.cells) - 1)
	}
	t.cells[i] = o
	t.n++
	return true
}

func (t *opens) grow() {
	old := t.cells
	size := max(minCells, 2*len(old))
	t.cells, t.n = make([]open, size), 0
	t.shift = uint(64 - bits.TrailingZeros(uint(size)))
	for i := range old {
		if old[i].phase != free {
			t.add(old[i])
		}
	}
}

// remove takes the entry of key out, if it is there, and moves those behind it back to where a search finds
// them.
func (t *opens) remove(key uint64) {
	o := t.get(key)
	if o == nil {
		return
	}
	mask := len(t.cells) - 1
	hole := t.home(key)
	for t.cells[hole].key != key || t.cells[hole].phase == free {
		hole = (hole + 1) & mask
	}
	for i := (hole + 1) & mask; t.cells[i].phase != free; i = (i + 1) & mask {
		if home := t.home(t.cells[i].key); (i-home)&mask >= (i-hole)&mask {
			t.cells[hole] = t.cells[i]
			hole = i
		}
	}
	t.cells[hole] = open{}
	t.n--
}

// opensLog collects the account changes of an event until the policy has seen the event itself. The policy
// that follows every open request (KV) gets EvOpened and EvClosed exactly when a request begins and ceases to
// count on a rank: only the account knows about bumps that expire, snapshots that no longer name a request,
// and tickets of another incarnation. A nil opensLog records nothing.
type opensLog struct{ list []openChange }

type openChange struct {
	key    uint64
	rank   RankID
	tokens int32
	open   bool
}

func (l *opensLog) opened(rank RankID, o *open) {
	if l != nil {
		l.list = append(l.list, openChange{key: o.key, rank: rank, tokens: o.tokens, open: true})
	}
}

func (l *opensLog) closed(rank RankID, key uint64) {
	if l != nil {
		l.list = append(l.list, openChange{key: key, rank: rank})
	}
}
