package sim

import (
	"encoding/binary"
	"math"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// kvEncoder writes the batches of one rank in the msgpack that the imitated publishers write: order of keys,
// types and widths as captured. Not safe for concurrent use.
type kvEncoder struct {
	format KVFormat
	hash   KVHash
	window bool
	block  int // tokens per block
	rank   int

	// digests are the whole hashes of what is stored, by their low 64 bits: a removal names those only. Kept
	// for KVBytes.
	digests map[uint64]*digest
	tokens  []uint32
	b       []byte
}

type digest struct {
	sum    [em.DigestSize]byte
	copies int
}

func newKVEncoder(k *KVEvents, block, rank int) *kvEncoder {
	return &kvEncoder{
		format: k.Format, hash: k.Hash, window: k.SlidingWindow, block: block, rank: rank,
		digests: map[uint64]*digest{},
	}
}

// batch is [ts, events, rank] for the changes of one step; the result is the caller's.
func (e *kvEncoder) batch(ts float64, events []em.BlockEvent) []byte {
	e.b = e.b[:0]
	e.array(map[bool]int{true: 2, false: 3}[e.format == KVOldSGLang])
	e.b = binary.BigEndian.AppendUint64(append(e.b, 0xcb), math.Float64bits(ts))
	groups := 1
	if e.window {
		groups = 2
	}
	e.array(len(events) * groups)
	for i := range events {
		for g := range groups {
			e.event(&events[i], g)
		}
	}
	if e.format != KVOldSGLang {
		e.uint(uint64(e.rank)) //nolint:gosec // ranks are not negative
	}
	return append(make([]byte, 0, len(e.b)), e.b...)
}

func (e *kvEncoder) event(ev *em.BlockEvent, group int) {
	switch ev.Kind {
	case em.BlocksCleared:
		e.cleared()
	case em.BlockRemoved:
		e.removed(ev.Hash, group)
	case em.BlocksStored:
		c, _ := ev.Req.Content.(*em.TokenContent)
		e.stored(c, ev.First, ev.Count, group)
	}
}

func (e *kvEncoder) cleared() {
	clear(e.digests)
	e.tag(1, "AllBlocksCleared", 1)
}

// tag begins an event: as a map of fields members, the type first, or as an array.
func (e *kvEncoder) tag(fields int, name string, elements int) {
	if e.format != KVMap {
		e.array(elements)
		e.text(name)
		return
	}
	e.b = append(e.b, 0x80|byte(fields)) //nolint:gosec // below 16
	e.member("type")
	e.text(name)
}

// member writes the name of a map's member; arrays have none.
func (e *kvEncoder) member(name string) {
	if e.format == KVMap {
		e.text(name)
	}
}

func (e *kvEncoder) removed(hash uint64, group int) {
	e.tag(4, "BlockRemoved", map[bool]int{true: 2, false: 3}[e.format == KVOldSGLang])
	e.member("block_hashes")
	e.array(1)
	e.goneHash(hash, group)
	if e.format == KVOldSGLang {
		return
	}
	e.member("medium")
	e.text("GPU")
	if e.format == KVMap {
		e.member("group_idx")
		e.uint(uint64(group)) //nolint:gosec // 0 or 1
	}
}

func (e *kvEncoder) stored(c *em.TokenContent, first, count, group int) {
	salted := first == 0 && c.Salt() != ""
	e.tag(11, "BlockStored", e.elements(salted))
	from := first
	if group > 0 {
		from = first + count - 1 // a window keeps the last block of a span and tells no others
	}
	e.member("block_hashes")
	e.array(first + count - from)
	for i := from; i < first+count; i++ {
		e.storedHash(c, i, group)
	}
	e.member("parent_block_hash")
	e.parent(c, first)
	e.member("token_ids")
	e.ids(c, first, count)
	e.member("block_size")
	e.uint(uint64(e.block)) //nolint:gosec // positive
	e.member("lora_id")
	e.null()
	if e.format == KVOldSGLang {
		return
	}
	e.member("medium")
	e.text("GPU")
	if e.format == KVMap || salted {
		e.member("lora_name")
		e.null()
		e.member("extra_keys")
		e.extra(c, first+count-from, salted)
	}
	if e.format == KVMap {
		e.member("group_idx")
		e.uint(uint64(group)) //nolint:gosec // 0 or 1
		e.member("kv_cache_spec_kind")
		e.text([...]string{"full_attention", "sliding_window"}[group])
	}
}

// elements is the length of a stored event's array: up to the last one that says something.
func (e *kvEncoder) elements(salted bool) int {
	switch {
	case e.format == KVOldSGLang:
		return 6
	case salted:
		return 9
	}
	return 7
}

func (e *kvEncoder) extra(c *em.TokenContent, count int, salted bool) {
	e.array(count)
	for i := range count {
		if i == 0 && salted {
			e.array(1)
			e.text(c.Salt())
			continue
		}
		e.null()
	}
}

func (e *kvEncoder) parent(c *em.TokenContent, first int) {
	if first == 0 {
		e.null()
		return
	}
	hash, _ := c.BlockHash(first - 1)
	if e.hash == KVBytes {
		e.bin(c.Digest(first - 1))
		return
	}
	e.number(hash)
}

func (e *kvEncoder) ids(c *em.TokenContent, first, count int) {
	e.tokens = e.tokens[:0]
	for i := first; i < first+count; i++ {
		e.tokens = c.AppendBlockTokens(e.tokens, i)
	}
	e.array(len(e.tokens))
	for _, id := range e.tokens {
		e.uint(uint64(id))
	}
}

func (e *kvEncoder) storedHash(c *em.TokenContent, i, group int) {
	hash, _ := c.BlockHash(i)
	if e.hash != KVBytes {
		e.number(hash)
		return
	}
	sum := c.Digest(i)
	e.bin(sum)
	if group > 0 {
		return
	}
	if d := e.digests[hash]; d != nil {
		d.copies++
		return
	}
	e.digests[hash] = &digest{sum: sum, copies: 1}
}

func (e *kvEncoder) goneHash(hash uint64, group int) {
	if e.hash != KVBytes {
		e.number(hash)
		return
	}
	d := e.digests[hash]
	if d == nil { // its last copy, and told for the second group
		e.bin(em.WidenHash(hash))
		return
	}
	e.bin(d.sum)
	if last := !e.window || group > 0; last {
		if d.copies--; d.copies == 0 {
			delete(e.digests, hash)
		}
	}
}

func (e *kvEncoder) number(hash uint64) {
	if signed := int64(hash); e.hash == KVInt && signed < 0 { //nolint:gosec // the bit pattern is the hash
		e.b = binary.BigEndian.AppendUint64(append(e.b, 0xd3), hash)
		return
	}
	e.uint(hash)
}

// The pieces of msgpack, in their shortest forms.

func (e *kvEncoder) null() { e.b = append(e.b, 0xc0) }

func (e *kvEncoder) array(n int) {
	switch {
	case n < 16:
		e.b = append(e.b, 0x90|byte(n)) //nolint:gosec // checked
	case n < 1<<16:
		e.b = binary.BigEndian.AppendUint16(append(e.b, 0xdc), uint16(n))
	default:
		e.b = binary.BigEndian.AppendUint32(append(e.b, 0xdd), uint32(n)) //nolint:gosec // tokens of one step
	}
}

func (e *kvEncoder) uint(v uint64) {
	switch {
	case v < 1<<7:
		e.b = append(e.b, byte(v))
	case v < 1<<8:
		e.b = append(e.b, 0xcc, byte(v))
	case v < 1<<16:
		e.b = binary.BigEndian.AppendUint16(append(e.b, 0xcd), uint16(v))
	case v < 1<<32:
		e.b = binary.BigEndian.AppendUint32(append(e.b, 0xce), uint32(v))
	default:
		e.b = binary.BigEndian.AppendUint64(append(e.b, 0xcf), v)
	}
}

func (e *kvEncoder) text(s string) {
	switch n := len(s); {
	case n < 32:
		e.b = append(e.b, 0xa0|byte(n))
	case n < 1<<8:
		e.b = append(e.b, 0xd9, byte(n))
	case n < 1<<16:
		e.b = binary.BigEndian.AppendUint16(append(e.b, 0xda), uint16(n))
	default:
		//nolint:gosec // bounded by the body
		e.b = binary.BigEndian.AppendUint32(append(e.b, 0xdb), uint32(n))
	}
	e.b = append(e.b, s...)
}

func (e *kvEncoder) bin(sum [em.DigestSize]byte) {
	e.b = append(append(e.b, 0xc4, em.DigestSize), sum[:]...)
}
