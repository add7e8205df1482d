package routing

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Distinct blocks and overlaps equal those of plain sets, over many ranks, shared prefixes and removed ranks.
func TestActiveBlocksMatchTheOracle(t *testing.T) {
	type open struct {
		hashes []uint64
		blocks int64
	}
	rapid.Check(t, func(t *rapid.T) {
		b := newActiveBlocks(&View{})
		ranks := rapid.SampledFrom([]int{1, 3, 130}).Draw(t, "ranks")
		want := map[RankID]map[uint64]open{}
		var c scratch
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			id, key := ID(0, rapid.IntRange(0, ranks-1).Draw(t, "rank")), rapid.Uint64Range(0, 9).
				Draw(t, "key")
			switch act := rapid.IntRange(0, 9).Draw(t, "act"); {
			case act == 0:
				b.removeRank(id)
				delete(want, id)
			case act < 4:
				b.close(id, key)
				delete(want[id], key)
			default:
				hashes := chain(repeat(drawText(t)))
				blocks := int64(len(hashes)) + rapid.Int64Range(0, 2).Draw(t, "more")
				b.open(id, key, blocks, hashes)
				if want[id] == nil {
					want[id] = map[uint64]open{}
				}
				if _, known := want[id][key]; !known {
					want[id][key] = open{hashes, blocks}
				}
			}
			probe := chain(repeat(drawText(t)))
			depths := b.depths(probe, &c)
			for id, opens := range want {
				slot := int(b.slotOf.get(uint64(id)+1)) - 1
				distinct, single := map[uint64]bool{}, int64(0)
				for _, o := range opens {
					single += o.blocks - int64(len(o.hashes))
					for _, h := range o.hashes {
						distinct[h] = true
					}
				}
				depth := 0
				for depth < len(probe) && distinct[probe[depth]] {
					depth++
				}
				require.Equal(t, single+int64(len(distinct)), b.of(slot))
				require.Equal(t, int32(depth), depths[slot])
			}
		}
		for id := range want {
			b.removeRank(id)
		}
		require.Zero(t, b.counts.n+b.holders.n+b.openOf.n)
		for _, w := range b.sets {
			require.Zero(t, w, "a set that nobody holds is empty when it is used again")
		}
	})
}

// repeat makes chains long enough to be jumped over.
func repeat(text []byte) []byte {
	out := make([]byte, 0, 8*len(text))
	for _, c := range text {
		for range 8 {
			out = append(out, c)
		}
	}
	return out
}
