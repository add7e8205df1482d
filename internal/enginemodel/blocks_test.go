package enginemodel

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"
)

// oraclePool does what blockPool does with slices and scans only.
type oraclePool struct {
	refs  []int
	hash  []uint64 // 0 = not cached
	order []int32  // free blocks, oldest first
	age   []int    // when cached: lookup gives the copy cached last
	clock int
}

func newOraclePool(n int) *oraclePool {
	p := &oraclePool{refs: make([]int, n), hash: make([]uint64, n), age: make([]int, n)}
	for i := range n {
		p.order = append(p.order, int32(i))
	}
	return p
}

func (p *oraclePool) lookup(h uint64) (int32, bool) {
	best := none
	for i := range p.hash {
		if p.hash[i] == h && (best == none || p.age[i] > p.age[best]) {
			best = int32(i)
		}
	}
	return best, best != none
}

func (p *oraclePool) ref(i int32) {
	if p.refs[i] == 0 {
		p.order = slices.DeleteFunc(p.order, func(o int32) bool { return o == i })
	}
	p.refs[i]++
}

func (p *oraclePool) take() int32 {
	i := p.order[0]
	p.hash[i] = 0
	p.ref(i)
	return i
}

func (p *oraclePool) release(i int32) {
	p.refs[i]--
	if p.refs[i] == 0 {
		p.order = append(p.order, i)
	}
}

func (p *oraclePool) cache(i int32, h uint64) {
	p.clock++
	p.hash[i], p.age[i] = h, p.clock
}

func TestBlockPoolAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "blocks")
		real, oracle := newBlockPool(n, &blockLog{}), newOraclePool(n)
		var held []int32
		hash := rapid.Uint64Range(1, 6) // few, so that copies and hits are common
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				if real.free == 0 {
					t.Skip("no free block")
				}
				a, b := real.take(), oracle.take()
				assert.Equal(t, b, a)
				held = append(held, a)
			},
			"hit": func(t *rapid.T) {
				h := hash.Draw(t, "hash")
				a, okA := real.lookup(h)
				b, okB := oracle.lookup(h)
				assert.Equal(t, okB, okA)
				if !okA {
					return
				}
				assert.Equal(t, b, a)
				real.ref(a)
				oracle.ref(b)
				held = append(held, a)
			},
			"cache": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip("nothing held")
				}
				b := rapid.SampledFrom(held).Draw(t, "block")
				if real.blocks[b].cached {
					t.Skip("holds a hash already")
				}
				h := hash.Draw(t, "hash")
				real.cache(b, h)
				oracle.cache(b, h)
			},
			"release": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip("nothing held")
				}
				i := rapid.IntRange(0, len(held)-1).Draw(t, "held")
				b := held[i]
				held = slices.Delete(held, i, i+1)
				real.release(b)
				oracle.release(b)
			},
			"": func(t *rapid.T) {
				assert.Equal(t, len(oracle.order), real.free)
				assert.Equal(t, n-len(oracle.order), real.used())
				var list []int32
				for i := real.head; i != none; i = real.blocks[i].next {
					list = append(list, i)
				}
				assert.Equal(t, oracle.order, append([]int32{}, list...))
			},
		})
	})
}

func TestQueueAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q queue
		var oracle []*Request
		t.Repeat(map[string]func(*rapid.T){
			"back": func(t *rapid.T) {
				r := &Request{Prompt: rapid.IntRange(1, 9).Draw(t, "prompt")}
				q.pushBack(r)
				oracle = append(oracle, r)
			},
			"front": func(t *rapid.T) {
				r := &Request{Prompt: 3}
				q.pushFront(r)
				oracle = slices.Insert(oracle, 0, r)
			},
			"pop": func(t *rapid.T) {
				if len(oracle) == 0 {
					t.Skip("empty")
				}
				assert.Same(t, oracle[0], q.popFront())
				oracle = oracle[1:]
			},
			"remove": func(t *rapid.T) {
				if len(oracle) == 0 {
					t.Skip("empty")
				}
				i := rapid.IntRange(0, len(oracle)-1).Draw(t, "at")
				q.remove(oracle[i])
				oracle = slices.Delete(oracle, i, i+1)
			},
			"": func(t *rapid.T) {
				assert.Equal(t, len(oracle), q.len())
				sum := 0
				for _, r := range oracle {
					sum += r.Prompt
				}
				assert.Equal(t, sum, q.tokens)
				if len(oracle) > 0 {
					assert.Same(t, oracle[0], q.front())
				}
			},
		})
	})
}
