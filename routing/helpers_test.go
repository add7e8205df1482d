package routing

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func newPolicy(t require.TestingT, name string) Policy {
	p, err := New(name, "", nil)
	require.NoError(t, err)
	return p
}

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }

// up is a rank coming up with a given room, first epoch.
func up(id RankID, room int) *Event {
	return &Event{Kind: EvRankUp, Rank: id, Epoch: 1, Incarnation: 7, MaxOngoing: room}
}

// routerWith has n ready ranks of group 0.
func routerWith(p Policy, n, room int) *Router {
	r := NewRouter(p, 42)
	for i := range n {
		r.Observe(up(ID(0, i), room))
	}
	return r
}

func pick(r *Router, q Request) Decision {
	var d Decision
	r.Pick(&q, &d)
	return d
}

func loadOf(r *Router, id RankID) Load {
	v := r.Snapshot()
	if i, ok := v.Find(id); ok {
		return v.Ranks[i].Load
	}
	return Load{}
}

// drawView is any view: ranks of several groups, ready or not, silent or not, empty to overfull.
func drawView(t *rapid.T) View {
	v := View{OnTheWay: rapid.IntRange(0, 1).Draw(t, "on the way")}
	ids := rapid.SliceOfNDistinct(rapid.IntRange(0, 40), 0, 20, rapid.ID[int]).Draw(t, "ids")
	for _, n := range ids {
		id := ID(n/8, n%8)
		i, _ := v.Find(id)
		rk := Rank{
			ID: id, Epoch: 1, MaxOngoing: rapid.IntRange(0, 6).Draw(t, "max"),
			Ready: rapid.IntRange(0, 4).Draw(t, "ready") > 0, Silent: rapid.IntRange(0, 4).Draw(t, "silent") == 0, Local: rapid.Bool().Draw(t, "local"),
			Load: Load{W: rapid.IntRange(0, 3).Draw(t, "w"), R: rapid.IntRange(0, 3).Draw(t, "r")},
		}
		v.Ranks = append(v.Ranks[:i:i], append([]Rank{rk}, v.Ranks[i:]...)...)
	}
	return v
}

// drawRequest is any request over the ranks of v and a few that are not there.
func drawRequest(t *rapid.T, v *View) Request {
	q := Request{ID: 1, Tokens: rapid.IntRange(0, 100).Draw(t, "tokens"), HasDirect: rapid.IntRange(0, 3).Draw(t, "direct") > 0}
	any := func(label string) RankID {
		if len(v.Ranks) == 0 || rapid.IntRange(0, 5).Draw(t, label+" stranger") == 0 {
			return ID(9, 9)
		}
		return v.Ranks[rapid.IntRange(0, len(v.Ranks)-1).Draw(t, label)].ID
	}
	q.Direct = any("named")
	for range rapid.IntRange(0, 3).Draw(t, "tries") {
		q.Tried = append(q.Tried, any("tried"))
	}
	return q
}

// drawPolicy is any policy with any parameters.
func drawPolicy(t *rapid.T) Policy {
	all := []Policy{RoundRobin{}, Random{}, Direct{}, PowerOfTwo{}, PowerOfTwo{PreferLocal: true}, LeastLoaded{}}
	return rapid.SampledFrom(all).Draw(t, "policy")
}

func forEachPolicy(t *testing.T, f func(t *testing.T, p Policy)) {
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) { f(t, newPolicy(t, name)) })
	}
}
