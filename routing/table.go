package routing

import "math/bits"

// table is a hash table from 64-bit keys to values that are not 0: linear probing, deletion shifts back, so
// that adds and removes neither allocate nor slow down once it is as large as it needs to be. Policies keep
// their memory in it.
type table struct {
	cells []tableCell // length is a power of two
	n     int
	shift uint
}

type tableCell struct {
	key uint64
	val uint32 // 0 = free
}

func (t *table) home(key uint64) int {
	return int(key * fibonacci >> t.shift)
}

// get is the value of key, 0 if it is not there.
func (t *table) get(key uint64) uint32 {
	if t.n == 0 {
		return 0
	}
	for i := t.home(key); ; i = (i + 1) & (len(t.cells) - 1) {
		if c := &t.cells[i]; c.val == 0 || c.key == key {
			return c.val
		}
	}
}

// set gives key the value val, which is not 0.
func (t *table) set(key uint64, val uint32) {
	t.slot(key).val = val
}

// slot is the cell of key. A new one has value 0 and must be given another before anything else is done.
func (t *table) slot(key uint64) *tableCell {
	if 2*(t.n+1) > len(t.cells) {
		t.grow()
	}
	i := t.home(key)
	for t.cells[i].val != 0 {
		if t.cells[i].key == key {
			return &t.cells[i]
		}
		i = (i + 1) & (len(t.cells) - 1)
	}
	t.n++
	t.cells[i].key = key
	return &t.cells[i]
}

func (t *table) grow() {
	old := t.cells
	size := max(minCells, 2*len(old))
	t.cells, t.n = make([]tableCell, size), 0
	t.shift = uint(64 - bits.TrailingZeros(uint(size)))
	for i := range old {
		if old[i].val != 0 {
			t.set(old[i].key, old[i].val)
		}
	}
}

// remove deletes key, if it is there, and moves the cells behind it back to where a search finds them.
func (t *table) remove(key uint64) {
	if t.get(key) == 0 {
		return
	}
	mask := len(t.cells) - 1
	hole := t.home(key)
	for t.cells[hole].key != key {
		hole = (hole + 1) & mask
	}
	for i := (hole + 1) & mask; t.cells[i].val != 0; i = (i + 1) & mask {
		if home := t.home(t.cells[i].key); (i-home)&mask >= (i-hole)&mask {
			t.cells[hole] = t.cells[i]
			hole = i
		}
	}
	t.cells[hole] = tableCell{}
	t.n--
}
