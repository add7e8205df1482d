package sim

import (
	"github.com/tinylib/msgp/msgp"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// kvEncoder writes the batches of one rank in the msgpack that the imitated publishers write: order of keys,
// types and widths as captured. Not safe for concurrent use.
type kvEncoder struct {
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
		hash: k.Hash, window: k.SlidingWindow, block: block, rank: rank,
		digests: map[uint64]*digest{},
	}
}

// batch is [ts, events, rank] for the changes of one step; the result is the caller's.
func (e *kvEncoder) batch(ts float64, events []em.BlockEvent) []byte {
	e.b = e.b[:0]
	e.array(3)
	e.b = msgp.AppendFloat64(e.b, ts)
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
	e.uint(uint64(e.rank))
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
	e.tag(1, "AllBlocksCleared")
}

// tag begins an event: a map of fields members, the type first.
func (e *kvEncoder) tag(fields uint32, name string) {
	e.b = msgp.AppendMapHeader(e.b, fields)
	e.text("type")
	e.text(name)
}

func (e *kvEncoder) removed(hash uint64, group int) {
	e.tag(4, "BlockRemoved")
	e.text("block_hashes")
	e.array(1)
	e.goneHash(hash, group)
	e.text("medium")
	e.text("GPU")
	e.text("group_idx")
	e.uint(uint64(group))
}

func (e *kvEncoder) stored(c *em.TokenContent, first, count, group int) {
	e.tag(11, "BlockStored")
	from := first
	if group > 0 {
		from = first + count - 1 // a window keeps the last block of a span and tells no others
	}
	e.text("block_hashes")
	e.array(first + count - from)
	for i := from; i < first+count; i++ {
		e.storedHash(c, i, group)
	}
	e.text("parent_block_hash")
	e.parent(c, first)
	e.text("token_ids")
	e.ids(c, first, count)
	e.text("block_size")
	e.uint(uint64(e.block))
	e.text("lora_id")
	e.null()
	e.text("medium")
	e.text("GPU")
	e.text("lora_name")
	e.null()
	e.text("extra_keys")
	e.array(first + count - from)
	for i := from; i < first+count; i++ {
		if i == 0 && c.Salt() != "" {
			e.array(1)
			e.text(c.Salt())
			continue
		}
		e.null()
	}
	e.text("group_idx")
	e.uint(uint64(group))
	e.text("kv_cache_spec_kind")
	e.text([...]string{"full_attention", "sliding_window"}[group])
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
	if signed := int64(hash); e.hash == KVInt && signed < 0 {
		e.b = msgp.AppendInt64(e.b, signed)
		return
	}
	e.uint(hash)
}

func (e *kvEncoder) null() { e.b = msgp.AppendNil(e.b) }

func (e *kvEncoder) array(n int) {
	e.b = msgp.AppendArrayHeader(e.b, uint32(n))
}

func (e *kvEncoder) uint(v uint64) { e.b = msgp.AppendUint64(e.b, v) }

func (e *kvEncoder) text(s string) { e.b = msgp.AppendString(e.b, s) }

func (e *kvEncoder) bin(sum [em.DigestSize]byte) { e.b = msgp.AppendBytes(e.b, sum[:]) }
