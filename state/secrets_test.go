package state

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

func TestTurnKey(t *testing.T) {
	first, second, third := bytes.Repeat([]byte{1}, GossipKeySize), bytes.Repeat([]byte{2}, GossipKeySize),
		bytes.Repeat([]byte{3}, GossipKeySize)
	m := withNodes(t, "a", "b")
	turn := func(next []byte) Command {
		return Command{TurnKey: &TurnKey{From: KeyringSum(m.Secrets.Keyring()), Next: next}}
	}
	require.Nil(t, m.Secrets.Keyring())
	assert.Empty(t, KeyringSum(m.Secrets.Keyring()))
	m.refused(turn(first), ErrBadCommand, problem.Conflict)
	m.must(Command{Init: &Init{Cluster: "c1", Secrets: Secrets{GossipKey: first}}})
	assert.Equal(t, []string{"a", "b"}, m.Untaken())
	m.refused(turn(first), ErrBadCommand, problem.InvalidArgument)
	m.refused(turn(second[:31]), ErrBadCommand, problem.InvalidArgument)
	assert.True(t, m.must(turn(nil)).Unchanged, "no change is under way")

	stale := turn(third)
	for _, step := range []struct {
		next []byte
		want [][]byte
	}{{second, [][]byte{first, second}}, {nil, [][]byte{second, first}}, {nil, [][]byte{second}}} {
		m.must(turn(step.next))
		require.Equal(t, step.want, m.Secrets.Keyring())
		m.refused(stale, ErrKeyTurned, problem.Conflict)
		if m.Secrets.Turning() {
			m.refused(turn(third), ErrKeyTurned, problem.Conflict)
		}
		a := node("a")
		a.Keyring = KeyringSum(step.want)
		m.must(putNode(a))
		assert.Equal(t, []string{"b"}, m.Untaken())
	}
	assert.False(t, m.Secrets.Turning())
	m.must(Command{NodeLost: nodeRef("b")})
	assert.Empty(t, m.Untaken(), "who is lost gets it later")
	assert.Empty(t, m.Public().Secrets)
}

func TestLeasesLastAsLongAsTheFirstInitSays(t *testing.T) {
	m := newMachine(t)
	m.must(Command{Init: &Init{Cluster: "c"}})
	m.must(Command{Init: &Init{Cluster: "c", LeaseTTL: 4000}})
	m.must(Command{Init: &Init{Cluster: "c", LeaseTTL: 1000}})
	assert.Equal(t, int64(4000), m.LeaseTTL)
	m.refused(Command{Init: &Init{Cluster: "c", LeaseTTL: -1}}, ErrBadCommand, problem.InvalidArgument)
}
