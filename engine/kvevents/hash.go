package kvevents

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/zeebo/xxh3"
)

// HashKind is the wire type of an engine's block hash.
type HashKind uint8

// The kinds. HashNone is the zero Hash: no parent.
const (
	HashNone  HashKind = iota
	HashUint           // integer ≥ 0, whatever its encoding
	HashInt            // integer < 0
	HashBytes          // 1 to MaxHashBytes raw bytes
)

// MaxHashBytes is the longest raw hash: SHA-256.
const MaxHashBytes = 32

// Hash is an engine's name of a KV block: opaque, comparable, and distinct for distinct wire types (integer,
// bytes). It means nothing outside one incarnation of one rank.
type Hash struct {
	Kind HashKind
	Len  uint8              // bytes used
	Data [MaxHashBytes]byte // integers: 8 bytes big-endian
}

// UintHash is the hash of a non-negative integer.
func UintHash(v uint64) Hash {
	h := Hash{Kind: HashUint, Len: 8}
	binary.BigEndian.PutUint64(h.Data[:], v)
	return h
}

// IntHash is the hash of any integer: non-negative ones equal UintHash.
func IntHash(v int64) Hash {
	h := UintHash(uint64(v)) //nolint:gosec // the bit pattern is the name
	if v < 0 {
		h.Kind = HashInt
	}
	return h
}

// BytesHash is the hash of raw bytes; ok is false for none or more than MaxHashBytes.
func BytesHash(b []byte) (h Hash, ok bool) {
	if len(b) == 0 || len(b) > MaxHashBytes {
		return Hash{}, false
	}
	h.Kind, h.Len = HashBytes, uint8(len(b)) //nolint:gosec // at most 32
	copy(h.Data[:], b)
	return h, true
}

// IsZero says that there is no hash.
func (h Hash) IsZero() bool { return h.Kind == HashNone }

// Handle condenses h, kind and length included, to 64 bits for tables that are keyed by them. Two hashes of
// one rank share a handle with probability 2^-64 per pair.
func (h Hash) Handle() uint64 {
	return xxh3.HashSeed(h.Data[:h.Len], uint64(h.Kind)<<8|uint64(h.Len))
}

// String is for logs and tests.
func (h Hash) String() string {
	switch h.Kind {
	case HashUint:
		return fmt.Sprintf("%d", binary.BigEndian.Uint64(h.Data[:]))
	case HashInt:
		return fmt.Sprintf("%d", int64(binary.BigEndian.Uint64(h.Data[:]))) //nolint:gosec // the bit pattern is the name
	case HashBytes:
		return hex.EncodeToString(h.Data[:h.Len])
	case HashNone:
	}
	return "none"
}
