package routing

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestTheExampleOfMexInTheDocs: docs/routing-reference.md prints what `route explain` prints of three ranks;
// the numbers are the policy's.
func TestTheExampleOfMexInTheDocs(t *testing.T) {
	text, err := os.ReadFile("../docs/routing-reference.md")
	require.NoError(t, err)
	rows := map[string][]string{} // by rank: the columns from QUEUE to SCORE, and the mark of the pick
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 11 && f[1] == "ok" {
			rows[f[0]] = f[4:]
		}
	}
	rank := func(n int, l Load, pairs int64) Rank {
		return Rank{ID: ID(0, n), Ready: true, MaxOngoing: 256, Load: l, Pairs: pairs, Capacity: 699_392}
	}
	v := View{Ranks: []Rank{
		rank(0, Load{F: 1, R: 12, Q: 6000, K: 140_000, Kq: 6000}, 6000*6000),
		rank(1, Load{R: 2, K: 20_000}, 0),
		rank(2, Load{W: 1, F: 1, R: 6, Q: 50_000, K: 60_000, Kq: 50_000}, 2*25_000*25_000),
	}}
	decide := func() (scores map[RankID][]float64, pick RankID) {
		d := Decision{Explain: true}
		newPolicy(t, "mex").Decide(&Request{Tokens: 12_000, Hits: []Hit{{Rank: ID(0, 0), Tokens: 8192}}}, &v,
			alone(), seeded(1), &d)
		scores = map[RankID][]float64{}
		for _, term := range d.Terms {
			scores[term.Rank] = append(scores[term.Rank], term.Value)
		}
		for id, terms := range scores {
			total := 0.0
			for _, ms := range terms {
				total += ms
			}
			scores[id] = append(terms, total)
		}
		return scores, d.Ranked[0]
	}
	v.Rho, v.Ranks[0].Rho, v.Ranks[1].Rho, v.Ranks[2].Rho = 0.6, 0.5, 0.55, 0.75
	scores, pick := decide()
	require.Len(t, scores, 3)
	for id, terms := range scores {
		var want []string
		for _, ms := range terms {
			s := strconv.FormatFloat(ms, 'f', 4, 64)
			want = append(want, strings.TrimSuffix(strings.TrimRight(s, "0"), "."))
		}
		if id == pick {
			want = append(want, "<")
		}
		assert.Equal(t, want, rows[id.String()], id.String())
	}
	assert.Equal(t, ID(0, 0), pick)
	v.Rho, v.Ranks[0].Rho, v.Ranks[1].Rho, v.Ranks[2].Rho = 0, 0, 0, 0
	scores, pick = decide()
	assert.Equal(t, ID(0, 1), pick)
	assert.InDelta(t, 910, scores[ID(0, 1)][7], 0.5)
	assert.InDelta(t, 1084, scores[ID(0, 0)][7], 0.5)
}
