package routing

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// textOracle keeps every prefix that was sent to each rank, as strings.
type textOracle map[RankID]map[string]bool

func (o textOracle) insert(text []byte, id RankID) {
	for i := 1; i <= len(text); i++ {
		o[id][string(text[:i])] = true
	}
}

// match is the longest prefix of text that any rank was sent, and who was.
func (o textOracle) match(text []byte) (length int, owners map[RankID]bool) {
	for i := len(text); i > 0; i-- {
		owners = map[RankID]bool{}
		for id, prefixes := range o {
			if prefixes[string(text[:i])] {
				owners[id] = true
			}
		}
		if len(owners) > 0 {
			return i, owners
		}
	}
	return 0, nil
}

// checkTree reports that counts, lists and marks of a tree agree with each other.
func checkTree(t require.TestingT, tree *textTree) {
	chars := 0
	for i := 1; i < len(tree.nodes); i++ {
		chars += len(tree.nodes[i].text)
	}
	require.Equal(t, chars, tree.chars)
	nodes, marks := 0, 0
	for i := 1; i < len(tree.nodes); i++ {
		nodes += min(1, len(tree.nodes[i].text))
	}
	for slot := range tree.ranks {
		marks += tree.ranks[slot].nodes
	}
	require.Equal(t, chars+nodes*nodeChars+marks*markChars, tree.charge())
	for slot := range tree.ranks {
		rk := &tree.ranks[slot]
		seen, count, length := map[uint32]bool{}, 0, 0
		for m := rk.newest; m != 0; m = tree.marks[m].older {
			mark := tree.marks[m]
			require.Equal(t, uint32(slot), mark.slot)
			parent := tree.nodes[mark.node].parent
			require.True(t, parent == 0 || seen[parent], "a parent is more recent than its children")
			seen[mark.node] = true
			count++
			length += len(tree.nodes[mark.node].text)
			if mark.older == 0 {
				require.Equal(t, rk.oldest, m)
			}
		}
		require.Equal(t, rk.nodes, count)
		require.Equal(t, rk.chars, length)
	}
}

func ownersOf(tree *textTree, node uint32) map[RankID]bool {
	owners := map[RankID]bool{}
	for m := tree.nodes[node].marks; m != 0; m = tree.marks[m].next {
		owners[tree.ranks[tree.marks[m].slot].id] = true
	}
	return owners
}

func TestTextTreeMatchesTheOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tree, o := newTextTree(&View{}, maxTreeChars), textOracle{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			id := ID(0, rapid.IntRange(0, 3).Draw(t, "rank"))
			text := drawText(t)
			switch rapid.IntRange(0, 9).Draw(t, "act") {
			case 0:
				tree.removeRank(id)
				delete(o, id)
			case 1, 2:
				tree.addRank(id, 1)
				if o[id] == nil {
					o[id] = map[string]bool{}
				}
			default:
				tree.insert(text, id)
				if o[id] != nil {
					o.insert(text, id)
				}
			}
			checkTree(t, tree)
			for id, prefixes := range o {
				require.Equal(t, len(prefixes), tree.rank(id).chars)
			}
			probe := drawText(t)
			length, owners := o.match(probe)
			m := tree.match(probe)
			require.Equal(t, length, m.length)
			if length > 0 {
				require.Equal(t, owners, ownersOf(tree, m.node))
			}
		}
	})
}

// Eviction takes the least recently used text of a rank, never a head before its tail, and never more than
// asked.
func TestTextTreeEviction(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 4000).Draw(t, "limit")
		tree := newTextTree(&View{Ranks: []Rank{{ID: ID(0, 0)}, {ID: ID(0, 1)}}}, limit)
		var last []byte
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			last = drawText(t)
			tree.insert(last, ID(0, rapid.IntRange(0, 1).Draw(t, "rank")))
			checkTree(t, tree)
			require.LessOrEqual(t, tree.charge(), limit)
		}
		for _, id := range []RankID{ID(0, 0), ID(0, 1)} {
			tree.removeRank(id)
			checkTree(t, tree)
		}
		require.Zero(t, tree.chars)
		require.Zero(t, tree.kids.n+tree.owned.n)
	})
}

func TestTextTreeEvictsTheOldestFirst(t *testing.T) {
	a := ID(0, 0)
	tree := newTextTree(&View{Ranks: []Rank{{ID: a}}}, 20+4*(nodeChars+markChars))
	tree.insert([]byte("system: one"), a)
	tree.insert([]byte("system: two"), a)
	tree.insert([]byte("system: one"), a) // renewed
	tree.insert([]byte("other"), a)       // 8+3+3+5 = 19, in four nodes
	tree.insert([]byte("xyz"), a)         // 22, in five: "two" goes
	require.Equal(t, 11, tree.match([]byte("system: one")).length)
	require.Equal(t, 8, tree.match([]byte("system: two")).length)
	require.Equal(t, 5, tree.match([]byte("other")).length)
}

func TestTextTreeNewIncarnationBeginsEmpty(t *testing.T) {
	a := ID(0, 0)
	tree := newTextTree(&View{Ranks: []Rank{{ID: a, Incarnation: 1}}}, 1000)
	tree.insert([]byte("abc"), a)
	tree.addRank(a, 1)
	require.Equal(t, 3, tree.rank(a).chars)
	tree.addRank(a, 2)
	require.Zero(t, tree.rank(a).chars)
	require.Zero(t, tree.chars)
}

// RP21: prompts that share all but their last byte are bounded by the nodes that they take, not by their
// text.
func TestSmallSuffixesFillATree(t *testing.T) {
	a := ID(0, 0)
	const limit = 256 << 10
	tree := newTextTree(&View{Ranks: []Rank{{ID: a}}}, limit)
	system := bytes.Repeat([]byte("s"), 10_000)
	for i := range 20_000 {
		tree.insert(append(system[:len(system):len(system)], byte(i), byte(i>>8)), a)
		require.LessOrEqual(t, tree.charge(), limit)
	}
	checkTree(t, tree)
	require.LessOrEqual(t, len(tree.nodes), limit/(nodeChars+markChars)+3)
	require.Equal(t, len(system)+2, tree.match(append(system, byte(19_999&0xff), byte(19_999>>8))).length,
		"the newest is there")
}

// RP21: a conversation that grows by a byte a turn does not make every insert touch more nodes.
func TestAPathIsBounded(t *testing.T) {
	a := ID(0, 0)
	tree := newTextTree(&View{Ranks: []Rank{{ID: a}}}, maxTreeChars)
	text := bytes.Repeat([]byte("x"), 3*maxPath)
	for n := range text {
		tree.insert(text[:n+1], a)
	}
	checkTree(t, tree)
	require.Equal(t, maxPath, tree.rank(a).nodes)
	require.Equal(t, maxPath, tree.match(text).length)
	long := bytes.Repeat([]byte("y"), 2*maxTextChars)
	tree.insert(long, a)
	require.Equal(t, maxTextChars, tree.match(long).length, "of a long prompt the beginning")
}

// RP21: what a sweep takes out is spread over events, and goes on down to its target.
func TestASweepIsDoneInSteps(t *testing.T) {
	a := ID(0, 0)
	v := &View{Ranks: []Rank{{ID: a}}, Now: 1}
	st := newTextState(v)
	const prompts = 4 * maxSweep
	for i := range prompts {
		st.tree.insert([]byte{byte(i >> 8), byte(i), 'x'}, a)
	}
	nodes := func() int { return st.tree.rank(a).nodes }
	few := func(*View, RankID) int { return 10 }
	many := func(*View, RankID) int { return prompts - maxSweep - 1 }
	w := sweep{interval: 1, high: many, low: few, nodes: true}
	v.Now = 100
	for before := nodes(); before > 10; before = nodes() {
		st.observe(v, &Event{Kind: EvSilent}, w)
		require.LessOrEqual(t, before-nodes(), maxSweep)
		require.Less(t, nodes(), before, "it goes on with the next event")
		checkTree(t, st.tree)
	}
	require.Equal(t, 10, nodes())
	st.tree.insert([]byte("more than the target"), a)
	st.observe(v, &Event{Kind: EvSilent}, w)
	require.Equal(t, 11, nodes(), "until the next interval")
}

func FuzzTextTree(f *testing.F) {
	f.Add([]byte("abcabd"), []byte("abx"), uint8(3))
	f.Add([]byte("\xc3\xa4\xc3\xb6"), []byte("\xc3\xbc"), uint8(1))
	f.Add([]byte{}, bytes.Repeat([]byte{0}, 100), uint8(0))
	f.Fuzz(func(t *testing.T, x, y []byte, cut uint8) {
		a, b := ID(0, 0), ID(1, 0)
		tree := newTextTree(&View{Ranks: []Rank{{ID: a}, {ID: b}}}, 1000)
		for _, text := range [][]byte{x, y, x[:min(len(x), int(cut))], append(y[:len(y):len(y)], x...)} {
			tree.insert(text, a)
			tree.insert(text, b)
			m := tree.match(text)
			require.LessOrEqual(t, m.length, len(text))
			checkTree(t, tree)
		}
	})
}

func TestCommonPrefix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawText(t), drawText(t)
		want := 0
		for want < min(len(a), len(b)) && a[want] == b[want] {
			want++
		}
		require.Equal(t, want, commonPrefix(a, b))
	})
}

// rank is what the tree knows of a rank; the zero value if it is unknown.
func (t *textTree) rank(id RankID) textRank {
	if s := t.slots.get(uint64(id) + 1); s != 0 {
		return t.ranks[s-1]
	}
	return textRank{}
}

// TestTheSmallestTreeIsCountedInCharacters: a prompt of 100,000 characters weighs more than a few short ones.
func TestTheSmallestTreeIsCountedInCharacters(t *testing.T) {
	r := routerWith(newPolicy(t, "cache-aware"), 2, 99)
	long := pick(r, Request{ID: 1, Tokens: 25_000, Text: bytes.Repeat([]byte("a"), 100_000)}).Ranked[0]
	for i, letter := range []byte("bcdefg") {
		d := pick(r, Request{ID: uint64(i) + 2, Tokens: 50, Text: bytes.Repeat([]byte{letter}, 200)})
		require.Equal(t, Route, d.Kind)
		assert.NotEqual(t, long, d.Ranked[0], string(letter))
	}
}

// RA5: the longer of the own tree's match and of what the ranks' records say counts.
func TestTextPoliciesFollowWhatOtherIngressesSent(t *testing.T) {
	for _, p := range []Policy{
		newPolicy(t, "prefix-aware"), tuned(t, "prefix-aware"),
		newPolicy(t, "cache-aware"),
	} {
		r := routerWith(p, 3, 99)
		text := bytes.Repeat([]byte("abcdefgh"), 500) // 4,000 characters, 1,000 tokens
		own := pick(r, Request{ID: 1, Tokens: 550, Text: text[:2200]}).Ranked[0]
		other := ID(0, (own.Rank()+1)%3)
		ask := func(held int32) RankID {
			d := r.Explain(&Request{
				ID: 2, Tokens: 1000, Text: text,
				Hits: []Hit{{Rank: other, Tokens: held}},
			})
			require.Equal(t, ReasonPrefixMatch, d.Reason)
			return d.Ranked[0]
		}
		assert.Equal(t, other, ask(750))
		assert.Equal(t, own, ask(500), "the own tree has as much")
		d := r.Explain(&Request{
			ID: 3, Tokens: 1000, Text: bytes.Repeat([]byte("z"), 4000),
			Hits: []Hit{{Rank: other, Tokens: 50}},
		})
		assert.Equal(t, ReasonLowMatch, d.Reason)
	}
}
