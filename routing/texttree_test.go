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

// checkTree says that counts, lists and marks of a tree agree with each other.
func checkTree(t require.TestingT, tree *textTree) {
	chars := 0
	for i := 1; i < len(tree.nodes); i++ {
		chars += len(tree.nodes[i].text)
	}
	require.Equal(t, chars, tree.chars)
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

// Eviction takes the least recently used text of a rank, never a head before its tail, and never more than asked.
func TestTextTreeEviction(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 80).Draw(t, "limit")
		tree := newTextTree(&View{Ranks: []Rank{{ID: ID(0, 0)}, {ID: ID(0, 1)}}}, limit)
		var last []byte
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			last = drawText(t)
			tree.insert(last, ID(0, rapid.IntRange(0, 1).Draw(t, "rank")))
			checkTree(t, tree)
			require.LessOrEqual(t, tree.chars, limit)
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
	tree := newTextTree(&View{Ranks: []Rank{{ID: a}}}, 20)
	tree.insert([]byte("system: one"), a)
	tree.insert([]byte("system: two"), a)
	tree.insert([]byte("system: one"), a) // renewed
	tree.insert([]byte("other"), a)       // 8+3+3+5 = 19
	tree.insert([]byte("xyz"), a)         // 22: "two" goes
	require.Equal(t, 11, tree.match([]byte("system: one")).length)
	require.Equal(t, 8, tree.match([]byte("system: two")).length)
	require.Equal(t, 5, tree.match([]byte("other")).length)
}

func TestTextTreeNewIncarnationBeginsEmpty(t *testing.T) {
	a := ID(0, 0)
	tree := newTextTree(&View{Ranks: []Rank{{ID: a, Incarnation: 1}}}, 100)
	tree.insert([]byte("abc"), a)
	tree.addRank(a, 1)
	require.Equal(t, 3, tree.rank(a).chars)
	tree.addRank(a, 2)
	require.Zero(t, tree.rank(a).chars)
	require.Zero(t, tree.chars)
}

func FuzzTextTree(f *testing.F) {
	f.Add([]byte("abcabd"), []byte("abx"), uint8(3))
	f.Add([]byte("\xc3\xa4\xc3\xb6"), []byte("\xc3\xbc"), uint8(1))
	f.Add([]byte{}, bytes.Repeat([]byte{0}, 100), uint8(0))
	f.Fuzz(func(t *testing.T, x, y []byte, cut uint8) {
		a, b := ID(0, 0), ID(1, 0)
		tree := newTextTree(&View{Ranks: []Rank{{ID: a}, {ID: b}}}, 64)
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

// TestTextPoliciesFollowWhatOtherIngressesSent: the longer of the own tree's match and of what the ranks'
// records say counts.
func TestTextPoliciesFollowWhatOtherIngressesSent(t *testing.T) {
	for _, p := range []Policy{newPolicy(t, "prefix-aware"), tuned(t, "prefix-aware"), newPolicy(t, "cache-aware")} {
		r := routerWith(p, 3, 99)
		text := bytes.Repeat([]byte("abcdefgh"), 500) // 4,000 characters, 1,000 tokens
		own := pick(r, Request{ID: 1, Tokens: 550, Text: text[:2200]}).Ranked[0]
		other := ID(0, (own.Rank()+1)%3)
		ask := func(held int32) RankID {
			d := r.Explain(&Request{ID: 2, Tokens: 1000, Text: text, Hits: []Hit{{Rank: other, Tokens: held}}})
			require.Equal(t, ReasonPrefixMatch, d.Reason)
			return d.Ranked[0]
		}
		assert.Equal(t, other, ask(750))
		assert.Equal(t, own, ask(500), "the own tree has as much")
		d := r.Explain(&Request{ID: 3, Tokens: 1000, Text: bytes.Repeat([]byte("z"), 4000), Hits: []Hit{{Rank: other, Tokens: 50}}})
		assert.Equal(t, ReasonLowMatch, d.Reason)
	}
}
