package kvindex

import "github.com/zeebo/xxh3"

// Handle names a block in its engine's own words: an opaque key for parents and removals, never for look-up.
// It is tagged by type and attention group: the integer 1, the bytes {1} and the 1 of another group are three
// handles. Integers map to handles one to one inside a tag; byte strings (16 and 32 byte digests) by xxh3.
type Handle uint64

// Tags of a handle's type.
const (
	tagUint  = 0x9e3779b97f4a7c15
	tagInt   = 0xc2b2ae3d27d4eb4f
	tagBytes = 0x165667b19e3779f9
)

// UintHandle is the handle of an unsigned integer hash (vLLM).
func UintHandle(group int, v uint64) Handle { return Handle(scramble(v ^ tag(tagUint, group))) }

// IntHandle is the handle of a signed integer hash (SGLang). What is not negative has two forms on the wire,
// and one handle.
func IntHandle(group int, v int64) Handle {
	if v >= 0 {
		return UintHandle(group, uint64(v))
	}
	return Handle(scramble(uint64(v) ^ tag(tagInt, group))) //nolint:gosec // the bits are wanted
}

// BytesHandle is the handle of a digest.
func BytesHandle(group int, b []byte) Handle { return Handle(xxh3.HashSeed(b, tag(tagBytes, group))) }

func tag(kind uint64, group int) uint64 {
	return scramble(kind + uint64(group)) //nolint:gosec // the bits are wanted
}

// scramble is a bijection that spreads its input over all bits (the finalizer of MurmurHash3).
func scramble(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
