package kvindex

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// stream is a replica's block set and the records it sends, numbered from 1.
type stream struct {
	ix      *Index
	c       *BlockSet
	records []Delta
}

func newStream(t *testing.T) *stream {
	s := &stream{}
	s.ix = newIndex(t, Config{OnChange: func(_ *BlockSet, d Delta) {
		s.records = append(s.records, Delta{d.Change, d.Parent, slices.Clone(d.Hashes)})
	}})
	s.c = open(t, s.ix, 3, FromEvents)
	return s
}

// churn is a batch of an engine's life: prompts that share prefixes come, and go from their ends, sometimes
// from the front.
func (s *stream) churn(r *rand.Rand) {
	ids := count(1 + r.IntN(80))
	for i := r.IntN(len(ids)); i < len(ids); i++ {
		ids[i] += uint32(1000 * r.IntN(6))
	}
	hashes := chain(ids, 1)
	names := make([]Handle, len(hashes))
	for i, h := range hashes {
		names[i] = UintHandle(0, h)
	}
	switch r.IntN(20) {
	case 0:
		s.c.Clear()
	case 1, 2, 3, 4, 5:
		s.c.Removed(0, names[r.IntN(len(names)):])
	case 6:
		s.c.Removed(0, names[:r.IntN(len(names))])
	default:
		s.c.Stored(testHasher, &StoredEvent{Root: rootOf(1), Blocks: names, Tokens: ids, BlockSize: 1})
	}
}

// reader is an ingress: it applies records in order, drops those it has, and starts over from a snapshot
// after a gap.
type reader struct {
	t         *testing.T
	from      *stream
	ix        *Index
	c         *BlockSet
	last      int
	snapshots int
}

func (r *reader) receive(seq int, d Delta) {
	switch {
	case seq <= r.last:
	case seq == r.last+1:
		r.c.Apply(d)
		r.last = seq
	default:
		r.snapshot()
	}
}

func (r *reader) snapshot() {
	r.snapshots++
	c, err := r.ix.Open(Owner{Rank: 3, Epoch: 1, Incarnation: 1}, Options{Feed: FromDeltas})
	require.NoError(r.t, err)
	r.from.c.Snapshot(50, c.Apply)
	c.Show()
	r.c, r.last = c, len(r.from.records)
}

func (r *reader) requireEqual() {
	require.Equal(r.t, r.from.c.Len(), r.c.Len())
	require.Equal(r.t, sumOf(r.from.c), sumOf(r.c))
	require.Equal(r.t, r.from.c.orphans, r.c.orphans)
	for k := range 6 {
		ids := count(80)
		for i := 20; i < len(ids); i++ {
			ids[i] += uint32(1000 * k)
		}
		require.Equal(r.t, hitsOf(r.from.ix, chain(ids, 1)), hitsOf(r.ix, chain(ids, 1)))
	}
}

// KV3: a reader that lists again after a lost delta holds what the sender holds, whatever came twice or late.
func TestKV3ExactAfterDropsDuplicatesAndReorders(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	from := newStream(t)
	in := &reader{t: t, from: from, ix: newIndex(t, Config{})}
	in.snapshot()
	sent, held := 0, -1
	deliver := func(i int) { in.receive(i+1, from.records[i]) }
	for range 4000 / scale {
		from.churn(r)
		for ; sent < len(from.records); sent++ {
			switch r.IntN(300) {
			case 0: // lost
			case 1: // twice
				deliver(sent)
				deliver(sent)
			case 2: // late
				held = sent
			default:
				deliver(sent)
				if held >= 0 {
					deliver(held)
					held = -1
				}
			}
		}
		for in.ix.Sweep(64) && r.IntN(3) > 0 {
		}
	}
	if in.last < len(from.records) { // the heartbeat names the last number
		in.snapshot()
	}
	in.requireEqual()
	verify(t, from.ix)
	verify(t, in.ix)
	assert.Positive(t, in.snapshots)
	assert.Zero(t, in.ix.Stats().Conflict)
	t.Logf("%d records, %d snapshots, %d blocks, %d orphans", len(from.records), in.snapshots, in.c.Len(),
		in.c.orphans)
}

func TestSnapshotPlusLaterDeltasEqualsTheWholeStream(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		from := newStream(t)
		for range 200 {
			from.churn(r)
		}
		late := &reader{t: t, from: from, ix: newIndex(t, Config{})}
		late.snapshot()
		for range 100 {
			from.churn(r)
		}
		for i := late.last; i < len(from.records); i++ {
			late.receive(i+1, from.records[i])
		}
		late.requireEqual()
		first := &reader{t: t, from: from, ix: newIndex(t, Config{}), c: nil}
		first.c = open(t, first.ix, 3, FromDeltas)
		for i, d := range from.records {
			first.receive(i+1, d)
		}
		first.requireEqual()
	}
}

func TestClearedEmptiesOneRank(t *testing.T) {
	ix := newIndex(t, Config{})
	ids := count(160)
	var sets []*BlockSet
	for rank := range uint32(4) {
		c := open(t, ix, rank, FromEvents)
		c.Stored(testHasher, event(ids, 16, int(rank)))
		sets = append(sets, c)
	}
	sets[2].Clear()
	assert.Equal(t, map[uint32]int{0: 10, 1: 10, 2: 0, 3: 10}, hitsOf(ix, chain(ids, 16)))
	sets[2].Stored(testHasher, event(ids[:32], 16, 2))
	assert.Equal(t, 2, hitsOf(ix, chain(ids, 16))[2], "the engine goes on after a clear")
	for ix.Sweep(10) {
	}
	assert.Equal(t, map[uint32]int{0: 10, 1: 10, 2: 2, 3: 10}, hitsOf(ix, chain(ids, 16)))
	verify(t, ix)
}

// KV6: store one hash twice, remove once, remove again: Resident after the first, gone after the second; a
// 7-block hit scores 7.
func TestKV6OneBitPerPhysicalCopy(t *testing.T) {
	ix := newIndex(t, Config{})
	c := open(t, ix, 0, FromEvents)
	ids := count(7 * 16)
	ev := event(ids, 16, 1)
	c.Stored(testHasher, ev)
	c.Stored(testHasher, ev)
	c.Removed(0, ev.Blocks)
	assert.Equal(t, 7, hitsOf(ix, chain(ids, 16))[0],
		"resident after the first removal; a 7-block hit scores 7")
	c.Removed(0, ev.Blocks)
	assert.Equal(t, 0, hitsOf(ix, chain(ids, 16))[0])
	c.Removed(0, ev.Blocks)
	assert.Equal(t, uint64(7), ix.Stats().UnknownRemove, "clamped at zero")
	c.Stored(testHasher, ev)
	assert.Equal(t, 7, hitsOf(ix, chain(ids, 16))[0])
	verify(t, ix)
}

// KV6: a block stored twice is held until it is removed twice.
func TestKV6TheLastBlockIsStoredTwiceInABatchOfItsOwn(t *testing.T) {
	ix := newIndex(t, Config{})
	c := open(t, ix, 0, FromEvents)
	ids := count(7 * 16)
	ev := event(ids, 16, 1)
	c.Stored(testHasher, ev)
	again := &StoredEvent{
		HasParent: true, Parent: ev.Blocks[5], Blocks: ev.Blocks[6:], Tokens: ids[6*16:],
		BlockSize: 16,
	}
	c.Stored(testHasher, again)
	c.Removed(0, ev.Blocks[6:])
	assert.Equal(t, 7, hitsOf(ix, chain(ids, 16))[0])
	c.Removed(0, ev.Blocks[6:])
	assert.Equal(t, 6, hitsOf(ix, chain(ids, 16))[0])
}

// KV7: hybrid attention groups; 16- and 64-token blocks in one stream: Only full-attention blocks count;
// every parent resolves.
func TestKV7OnlyFullAttentionCounts(t *testing.T) {
	ix := newIndex(t, Config{})
	c := open(t, ix, 0, FromEvents)
	ids := count(128)
	store := func(from int, group int, size int, kind string) {
		n := (len(ids) - from) / size
		ev := &StoredEvent{
			Root: rootOf(size), Tokens: ids[from : from+n*size], BlockSize: size, Group: group,
			Kind: kind,
		}
		for i := range n {
			ev.Blocks = append(ev.Blocks, UintHandle(group, uint64(from/size+i)))
		}
		if from > 0 {
			ev.HasParent, ev.Parent = true, UintHandle(group, uint64(from/size-1))
		}
		c.Stored(testHasher, ev)
	}
	ids = ids[:64]
	store(0, 0, 16, "full_attention")
	store(0, 1, 64, "sliding_window")
	ids = count(128)
	store(64, 1, 64, "sliding_window")
	store(64, 0, 16, "full_attention")
	assert.Equal(t, 8, hitsOf(ix, chain(ids, 16))[0])
	assert.Equal(t, 16, c.BlockSize())
	assert.Empty(t, c.aside.blocks, "every parent resolves")
	c.Removed(1, []Handle{UintHandle(1, 0), UintHandle(1, 1)})
	assert.Equal(t, 8, hitsOf(ix, chain(ids, 16))[0], "the same numbers in another group are other blocks")
	assert.Equal(t, uint64(3), ix.Stats().OtherGroup)
	assert.Zero(t, ix.Stats().UnknownParent)
	assert.Zero(t, ix.Stats().UnknownRemove)
	store(0, 0, 32, "full_attention")
	assert.Equal(t, uint64(1), ix.Stats().BadBlockSize,
		"another size is counted, not indexed as a silent zero")
}

// kv11 is 8 engines with prompts of 20,000 tokens, 4,000 of them the same system prompt, several times what
// the cap holds.
type kv11 struct {
	ix    *Index
	sets  []*BlockSet
	live  [][]int // prompts that each engine holds: 40, the oldest goes
	ids   []uint32
	names []Handle
}

const (
	kv11Cap    = 8 << 20
	kv11System = 4000 / 16
	kv11Blocks = 20000 / 16
)

// handles of prompt n.
func (k *kv11) handles(n int) []Handle {
	k.names = k.names[:0]
	for i := range kv11Blocks {
		v := uint64(i)
		if i >= kv11System {
			v |= uint64(n+1) << 32
		}
		k.names = append(k.names, UintHandle(0, v))
	}
	return k.names
}

func (k *kv11) store(n int) {
	for i := kv11System * 16; i < len(k.ids); i++ {
		k.ids[i] = uint32(n<<16 | i)
	}
	rank := n % len(k.sets)
	c := k.sets[rank]
	c.Stored(testHasher, &StoredEvent{Root: rootOf(16), Blocks: k.handles(n), Tokens: k.ids, BlockSize: 16})
	if k.live[rank] = append(k.live[rank], n); len(k.live[rank]) > 40 {
		c.Removed(0, k.handles(k.live[rank][0]))
		k.live[rank] = k.live[rank][1:]
	}
}

// KV11: the index never takes more bytes than its cap.
func TestKV11TheCapHolds(t *testing.T) {
	prompts := 800
	if testing.Short() || scale > 1 {
		prompts = 120
	}
	k := &kv11{live: make([][]int, 8), ids: count(20000), names: make([]Handle, 0, kv11Blocks)}
	system := chain(k.ids[:kv11System*16], 16)
	before := heap()
	k.ix = newIndex(t, Config{Bytes: kv11Cap})
	for rank := range uint32(8) {
		k.sets = append(k.sets, open(t, k.ix, rank, FromEvents))
	}
	for n := range prompts {
		k.ix.Advance(time.Duration(n+1) * time.Second)
		k.store(n)
		require.LessOrEqual(t, k.ix.Stats().Bytes, kv11Cap)
		require.Equal(t, kv11System, hitsOf(k.ix, system)[uint32(n%8)], "what every request matches stays")
	}
	used := int64(heap()) - int64(before)
	s := k.ix.Stats()
	t.Logf("cap %d KiB, charged %d, heap %d; %d blocks, %d handles, %d evicted, %d refused, %d aside",
		kv11Cap>>10, s.Bytes>>10, used>>10,
		s.Blocks, s.Handles, s.Evicted, s.Refused, s.Aside)
	assert.Less(t, used, int64(kv11Cap)*11/10, "heap within cap + 10 %")
	assert.Positive(t, s.Evicted)
	assert.Zero(t, s.Orphans, "prefix closure kept")
	full, hits := chain(k.ids, 16), make([]Hit, 0, 8)
	assert.Zero(t, testing.AllocsPerRun(100, func() { hits = k.ix.Match(full, hits[:0]) }),
		"a look-up at the cap costs no memory, as below it")
	verify(t, k.ix)
	for rank, c := range k.sets {
		for _, n := range k.live[rank] {
			c.Removed(0, k.handles(n))
		}
		assert.Zero(t, c.Len())
	}
	verify(t, k.ix)
}

// KV12: one block on 32 ranks; 4,096-block prompt; same tokens under another salt, LoRA or image: 32 holders;
// full hit scores 4,096; 0 blocks shared.
func TestKV12NoCapOnHoldersOrDepth(t *testing.T) {
	ix := newIndex(t, Config{})
	ids := count(4096)
	for rank := range uint32(32) {
		c := open(t, ix, rank, FromEvents)
		n := 1
		if rank == 7 {
			n = 4096
		}
		c.Stored(testHasher, event(ids[:n], 1, int(rank)))
	}
	got := hitsOf(ix, chain(ids, 1))
	require.Len(t, got, 32)
	for rank, n := range got {
		if rank == 7 {
			assert.Equal(t, 4096, n)
			continue
		}
		assert.Equal(t, 1, n)
	}
}

// KV12: prompts under another adapter, cache salt, model, unit or block size share no block.
func TestKV12OtherSaltsShareNothing(t *testing.T) {
	ids := count(64)
	base := Salt{Unit: Tokens, BlockSize: 16, Model: "m"}
	salts := []Salt{base, base, base, base, base, base}
	salts[1].Adapter = "lora"
	salts[2].CacheSalt = "lora"
	salts[3].Model = "mlora"
	salts[4].Unit = Text
	salts[5].BlockSize = 32
	seen := map[uint64]int{}
	add := func(k int, hashes []uint64) {
		for _, h := range hashes {
			_, twice := seen[h]
			assert.False(t, twice, "salt %d shares a block", k)
			seen[h] = k
		}
	}
	for k, s := range salts {
		add(k, testHasher.Tokens(nil, testHasher.Root(s), ids, 16, nil))
	}
	image := testHasher.Tokens(nil, testHasher.Root(base), ids, 16,
		[]Extra{{Block: 1, Key: testHasher.Key("sha of a cat")}})
	plain := testHasher.Tokens(nil, testHasher.Root(base), ids, 16, nil)
	assert.Equal(t, plain[0], image[0], "in front of the image nothing changed")
	add(6, image[1:])
	add(7, NewHasher([]byte("other")).Tokens(nil, NewHasher([]byte("other")).Root(base), ids, 16, nil))
}

// KV13: self-parent, cycle, length 2^31, negative rank, cut frames; fuzz for seconds per change: Dropped and
// counted; nothing else changes; 0 crashes. Tests: `TestKV13HostileEventsAreDroppedAndCounted`,
// `TestKV13ACycleOfBlocksKeptAsideIsBroken` (kvindex), `TestKV13GarbageIsCountedAndChangesNothing`
// (dpserver), fuzz targets of kvindex and kvevents.
func TestKV13HostileEventsAreDroppedAndCounted(t *testing.T) {
	ids := count(64)
	good := func(ix *Index) *BlockSet {
		c := open(t, ix, 0, FromEvents)
		c.Stored(testHasher, event(ids, 16, 1)) // blocks 1000…1003
		return c
	}
	a, b, x := named(1, 4)[0], named(1, 4)[1], UintHandle(0, 77)
	other := count(160)[96:]
	for name, tc := range map[string]struct {
		ev   StoredEvent
		want func(Stats) uint64
	}{
		"self-parent": {StoredEvent{
			HasParent: true, Parent: x, Blocks: []Handle{x}, Tokens: other[:16],
			BlockSize: 16,
		}, func(s Stats) uint64 { return s.SelfParent }},
		"twice in a chain": {StoredEvent{
			Root: 5, Blocks: []Handle{x, UintHandle(0, 78), x},
			Tokens: other[:48], BlockSize: 16,
		}, func(s Stats) uint64 { return s.Cycle }},
		"cycle": {StoredEvent{
			HasParent: true, Parent: b, Blocks: []Handle{x, a}, Tokens: other[:32],
			BlockSize: 16,
		}, func(s Stats) uint64 { return s.Cycle }},
		"length 2^31": {
			StoredEvent{Blocks: []Handle{x}, Tokens: other[:16], BlockSize: 1 << 31},
			func(s Stats) uint64 { return s.BadLength },
		},
		"length 0": {StoredEvent{Blocks: []Handle{x}, Tokens: other[:16]}, func(s Stats) uint64 {
			return s.BadLength
		}},
		"length negative": {
			StoredEvent{Blocks: []Handle{x}, Tokens: other[:16], BlockSize: -16},
			func(s Stats) uint64 { return s.BadLength },
		},
		"too few tokens": {
			StoredEvent{Blocks: []Handle{x}, Tokens: other[:15], BlockSize: 16},
			func(s Stats) uint64 { return s.BadLength },
		},
		"too many tokens": {
			StoredEvent{Blocks: []Handle{x}, Tokens: other[:17], BlockSize: 16},
			func(s Stats) uint64 { return s.BadLength },
		},
		"other block size": {
			StoredEvent{Blocks: []Handle{x}, Tokens: other[:8], BlockSize: 8},
			func(s Stats) uint64 { return s.BadBlockSize },
		},
		"known elsewhere": {
			StoredEvent{Root: 5, Blocks: []Handle{a}, Tokens: other[:16], BlockSize: 16},
			func(s Stats) uint64 { return s.Cycle },
		},
		"unknown parent": {StoredEvent{
			HasParent: true, Parent: x, Blocks: []Handle{UintHandle(0, 78)},
			Tokens: other[:16], BlockSize: 16,
		}, func(s Stats) uint64 { return s.UnknownParent }},
		"negative group": {StoredEvent{
			Group: -5, Kind: "mamba", Blocks: []Handle{x}, Tokens: other[:16],
			BlockSize: 16,
		}, func(s Stats) uint64 { return s.OtherGroup }},
		"aside, twice": {
			StoredEvent{
				HasParent: true, Parent: x,
				Blocks: []Handle{UintHandle(0, 78), UintHandle(0, 78)}, Tokens: other[:32], BlockSize: 16,
			},
			func(s Stats) uint64 { return s.Conflict },
		},
		"nothing in it": {StoredEvent{BlockSize: 16}, func(Stats) uint64 { return 1 }},
		"blocks, no tokens": {StoredEvent{Blocks: []Handle{x}, BlockSize: 16}, func(s Stats) uint64 {
			return s.BadLength
		}},
	} {
		t.Run(name, func(t *testing.T) {
			ix := newIndex(t, Config{})
			c := good(ix)
			sum := sumOf(c)
			c.Stored(testHasher, &tc.ev)
			assert.Equal(t, uint64(1), tc.want(ix.Stats()))
			assert.Equal(t, sum, sumOf(c), "nothing else changes")
			assert.Equal(t, 4, hitsOf(ix, chain(ids, 16))[0])
			assert.Equal(t, 0, hitsOf(ix, chain(other, 16))[0], "never re-rooted")
			verify(t, ix)
		})
	}
}

// KV13: blocks whose parents name each other in a circle are counted and never held.
func TestKV13ACycleOfBlocksKeptAsideIsBroken(t *testing.T) {
	ix := newIndex(t, Config{})
	c := open(t, ix, 0, FromEvents)
	h := named(0, 4)
	ids := count(4)
	c.Stored(testHasher, &StoredEvent{
		HasParent: true, Parent: h[0], Blocks: h[1:3], Tokens: ids[1:3],
		BlockSize: 1,
	})
	c.Stored(testHasher, &StoredEvent{
		HasParent: true, Parent: h[2], Blocks: h[:1], Tokens: ids[:1],
		BlockSize: 1,
	})
	assert.Equal(t, uint64(1), ix.Stats().Cycle)
	assert.Len(t, c.aside.blocks, 2)
	c.Stored(testHasher, &StoredEvent{Root: rootOf(1), Blocks: h[:1], Tokens: ids[:1], BlockSize: 1})
	assert.Equal(t, 3, hitsOf(ix, chain(ids[:3], 1))[0], "its parent came after all")
	assert.Empty(t, c.aside.blocks)
	verify(t, ix)
}

func TestCircularRecordsAreDropped(t *testing.T) {
	ix := newIndex(t, Config{})
	c := open(t, ix, 0, FromDeltas)
	c.Apply(Delta{Change: Stored, Parent: 20, Hashes: []uint64{10}})
	c.Apply(Delta{Change: Stored, Parent: 10, Hashes: []uint64{20}})
	c.Apply(Delta{Change: Stored, Parent: 30, Hashes: []uint64{30}})
	c.Apply(Delta{Change: Stored, Hashes: []uint64{10}})
	c.Apply(Delta{Change: Stored, Hashes: []uint64{40, 0, 41}})
	assert.Equal(t, uint64(4), ix.Stats().Conflict)
	assert.Equal(t, 2, c.Len())
	assert.Equal(t, 1, c.orphans)
	verify(t, ix)
	c.Apply(Delta{Change: Stored, Hashes: []uint64{20}})
	assert.Zero(t, c.orphans, "the parent that was only named is there now")
	assert.Equal(t, 2, hitsOf(ix, []uint64{20, 10})[0])
	verify(t, ix)
}

// The index keeps the bytes of heap per block that docs/performance.md claims.
func TestSK5HeapPerBlock(t *testing.T) {
	if scale > 1 {
		t.Skip("the race detector shows nothing here: one goroutine")
	}
	chains := benchChains
	if testing.Short() {
		chains /= 4
	}
	plain := newBench(t, 8, chains, true, FromDeltas)
	handles := newBench(t, 8, chains, true, FromEvents)
	s := handles.ix.Stats()
	perHandle := (handles.perHeap - plain.perHeap) * float64(s.Blocks) / float64(s.Handles)
	t.Logf("8 ranks, %d blocks, %d (rank, block): %.1f B per block, %.1f B per (rank, block); charged %.1f "+
		"per block in all",
		s.Blocks, s.Handles, plain.perHeap, perHandle, float64(s.Bytes)/float64(s.Blocks))
	assert.LessOrEqual(t, plain.perHeap, 64.0)
	assert.LessOrEqual(t, perHandle, 24.0)
	wide := newBench(t, 1024, chains/5, false, FromDeltas)
	t.Logf("1,024 ranks: %.1f B per block", wide.perHeap)
	assert.LessOrEqual(t, wide.perHeap, 192.0)
}

// SK5: hashing and look-up allocate nothing with 8, 1,024 and 7,000 ranks.
func TestSK5LookUpDoesNotAllocate(t *testing.T) {
	for _, ranks := range []int{8, 1024, 7000 / scale} {
		x := newBench(t, ranks, 100, ranks == 8, FromDeltas)
		root := benchRoot()
		hashes, out := make([]uint64, 0, benchPrompt), make([]Hit, 0, ranks)
		i := 0
		allocs := testing.AllocsPerRun(200, func() {
			hashes = benchHasher.Tokens(hashes[:0], root, x.ids[i%len(x.ids)], benchBlock, nil)
			out = x.ix.Match(hashes, out[:0])
			i++
		})
		assert.Zero(t, allocs)
		assert.Len(t, out, ranks)
	}
}
