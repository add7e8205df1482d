package routing

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
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

// drawView is any view: ranks of several groups, ready or not, silent or not, busy or not, empty to overfull.
func drawView(t *rapid.T) View {
	v := View{OnTheWay: rapid.IntRange(0, 1).Draw(t, "on the way"), PrefixCachingOff: rapid.IntRange(0, 9).
		Draw(t, "caching") == 0}
	ids := rapid.SliceOfNDistinct(rapid.IntRange(0, 40), 0, 20, rapid.ID[int]).Draw(t, "ids")
	for _, n := range ids {
		id := ID(n/8, n%8)
		i, _ := v.Find(id)
		rk := Rank{
			ID: id, Epoch: 1, MaxOngoing: rapid.IntRange(0, 6).Draw(t, "max"),
			Ready: rapid.IntRange(0, 4).Draw(t, "ready") > 0, Silent: rapid.IntRange(0, 4).
				Draw(t, "silent") == 0, Local: rapid.Bool().Draw(t, "local"),
			Busy: rapid.IntRange(0, 4).Draw(t, "busy") == 0, LeftOut: rapid.IntRange(0, 4).
				Draw(t, "left out") == 0,
		}
		drawLoad(t, &rk)
		v.Ranks = append(v.Ranks[:i:i], append([]Rank{rk}, v.Ranks[i:]...)...)
	}
	return v
}

func drawLoad(t *rapid.T, rk *Rank) {
	rk.Load = Load{
		W: rapid.IntRange(0, 3).Draw(t, "w"), F: rapid.IntRange(0, 1).Draw(t, "f"),
		R: rapid.IntRange(0, 3).Draw(t, "r"),
	}
	before := int64(rk.Load.W + rk.Load.F)
	rk.Load.Q, rk.Load.Kq = before*rapid.Int64Range(0, 40).Draw(t, "q"), before*40
	rk.Load.K = int64(rk.Load.R) * rapid.Int64Range(0, 50).Draw(t, "k")
	rk.Pairs = rk.Load.Q * rk.Load.Q
	rk.Capacity = rapid.SampledFrom([]int64{0, 100, 1000}).Draw(t, "capacity")
	rk.BlockSize = rapid.SampledFrom([]int{0, 4, 16}).Draw(t, "block")
	rk.HasKVUsage = rapid.Bool().Draw(t, "reports")
	if rk.HasKVUsage {
		rk.KVUsage = rapid.Float64Range(0, 1).Draw(t, "usage")
	}
}

// drawRequest is any request over the ranks of v and a few that are not there.
func drawRequest(t *rapid.T, v *View) Request {
	q := Request{ID: 1, Tokens: rapid.IntRange(0, 100).Draw(t, "tokens"), HasDirect: rapid.IntRange(0, 3).
		Draw(t, "direct") > 0}
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
	for range rapid.IntRange(0, 5).Draw(t, "hits") {
		q.Hits = append(q.Hits, Hit{Rank: any("hit"), Tokens: rapid.Int32Range(-4, 120).Draw(t, "cached")})
	}
	slices.SortFunc(q.Hits, func(a, b Hit) int { return int(a.Rank) - int(b.Rank) })
	q.Hits = slices.CompactFunc(q.Hits, func(a, b Hit) bool { return a.Rank == b.Rank })
	q.Text = drawText(t)
	q.Blocks = chain(q.Text[:rapid.IntRange(0, len(q.Text)).Draw(t, "full blocks")])
	q.Session = rapid.SampledFrom([]string{"", "a", "b", "c"}).Draw(t, "session")
	return q
}

// drawText is a text of few letters, so that texts share prefixes, and of some that fork inside a character.
func drawText(t *rapid.T) []byte {
	return []byte(strings.Join(rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "\xc3\xa4", "\xc3\xb6"}),
		0, 20).Draw(t, "text"), ""))
}

// chain is one block hash per byte of text.
func chain(text []byte) []uint64 {
	out, h := make([]uint64, 0, len(text)), uint64(1)
	for _, b := range text {
		h = spread(h*31 + uint64(b) + 1)
		out = append(out, h)
	}
	return out
}

// allPolicies is every policy in every variant that decides differently.
func allPolicies(t require.TestingT) []Policy {
	all := []Policy{PowerOfTwo{PreferLocal: true}}
	for _, name := range Names() {
		all = append(all, newPolicy(t, name))
	}
	for _, p := range []struct {
		name, preset string
		params       map[string]any
	}{
		{"scoring", "", map[string]any{"profile": "locality"}},
		{"scoring", "", map[string]any{"profile": "load"}},
		{"kv", "tuned", nil},
		{"kv", "", map[string]any{"no_track_active_blocks": true}},
		{"kv", "", map[string]any{"router_temperature": 0.5}},
		{"prefix-aware", "tuned", map[string]any{"imbalanced_threshold": 2}},
		{"cache-aware", "tuned", map[string]any{"balance_abs_threshold": 1}},
		{"session-affinity", "tuned", nil},
		{"mex", "", map[string]any{"goal": "latency", "cost_model": "moe"}},
		{"mex", "", map[string]any{"ttft_s": 0.001, "tpot_s": 0.0001}},
	} {
		made, err := New(p.name, p.preset, p.params)
		require.NoError(t, err)
		all = append(all, made)
	}
	return all
}

// drawPolicy is any policy with any parameters.
func drawPolicy(t *rapid.T) Policy {
	once.Do(func() { drawn = allPolicies(t) })
	return rapid.SampledFrom(drawn).Draw(t, "policy")
}

var (
	once  sync.Once
	drawn []Policy
)

func forEachPolicy(t *testing.T, f func(t *testing.T, p Policy)) {
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) { f(t, newPolicy(t, name)) })
	}
}

// Explain is Why without the view.
func (r *Router) Explain(q *Request) Decision {
	d, _ := r.Why(q)
	return d
}

// spread maps a number to one that looks drawn: splitmix64.
func spread(id uint64) uint64 {
	id ^= id >> 30
	id *= 0xBF58476D1CE4E5B9
	id ^= id >> 27
	id *= 0x94D049BB133111EB
	return id ^ id>>31
}
