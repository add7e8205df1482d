package ingress

import (
	"sync"
	"sync/atomic"
)

// bodyBuffer is memory for a request's body.
type bodyBuffer struct{ b []byte }

// bodySizes are the sizes in bytes of the buffers that are used again. Each is four times as large as the one before it, so a buffer
// is at most four times as large as the whole body in it, or of the smallest size.
var bodySizes = [...]int{16 << 10, 64 << 10, 256 << 10, 1 << 20}

// bodyMemory gives requests the memory of their bodies. All of it together is held to a budget, which is taken before the memory is:
// a body for which nothing is left is refused, so clients cannot use up the memory of the node. Safe for concurrent use.
type bodyMemory struct {
	budget int64
	taken  atomic.Int64              // bytes of all buffers that requests hold
	pools  [len(bodySizes)]sync.Pool // *bodyBuffer of each size
}

// take gives an empty buffer with room for size bytes; nil if that is more than the budget has left.
func (m *bodyMemory) take(size int) *bodyBuffer {
	class := sizeClass(size)
	if class < len(bodySizes) {
		size = bodySizes[class]
	}
	if n := int64(size); m.taken.Add(n) > m.budget {
		m.taken.Add(-n)
		return nil
	}
	if class < len(bodySizes) {
		if b, _ := m.pools[class].Get().(*bodyBuffer); b != nil {
			return b
		}
	}
	return &bodyBuffer{b: make([]byte, 0, size)}
}

// grow gives a buffer of at least twice the size with the content of b, which is full, and takes b back. The new one is not larger
// than most bytes, or the size of bodySizes above that. Behind 64 KiB it is as large as most if that is 1 MiB or less: what copies
// would cost there is more than the memory. nil if the budget has less left: b stays the caller's then.
func (m *bodyMemory) grow(b *bodyBuffer, most int) *bodyBuffer {
	size := 2 * cap(b.b)
	if cap(b.b) >= bodySizes[1] && most <= bodySizes[len(bodySizes)-1] {
		size = most
	}
	larger := m.take(min(size, most))
	if larger == nil {
		return nil
	}
	larger.b = append(larger.b, b.b...)
	m.give(b, true)
	return larger
}

// give takes a buffer back; a nil buffer is none. It is used again unless it is larger than every size of bodySizes, or somebody may
// still read it (reusable is false): an engine connection that was given up may be in the middle of writing it.
func (m *bodyMemory) give(b *bodyBuffer, reusable bool) {
	if b == nil {
		return
	}
	m.taken.Add(-int64(cap(b.b)))
	if class := sizeClass(cap(b.b)); reusable && class < len(bodySizes) {
		b.b = b.b[:0]
		m.pools[class].Put(b)
	}
}

// sizeClass is the index in bodySizes of the smallest size that holds n bytes; len(bodySizes) if none does.
func sizeClass(n int) int {
	for i, size := range bodySizes {
		if n <= size {
			return i
		}
	}
	return len(bodySizes)
}
