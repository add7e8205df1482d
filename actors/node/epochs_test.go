package node

import (
	"maps"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Released units are left out of the file and stay refused: by a copy of the state that is as new, and,
// without one, until it is there. A node of the previous version can read the file too.
func TestEpochsOfUnitsThatAreReleasedAreLeftOut(t *testing.T) {
	dir := t.TempDir()
	inBubble(t, func(c *Config) { c.DataDir = dir }, func(t *testing.T, b *bubble) {
		for i := range 50 {
			unit := "old/" + string(rune('a'+i)) + "/0"
			b.serving(unit, 7)
			b.store.change(func(s *state.State) { delete(s.Units, unit) })
			time.Sleep(time.Minute)
		}
		b.serving("new/0/0", 1)
		synctest.Wait()
		seen, err := loadEpochs(dir)
		require.NoError(t, err)
		index := seen[indexName]
		delete(seen, indexName)
		assert.Equal(t, map[string]uint64{"new/0/0": 1}, seen)
		assert.NotZero(t, index)
		require.ErrorIs(t, b.start2("old/a/0", 7), ErrStaleEpoch)
		require.ErrorIs(t, b.start2("old/a/0", 3), ErrStaleEpoch)
		b.store.change(func(s *state.State) { s.Index = index + 9 })
	})
	// the next process, with an old copy
	inBubble(t, func(c *Config) { c.DataDir = dir }, func(t *testing.T, b *bubble) {
		err := b.start2("old/a/0", 7)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err), "%v", err)
		assert.Zero(t, b.launched())
		b.store.change(func(s *state.State) { s.Index, s.Epochs["old/a/0"] = 1000, 7 })
		require.ErrorIs(t, b.start2("old/a/0", 7), ErrStaleEpoch)
		b.serving("old/a/0", 8)
	})
}

// start2 orders a start that the state does not show.
func (b *bubble) start2(unit string, epoch uint64) error {
	before := b.store.State()
	o := b.order(unit, epoch)
	b.store.change(func(s *state.State) {
		s.Units, s.Epochs, s.Index = maps.Clone(before.Units), maps.Clone(before.Epochs), before.Index-1
	})
	return b.node.StartRank(b.t.Context(), o)
}
