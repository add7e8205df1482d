package routing

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestTableMatchesAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var table table
		want := map[uint64]uint32{}
		key := rapid.Custom(func(t *rapid.T) uint64 { // few distinct homes: long chains
			return (rapid.Uint64Range(0, 3).Draw(t, "home")<<60 | rapid.Uint64Range(0, 30).
				Draw(t, "low")) * inverse(fibonacci)
		})
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			k := key.Draw(t, "key")
			if rapid.Bool().Draw(t, "remove") {
				table.remove(k)
				delete(want, k)
			} else {
				v := rapid.Uint32Range(1, 9).Draw(t, "value")
				table.set(k, v)
				want[k] = v
			}
			require.Equal(t, len(want), table.n)
			for k, v := range want {
				require.Equal(t, v, table.get(k))
			}
			require.Equal(t, want[k], table.get(k))
		}
	})
}
