package state

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// electors reads "a:v b:s c:-" as members: v voter, s standby, - not in consensus; then ! lost, ? silent, x
// removed, and a zone.
func electors(text string) []Elector {
	var out []Elector
	for f := range strings.FieldsSeq(text) {
		name, how, _ := strings.Cut(f, ":")
		e := Elector{UID: name, Node: name, Control: true, Live: true, Voter: how[0] == 'v',
			Member: how[0] != '-'}
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

var changeNames = map[ChangeKind]string{AddStandby: "add", Promote: "promote", Demote: "demote",
	RemoveMember: "remove"}

// settled carries out all changes, with a as the leader, and returns their names.
func settled(t require.TestingT, ms []Elector) string {
	var out []string
	for range 5 * (len(ms) + 1) {
		c := Electorate(ms, "a")
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
	assert.Equal(t, Change{RemoveMember, "a"}, Electorate(electors("a:vx b:v c:v d:v"), ""),
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
			c := Electorate(ms, "a")
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

// A leader that was removed goes soon: the votes of the others must do without it then.
func TestALeaderThatGoesTakesNoVotes(t *testing.T) {
	for _, others := range []string{"b:v c:v", "b:v! c:v", "b:v c:v d:v e:v"} {
		ms := electors("a:vx " + others)
		assert.Equal(t, Change{}, Electorate(ms, "a"), others)
		assert.NotEqual(t, Change{}, Electorate(ms, "c"), others)
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
