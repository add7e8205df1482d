package dpserver

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"testing"

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
					old.columnSums())
				assert.Equal(t, client.EventsLive, r.Status().KV.Events.State)
			})
		})
	}
}
