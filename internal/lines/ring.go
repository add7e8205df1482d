package lines

import "slices"

// Ring keeps the last entries of a sequence, bounded in number and in bytes. Entries are numbered from 0. It
// is not safe for concurrent use.
type Ring[T any] struct {
	Most      int          // entries
	MostBytes int          // of all entries, but the newest one is kept whatever its size; 0 = no bound
	Size      func(*T) int // bytes of an entry; nil = they are not counted

	held  []T    // oldest first
	first uint64 // number of held[0]
	bytes int    // of held
}

// Add appends an entry, and drops the oldest ones that are beyond the bounds.
func (r *Ring[T]) Add(entry T) {
	r.held, r.bytes = append(r.held, entry), r.bytes+r.size(&entry)
	drop := 0
	for len(r.held)-drop > r.Most || r.MostBytes > 0 && r.bytes > r.MostBytes && len(r.held)-drop > 1 {
		r.bytes -= r.size(&r.held[drop])
		drop++
	}
	clear(r.held[:drop]) // what they refer to goes now, the slice when it grows
	r.held, r.first = r.held[drop:], r.first+uint64(drop)
}

// Keep drops all but the n newest entries, and the memory of the others.
func (r *Ring[T]) Keep(n int) {
	drop := max(0, len(r.held)-n)
	for i := range r.held[:drop] {
		r.bytes -= r.size(&r.held[i])
	}
	r.held, r.first = slices.Clone(r.held[drop:]), r.first+uint64(drop)
}

// From returns the entries from a number on that are kept, and the number of the first of them. The slice is
// valid until the ring changes.
func (r *Ring[T]) From(number uint64) (entries []T, first uint64) {
	first = min(max(number, r.first), r.Next())
	return r.held[first-r.first:], first
}

// Next is the number that the next entry gets.
func (r *Ring[T]) Next() uint64 { return r.first + uint64(len(r.held)) }

// Len is how many entries are kept.
func (r *Ring[T]) Len() int { return len(r.held) }

// Bytes is the size of the entries that are kept.
func (r *Ring[T]) Bytes() int { return r.bytes }

func (r *Ring[T]) size(entry *T) int {
	if r.Size == nil {
		return 0
	}
	return r.Size(entry)
}
