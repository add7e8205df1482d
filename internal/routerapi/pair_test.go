package routerapi

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/routing"
)

// pairReasons are the reasons of pair decisions that take a rank, with their ways.
var pairReasons = map[string]string{
	routing.PairLongPrefill: "remote", routing.PairPrefillHasRoom: "remote", routing.PairAlways: "remote",
	routing.PairRemoteCheaper: "remote",
	routing.PairShortPrefill:  "local", routing.PairLocalCheaper: "local", routing.PairDecodeHolds: "local",
	routing.PairPrefillQueue: "local", routing.PairCannotSplit: "local", routing.PairPrefillBusy: "local",
	routing.PairNoPrefill: "fallback", routing.PairPrefillFull: "fallback",
	routing.PairLeasesFull: "fallback", routing.PairNotPrewarmed: "fallback",
}

// TestEveryPairReasonHasWords: a person reads a sentence of its own for each reason.
func TestEveryPairReasonHasWords(t *testing.T) {
	x := &client.Explanation{Tokens: 4000, Pair: &client.PairExplanation{UncachedTokens: 3000}}
	said := map[string]string{}
	for reason, way := range pairReasons {
		d := routing.PairDecision{Kind: routing.Route, Remote: way == "remote", Reason: reason}
		assert.Equal(t, way == "fallback", d.IsFallback(), reason)
		words := pairWords(&d, x, "several sequences")
		assert.Empty(t, said[words], "%s and %s say the same", reason, said[words])
		said[words] = reason
	}
	assert.Contains(t, said, "decode rank 0/0 would have to compute 3000 of 4000 tokens")
	assert.Contains(t, said, "the request cannot be split: several sequences")
	d := routing.PairDecision{Kind: routing.Queue, Reason: routing.ReasonNoRoom}
	assert.Equal(t, "no rank can take it now", pairWords(&d, x, ""))
}

// TestPairCandidates: by their ranks, the decode rank alone last, and exactly the taken one is marked.
func TestPairCandidates(t *testing.T) {
	pair := func(prefill, decode int) routing.PairCandidate {
		return routing.PairCandidate{
			Remote: true, Prefill: routing.ID(0, prefill), Decode: routing.ID(0, decode), Cost: 7,
			Terms: []routing.Term{{Name: "queue", Unit: "ms", Raw: 7, Weight: 1, Value: 7}},
		}
	}
	d := routing.PairDecision{
		Kind: routing.Route, Remote: true, Prefill: routing.ID(0, 1), Decode: routing.ID(0, 0),
		Candidates: []routing.PairCandidate{
			pair(1, 2), pair(1, 0), pair(0, 2), {Decode: routing.ID(0, 0), Cost: 9}, pair(0, 0),
		},
	}
	marks := func() (out []string) {
		for _, c := range pairCandidates(&d) {
			mark := c.Prefill + "+" + c.Decode
			if c.Picked {
				mark += "<"
			}
			out = append(out, mark)
		}
		return out
	}
	assert.Equal(t, []string{"0/0+0/0", "0/0+0/2", "0/1+0/0<", "0/1+0/2", "+0/0"}, marks())
	assert.Equal(t, []client.Term{{Name: "queue", Unit: "ms", Raw: 7, Weight: 1, Value: 7}},
		pairCandidates(&d)[0].Terms)
	d.Remote = false
	assert.Equal(t, []string{"0/0+0/0", "0/0+0/2", "0/1+0/0", "0/1+0/2", "+0/0<"}, marks())
}
