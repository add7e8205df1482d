package remote

// Sizes of a log.
const (
	chunkBytes = 64 << 10
	maxChunks  = 16 // 1 MiB
)

// recordLog is the packed records of all ranks of a node, in one order, as long as a stream may need them:
// written once, and read by every stream at its own pace. A chunk's bytes never change, so they are sent
// without a copy. A reader that is too slow loses its place; it never blocks the writer. Not safe for
// concurrent use.
type recordLog struct {
	chunks []*logChunk
	first  uint64 // number of chunks[0]
	count  uint64 // all records since the start
}

type logChunk struct {
	buf   []byte
	start uint64 // records before it
}

// place is a reader's position in the log.
type place struct {
	chunk uint64
	pos   int
	count uint64 // records before it
}

func (p place) before(q place) bool {
	return p.chunk < q.chunk || p.chunk == q.chunk && p.pos < q.pos
}

// append adds one packed record.
func (l *recordLog) append(part []byte) {
	n := len(l.chunks)
	if n == 0 || len(l.chunks[n-1].buf)+len(part) > cap(l.chunks[n-1].buf) {
		if n == maxChunks {
			l.chunks = append(l.chunks[:0], l.chunks[1:]...)
			l.first++
		}
		l.chunks = append(l.chunks,
			&logChunk{buf: make([]byte, 0, max(chunkBytes, len(part))), start: l.count})
	}
	c := l.chunks[len(l.chunks)-1]
	c.buf = append(c.buf, part...)
	l.count++
}

// end is the position after the last record.
func (l *recordLog) end() place {
	n := len(l.chunks)
	if n == 0 {
		return place{chunk: l.first, count: l.count}
	}
	return place{chunk: l.first + uint64(n) - 1, pos: len(l.chunks[n-1].buf), count: l.count}
}

// hasLost says whether a reader at p missed records, or is more than limit of them behind.
func (l *recordLog) hasLost(p place, limit uint64) bool {
	return p.chunk < l.first || l.count-p.count > limit
}

// read returns records from p up to until, and where they end; nil if there are none. hasLost(p) must be
// false.
func (l *recordLog) read(p, until place) (records []byte, next place) {
	for p.before(until) {
		c := l.chunks[p.chunk-l.first]
		if p.chunk == until.chunk {
			return c.buf[p.pos:until.pos:until.pos], until
		}
		records = c.buf[p.pos:len(c.buf):len(c.buf)]
		p = place{chunk: p.chunk + 1, count: l.chunks[p.chunk+1-l.first].start}
		if len(records) > 0 {
			return records, p
		}
	}
	return nil, p
}
