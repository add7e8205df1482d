package kvindex

import "slices"

// aside keeps stored blocks whose parent is not known, as digests. They count for nothing until the parent is
// stored, and are never taken for blocks 0.
type aside struct {
	blocks   map[Handle]waiting
	children map[Handle][]Handle // by parent, in order of arrival
	order    []turn              // by age; a turn that is not its block's is over
	turns    uint64
}

// waiting is one block kept aside.
type waiting struct {
	parent Handle
	digest uint64
	more   uint32 // copies beyond the first
	turn   uint64
}

type turn struct {
	block Handle
	n     uint64
}

const (
	maxAside   = 4096 // blocks per block set
	asideBytes = 256  // charged per block: three maps and the order
)

func (a *aside) bytes() int { return len(a.blocks) * asideBytes }

// top is the first ancestor of h that is not aside; h itself if it is not.
func (a *aside) top(h Handle) Handle {
	for {
		w, ok := a.blocks[h]
		if !ok {
			return h
		}
		h = w.parent
	}
}

// add keeps one block, in place of the oldest when there are too many.
func (a *aside) add(ix *Index, b, parent Handle, digest uint64) retainResult {
	if w, ok := a.blocks[b]; ok {
		if w.parent != parent || w.digest != digest {
			return conflicts
		}
		w.more++
		a.blocks[b] = w
		return kept
	}
	ix.counters.UnknownParent++
	if len(a.blocks) >= maxAside {
		a.dropOldest(ix)
	}
	if !ix.chargeBytes(asideBytes) {
		return full
	}
	if a.blocks == nil {
		a.blocks, a.children = make(map[Handle]waiting), make(map[Handle][]Handle)
	}
	a.turns++
	a.blocks[b] = waiting{parent: parent, digest: digest, turn: a.turns}
	a.children[parent] = append(a.children[parent], b)
	if len(a.order) >= 2*maxAside {
		a.order = slices.DeleteFunc(a.order, a.over)
	}
	a.order = append(a.order, turn{b, a.turns})
	return kept
}

func (a *aside) over(t turn) bool {
	w, ok := a.blocks[t.block]
	return !ok || w.turn != t.n
}

func (a *aside) dropOldest(ix *Index) {
	for len(a.order) > 0 {
		t := a.order[0]
		a.order = a.order[1:]
		if !a.over(t) {
			a.take(ix, t.block)
			ix.counters.AsideDropped++
			return
		}
	}
}

// take removes b, if it is there, and says how many copies there were.
func (a *aside) take(ix *Index, b Handle) (w waiting, copies uint32) {
	w, ok := a.blocks[b]
	if !ok {
		return w, 0
	}
	delete(a.blocks, b)
	ix.charge -= asideBytes
	peers := a.children[w.parent]
	peers = slices.DeleteFunc(peers, func(p Handle) bool { return p == b })
	if len(peers) == 0 {
		delete(a.children, w.parent)
	} else {
		a.children[w.parent] = peers
	}
	return w, 1 + w.more
}

// remove takes one copy of b away, or all of them; false if b is not aside.
func (a *aside) remove(ix *Index, b Handle, all bool) bool {
	w, ok := a.blocks[b]
	if !ok {
		return false
	}
	if all || w.more == 0 {
		a.take(ix, b)
		return true
	}
	w.more--
	a.blocks[b] = w
	return true
}

// side counts what is rarely more than one: the first copy of a block lives in its bit alone.
type side struct {
	copies  extras[Handle] // physical copies of a handle beyond the first
	aliases extras[slot]   // handles of a block beyond the first
}

// extras counts what there is of a thing beyond the first.
type extras[K comparable] struct {
	counts map[K]uint32
	n      int // sum
}

const sideBytes = 40 // charged per entry

func (s *side) bytes() int { return sideBytes * (len(s.copies.counts) + len(s.aliases.counts)) }

// add counts n more. Without room they go uncounted, and the block is lost one removal too early.
func (e *extras[K]) add(ix *Index, key K, n uint32) {
	if n == 0 {
		return
	}
	if e.counts[key] == 0 && !ix.chargeBytes(sideBytes) {
		ix.counters.Refused++
		return
	}
	if e.counts == nil {
		e.counts = make(map[K]uint32)
	}
	e.counts[key] += n
	e.n += int(n)
}

// take takes one away; false if there was only the first.
func (e *extras[K]) take(ix *Index, key K) bool {
	if len(e.counts) == 0 {
		return false
	}
	n := e.counts[key]
	if n > 1 {
		e.counts[key] = n - 1
		e.n--
	} else if n == 1 {
		e.forget(ix, key)
	}
	return n > 0
}

func (e *extras[K]) forget(ix *Index, key K) {
	if len(e.counts) > 0 && e.counts[key] > 0 {
		e.n -= int(e.counts[key])
		delete(e.counts, key)
		ix.charge -= sideBytes
	}
}
