package kvindex

import (
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The workload: prompts of 2,048 tokens, which are 128 blocks of 16. R1: one rank holds each chain. R8: every
// rank holds the first 64 blocks of each chain, and one rank holds the rest.
const (
	benchBlock  = 16
	benchPrompt = 128
	benchHalf   = benchPrompt / 2
	benchChains = 1_000_000 / benchPrompt
)

var benchHasher = NewHasher([]byte("a secret of the cluster"))

func benchRoot() uint64 {
	return benchHasher.Root(Salt{Unit: Tokens, BlockSize: benchBlock, Model: "m"})
}

type bench struct {
	ix      *Index
	sets    []*BlockSet
	ids     [][]uint32
	events  []StoredEvent // by chain
	perHeap float64       // heap bytes per block, handles included
}

// newBench fills an index of ranks block sets with about 1M blocks; wide chains have their first half on
// every rank when everywhere is set.
func newBench(tb testing.TB, ranks, chains int, everywhere bool, feed Feed) *bench {
	b := &bench{}
	r := rand.New(rand.NewPCG(1, 2))
	for range chains {
		ids := make([]uint32, benchPrompt*benchBlock)
		for i := range ids {
			ids[i] = r.Uint32N(150_000)
		}
		ev := StoredEvent{
			Root: benchRoot(), BlockSize: benchBlock, Tokens: ids,
			Blocks: make([]Handle, benchPrompt),
		}
		for i := range ev.Blocks {
			ev.Blocks[i] = UintHandle(0, r.Uint64())
		}
		b.ids, b.events = append(b.ids, ids), append(b.events, ev)
	}
	before := heap()
	ix, err := New(Config{Sets: ranks, Bytes: 4 << 30})
	require.NoError(tb, err)
	b.ix = ix
	for i := range ranks {
		c, err := ix.Open(Owner{Rank: uint32(i), Epoch: 1}, Options{Feed: feed, Shown: true})
		require.NoError(tb, err)
		b.sets = append(b.sets, c)
	}
	var hashes []uint64
	for i := range b.events {
		if feed == FromEvents {
			b.store(i, everywhere)
			continue
		}
		hashes = benchHasher.Tokens(hashes[:0], benchRoot(), b.ids[i], benchBlock, nil)
		for k, c := range b.sets {
			if k == i%ranks {
				c.Apply(Delta{Change: Stored, Hashes: hashes})
			} else if everywhere {
				c.Apply(Delta{Change: Stored, Hashes: hashes[:benchHalf]})
			}
		}
	}
	after := heap()
	b.perHeap = float64(after-before) / float64(ix.Stats().Blocks)
	return b
}

func (b *bench) store(i int, everywhere bool) {
	half := b.events[i]
	half.Blocks, half.Tokens = half.Blocks[:benchHalf], half.Tokens[:benchHalf*benchBlock]
	for k, c := range b.sets {
		if k == i%len(b.sets) {
			c.Stored(benchHasher, &b.events[i])
		} else if everywhere {
			c.Stored(benchHasher, &half)
		}
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// prompts are 512 prompts of which the first matched blocks are those of a chain.
func (b *bench) prompts(matched int) [][]uint32 {
	r := rand.New(rand.NewPCG(3, 4))
	out := make([][]uint32, 512)
	for i := range out {
		out[i] = append(out[i], b.ids[r.IntN(len(b.ids))]...)
		for k := matched * benchBlock; k < len(out[i]); k++ {
			out[i][k] = r.Uint32N(150_000)
		}
	}
	return out
}

func (b *bench) lookup(tb *testing.B, matched int) {
	prompts := b.prompts(matched)
	hashes := make([]uint64, 0, benchPrompt)
	out := make([]Hit, 0, len(b.sets))
	root := benchRoot()
	i := 0
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	tb.ReportAllocs()
	begun := cpu()
	for tb.Loop() {
		hashes = benchHasher.Tokens(hashes[:0], root, prompts[i%len(prompts)], benchBlock, nil)
		out = b.ix.Match(hashes, out[:0])
		i++
	}
	tb.ReportMetric(float64(cpu()-begun)/float64(i), "cpu-ns/op")
	best := int32(0)
	for _, h := range out {
		best = max(best, h.Blocks)
	}
	require.GreaterOrEqual(tb, int(best), matched)
}

func BenchmarkHash128(b *testing.B) {
	ids := make([]uint32, benchPrompt*benchBlock)
	hashes := make([]uint64, 0, benchPrompt)
	root := benchRoot()
	b.ReportAllocs()
	for b.Loop() {
		hashes = benchHasher.Tokens(hashes[:0], root, ids, benchBlock, nil)
	}
}

func benchmarkMatch(b *testing.B, ranks int, everywhere bool) {
	x := newBench(b, ranks, benchChains, everywhere, FromDeltas)
	for _, m := range []struct {
		name    string
		matched int
	}{{"Half", benchHalf}, {"ThreeQuarters", 96}, {"Full", benchPrompt}, {"Miss", 0}} {
		b.Run(m.name, func(b *testing.B) { x.lookup(b, m.matched) })
	}
}

func BenchmarkMatchR1(b *testing.B)      { benchmarkMatch(b, 8, false) }
func BenchmarkMatchR8(b *testing.B)      { benchmarkMatch(b, 8, true) }
func BenchmarkMatch1024R1(b *testing.B)  { benchmarkMatch(b, 1024, false) }
func BenchmarkMatch1024All(b *testing.B) { benchmarkMatch(b, 1024, true) }

// BenchmarkApply is decoded events at 1M resident blocks: each round removes a chain and stores it again.
// Blocks/s of processor time, stored and removed ones counted alike.
func BenchmarkApply(b *testing.B) {
	x := newBench(b, 8, benchChains, false, FromEvents)
	order := rand.New(rand.NewPCG(5, 6)).Perm(len(x.events))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	n, blocks := 0, 0
	var stored, removed time.Duration
	for b.Loop() {
		i := order[n%len(order)]
		n++
		ev, c := &x.events[i], x.sets[i%8]
		t0 := cpu()
		c.Removed(0, ev.Blocks)
		t1 := cpu()
		c.Stored(benchHasher, ev)
		removed += t1 - t0
		stored += cpu() - t1
		blocks += len(ev.Blocks)
	}
	b.ReportMetric(2*float64(blocks)/(stored+removed).Seconds()/1e6, "M-applies/s")
	b.ReportMetric(float64(stored.Nanoseconds())/float64(blocks), "ns/stored")
	b.ReportMetric(float64(removed.Nanoseconds())/float64(blocks), "ns/removed")
}

// BenchmarkBound is what an apply cannot do without: the hash of 16 tokens and one write each to two tables
// of 32-byte entries, 1M keys in each. Its ratio to BenchmarkApply says more than either on a busy machine.
func BenchmarkBound(b *testing.B) {
	type entry struct {
		key, value uint64
		_          [2]uint64
	}
	const n = 1 << 21
	t1, t2 := make([]entry, n), make([]entry, n)
	put := func(t []entry, key uint64) {
		i := key >> (64 - 21)
		for t[i].key != 0 && t[i].key != key {
			i = (i + 1) % n
		}
		t[i].key, t[i].value = key, key
	}
	keys := make([]uint64, 1_000_000)
	r := rand.New(rand.NewPCG(8, 9))
	for i := range keys {
		keys[i] = r.Uint64() | 1
	}
	ids := make([]uint32, benchBlock)
	root := benchRoot()
	hashes := make([]uint64, 0, 1)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	i := 0
	begun := cpu()
	for b.Loop() {
		ids[0] = uint32(i)
		hashes = benchHasher.Tokens(hashes[:0], root, ids, benchBlock, nil)
		put(t1, keys[i])
		put(t2, keys[i]^hashes[0]&1)
		if i++; i == len(keys) {
			i = 0
		}
	}
	b.ReportMetric(float64(cpu()-begun)/float64(b.N), "cpu-ns/op")
}
