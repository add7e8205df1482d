package kvindex

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// repeater is an engine with few blocks that tells of every block of a prompt as stored, also of those that
// it has: what vLLM does for requests that ask for it. Each removal is told once.
type repeater struct {
	room  int
	order []int // numbers of the prompts that it holds, the least recently used in front
}

const promptBlocks = 4

// prompt number k has blocks and tokens of its own.
func promptOf(k int) *StoredEvent {
	ids := make([]uint32, promptBlocks)
	for i := range ids {
		ids[i] = uint32(promptBlocks*k + i + 1)
	}
	return &StoredEvent{Root: rootOf(1), Blocks: named(k+1, promptBlocks), Tokens: ids, BlockSize: 1}
}

// serve tells of prompt k, behind the removals that make room for it.
func (e *repeater) serve(c *BlockSet, k int) {
	for i, held := range e.order {
		if held == k {
			e.order = append(append(e.order[:i:i], e.order[i+1:]...), k)
			c.Stored(testHasher, promptOf(k))
			return
		}
	}
	for (len(e.order)+1)*promptBlocks > e.room {
		c.Removed(0, promptOf(e.order[0]).Blocks)
		e.order = e.order[1:]
	}
	e.order = append(e.order, k)
	c.Stored(testHasher, promptOf(k))
}

// RP19: an engine that repeats what it has stored is found out before the blocks that are counted are more
// than it has, and from then on no block is held that the engine has removed.
func TestRepeatsLeaveNoPhantomBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ix := newIndex(t, Config{Bytes: 1 << 20, Sets: 2})
		c := open(t, ix, 1, FromEvents)
		e := &repeater{room: promptBlocks * rapid.IntRange(1, 6).Draw(t, "room")}
		found := false
		for _, k := range rapid.SliceOfN(rapid.IntRange(0, 9), 1, 300).Draw(t, "requests") {
			e.serve(c, k)
			found = c.LimitCopies(e.room) || found
			require.LessOrEqual(t, c.Len()+c.side.copies.n+c.side.aliases.n, e.room)
			if !found {
				continue
			}
			held := map[int]bool{}
			for _, has := range e.order {
				held[has] = true
			}
			for k := range 10 {
				if hits := hitsOf(ix, chain(promptOf(k).Tokens, 1))[1]; !held[k] {
					require.Zero(t, hits, "prompt %d was removed", k)
				}
			}
			verify(t, ix)
		}
	})
}

// RP19: as many copies as it has blocks are believed, each until it is removed.
func TestCopiesOfAnHonestEngineAreCounted(t *testing.T) {
	ix := newIndex(t, Config{Bytes: 1 << 20, Sets: 2})
	c := open(t, ix, 1, FromEvents)
	for range 3 {
		c.Stored(testHasher, promptOf(1))
		require.False(t, c.LimitCopies(3*promptBlocks))
		require.False(t, c.LimitCopies(0), "not known")
	}
	for want := 2; want >= 0; want-- {
		c.Removed(0, promptOf(1).Blocks)
		require.Equal(t, want > 0, c.Len() == promptBlocks)
	}
}
