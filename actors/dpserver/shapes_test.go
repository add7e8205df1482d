package dpserver

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// sglangPage is SGLang's name of a page: the top 64 bits of SHA-256 over the parent's digest and the tokens.
func sglangPage(parent []byte, tokens ...uint32) (name int64, digest []byte) {
	b := bytes.Clone(parent)
	for _, id := range tokens {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	sum := sha256.Sum256(b)
	return int64(binary.BigEndian.Uint64(sum[:])), sum[:]
}

// TestKV1EveryShapeMakesOneIndex: arrays and maps, names as integers of both signs and as digests of both
// lengths, fields of a later version, a chain of SGLang: the same tokens make the same index.
func TestKV1EveryShapeMakesOneIndex(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8}
	first, digest := sglangPage(nil, tokens[:4]...)
	second, _ := sglangPage(digest, tokens[4:]...)
	assert.Equal(t, int64(-3488128144981237669), first, "chain([1,2,3,4], page 4)")
	short := func(b byte) []byte { return bytes.Repeat([]byte{b}, 16) }
	long := func(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }
	asMap := func(hashes list, parent any, ids []uint32, more ...any) map[string]any {
		m := map[string]any{
			"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
			"token_ids": ids, "block_size": 4,
		}
		for i := 0; i < len(more); i += 2 {
			m[more[i].(string)] = more[i+1] //nolint:forcetypeassert // written below
		}
		return m
	}
	for name, events := range map[string]list{
		"arrays":     {list{"BlockStored", list{1, 2}, nil, tokens, 4, nil, "GPU"}},
		"old SGLang": {list{"BlockStored", list{first, second}, nil, tokens, 4, nil}},
		"two events": {
			list{"BlockStored", list{uint64(1<<63 + 9)}, nil, tokens[:4], 4},
			list{"BlockStored", list{-9}, uint64(1<<63 + 9), tokens[4:], 4},
		},
		"maps": {asMap(list{1, 2}, nil, tokens)},
		"mixed": {
			asMap(list{long(1)}, nil, tokens[:4], "medium", "GPU"),
			list{"BlockStored", list{long(2)}, long(1), tokens[4:], 4},
		},
		"short digests": {asMap(list{short(1), short(2)}, nil, tokens)},
		"later fields": {
			asMap(list{1, 2}, nil, tokens, "colour", "red", "group_idx", 0),
			list{"BlockRemoved", list{}, "GPU", 0, "LOCAL", "more"},
		},
		"longer array": {list{
			"BlockStored",
			list{1, 2},
			nil, tokens, 4, nil, "GPU", nil,
			list{nil, nil},
			0,
			"full_attention", nil, "LOCAL", 7, "later",
		}},
		"unknown events": {
			list{"BlockMoved", 1},
			map[string]any{"type": "Else"},
			asMap(list{1, 2}, nil, tokens),
		},
	} {
		t.Run(name, func(t *testing.T) {
			withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
				p.publish(events...)
				old := newReader(t)
				old.follow(r)
				require.Equal(t, map[kvindex.Tier][2]uint64{kvindex.GPU: {2, sum(prompt(tokens...))}},
					old.blockSums())
				assert.Equal(t, client.EventsLive, r.Status().KV.Events.State)
			})
		})
	}
}

// RP31: blocks of a request with a cache_salt are cached for that salt alone. Should an engine name the
// blocks of two salts alike, the second ones are not believed, and no removal leaves a block that the engine
// has dropped.
func TestSaltedBlocksOfSGLang(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8}
	event := func(first int, parent any, ids []uint32, salt string) map[string]any {
		hashes := list{}
		for i := range len(ids) / 4 {
			hashes = append(hashes, first+i)
		}
		return map[string]any{
			"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": ids,
			"block_size": 4, "lora_id": nil, "medium": "CPU_PINNED", "cache_salt": salt,
		}
	}
	hits := func(old *reader) (out [3]int) {
		for i, salt := range []string{"", "tenant-a", "tenant-b"} {
			out[i] = old.hit(kvindex.CPU, salted(kvindex.Salt{CacheSalt: salt}, tokens...))
		}
		return out
	}
	withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
		old := newReader(t)
		p.publish(event(1, nil, tokens[:4], "tenant-a"), event(2, 1, tokens[4:], "tenant-a"))
		old.follow(r)
		assert.Equal(t, [3]int{0, 2, 0}, hits(old))
		p.publish(event(11, nil, tokens, "tenant-b"))
		old.follow(r)
		assert.Equal(t, [3]int{0, 2, 2}, hits(old))
		p.publish(list{"BlockRemoved", list{12, 11}, "CPU_PINNED"}, event(1, nil, tokens[:4], "tenant-b"))
		old.follow(r)
		assert.Equal(t, [3]int{0, 2, 0}, hits(old), "a name that is known under another salt")
		p.publish(list{"BlockRemoved", list{2, 1}, "CPU_PINNED"})
		old.follow(r)
		assert.Equal(t, [3]int{}, hits(old))
		last := event(3, nil, tokens[:4], "tenant-a")
		last["image_hash"] = "may set blocks apart"
		p.publish(last)
		time.Sleep(2 * healthPeriod(&standard)) // counters are a copy of some moments ago
		assert.Equal(t, uint64(1), events(r).UnknownMembers)
		assert.Equal(t, uint64(1), events(r).Dropped, "the second store of one name")
	})
}
