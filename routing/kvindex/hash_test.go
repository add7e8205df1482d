package kvindex

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestTextBlocksGrow: the blocks of a longer text begin with those of the text, each covers what TextSpan
// says, and none is larger than 1/8 of its position.
func TestTextBlocksGrow(t *testing.T) {
	h := NewHasher([]byte("s"))
	text := []byte(strings.Repeat("0123456789abcdef", 1<<15)) // 512 KiB
	whole := h.Text(nil, 1, text)
	assert.Len(t, whole, textFine+7*textStep)
	seen := map[uint64]bool{}
	for n := range whole {
		assert.Equal(t, whole[:n+1], h.Text(nil, 1, text[:TextSpan(n+1)]))
		assert.Len(t, h.Text(nil, 1, text[:TextSpan(n+1)-1]), n)
		if at := TextSpan(n); n >= textFine {
			assert.LessOrEqual(t, TextSpan(n+1)-at, at/8)
		}
		assert.False(t, seen[whole[n]])
		seen[whole[n]] = true
	}
	assert.Equal(t, 10<<20, TextSpan(len(h.Text(nil, 1, make([]byte, 10<<20+1)))),
		"blocks stop growing at 64 KiB")
}

// TestTextBlocksShareWhatIsInFront: a text that changes anywhere shares exactly the blocks before the change.
func TestTextBlocksShareWhatIsInFront(t *testing.T) {
	h := NewHasher([]byte("s"))
	rapid.Check(t, func(t *rapid.T) {
		text := make([]byte, rapid.IntRange(1, 100_000).Draw(t, "n"))
		for i := range text {
			text[i] = byte(i * 7)
		}
		one := h.Text(nil, 1, text)
		at := rapid.IntRange(0, len(text)-1).Draw(t, "at")
		text[at]++
		two := h.Text(nil, 1, text)
		n := 0
		for n < len(one) && one[n] == two[n] {
			n++
		}
		require.LessOrEqual(t, TextSpan(n), at)
		require.True(t, n == len(one) || TextSpan(n+1) > at)
	})
}
