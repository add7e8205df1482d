package kvindex

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// recordOracle is the record of a rank as a list of prompts by age. What is held is the union of their
// blocks.
type recordOracle []routed

type routed struct {
	path []uint64
	at   time.Duration
}

func (o recordOracle) union() map[uint64]bool {
	out := map[uint64]bool{}
	for _, p := range o {
		for _, h := range p.path {
			out[h] = true
		}
	}
	return out
}

func (o recordOracle) depth(path []uint64) (n int) {
	held := o.union()
	for n < len(path) && held[path[n]] {
		n++
	}
	return n
}

func (o *recordOracle) insert(p routed) {
	*o = append(*o, p)
	slices.SortStableFunc(*o, func(a, b routed) int { return int(a.at - b.at) })
}

func (o *recordOracle) record(path []uint64, at time.Duration) {
	leaf := path[len(path)-1]
	*o = slices.DeleteFunc(*o, func(p routed) bool { return p.path[len(p.path)-1] == leaf })
	o.insert(routed{path, at})
}

func (o *recordOracle) expire(now time.Duration) {
	*o = slices.DeleteFunc(*o, func(p routed) bool { return p.at <= now })
}

// drop takes n blocks away, the least recently routed first, from the back.
func (o *recordOracle) drop(n int) {
	for n > 0 && len(*o) > 0 {
		p, rest := (*o)[0], (*o)[1:]
		others := rest.union()
		for n > 0 && len(p.path) > 0 && !others[p.path[len(p.path)-1]] {
			p.path = p.path[:len(p.path)-1]
			n--
		}
		if *o = rest; len(p.path) > 0 && !others[p.path[len(p.path)-1]] {
			o.insert(p)
			return
		}
	}
}

func (o *recordOracle) withdraw(path []uint64, keep int, at time.Duration) {
	n := o.depth(path)
	if n <= keep {
		return
	}
	i := slices.IndexFunc(*o, func(p routed) bool { return p.path[len(p.path)-1] == path[n-1] })
	if i < 0 || (*o)[i].at > at {
		return
	}
	end := (*o)[i].at
	*o = slices.Delete(slices.Clone(*o), i, i+1)
	others := o.union()
	for n > keep && !others[path[n-1]] {
		n--
	}
	if n > 0 && !others[path[n-1]] {
		o.insert(routed{path[:n], end})
	}
}

// A record renews, expires, gives way at its capacity, is withdrawn and trims as a list of prompts would.
func TestRecordsEqualAListOfPrompts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := drawForest(t)
		var deltas []Delta
		ix := newIndex(t, Config{OnChange: func(_ *BlockSet, d Delta) {
			d.Hashes = append([]uint64(nil), d.Hashes...)
			deltas = append(deltas, d)
		}})
		capacity := rapid.IntRange(0, 120).Draw(t, "capacity")
		c, err := ix.Open(Owner{}, Options{
			Feed: FromRecords, Shown: true, TTL: 10 * second,
			Capacity: capacity,
		})
		require.NoError(t, err)
		copied := open(t, newIndex(t, Config{}), 0, FromDeltas)
		var o recordOracle
		bound := func() {
			if capacity > 0 {
				o.drop(len(o.union()) - capacity)
			}
		}
		for step := range rapid.IntRange(1, 60).Draw(t, "steps") {
			now := time.Duration(step+1) * second
			ix.Advance(now)
			o.expire(now)
			k, a, b := f.stretch(t)
			switch rapid.IntRange(0, 6).Draw(t, "op") {
			case 0, 1:
				at := now + time.Duration(rapid.IntRange(0, 10).Draw(t, "left"))*second
				c.Withdraw(f.hashes[k][:b], a, at)
				o.withdraw(f.hashes[k][:b], a, at)
			case 2:
				n := rapid.IntRange(0, 30).Draw(t, "n")
				c.Trim(n)
				o.drop(n)
			case 3:
				capacity = rapid.IntRange(0, 120).Draw(t, "new capacity")
				c.SetCapacity(capacity)
				bound()
			default:
				held := o.depth(f.hashes[k][:b])
				require.Equal(t, Recorded{Held: held, At: now + 10*second}, c.Record(f.hashes[k][:b], now))
				o.record(f.hashes[k][:b], now+10*second)
				bound()
			}
			sum := uint64(0)
			for h := range o.union() {
				sum += h
			}
			require.Equal(t, len(o.union()), c.Len())
			require.Equal(t, sum, sumOf(c))
			at, some := c.Expires()
			require.True(t, some || len(o) == 0)
			for _, p := range o {
				require.LessOrEqual(t, at, p.at)
			}
			for _, d := range deltas {
				copied.Apply(d)
			}
			deltas = deltas[:0]
			require.Equal(t, sum, sumOf(copied), "its deltas make the same block set")
		}
		verify(t, ix)
		verify(t, copied.ix)
	})
}

// TestARecordUnderTheCapStaysCovered: whatever is evicted, what is left still expires, and other block sets
// of the blocks do not matter.
func TestARecordUnderTheCapStaysCovered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := drawForest(t)
		ix := newIndex(t, Config{})
		small(ix, 1)
		c := open(t, ix, 0, FromRecords)
		events := open(t, ix, 1, FromEvents)
		var last Recorded
		for step := range rapid.IntRange(1, 60).Draw(t, "steps") {
			now := time.Duration(step) * second
			ix.Advance(now)
			k, a, b := f.stretch(t)
			switch rapid.IntRange(0, 6).Draw(t, "op") {
			case 0:
				events.Stored(testHasher, &StoredEvent{
					Root: rootOf(1), Blocks: f.names(k, 0, b, 1, 0),
					Tokens: f.ids[k][:b], BlockSize: 1,
				})
			case 1:
				events.Removed(0, f.names(k, a, b, 1, 0))
			case 2:
				c.Withdraw(f.hashes[k][:b], a, last.At)
			case 3:
				ix.cap = ix.charge + rapid.IntRange(0, 300).Draw(t, "room")
			case 4:
				for range rapid.IntRange(0, 40).Draw(t, "evictions") {
					ix.evict()
				}
			default:
				last = c.Record(f.hashes[k][:b], now)
			}
			verify(t, ix)
		}
		ix.cap = 1 << 30
		ix.Advance(1000 * second)
		assert.Zero(t, c.Len(), "all of it expires")
		assert.Empty(t, c.prompts)
		assert.Empty(t, c.ends)
		verify(t, ix)
	})
}
