package ingress

import (
	"sync"
	"sync/atomic"
)

// bodyBuffer is memory for a request's body.
type bodyBuffer struct{ b []byte }

// bodySizes are the sizes in bytes of pooled buffers. Each is four times the size before it, so a buffer is
// at most four times as large as the body in it, or of the smallest size.
var bodySizes = [...]int{16 << 10, 64 << 10, 256 << 10, 1 << 20}

// bodyMemory allocates the memory of request bodies within a budget for the whole node. It refuses a body for
// which the budget has nothing left, so clients cannot exhaust the node's memory. Safe for concurrent use.
type bodyMemory struct {
	budget int64
	taken  atomic.Int64              // bytes of all buffers in use
	pools  [len(bodySizes)]sync.Pool // *bodyBuffer of each size
}

// take returns an empty buffer with room for size bytes, or nil if the budget has less left.
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

// grow returns a buffer of at least twice the size with the content of b, which is full, and returns b to the
// pool. The new buffer is not larger than most bytes, rounded up to a size of bodySizes. Above 64 KiB it has
// most bytes if that is 1 MiB or less, because further copies cost more than the memory. It returns nil if
// the budget has less left; b then remains the caller's.
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

// give returns a buffer to the pool; nil is allowed. The buffer is not used again if it is larger than every
// size of bodySizes, or if reusable is false because an abandoned engine connection may still read it.
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
