package state

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/problem"
)

// electors reads "a:v b:s c:-" as members: v voter, s standby, - not in consensus; then ! lost, ? silent, x
// removed, and a zone.
func electors(text string) []Elector {
	var out []Elector
	for f := range strings.FieldsSeq(text) {
		name, how, _ := strings.Cut(f, ":")
		e := Elector{
			UID: name, Node: name, Control: true, Live: true, Voter: how[0] == 'v',
			Member: how[0] != '-',
		}
		for _, c := range how[1:] {
			switch c {
			case '!':
				e.Lost, e.Live = true, false
			case '?':
				e.Live = false
			case 'x':
				e.Control, e.Node = false, ""
			default:
				e.Zone += string(c)
			}
		}
		out = append(out, e)
	}
	return out
}

// carryOut does one change as consensus would.
func carryOut(t require.TestingT, ms []Elector, c Change) []Elector {
	out := slices.Clone(ms)
	i := slices.IndexFunc(out, func(e Elector) bool { return e.UID == c.UID })
	require.GreaterOrEqual(t, i, 0)
	m := &out[i]
	switch c.Kind {
	case AddStandby:
		require.False(t, m.Member)
		m.Member = true
	case Promote:
		require.True(t, m.Member && !m.Voter && m.Live)
		m.Voter = true
	case Demote:
		require.True(t, m.Voter)
		m.Voter = false
	case RemoveMember:
		require.True(t, m.Member)
		m.Member, m.Voter = false, false
	default:
		require.Fail(t, "no change is nothing to carry out")
	}
	return out
}

var changeNames = map[ChangeKind]string{
	AddStandby: "add", Promote: "promote", Demote: "demote",
	RemoveMember: "remove",
}

// settled carries out all changes, with a as the leader, and returns their names.
func settled(t require.TestingT, ms []Elector) string {
	var out []string
	for range 5 * (len(ms) + 1) {
		c := NextVoterChange(ms, "a")
		if c.Kind == NoChange {
			return strings.Join(out, ", ")
		}
		out = append(out, changeNames[c.Kind]+" "+c.UID)
		ms = carryOut(t, ms, c)
	}
	require.Fail(t, "the electorate does not settle", "%v", out)
	return ""
}

func TestElectorate(t *testing.T) {
	for _, c := range []struct{ name, members, want string }{
		{"one is alone", "a:v", ""},
		{"two: one votes", "a:v b:-", "add b"},
		{"three: three vote", "a:v b:s c:-", "add c, promote b, promote c"},
		{"four: three vote", "a:v b:s c:s d:s", "promote b, promote c"},
		{"five", "a:v b:v c:v d:s e:s", "promote d, promote e"},
		{"six: five vote", "a:v b:v c:v d:v e:v f:-", "add f"},
		{"not to an even number", "a:v b:s c:s?", ""},
		{"nor with one too few for five", "a:v b:v c:v d:s e:s?", ""},
		{"from two to three", "a:v b:v c:s", "promote c"},
		{"a lost voter is replaced, first in, then out", "a:v b:v! c:v d:s", "promote d, demote b"},
		{"a silent one is not", "a:v b:v? c:v d:s", ""},
		{"without a standby it stays", "a:v b:v c:v!", ""},
		{"two of five lost: three are enough", "a:v b:v! c:v d:v! e:v", "demote d, demote b"},
		{"removed voters go at once", "a:v b:vx c:v d:s", "remove b, promote d"},
		{"a removed standby too", "a:v b:sx", "remove b"},
		{"three to two: one votes", "a:v b:v c:vx", "remove c, demote b"},
		{"not below a quorum", "a:v b:v? c:vx d:s", "promote d, remove c"},
		{"another zone goes first", "a:v1 b:s1 c:s2 d:s3", "promote c, promote d"},
		{"the crowded zone gives up its vote", "a:v1 b:v2 c:v1 d:v3", "demote c"},
		{"the leader votes whatever it is", "a:vx b:v c:v d:v", ""},
		{"a lost newcomer waits", "a:v b:-!", ""},
	} {
		t.Run(c.name, func(t *testing.T) { assert.Equal(t, c.want, settled(t, electors(c.members))) })
	}
	assert.Equal(t, Change{RemoveMember, "a"}, NextVoterChange(electors("a:vx b:v c:v d:v"), ""),
		"told so: nobody is protected")
}

func drawElectors(t *rapid.T) []Elector {
	out := []Elector{{UID: "a", Node: "a", Control: true, Live: true, Member: true, Voter: true}}
	for i := range rapid.IntRange(0, 8).Draw(t, "others") {
		e := Elector{UID: fmt.Sprint("m", i), Zone: rapid.SampledFrom([]string{"", "1", "2"}).Draw(t, "zone")}
		e.Member = rapid.Bool().Draw(t, "member")
		e.Voter = e.Member && rapid.Bool().Draw(t, "voter")
		e.Control = rapid.IntRange(0, 4).Draw(t, "control") > 0
		if e.Control {
			e.Node = e.UID
			e.Lost = rapid.IntRange(0, 3).Draw(t, "lost") == 0
		}
		e.Live = !e.Lost && rapid.IntRange(0, 3).Draw(t, "live") > 0
		out = append(out, e)
	}
	return out
}

func quorum(ms []Elector) (ok bool) {
	voters, live := 0, 0
	for _, m := range ms {
		if m.Voter {
			voters++
		}
		if m.Voter && (m.Live || m.UID == "a") {
			live++
		}
	}
	return live*2 > voters
}

// TestAnyElectorateSettlesWithItsQuorum: from any start it comes to rest; no change takes away a quorum of
// living voters, which is needed to commit it; the leader stays; and when all live, 1, 3 or 5 vote and none
// who was removed is left.
func TestAnyElectorateSettlesWithItsQuorum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ms := drawElectors(t)
		if !quorum(ms) {
			return // nobody leads
		}
		for step := 0; ; step++ {
			require.Less(t, step, 4*len(ms)+1, "it does not come to rest")
			c := NextVoterChange(ms, "a")
			if c.Kind == NoChange {
				break
			}
			require.NotEqual(t, "a", c.UID)
			ms = carryOut(t, ms, c)
			require.True(t, quorum(ms), "after %v", c)
		}
		checkSettled(t, ms)
		for i := range ms {
			ms[i].Lost, ms[i].Live = false, true
		}
		settled(t, ms)
	})
}

// TestALeaderThatGoesTakesNoVotes: a removed leader leaves soon, and the other voters must have a majority
// without it.
func TestALeaderThatGoesTakesNoVotes(t *testing.T) {
	for _, others := range []string{"b:v c:v", "b:v! c:v", "b:v c:v d:v e:v"} {
		ms := electors("a:vx " + others)
		assert.Equal(t, Change{}, NextVoterChange(ms, "a"), others)
		assert.NotEqual(t, Change{}, NextVoterChange(ms, "c"), others)
	}
}

// checkSettled counts by hand what is left to be wished for.
func checkSettled(t *rapid.T, ms []Elector) {
	voters, control, troubled, strangers := 0, 0, false, 0
	for _, m := range ms {
		troubled = troubled || (m.Control && (m.Lost || !m.Live))
		if m.Control {
			control++
		}
		if m.Voter {
			voters++
		}
		if m.Member && !m.Control {
			strangers++
		}
	}
	if troubled {
		return
	}
	require.Zero(t, strangers)
	require.Equal(t, map[int]int{1: 1, 2: 1, 3: 3, 4: 3}[control]+map[bool]int{true: 5}[control >= 5], voters)
}

// successorIn returns the node that gets a vote by a list of changes.
func successorIn(changes []Change) string {
	for _, c := range changes {
		if c.Kind == Promote {
			return c.UID
		}
	}
	return ""
}

// HF30: the table of which voters may leave, and what the refusal says to do.
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
		{
			name: "of another zone, if there is one", members: "a:v1 b:v2 c:v1! d:s1 e:s3", uid: "b",
			successor: "e",
		},
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
			members := electors(c.members)
			changes, err := CheckUnvote(members, "a", c.uid)
			if c.code == "" {
				require.NoError(t, err)
				assert.Equal(t, c.successor, successorIn(changes))
				if votes := slices.ContainsFunc(members, func(m Elector) bool {
					return m.UID == c.uid && m.Voter
				}); !votes {
					assert.Empty(t, changes)
					return
				}
				last := map[bool]ChangeKind{true: HandOver, false: Demote}[c.uid == "a"]
				assert.Equal(t, Change{last, c.uid}, changes[len(changes)-1])
				return
			}
			assert.Empty(t, changes)
			require.ErrorIs(t, err, ErrVoteNeeded)
			assert.Equal(t, c.code, problem.CodeOf(err))
			assert.Contains(t, err.Error(), c.says)
			var known *problem.Error
			require.ErrorAs(t, err, &known)
			assert.Equal(t, c.hint, known.Hint)
		})
	}
}

// machines is a cluster of control nodes with removals, failures and the leader's own changes in any order.
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

// care makes one change that the leader makes by itself.
func (m *machines) care() bool {
	c := NextVoterChange(m.all, m.leader())
	if c.Kind != NoChange {
		m.all = carryOut(m.t, m.all, c)
	}
	return c.Kind != NoChange
}

// remove is `leave` of a node that lives, or `nodes remove` of one that does not, with the steps of
// cluster.Upkeep.
func (m *machines) remove(uid string) {
	others := slices.ContainsFunc(m.all, func(e Elector) bool { return e.UID != uid && e.Control && !e.Lost })
	if !others {
		return // the last control node
	}
	changes, err := CheckUnvote(m.all, m.leader(), uid)
	if err != nil {
		return
	}
	if successor := successorIn(changes); successor != "" {
		m.all = carryOut(m.t, m.all, Change{Promote, successor})
		require.True(m.t, m.hasMajority(), "with the successor %s: %+v", successor, m.all)
	}
	i := m.at(uid)
	m.all[i].Voter = false
	require.True(m.t, m.hasMajority(), "without the vote of %s: %+v", uid, m.all)
	m.all = slices.Delete(m.all, i, i+1)
}

// HF30: whatever fails in between, no accepted removal and no step towards it leaves the voters without a
// living majority.
func TestRemovalsKeepALivingMajority(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := &machines{t: rt}
		for i := range rapid.IntRange(1, 7).Draw(rt, "nodes") {
			uid := fmt.Sprint("n", i)
			m.all = append(m.all, Elector{
				UID: uid, Node: uid, Control: true, Live: true, Member: i == 0,
				Voter: i == 0,
			})
		}
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			uid := m.all[rapid.IntRange(0, len(m.all)-1).Draw(rt, "node")].UID
			e := &m.all[m.at(uid)]
			switch rapid.SampledFrom([]string{
				"care", "settle", "fail", "lose", "heal", "remove",
				"remove",
			}).Draw(rt, "step") {
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
