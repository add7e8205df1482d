package kvevents

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
)

// Media and localities as engines spell them; others are passed on as they come.
const (
	MediumGPU     = "GPU"
	MediumCPU     = "CPU"
	MediumStorage = "STORAGE"
)

// Stored: blocks entered a rank's cache. The slices are valid only during the call.
type Stored struct {
	Hashes    []Hash
	Parent    Hash     // zero at the root
	Tokens    []uint32 // of all blocks, concatenated: BlockSize per hash
	BlockSize int      // tokens per block, of this event
	Medium    string   // "" = the engine's only one (old shapes)
	LoraName  string   // "" = none
	LoraID    int64    // -1 = none
	Group     int      // KV group of a hybrid model, 0 otherwise
	Kind      string   // kv_cache_spec_kind; "" = not told
	Locality  string   // "" = not told
	// CacheSalt is the salt of the request that stored the blocks, on every event of a chain, as SGLang
	// writes it; "" = none, or it stands in Extra. SGLang's hashes differ under two salts.
	CacheSalt string
	// Extra holds, per block, the raw msgpack of its extra_keys entry, nil where the entry is nil; nil as a
	// whole where the event has none. Blocks with different extras never share (cache_salt, LoRA, images):
	// see Salt.
	Extra [][]byte
}

// Removed: one copy of each block left the cache. The key of a block is (Hash, Group, Medium).
type Removed struct {
	Hashes   []Hash
	Medium   string
	Group    int
	Locality string
}

// Sink takes the events of one rank, in the engine's order, from one goroutine at a time. Its methods must
// not block and must not keep what they are given. The first call is Reset.
type Sink interface {
	Stored(ev *Stored)
	Removed(ev *Removed)
	// Cleared: the engine dropped every block. From here on the state is exact again.
	Cleared()
	// Reset: forget every block of the rank. partial = the engine may hold blocks that no event will report.
	Reset(partial bool)
}

// Salt is the cache_salt of a Stored event, "" without one. ok is false if its blocks are set apart by
// something else too (images, embeddings): such blocks match no text prompt.
func (ev *Stored) Salt() (salt string, ok bool) {
	salt = ev.CacheSalt
	for i, raw := range ev.Extra {
		if raw == nil {
			continue
		}
		r := reader{raw}
		n, isArray := r.array()
		if !isArray {
			return "", false
		}
		if ev.LoraName != "" && n > 0 {
			name, isText := r.text()
			if !isText || string(name) != ev.LoraName {
				return "", false
			}
			n--
		}
		if n == 0 {
			continue
		}
		text, isText := r.text()
		// the salt stands on the first block of a chain only
		if n > 1 || !isText || i > 0 || !ev.Parent.IsZero() {
			return "", false
		}
		salt = string(text)
	}
	return salt, true
}

// maxGroups bounds the KV groups of a hybrid model.
const maxGroups = 64

// groupFilter remembers which KV groups of a rank can be indexed by prefix, because removals name the group
// but not its kind. A nil groupFilter passes every removal. Not safe for concurrent use.
type groupFilter struct {
	out     uint64 // groups whose kind cannot be indexed
	Skipped uint64 // events of such groups
}

// indexed reports whether blocks of this kind hold every token of a prefix (a sliding window or a Mamba
// state keeps only a part of it).
func indexed(spec string) bool {
	switch spec {
	case "", "full_attention", "mla_attention", "sink_full_attention":
		return true
	}
	return false
}

func (g *groupFilter) stored(e *decoded) bool {
	if indexed(e.fields.Kind) {
		return true
	}
	if g != nil {
		g.out |= 1 << e.fields.Group
		g.Skipped++
	}
	return false
}

func (g *groupFilter) removed(e *decoded) bool {
	if g == nil || g.out&(1<<e.fields.Group) == 0 {
		return true
	}
	g.Skipped++
	return false
}

// forget clears the groups, for a new incarnation.
func (g *groupFilter) forget() { g.out = 0 }

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
	h := UintHash(uint64(v))
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
	h.Kind, h.Len = HashBytes, uint8(len(b))
	copy(h.Data[:], b)
	return h, true
}

// IsZero reports that there is no hash.
func (h Hash) IsZero() bool { return h.Kind == HashNone }

// String is for logs and tests.
func (h Hash) String() string {
	switch h.Kind {
	case HashUint:
		return fmt.Sprintf("%d", binary.BigEndian.Uint64(h.Data[:]))
	case HashInt:

		return strconv.FormatInt(int64(binary.BigEndian.Uint64(h.Data[:])), 10)
	case HashBytes:
		return hex.EncodeToString(h.Data[:h.Len])
	case HashNone:
	}
	return "none"
}
