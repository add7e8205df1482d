package kvevents

import "github.com/tinylib/msgp/msgp"

// reader reads msgpack without copying. Each method takes a value of its type and returns true, or leaves the
// position and returns false: another type, cut off, or beyond a limit.
type reader struct{ b []byte }

// take takes a value by a function of the library.
func take[T any](r *reader, read func([]byte) (T, []byte, error)) (v T, ok bool) {
	v, rest, err := read(r.b)
	if err == nil {
		r.b = rest
	}
	return v, err == nil
}

func (r *reader) null() bool {
	if !msgp.IsNil(r.b) {
		return false
	}
	r.b = r.b[1:]
	return true
}

// unsigned takes an integer ≥ 0 of any encoding.
func (r *reader) unsigned() (uint64, bool) {
	v, rest, err := msgp.ReadUint64Bytes(r.b)
	if err != nil {
		return 0, false
	}
	r.b = rest
	return v, true
}

// integer takes any integer, as two's complement with its sign beside it.
func (r *reader) integer() (v uint64, negative, ok bool) {
	switch msgp.NextType(r.b) { //nolint:exhaustive // the others are no integers
	case msgp.UintType:
		v, ok = r.unsigned()
		return v, false, ok
	case msgp.IntType:
		signed, ok := take(r, msgp.ReadInt64Bytes)
		return uint64(signed), signed < 0, ok
	}
	return 0, false, false
}

// float takes a float or an integer.
func (r *reader) float() (float64, bool) {
	switch msgp.NextType(r.b) { //nolint:exhaustive // the others are integers or nothing
	case msgp.Float64Type, msgp.Float32Type:
		return take(r, msgp.ReadFloat64Bytes)
	}
	v, negative, ok := r.integer()
	if negative {
		return float64(int64(v)), ok
	}
	return float64(v), ok
}

// array takes an array's head. Each element has at least one byte, so a length beyond the rest is wrong.
func (r *reader) array() (int, bool) { return r.head(msgp.ArrayType, msgp.ReadArrayHeaderBytes, 1) }

// mapping takes a map's head.
func (r *reader) mapping() (int, bool) { return r.head(msgp.MapType, msgp.ReadMapHeaderBytes, 2) }

func (r *reader) head(kind msgp.Type, read func([]byte) (uint32, []byte, error), least int) (int, bool) {
	if msgp.NextType(r.b) != kind {
		return 0, false
	}
	n, rest, err := read(r.b)
	if err != nil || int(n) > len(rest)/least {
		return 0, false
	}
	r.b = rest
	return int(n), true
}

// text takes a string of at most maxText bytes.
func (r *reader) text() ([]byte, bool) { return r.run(msgp.StrType, msgp.ReadStringZC, maxText) }

// bin takes raw bytes of at most a hash's length.
func (r *reader) bin() ([]byte, bool) { return r.run(msgp.BinType, msgp.ReadBytesZC, MaxHashBytes) }

func (r *reader) run(kind msgp.Type, read func([]byte) ([]byte, []byte, error), most int) ([]byte, bool) {
	if msgp.NextType(r.b) != kind {
		return nil, false
	}
	b, rest, err := read(r.b)
	if err != nil || len(b) > most {
		return nil, false
	}
	r.b = rest
	return b, true
}

// skip passes one value of any type and returns its bytes.
func (r *reader) skip() (value []byte, ok bool) {
	rest, err := msgp.Skip(r.b)
	if err != nil {
		return nil, false
	}
	value = r.b[:len(r.b)-len(rest)]
	r.b = rest
	return value, true
}
