package kvindex

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestHandlesAreTaggedByTypeAndGroup(t *testing.T) {
	seen := map[Handle]bool{}
	for _, h := range []Handle{
		UintHandle(0, 1), UintHandle(1, 1), UintHandle(0, 1<<63), IntHandle(0, -1), IntHandle(1, -1),
		IntHandle(0, -1<<63),
		BytesHandle(0, []byte{1}), BytesHandle(0, make([]byte, 32)), BytesHandle(0, make([]byte, 16)),
		BytesHandle(2, []byte{1}),
	} {
		assert.False(t, seen[h])
		seen[h] = true
	}
	assert.Equal(t, UintHandle(3, 7), IntHandle(3, 7), "one number, two forms on the wire")
}

func TestTextBlocks(t *testing.T) {
	root := testHasher.Root(Salt{Unit: Text, BlockSize: DefaultTextBlock})
	text := make([]byte, 3*DefaultTextBlock+5)
	hashes := testHasher.Bytes(nil, root, text, DefaultTextBlock)
	require.Len(t, hashes, 3, "full blocks only")
	text[DefaultTextBlock]++
	other := testHasher.Bytes(nil, root, text, DefaultTextBlock)
	assert.Equal(t, hashes[0], other[0])
	assert.NotEqual(t, hashes[1], other[1])
	assert.NotEqual(t, hashes[2], other[2], "chained")
	assert.Empty(t, testHasher.Bytes(nil, root, text, 0))
	assert.Empty(t, testHasher.Tokens(nil, root, count(9), MaxBlockSize+1, nil))
}

// The hashes are a contract between processes of one cluster, of different versions.
func TestHashesStayTheSame(t *testing.T) {
	h := NewHasher([]byte("secret"))
	root := h.Root(Salt{Unit: Tokens, BlockSize: 16, Model: "m", Adapter: "a", CacheSalt: "s"})
	got := h.Tokens([]uint64{root}, root, count(32), 16, []Extra{{Block: 1, Key: h.Key("image")}})
	assert.Equal(t, []uint64{0xfe48a3339866c0b2, 0x30dda267321ff962, 0xa6ce6a394c74eab}, got)
}

func TestFencingByEpochAndIncarnation(t *testing.T) {
	ix := newIndex(t, Config{})
	first := Owner{Rank: 5, Epoch: 2, Incarnation: 70}
	c, err := ix.Open(first, Options{Feed: FromDeltas, Shown: true})
	require.NoError(t, err)
	assert.Same(t, c, ix.Find(first))
	c.Apply(Delta{Change: Stored, Hashes: []uint64{1, 2}})
	second := Owner{Rank: 5, Epoch: 2, Incarnation: 9}
	assert.Nil(t, ix.Find(second), "another incarnation")
	d, err := ix.Open(second, Options{Feed: FromDeltas})
	require.NoError(t, err)
	assert.Empty(t, ix.Match([]uint64{1}, nil),
		"the old block set is hidden at once, the new one until its snapshot")
	c.Apply(Delta{Change: Stored, Hashes: []uint64{3}})
	assert.Negative(t, c.bit)
	_, err = ix.Open(Owner{Rank: 5, Epoch: 1, Incarnation: 9}, Options{})
	require.ErrorIs(t, err, ErrFenced)
	assert.Equal(t, uint64(3), ix.Stats().Fenced)
	assert.Nil(t, ix.Find(Owner{Rank: 6, Epoch: 1}))
	assert.Equal(t, uint64(1), ix.Stats().Unopened)
	d.Show()
	assert.Equal(t, map[uint32]int{5: 0}, hitsOf(ix, []uint64{1, 2}))
	verify(t, ix)
}

func TestBlockSetsAreSweptThenReused(t *testing.T) {
	ix := newIndex(t, Config{})
	for i := range 300 {
		c, err := ix.Open(Owner{Rank: uint32(i % 40), Epoch: uint64(i)},
			Options{Feed: FromDeltas, Shown: true})
		require.NoError(t, err)
		c.Apply(Delta{Change: Stored, Hashes: []uint64{1, 2, uint64(i + 3)}})
	}
	got := hitsOf(ix, []uint64{1, 2})
	assert.Len(t, got, 40)
	for rank, n := range got {
		assert.Equal(t, 2, n, "rank %d", rank)
	}
	for i := range 24 {
		_, err := ix.Open(Owner{Rank: uint32(100 + i)}, Options{})
		require.NoError(t, err)
	}
	_, err := ix.Open(Owner{Rank: 999}, Options{})
	require.ErrorIs(t, err, ErrNoBlockSet)
	verify(t, ix)
}

func TestTiersAreBlockSetsOfTheirOwn(t *testing.T) {
	ix := newIndex(t, Config{})
	for _, tier := range []Tier{GPU, CPU} {
		c, err := ix.Open(Owner{Rank: 1, Tier: tier}, Options{Feed: FromDeltas, Shown: true})
		require.NoError(t, err)
		c.Apply(Delta{Change: Stored, Hashes: []uint64{1, 2, 3}[:1+tier]})
	}
	assert.Equal(t, []Hit{{Rank: 1, Blocks: 1}, {Rank: 1, Blocks: 2, Tier: CPU}},
		ix.Match([]uint64{1, 2, 3}, nil))
}

// A handle whose block was evicted must not remove what is in its slot now.
func TestAStaleHandleRemovesNothing(t *testing.T) {
	ix := newIndex(t, Config{})
	small(ix, 2)
	c := open(t, ix, 0, FromEvents)
	ids := count(600)
	old := event(ids, 1, 1)
	c.Stored(testHasher, old)
	for salt := 2; salt < 5; salt++ {
		ix.Advance(time.Duration(salt) * time.Second)
		for i := range ids {
			ids[i] += 5000
		}
		c.Stored(testHasher, event(ids, 1, salt))
	}
	require.GreaterOrEqual(t, ix.Stats().Evicted, uint64(600))
	sum, n := sumOf(c), c.Len()
	c.Removed(0, old.Blocks)
	assert.Equal(t, sum, sumOf(c))
	assert.Equal(t, n, c.Len())
	verify(t, ix)
}

func TestAsideForksAttachTogether(t *testing.T) {
	ix := newIndex(t, Config{})
	c := open(t, ix, 0, FromEvents)
	trunk, ids := count(3), count(3)
	name := named(1, 30)
	for k := range uint32(3) {
		c.Stored(testHasher, &StoredEvent{
			HasParent: true, Parent: name[2], Blocks: name[10+2*k : 12+2*k], Tokens: []uint32{100 + k, 200},
			BlockSize: 1,
		})
	}
	assert.Len(t, c.aside.blocks, 6)
	c.Stored(testHasher, &StoredEvent{Root: rootOf(1), Blocks: name[:3], Tokens: trunk, BlockSize: 1})
	assert.Empty(t, c.aside.blocks)
	for k := range uint32(3) {
		assert.Equal(t, 5, hitsOf(ix, chain(append(ids[:3:3], 100+k, 200), 1))[0])
	}
	verify(t, ix)
}

func TestAsideIsBounded(t *testing.T) {
	ix := newIndex(t, Config{})
	c := open(t, ix, 0, FromEvents)
	for i := range 3 * maxAside {
		c.Stored(testHasher, &StoredEvent{
			HasParent: true, Parent: UintHandle(0, 0), Blocks: []Handle{UintHandle(0, uint64(i+1))},
			Tokens: []uint32{uint32(i)}, BlockSize: 1,
		})
	}
	assert.Len(t, c.aside.blocks, maxAside)
	assert.Equal(t, uint64(2*maxAside), ix.Stats().AsideDropped)
	c.Stored(testHasher, &StoredEvent{
		Root: rootOf(1), Blocks: []Handle{UintHandle(0, 0)},
		Tokens: []uint32{7}, BlockSize: 1,
	})
	assert.Equal(t, maxAside+1, c.Len(), "the youngest were kept")
	verify(t, ix)
}

func TestNewRefusesWhatCannotWork(t *testing.T) {
	for _, c := range []Config{
		{Sets: -1},
		{Sets: MaxSets + 1},
		{Bytes: 1000},
		{Sets: MaxSets, Bytes: minBytes},
	} {
		_, err := New(c)
		assert.Error(t, err)
	}
}
