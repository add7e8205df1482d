//go:build dpserve_next

package state

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestNextVersionWaitsForOldControlNodes runs under go test -tags dpserve_next: what the next version adds is
// held back until every control node can read it.
func TestNextVersionWaitsForOldControlNodes(t *testing.T) {
	s := New()
	s.Nodes["a"], s.Nodes["b"] = leveled("a", Level, RoleControl), leveled("b", 0, RoleControl)
	mark := Command{nextCommand: nextCommand{Mark: &Mark{Text: "x"}}}
	_, err := s.Readable(mark)
	require.ErrorIs(t, err, ErrControlTooOld)
	assert.Contains(t, err.Error(), "too old: b")
	put := Command{PutNode: &PutNode{Node: *leveled("a", Level, RoleControl)}}
	put.PutNode.Node.Colour = "blue"
	cut, err := s.Readable(put)
	require.NoError(t, err)
	assert.Empty(t, cut.PutNode.Node.Colour)
	assert.Equal(t, Level, cut.PutNode.Node.Level)
	assert.Equal(t, "blue", put.PutNode.Node.Colour, "the caller's is not touched")
	s.Nodes["b"] = leveled("b", Level, RoleControl)
	_, err = s.Readable(mark)
	require.NoError(t, err)
	kept, err := s.Readable(put)
	require.NoError(t, err)
	assert.Equal(t, "blue", kept.PutNode.Node.Colour)
}
