package state

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/problem"
)

func TestCheckUnvote(t *testing.T) {
	for _, c := range []struct {
		name, members, uid, successor string
		code                          problem.Code
		says                          string // in the error
		hint                          string
	}{
		{name: "three healthy voters", members: "a:v b:v c:v", uid: "c"},
		{name: "the leader of three", members: "a:v b:v c:v", uid: "a"},
		{name: "a node without a vote", members: "a:v b:v! c:v d:s", uid: "d"},
		{name: "an unknown node", members: "a:v b:v!", uid: "x"},
		{name: "the lost one of three", members: "a:v b:v c:v!", uid: "c"},
		{
			name: "a living one beside a lost one", members: "a:v b:v c:v!", uid: "b", code: problem.Conflict,
			says: "a is alive, c is lost",
			hint: "c is lost and votes: bring it back or remove it first: dpserve nodes remove c",
		},
		{
			name: "the leader beside a lost one", members: "a:v b:v c:v!", uid: "a", code: problem.Conflict,
			says: "b is alive, c is lost",
			hint: "c is lost and votes: bring it back or remove it first: dpserve nodes remove c",
		},
		{
			name: "a living one beside a silent one", members: "a:v b:v c:v?", uid: "b",
			code: problem.Unavailable,
			says: "a is alive, c is silent",
			hint: "c votes and does not answer: wait until it answers or is lost",
		},
		{name: "a standby takes over", members: "a:v b:v c:v! d:s", uid: "b", successor: "d"},
		{name: "of another zone, if there is one", members: "a:v1 b:v2 c:v1! d:s1 e:s3", uid: "b",
			successor: "e"},
		{
			name: "not a silent standby", members: "a:v b:v c:v! d:s?", uid: "b", code: problem.Conflict,
			says: "a is alive, c is lost",
			hint: "c is lost and votes: bring it back or remove it first: dpserve nodes remove c",
		},
		{name: "the only voter of two", members: "a:v b:s", uid: "a", successor: "b"},
		{
			name: "the only voter, the other is silent", members: "a:v b:s?", uid: "a",
			code: problem.Unavailable,
			says: "no other node votes",
			hint: "wait until another control node answers and has a copy of the state; look at " +
				"dpserve nodes",
		},
		{name: "one of five, two are lost", members: "a:v b:v c:v d:v! e:v!", uid: "d"},
		{
			name: "a living one of five, two are lost", members: "a:v b:v c:v d:v! e:v!", uid: "c",
			code: problem.Conflict,
			says: "a is alive, b is alive, d is lost, e is lost",
			hint: "d, e are lost and vote: bring them back or remove them first: dpserve nodes remove d",
		},
		{
			name: "a removed node still votes", members: "a:v b:v c:vx?", uid: "b", code: problem.Unavailable,
			says: "a removed node is not there, a is alive",
			hint: "wait until another control node answers and has a copy of the state; look at " +
				"dpserve nodes",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			successor, err := CheckUnvote(electors(c.members), "a", c.uid)
			if c.code == "" {
				require.NoError(t, err)
				assert.Equal(t, c.successor, successor)
				return
			}
			require.ErrorIs(t, err, ErrVoteNeeded)
			assert.Equal(t, c.code, problem.CodeOf(err))
			assert.Contains(t, err.Error(), c.says)
			var known *problem.Error
			require.ErrorAs(t, err, &known)
			assert.Equal(t, c.hint, known.Hint)
		})
	}
}

// machines is a cluster of control nodes on which people, failures and the leader's own care work in any
// order.
type machines struct {
	t   *rapid.T
	all []Elector
}

func (m *machines) at(uid string) int {
	return slices.IndexFunc(m.all, func(e Elector) bool { return e.UID == uid })
}

// leader is a voter that lives.
func (m *machines) leader() string {
	i := slices.IndexFunc(m.all, func(e Elector) bool { return e.Voter && e.Live })
	require.GreaterOrEqual(m.t, i, 0)
	return m.all[i].UID
}

// hasMajority says whether more than half of the voters live.
func (m *machines) hasMajority() bool {
	voters, live := 0, 0
	for _, e := range m.all {
		if e.Voter {
			voters++
			live += boolToInt(e.Live)
		}
	}
	return live > voters/2
}

// care is one change that the leader makes by itself.
func (m *machines) care() bool {
	c := Electorate(m.all, m.leader())
	if c.Kind != NoChange {
		m.all = carryOut(m.t, m.all, c)
	}
	return c.Kind != NoChange
}

// remove is `leave` of a node that lives, or `nodes remove` of one that does not, with the steps of the
// wiring.
func (m *machines) remove(uid string) {
	others := slices.ContainsFunc(m.all, func(e Elector) bool { return e.UID != uid && e.Control && !e.Lost })
	if !others {
		return // the last control node
	}
	successor, err := CheckUnvote(m.all, m.leader(), uid)
	if err != nil {
		return
	}
	if successor != "" {
		m.all = carryOut(m.t, m.all, Change{Promote, successor})
		require.True(m.t, m.hasMajority(), "with the successor %s: %+v", successor, m.all)
	}
	i := m.at(uid)
	m.all[i].Voter = false
	require.True(m.t, m.hasMajority(), "without the vote of %s: %+v", uid, m.all)
	m.all = slices.Delete(m.all, i, i+1)
}

// TestRemovalsKeepALivingMajority: whatever fails in between, no accepted removal and no step towards it
// leaves the voters without a living majority.
func TestRemovalsKeepALivingMajority(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := &machines{t: rt}
		for i := range rapid.IntRange(1, 7).Draw(rt, "nodes") {
			uid := fmt.Sprint("n", i)
			m.all = append(m.all, Elector{UID: uid, Node: uid, Control: true, Live: true, Member: i == 0,
				Voter: i == 0})
		}
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			uid := m.all[rapid.IntRange(0, len(m.all)-1).Draw(rt, "node")].UID
			e := &m.all[m.at(uid)]
			switch rapid.SampledFrom([]string{"care", "settle", "fail", "lose", "heal", "remove",
				"remove"}).Draw(rt, "step") {
			case "care":
				m.care()
			case "settle":
				for m.care() {
					require.True(rt, m.hasMajority())
				}
			case "fail":
				was := e.Live
				if e.Live = false; !m.hasMajority() {
					e.Live = was // that stops a cluster without any removal
				}
			case "lose":
				e.Lost = !e.Live
			case "heal":
				e.Lost, e.Live = false, true
			case "remove":
				m.remove(uid)
			}
			require.True(rt, m.hasMajority(), "%+v", m.all)
		}
	})
}
