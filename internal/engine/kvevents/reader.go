package kvevents

import (
	"encoding/binary"
	"math"
)

// reader reads msgpack without copying or allocating. Every method consumes a value of its type and returns
// true, or leaves the position unchanged and returns false: wrong type, cut off, or beyond the limit. It
// checks every announced length against the bytes that are left.
type reader struct {
	b []byte
	i int
}

// msgpack's type bytes.
const (
	codeNil      = 0xc0
	codeFalse    = 0xc2
	codeTrue     = 0xc3
	codeBin8     = 0xc4
	codeBin16    = 0xc5
	codeBin32    = 0xc6
	codeExt8     = 0xc7
	codeExt16    = 0xc8
	codeExt32    = 0xc9
	codeFloat32  = 0xca
	codeFloat64  = 0xcb
	codeUint8    = 0xcc
	codeUint16   = 0xcd
	codeUint32   = 0xce
	codeUint64   = 0xcf
	codeInt8     = 0xd0
	codeInt16    = 0xd1
	codeInt32    = 0xd2
	codeInt64    = 0xd3
	codeFixExt1  = 0xd4
	codeFixExt16 = 0xd8
	codeStr8     = 0xd9
	codeStr16    = 0xda
	codeStr32    = 0xdb
	codeArray16  = 0xdc
	codeArray32  = 0xdd
	codeMap16    = 0xde
	codeMap32    = 0xdf
)

func (r *reader) rest() int { return len(r.b) - r.i }

// be is the n-byte big-endian number behind the type byte.
func (r *reader) be(n int) (uint64, bool) {
	if r.rest() < 1+n {
		return 0, false
	}
	p := r.b[r.i+1:]
	switch n {
	case 1:
		return uint64(p[0]), true
	case 2:
		return uint64(binary.BigEndian.Uint16(p)), true
	case 4:
		return uint64(binary.BigEndian.Uint32(p)), true
	}
	return binary.BigEndian.Uint64(p), true
}

// null takes a nil.
func (r *reader) null() bool {
	if r.rest() < 1 || r.b[r.i] != codeNil {
		return false
	}
	r.i++
	return true
}

// unsigned takes an integer ≥ 0 of any encoding.
func (r *reader) unsigned() (uint64, bool) {
	v, negative, ok := r.integer()
	if !ok || negative {
		return 0, false
	}
	return v, true
}

// integer takes any integer, as two's complement with its sign beside it. A negative one that the caller
// cannot use is consumed too; the caller then drops the event.
func (r *reader) integer() (v uint64, negative, ok bool) {
	if r.rest() < 1 {
		return 0, false, false
	}
	c := r.b[r.i]
	switch {
	case c <= 0x7f:
		r.i++
		return uint64(c), false, true
	case c >= 0xe0:
		r.i++
		return uint64(int64(int8(c))), true, true //nolint:gosec // sign extension is meant
	case c >= codeUint8 && c <= codeUint64:
		n := 1 << (c - codeUint8)
		if v, ok = r.be(n); ok {
			r.i += 1 + n
		}
		return v, false, ok
	case c >= codeInt8 && c <= codeInt64:
		n := 1 << (c - codeInt8)
		if v, ok = r.be(n); ok {
			r.i += 1 + n
		}
		shift := 64 - 8*n
		signed := int64(v<<shift) >> shift    //nolint:gosec // sign extension is meant
		return uint64(signed), signed < 0, ok //nolint:gosec // two's complement
	}
	return 0, false, false
}

// float takes a float or an integer.
func (r *reader) float() (float64, bool) {
	if r.rest() < 1 {
		return 0, false
	}
	switch r.b[r.i] {
	case codeFloat64:
		v, ok := r.be(8)
		if ok {
			r.i += 9
		}
		return math.Float64frombits(v), ok
	case codeFloat32:
		v, ok := r.be(4)
		if ok {
			r.i += 5
		}
		return float64(math.Float32frombits(uint32(v))), ok //nolint:gosec // four bytes were read
	}
	v, negative, ok := r.integer()
	if negative {
		return float64(int64(v)), ok //nolint:gosec // two's complement
	}
	return float64(v), ok
}

// head takes the head of a container: fix codes from base, then the 8-, 16- and 32-bit forms (c8 0 = there is
// none).
func (r *reader) head(base, mask, c8, c16, c32 byte) (int, bool) {
	if r.rest() < 1 {
		return 0, false
	}
	c, n := r.b[r.i], 0
	switch {
	case mask != 0 && c&^mask == base:
		r.i++
		return int(c & mask), true
	case c8 != 0 && c == c8:
		n = 1
	case c == c16:
		n = 2
	case c == c32:
		n = 4
	default:
		return 0, false
	}
	v, ok := r.be(n)
	if !ok {
		return 0, false
	}
	r.i += 1 + n
	return int(v), true //nolint:gosec // at most 32 bits
}

// array takes an array's head. Each element has at least one byte, so a length beyond the rest is wrong.
func (r *reader) array() (int, bool) {
	at := r.i
	n, ok := r.head(0x90, 0x0f, 0, codeArray16, codeArray32)
	if !ok || n > r.rest() {
		r.i = at
		return 0, false
	}
	return n, true
}

// mapping takes a map's head.
func (r *reader) mapping() (int, bool) {
	at := r.i
	n, ok := r.head(0x80, 0x0f, 0, codeMap16, codeMap32)
	if !ok || n > r.rest()/2 {
		r.i = at
		return 0, false
	}
	return n, true
}

// text takes a string of at most limit bytes.
func (r *reader) text(limit int) ([]byte, bool) {
	return r.run(limit, 0xa0, 0x1f, codeStr8, codeStr16, codeStr32)
}

// bin takes raw bytes.
func (r *reader) bin(limit int) ([]byte, bool) {
	return r.run(limit, 0, 0, codeBin8, codeBin16, codeBin32)
}

func (r *reader) run(limit int, base, mask, c8, c16, c32 byte) ([]byte, bool) {
	at := r.i
	n, ok := r.head(base, mask, c8, c16, c32)
	if !ok || n > r.rest() || n > limit {
		r.i = at
		return nil, false
	}
	b := r.b[r.i : r.i+n]
	r.i += n
	return b, true
}

// skip passes one value of any type, nested at most depth deep.
func (r *reader) skip(depth int) bool {
	if r.rest() < 1 || depth < 0 {
		return false
	}
	c := r.b[r.i]
	switch {
	case c <= 0x7f, c >= 0xe0, c == codeNil, c == codeFalse, c == codeTrue:
		return r.advance(1)
	case c == codeFloat32:
		return r.advance(5)
	case c == codeFloat64:
		return r.advance(9)
	case c >= codeUint8 && c <= codeInt64:
		_, _, ok := r.integer()
		return ok
	case c >= codeFixExt1 && c <= codeFixExt16:
		return r.advance(2 + 1<<(c-codeFixExt1))
	case c >= codeExt8 && c <= codeExt32:
		n, ok := r.be(1 << (c - codeExt8))
		//nolint:gosec // checked against the rest
		return ok && n <= uint64(r.rest()) && r.advance(2+1<<(c-codeExt8)+int(n))
	case c >= codeBin8 && c <= codeBin32:
		_, ok := r.bin(math.MaxInt)
		return ok
	case c&0xe0 == 0xa0, c >= codeStr8 && c <= codeStr32:
		_, ok := r.text(math.MaxInt)
		return ok
	}
	if n, ok := r.array(); ok {
		return r.skipAll(n, depth)
	}
	if n, ok := r.mapping(); ok {
		return r.skipAll(2*n, depth)
	}
	return false
}

func (r *reader) advance(n int) bool {
	if r.rest() < n {
		return false
	}
	r.i += n
	return true
}

func (r *reader) skipAll(n, depth int) bool {
	for range n {
		if size := intSize(r.b, r.i); size > 0 { // most of a batch are token ids
			r.i += size
			continue
		}
		if !r.skip(depth - 1) {
			return false
		}
	}
	return true
}

// intSize is the length of the small integer at i, 0 if there is none: the quick way through lists of token
// ids.
func intSize(b []byte, i int) int {
	if i >= len(b) {
		return 0
	}
	size := 0
	switch c := b[i]; {
	case c <= 0x7f:
		return 1
	case c == codeUint8:
		size = 2
	case c == codeUint16:
		size = 3
	case c == codeUint32:
		size = 5
	}
	if len(b)-i < size {
		return 0
	}
	return size
}

// token takes a token id.
func (r *reader) token() (uint32, bool) {
	switch intSize(r.b, r.i) {
	case 1:
		r.i++
		return uint32(r.b[r.i-1]), true
	case 2:
		r.i += 2
		return uint32(r.b[r.i-1]), true
	case 3:
		r.i += 3
		return uint32(binary.BigEndian.Uint16(r.b[r.i-2:])), true
	case 5:
		r.i += 5
		return binary.BigEndian.Uint32(r.b[r.i-4:]), true
	}
	v, ok := r.unsigned()
	return uint32(v), ok && v <= math.MaxUint32 //nolint:gosec // checked beside it
}
