package share

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// HF76: every share that a file can write is its own number of parts, and sums do not drift.
func TestSharesAreExact(t *testing.T) {
	for parts := range 2*Whole + 1 {
		written, err := strconv.ParseFloat(Format(parts), 64)
		require.NoError(t, err)
		got, ok := Of(written)
		assert.True(t, ok, parts)
		assert.Equal(t, parts, got)
	}
	for text, c := range map[string]struct {
		times int
		fits  bool
	}{
		"0.1": {10, true}, "0.3333": {3, true}, "0.25": {4, true}, "0.3334": {3, false},
		"0.0001": {10_000, true},
	} {
		written, _ := strconv.ParseFloat(text, 64)
		parts, ok := Of(written)
		assert.True(t, ok, text)
		assert.Equal(t, c.fits, c.times*parts <= Whole, text)
	}
	for _, v := range []float64{0.33334, 1.0 / 3, 0.00001, 0.25000001} {
		_, ok := Of(v)
		assert.False(t, ok, v)
	}
	assert.Equal(t, []int{Whole, 1}, []int{On(0), On(1)})
}
