package enginemodel_test

import (
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// The chain of vLLM's sha256_cbor under PYTHONHASHSEED=0: tokens 0…47 in blocks of 16.
func TestSHA256CBORChain(t *testing.T) {
	prompt := make([]uint32, 48)
	for i := range prompt {
		prompt[i] = uint32(i)
	}
	root := em.RootOf("0")
	assert.Equal(t, "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
		hex.EncodeToString(root[:]))
	c := em.NewTokenContent(prompt, em.Prose{}, 16, "").Use(em.Hashing{Algo: em.HashSHA256CBOR, Root: root})
	for i, want := range []struct {
		digest string
		hash   uint64
	}{
		{"d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c", 12687895063098490012},
		{"fedd9e4abebebbe6f6cf96b682f08d316063fe2f22a5c552192dd62904fcccac", 1814341696565857452},
		{"ee4c34c217da17ac84268f864db16efed5fcefe10fcc4a9625a719adc68e654f", 2713165534665270607},
	} {
		d := c.Digest(i)
		assert.Equal(t, want.digest, hex.EncodeToString(d[:]))
		hash, ok := c.BlockHash(i)
		require.True(t, ok)
		assert.Equal(t, want.hash, hash)
	}
}

func TestBlockTokensAreThoseHashed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prompt := rapid.SliceOfN(rapid.Uint32(), 1, 40).Draw(t, "prompt")
		size := rapid.IntRange(1, 8).Draw(t, "size")
		c := em.NewTokenContent(prompt, em.ProseAfter(7, prompt, 0), size, "")
		gen := em.NewGenerator(em.ProseAfter(7, prompt, 0))
		var all []uint32
		for i := range 8 {
			all = c.AppendBlockTokens(all, i)
		}
		for i, id := range all {
			if i < len(prompt) {
				assert.Equal(t, prompt[i], id)
			} else {
				assert.Equal(t, gen.Token(i-len(prompt)), id)
			}
		}
	})
}

func TestWideHashesEndWithTheNarrowOne(t *testing.T) {
	d := em.WidenHash(0x0102030405060708)
	assert.Equal(t, "0102030405060708", hex.EncodeToString(d[24:]))
	assert.NotEqual(t, d, em.WidenHash(0x0102030405060709))
}
