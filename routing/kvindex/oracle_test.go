package kvindex

import (
	"pgregory.net/rapid"
)

// oracle is a block set in the dumbest way: lists and maps, no tree, no bits.
type oracle struct {
	held    map[Handle]*oracleBlock
	waiting []oracleWait
}

type oracleBlock struct {
	hash   uint64
	copies int
}

type oracleWait struct {
	block, parent Handle
	token         uint32
	copies        int
}

func newOracle() *oracle {
	return &oracle{held: map[Handle]*oracleBlock{}}
}

// stored takes a chain of one-token blocks behind parent (nil: block 0).
func (o *oracle) stored(parent *Handle, blocks []Handle, ids []uint32) {
	for i, b := range blocks {
		p := parent
		if i > 0 {
			p = &blocks[i-1]
		}
		o.storedOne(p, b, ids[i])
	}
	for again := true; again; {
		again = false
		for i, w := range o.waiting {
			if up, ok := o.held[w.parent]; ok {
				o.waiting = append(o.waiting[:i:i], o.waiting[i+1:]...)
				o.hold(w.block, up.hash, w.token, w.copies)
				again = true
				break
			}
		}
	}
}

func (o *oracle) storedOne(parent *Handle, b Handle, token uint32) {
	if held, ok := o.held[b]; ok {
		held.copies++
		return
	}
	if parent == nil {
		o.hold(b, rootOf(1), token, 1)
		return
	}
	if up, ok := o.held[*parent]; ok {
		o.hold(b, up.hash, token, 1)
		return
	}
	for i := range o.waiting {
		if o.waiting[i].block == b {
			o.waiting[i].copies++
			return
		}
	}
	o.waiting = append(o.waiting, oracleWait{b, *parent, token, 1})
}

func (o *oracle) hold(b Handle, up uint64, token uint32, copies int) {
	for i, w := range o.waiting {
		if w.block == b {
			copies += w.copies
			o.waiting = append(o.waiting[:i:i], o.waiting[i+1:]...)
			break
		}
	}
	hash := testHasher.Tokens(nil, up, []uint32{token}, 1, nil)[0]
	o.held[b] = &oracleBlock{hash, copies}
}

func (o *oracle) removed(b Handle) {
	if held, ok := o.held[b]; ok {
		if held.copies--; held.copies == 0 {
			delete(o.held, b)
		}
		return
	}
	for i := range o.waiting {
		if o.waiting[i].block == b {
			if o.waiting[i].copies--; o.waiting[i].copies == 0 {
				o.waiting = append(o.waiting[:i:i], o.waiting[i+1:]...)
			}
			return
		}
	}
}

func (o *oracle) holds(hash uint64) bool {
	for _, b := range o.held {
		if b.hash == hash {
			return true
		}
	}
	return false
}

func (o *oracle) leading(hashes []uint64) int {
	for i, h := range hashes {
		if !o.holds(h) {
			return i
		}
	}
	return len(hashes)
}

// prompts of the model tests: trunks of one-token blocks that fork from each other at some depth.
type forest struct {
	ids    [][]uint32
	hashes [][]uint64
}

func drawForest(t *rapid.T) forest {
	var f forest
	n := rapid.IntRange(1, 5).Draw(t, "prompts")
	for k := range n {
		length := rapid.IntRange(1, 110).Draw(t, "length")
		ids := make([]uint32, length)
		fork, from := 0, []uint32(nil)
		if k > 0 {
			from = f.ids[rapid.IntRange(0, k-1).Draw(t, "from")]
			fork = rapid.IntRange(0, min(len(from), length)).Draw(t, "fork")
		}
		copy(ids, from[:fork])
		for i := fork; i < length; i++ {
			ids[i] = uint32(1000*k + i)
		}
		f.ids = append(f.ids, ids)
		f.hashes = append(f.hashes, chain(ids, 1))
	}
	return f
}

// stretch is blocks [a, b) of a prompt.
func (f forest) stretch(t *rapid.T) (k, a, b int) {
	k = rapid.IntRange(0, len(f.ids)-1).Draw(t, "prompt")
	n := len(f.ids[k])
	a = rapid.IntRange(0, n-1).Draw(t, "begin")
	if rapid.Bool().Draw(t, "from 0") {
		a = 0
	}
	return k, a, rapid.IntRange(a+1, n).Draw(t, "end")
}

// name is the engine's own hash of a block: of block set salt, variant v (an engine may have two for one
// content).
func (f forest) name(k, i, salt, v int) Handle {
	return UintHandle(0, f.hashes[k][i]^uint64(salt)<<8^uint64(v))
}

func (f forest) names(k, a, b, salt, v int) []Handle {
	out := make([]Handle, 0, b-a)
	for i := a; i < b; i++ {
		out = append(out, f.name(k, i, salt, v))
	}
	return out
}
