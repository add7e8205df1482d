package simulate

import (
	"container/heap"
	"time"
)

// agenda is what will happen, in the order of time.
type agenda struct {
	entries entries
	seq     int
}

type entry struct {
	at  time.Duration
	seq int
	do  func()
}

type entries []entry

func (a entries) Len() int { return len(a) }
func (a entries) Less(i, k int) bool {
	return a[i].at < a[k].at || a[i].at == a[k].at && a[i].seq < a[k].seq
}
func (a entries) Swap(i, k int) { a[i], a[k] = a[k], a[i] }
func (a *entries) Push(x any) {
	e, _ := x.(entry)
	*a = append(*a, e)
}

func (a *entries) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
}

func (a *agenda) at(when time.Duration, do func()) {
	heap.Push(&a.entries, entry{when, a.seq, do})
	a.seq++
}

// next is when the next entry is due.
func (a *agenda) next() time.Duration {
	if len(a.entries) == 0 {
		return never
	}
	return a.entries[0].at
}

// do does the next entry.
func (a *agenda) do() {
	e, _ := heap.Pop(&a.entries).(entry)
	e.do()
}
