package kvindex

// sweep wipes the bits of columns that are gone, so that they can be used again.
type sweep struct {
	dying  []uint64 // bits to wipe in the next pass
	pass   []uint64 // bits being wiped
	cursor int      // slot to go on at; 0: no pass
	n      int      // dying bits
}

func newSweep(words int) sweep {
	return sweep{dying: make([]uint64, words), pass: make([]uint64, words)}
}

func (w *sweep) add(bit int) {
	w.dying[bit>>6] |= 1 << (bit & 63)
	w.n++
}

// begin starts a pass over all dying bits; false if there are none.
func (w *sweep) begin() bool {
	if w.n == 0 {
		return false
	}
	w.pass, w.dying = w.dying, w.pass
	clear(w.dying)
	w.n, w.cursor = 0, int(firstSlot)
	return true
}

// Sweep wipes at most n slots (about 10 ns each) for columns that were closed or cleared, and says whether
// there is more to do. Call it when the writer has nothing better to do: an unswept column cannot be used
// again and holds memory.
func (ix *Index) Sweep(n int) (more bool) {
	w := &ix.sweep
	if w.cursor == 0 && !w.begin() {
		return false
	}
	end := ix.end()
	stop := min(end, w.cursor+max(n, 1))
	for ; w.cursor < stop; w.cursor++ {
		ix.wipe(slot(w.cursor)) //nolint:gosec // bounded by New
	}
	if w.cursor < end {
		return true
	}
	for bit := range ix.columns {
		if w.pass[bit>>6]>>(bit&63)&1 == 1 {
			ix.free = append(ix.free, bit)
		}
	}
	clear(w.pass)
	w.cursor = 0
	return w.n > 0
}

// wipe takes the bits of the pass from s.
func (ix *Index) wipe(s slot) {
	hot := ix.hot(s)
	if hot[0].Load() == 0 {
		return
	}
	wiped := false
	for i, dead := range ix.sweep.pass {
		if held := hot[1+i].Load(); held&dead != 0 {
			hot[1+i].Store(held &^ dead)
			wiped = true
		}
	}
	if wiped {
		ix.reap(s)
	}
}
