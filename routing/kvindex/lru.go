package kvindex

// leaves is a binary heap of leaf slots by stamp, corrected late: an element's stamp is at most its slot's,
// so the top whose stamps agree is the least recently matched leaf. Slots that are no leaves any more are
// thrown out at the top.
type leaves struct {
	chunks [][]leaf // by 1024: growth copies nothing
	n      int
}

type leaf struct{ stamp, slot uint32 }

func (l *leaves) at(i int) *leaf { return &l.chunks[i>>chunkBits][i%chunkSlots] }

func (l *leaves) push(x leaf) {
	if l.n>>chunkBits == len(l.chunks) {
		l.chunks = append(l.chunks, make([]leaf, chunkSlots))
	}
	i := l.n
	l.n++
	for i > 0 && l.at((i-1)/2).stamp > x.stamp {
		*l.at(i) = *l.at((i - 1) / 2)
		i = (i - 1) / 2
	}
	*l.at(i) = x
}

// sink puts x at the top and lets it fall to its place.
func (l *leaves) sink(x leaf) {
	i := 0
	for {
		k := 2*i + 1
		if k >= l.n {
			break
		}
		if k+1 < l.n && l.at(k+1).stamp < l.at(k).stamp {
			k++
		}
		if l.at(k).stamp >= x.stamp {
			break
		}
		*l.at(i) = *l.at(k)
		i = k
	}
	*l.at(i) = x
}

func (l *leaves) pop() {
	l.n--
	if l.n > 0 {
		l.sink(*l.at(l.n))
	}
}

// noteLeaf puts s into the heap, if it is a leaf and not there; one call late: a chain that is removed from
// its end makes every block a leaf for a moment.
func (ix *Index) noteLeaf(s slot) {
	if s != ix.noted {
		ix.flushLeaf()
		ix.noted = s
	}
}

func (ix *Index) flushLeaf() {
	s := ix.noted
	ix.noted = none
	if s == none || ix.hash(s) == 0 || ix.cold(s).child != none || ix.queued(s) {
		return
	}
	ix.setQueued(s, true)
	ix.leaves.push(leaf{stamp: ix.cold(s).stamp.Load(), slot: s})
}

// evict drops the least recently matched leaf from all columns; false if there is none. A parent is never
// dropped before its children, so what a column holds stays closed under prefixes.
func (ix *Index) evict() bool {
	ix.flushLeaf()
	for ix.leaves.n > 0 {
		top := *ix.leaves.at(0)
		s := top.slot
		if ix.hash(s) == 0 || ix.cold(s).child != none || s == ix.pin {
			ix.leaves.pop()
			ix.setQueued(s, false)
			continue
		}
		if now := ix.cold(s).stamp.Load(); now != top.stamp {
			ix.leaves.sink(leaf{stamp: now, slot: s})
			continue
		}
		ix.leaves.pop()
		ix.setQueued(s, false)
		ix.dropSlot(s)
		ix.counters.Evicted++
		return true
	}
	return false
}

// dropSlot takes s from every column and frees it.
func (ix *Index) dropSlot(s slot) {
	hash := ix.hash(s)
	for w := 1; w < ix.stride; w++ {
		for held := ix.hot(s)[w].Load(); held != 0; held &= held - 1 {
			bit := (w-1)<<6 + trailing(held)
			if c := ix.columns[bit]; c != nil {
				c.lose(s, hash)
				continue
			}
			ix.hot(s)[w].Store(ix.hot(s)[w].Load() &^ (held & -held)) // a dying column
		}
	}
	ix.reap(s)
}
