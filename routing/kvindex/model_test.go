package kvindex

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// model drives an index and one oracle per rank through the same history.
type model struct {
	f       forest
	ix      *Index
	ranks   int
	sets    []*BlockSet
	oracles []*oracle
	now     time.Duration
	opened  uint64
}

func (m *model) open(t require.TestingT, rank int, shown bool) {
	m.opened++
	c, err := m.ix.Open(Owner{Rank: uint32(rank), Epoch: 1, Incarnation: m.opened},
		Options{Feed: FromEvents, Shown: shown})
	require.NoError(t, err)
	m.sets[rank], m.oracles[rank] = c, newOracle()
}

func (m *model) step(t *rapid.T) {
	rank := rapid.IntRange(0, m.ranks-1).Draw(t, "rank")
	c := m.sets[rank]
	switch rapid.IntRange(0, 19).Draw(t, "op") {
	case 0:
		c.Clear()
		m.oracles[rank] = newOracle()
	case 1:
		m.open(t, rank, rapid.Bool().Draw(t, "shown"))
	case 2, 3:
		c.Show()
	case 4:
		m.ix.Sweep(rapid.IntRange(1, 2000).Draw(t, "slots"))
	case 5, 6:
		m.now += time.Duration(rapid.IntRange(1, 20).Draw(t, "ticks")) * 200 * time.Millisecond
		m.ix.Advance(m.now)
	case 7, 8, 9, 10, 11, 12, 13:
		m.remove(t, rank)
	default:
		m.store(t, rank)
	}
}

// store sends a stretch of a prompt; what stood in front of it may never have been stored (lost events).
func (m *model) store(t *rapid.T, rank int) {
	k, a, b := m.f.stretch(t)
	v := rapid.IntRange(0, 1).Draw(t, "variant")
	ev := StoredEvent{
		Root: rootOf(1), Blocks: m.f.names(k, a, b, rank, v), Tokens: m.f.ids[k][a:b],
		BlockSize: 1,
	}
	var parent *Handle
	if a > 0 {
		ev.HasParent, ev.Parent = true, m.f.name(k, a-1, rank, v)
		parent = &ev.Parent
	}
	m.sets[rank].Stored(testHasher, &ev)
	m.oracles[rank].stored(parent, ev.Blocks, ev.Tokens)
}

// remove takes blocks from the end, from the front or from the middle.
func (m *model) remove(t *rapid.T, rank int) {
	k, a, b := m.f.stretch(t)
	if rapid.IntRange(0, 2).Draw(t, "tail") > 0 {
		b = len(m.f.ids[k])
	}
	names := m.f.names(k, a, b, rank, rapid.IntRange(0, 1).Draw(t, "variant"))
	m.sets[rank].Removed(0, names)
	for i := len(names) - 1; i >= 0; i-- {
		m.oracles[rank].removed(names[i])
	}
}

func (m *model) check(t *rapid.T) {
	for k := range m.f.hashes {
		got := hitsOf(m.ix, m.f.hashes[k])
		for rank, c := range m.sets {
			hit, there := got[uint32(rank)]
			require.Equal(t, c.Shown(), there, "rank %d", rank)
			if there {
				require.Equal(t, m.oracles[rank].leading(m.f.hashes[k]), hit, "rank %d prompt %d", rank, k)
			}
		}
	}
}

func TestMatchEqualsTheLinearModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{f: drawForest(t), ranks: rapid.IntRange(1, 5).Draw(t, "ranks")}
		m.ix = newIndex(t, Config{Sets: rapid.SampledFrom([]int{64, 130}).Draw(t, "block sets")})
		m.sets, m.oracles = make([]*BlockSet, m.ranks), make([]*oracle, m.ranks)
		for rank := range m.ranks {
			m.open(t, rank, true)
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			m.step(t)
			m.check(t)
		}
		verify(t, m.ix)
		for _, c := range m.sets {
			c.Close()
		}
		for m.ix.Sweep(100) {
		}
		verify(t, m.ix)
		assert.Zero(t, m.ix.Stats().Blocks, "swept clean")
	})
}

// lruOracle is one block set of chains under a bound, as a map.
type lruOracle struct {
	parent map[uint64]uint64
	stamp  map[uint64]int
	cap    int
}

func (o *lruOracle) touch(hashes []uint64, now int) int {
	n := 0
	for _, h := range hashes {
		if _, ok := o.parent[h]; !ok {
			break
		}
		o.stamp[h] = now
		n++
	}
	return n
}

func (o *lruOracle) evict(spare map[uint64]bool) bool {
	inner := map[uint64]bool{}
	for _, p := range o.parent {
		inner[p] = true
	}
	victim, found := uint64(0), false
	for h := range o.parent {
		if !inner[h] && !spare[h] && (!found || o.stamp[h] < o.stamp[victim]) {
			victim, found = h, true
		}
	}
	delete(o.parent, victim)
	delete(o.stamp, victim)
	return found
}

func (o *lruOracle) store(hashes []uint64, now int) {
	spare := map[uint64]bool{}
	for i, h := range hashes {
		if _, ok := o.parent[h]; !ok {
			if len(o.parent) == o.cap && !o.evict(spare) {
				return
			}
			o.parent[h] = 0
			if i > 0 {
				o.parent[h] = hashes[i-1]
			}
		}
		o.stamp[h] = now
		spare[h] = true
	}
}

// remove takes blocks from the end of p down to keep, as far as nothing else follows them.
func (o *lruOracle) remove(p []uint64, keep int) (gone []uint64) {
	for i := len(p) - 1; i >= keep; i-- {
		for _, up := range o.parent {
			if up == p[i] {
				return gone
			}
		}
		if _, ok := o.parent[p[i]]; ok {
			gone = append([]uint64{p[i]}, gone...)
		}
		delete(o.parent, p[i])
		delete(o.stamp, p[i])
	}
	return gone
}

// The cap evicts exactly the least recently matched leaf, and what is left is closed under prefixes.
func TestEvictsLeastRecentlyMatchedLeaves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ix := newIndex(t, Config{})
		small(ix, 1)
		c := open(t, ix, 0, FromDeltas)
		o := &lruOracle{
			parent: map[uint64]uint64{}, stamp: map[uint64]int{},
			cap: chunkSlots - int(firstSlot),
		}
		var prompts [][]uint64
		for k := range 12 {
			ids := count(400)
			if k > 0 {
				fork := rapid.IntRange(0, 399).Draw(t, "fork")
				for i := fork; i < len(ids); i++ {
					ids[i] += uint32(1000 * k)
				}
			}
			prompts = append(prompts, chain(ids, 1))
		}
		for now := range rapid.IntRange(1, 40).Draw(t, "steps") {
			ix.Advance(time.Duration(now+1) * time.Second)
			p := rapid.SampledFrom(prompts).Draw(t, "prompt")
			p = p[:rapid.IntRange(1, len(p)).Draw(t, "length")]
			switch rapid.IntRange(0, 3).Draw(t, "op") {
			case 0:
				require.Equal(t, o.touch(p, now+1), hitsOf(ix, p)[0])
				continue
			case 1:
				c.Apply(Delta{
					Change: Removed,
					Hashes: o.remove(p, rapid.IntRange(0, len(p)-1).Draw(t, "keep")),
				})
			default:
				c.Apply(Delta{Change: Stored, Hashes: p})
				o.store(p, now+1)
			}
			require.Equal(t, len(o.parent), c.Len())
			sum := uint64(0)
			for h := range o.parent {
				sum += h
			}
			require.Equal(t, sum, sumOf(c), "same blocks")
			require.Zero(t, c.orphans)
		}
		verify(t, ix)
	})
}
