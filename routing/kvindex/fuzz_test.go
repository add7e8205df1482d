package kvindex

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// tape turns bytes into choices; at its end everything is 0.
type tape struct{ rest []byte }

func (t *tape) n(below int) int {
	if len(t.rest) == 0 {
		return 0
	}
	b := t.rest[0]
	t.rest = t.rest[1:]
	return int(b) % below
}

func (t *tape) more() bool { return len(t.rest) > 0 }

// names are handles of a world so small that they meet in every wrong way.
func (t *tape) names(most int) []Handle {
	out := make([]Handle, t.n(most+1))
	for i := range out {
		out[i] = UintHandle(0, uint64(t.n(24)))
	}
	return out
}

func (t *tape) hashes(most int) []uint64 {
	out := make([]uint64, t.n(most+1))
	for i := range out {
		out[i] = uint64(t.n(24)) * 0x0101010101010101
	}
	return out
}

func (t *tape) event() *StoredEvent {
	ev := &StoredEvent{
		Root: uint64(t.n(2)), HasParent: t.n(3) > 0, Parent: UintHandle(0, uint64(t.n(24))),
		Blocks: t.names(6), BlockSize: 1,
	}
	for range ev.Blocks {
		ev.Tokens = append(ev.Tokens, uint32(t.n(3)))
	}
	switch t.n(16) {
	case 0:
		ev.BlockSize = 1 << 31
	case 1:
		ev.Tokens = append(ev.Tokens, 1)
	case 2:
		ev.Kind, ev.Group = "mamba", t.n(3)
	}
	if t.n(8) == 0 {
		ev.Extras = []Extra{{Block: t.n(4), Key: 9}, {Block: t.n(4), Key: 8}}
	}
	return ev
}

// FuzzIndexOps: whatever is applied, in whatever order, nothing panics, every count stays right, the cap
// holds, and look-ups equal a scan of each block set.
func FuzzIndexOps(f *testing.F) {
	f.Add([]byte("\x00\x01\x02\x03stored, removed, cleared"))
	f.Add([]byte{0, 0, 1, 0, 3, 1, 2, 3, 4, 0, 0, 0, 5, 1, 2, 6, 7, 8, 9})
	f.Add([]byte{7, 1, 0, 1, 2, 3, 7, 2, 4, 3, 2, 1, 8, 1, 9, 9, 9, 10, 3, 11, 200, 12})
	f.Fuzz(fuzzOne)
}

func fuzzOne(t *testing.T, data []byte) {
	in := &tape{rest: data[:min(len(data), 4096)]}
	ix := newIndex(t, Config{OnChange: func(*BlockSet, Delta) {}})
	small(ix, 1+in.n(2))
	var sets []*BlockSet
	for i, feed := range []Feed{FromEvents, FromDeltas, FromRecords, FromEvents} {
		c, err := ix.Open(Owner{Rank: uint32(i)}, Options{Feed: feed, Shown: true, Capacity: 9})
		require.NoError(t, err)
		sets = append(sets, c)
	}
	now := time.Duration(0)
	for in.more() {
		apply(t, ix, sets, in, &now)
	}
	checkAgainstScan(t, ix)
	verify(t, ix)
	for _, c := range sets {
		copied := newIndex(t, Config{})
		if c.bit < 0 {
			continue
		}
		to := open(t, copied, 0, FromDeltas)
		c.Snapshot(3, to.Apply)
		require.Equal(t, sumOf(c), sumOf(to))
		require.Equal(t, c.Len(), to.Len())
		verify(t, copied)
	}
}

func apply(t *testing.T, ix *Index, sets []*BlockSet, in *tape, now *time.Duration) {
	k := in.n(len(sets))
	c := sets[k]
	switch in.n(14) {
	case 0, 1, 2:
		c.Stored(testHasher, in.event())
	case 3, 4:
		c.Removed(in.n(3), in.names(6))
	case 5:
		c.Apply(Delta{Change: Stored, Parent: uint64(in.n(24)) * 0x0101010101010101, Hashes: in.hashes(6)})
	case 6:
		c.Apply(Delta{Change: Removed, Hashes: in.hashes(6)})
	case 7, 8:
		c.Record(in.hashes(6), *now)
	case 9:
		c.Withdraw(in.hashes(6), in.n(6), *now+time.Duration(in.n(255))*time.Second)
	case 10:
		*now += time.Duration(in.n(255)) * time.Second
		ix.Advance(*now)
	case 11:
		ix.Sweep(1 + in.n(255)*16)
	case 12:
		c.Trim(in.n(4))
		for range in.n(4) {
			ix.evict()
		}
	default:
		restart(t, ix, sets, k, in)
	}
}

func restart(t *testing.T, ix *Index, sets []*BlockSet, k int, in *tape) {
	c := sets[k]
	switch in.n(3) {
	case 0:
		c.Clear()
	case 1:
		c.Show()
	default:
		opt := c.opt
		opt.Shown = true
		c, err := ix.Open(c.Owner(), opt)
		require.NoError(t, err)
		sets[k] = c
	}
}

func checkAgainstScan(t *testing.T, ix *Index) {
	prompts := [][]uint64{}
	for s := firstSlot; int(s) < ix.end(); s++ { // every path from a block 0
		if ix.hash(s) == 0 || ix.cold(s).child != none {
			continue
		}
		var p []uint64
		for k := s; k >= firstSlot; k = ix.cold(k).parent {
			p = append([]uint64{ix.hash(k)}, p...)
		}
		prompts = append(prompts, append(p, 12345))
	}
	for _, p := range prompts {
		got := hitsOf(ix, p)
		for _, c := range ix.sets {
			if c == nil || !c.shown {
				continue
			}
			want := 0
			for want < len(p) {
				s := ix.table.find(&ix.pool, p[want])
				if s == none || !c.has(s) {
					break
				}
				want++
			}
			require.Equal(t, want, got[c.owner.Rank])
		}
	}
}
