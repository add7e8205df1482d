package routing

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/steptime"
)

// groupOf is a group whose ranks decode ten requests each.
func groupOf(ranks int) []GroupRank {
	out := make([]GroupRank, ranks)
	for i := range out {
		out[i] = GroupRank{
			ID: ID(0, i), Slots: 64, Decodes: 10, Open: 10, Context: 10_000, Capacity: 1_000_000,
		}
	}
	return out
}

// waitingFor are requests of these prompts that came 1 ms after each other until now.
func waitingFor(now time.Duration, prompts ...int) []GroupWaiting {
	var out []GroupWaiting
	for i, tokens := range prompts {
		since := now - time.Duration(len(prompts)-1-i)*time.Millisecond
		out = append(out, GroupWaiting{ID: uint64(i) + 1, Tokens: tokens, Since: since})
	}
	return out
}

func prompts(n, tokens int) []int { return slices.Repeat([]int{tokens}, n) }

// shown writes releases as "request→rank", or why there is none.
func shown(out *GroupLook) string {
	if len(out.Releases) == 0 {
		return out.Held.String()
	}
	var s []string
	for _, r := range out.Releases {
		s = append(s, fmt.Sprintf("%d→%d", r.ID, r.Rank.Rank()))
	}
	return strings.Join(s, " ")
}

// LG2: a table of groups, queues, pace, rate and goals, also goals of 0 and prompts longer than any rank;
// random arrivals, hits, first tokens, ends, departures; a queue that is always full of other lengths; one of
// a restart, of a request that waited elsewhere: what is released where, or held, with the words and the time
// to ask again; no release above a rank's places or memory (a prompt that no empty rank holds goes to the
// engine), each request once, the oldest in every cohort, at most 512 skips, the queue ends; same input, same
// output; what waits survives a restart, in the order of arrival.
func TestGroupRuleDecides(t *testing.T) {
	const now, ms = time.Hour, time.Millisecond
	model := NewGroupRule(0, 0).Model
	with := func(change func(rk *GroupRank)) []GroupRank {
		ranks := groupOf(4)
		for i := range ranks {
			change(&ranks[i])
		}
		return ranks
	}
	open := with(func(rk *GroupRank) {
		if rk.ID == ID(0, 1) {
			rk.Prompts, rk.Work = 1, model.Prefill(1024, 0)
		}
	})
	idle := with(func(rk *GroupRank) { rk.Decodes, rk.Open, rk.Context = 0, 0, 0 })
	full := with(func(rk *GroupRank) { rk.Slots = 0 })
	aged := func(age time.Duration, w []GroupWaiting) []GroupWaiting {
		for i := range w {
			w[i].Since -= age
		}
		return w
	}
	oldest := func(w []GroupWaiting, skips int, hits ...Hit) []GroupWaiting {
		w[0].Skips, w[0].Hits = skips, hits
		return w
	}
	type row struct {
		ranks   []GroupRank   // nil = four
		pace    time.Duration // the goal is 50 ms
		rate    float64
		change  func(r *GroupRule)
		waiting []GroupWaiting
		quiet   time.Duration // for so long no prompt is computed
		want    string
		askIn   time.Duration
	}
	decode := func(r *GroupRule) { r.Decode = true }
	for name, c := range map[string]row{
		"a prompt waits for one on every rank": {
			pace: 60 * ms, rate: 30, waiting: waitingFor(now, 1000),
			want: "waits for 3 more or 500 ms", askIn: 500 * ms,
		},
		"and no longer than that": {
			pace: 60 * ms, rate: 30, waiting: aged(500*ms, waitingFor(now, 1000)),
			want: "1→0",
		},
		"near the goal it waits for a part of that": {
			pace: 45 * ms, rate: 30, waiting: waitingFor(now, 1000),
			want: "waits for 3 more or 166 ms", askIn: 500 * ms / 3,
		},
		"below the goal it does not wait": {
			pace: 42 * ms, rate: 30, waiting: waitingFor(now, 1000),
			want: "1→0",
		},
		"nor if no other is to come": {
			pace: 60 * ms, rate: 1.9, waiting: waitingFor(now, 1000),
			want: "1→0",
		},
		"nor before there is a pace": {
			pace: 0, rate: 30, waiting: waitingFor(now, 1000),
			want: "1→0",
		},
		"nor if the group does not decode": {
			ranks: idle,
			pace:  60 * ms, rate: 30, waiting: waitingFor(now, 1000),
			want: "1→0",
		},
		"a hold of 0": {
			change: func(r *GroupRule) { r.Hold = 0 },
			pace:   60 * ms, rate: 30, waiting: waitingFor(now, 1000),
			want: "1→0",
		},
		"a goal of 0": {
			change: func(r *GroupRule) { r.Pace = 0 },
			pace:   60 * ms, rate: 30, waiting: waitingFor(now, 1000),
			want: "1→0",
		},
		"one prompt for every rank": {
			pace: 60 * ms, rate: 30, waiting: waitingFor(now, prompts(4, 1000)...),
			want: "1→0 2→1 3→2 4→3",
		},
		"seven are one layer": {
			pace: 60 * ms, rate: 30, waiting: waitingFor(now, prompts(7, 1000)...),
			want: "1→0 2→1 3→2 4→3",
		},
		"eight are two": {
			pace: 60 * ms, rate: 30, waiting: waitingFor(now, prompts(8, 1000)...),
			want: "1→0 2→1 3→2 4→3 5→0 6→1 7→2 8→3",
		},
		"a full queue waits for the last cohort": {
			ranks: open,
			pace:  60 * ms, rate: 30, waiting: aged(time.Minute, waitingFor(now, prompts(4, 1000)...)),
			want: "waits for the first tokens of 1",
		},
		"a prompt that has waited goes beside it": {
			ranks: open,
			pace:  60 * ms, rate: 30, waiting: aged(time.Minute, waitingFor(now, 1000)),
			want: "1→0",
		},
		"prompts that are alike, and smaller ones in what is left": {
			pace: 60 * ms, rate: 30,
			waiting: waitingFor(now, 16_000, 1000, 15_000, 300, 16_000, 14_000, 2000),
			want:    "1→0 5→1 3→2 6→3 7→3 2→3 4→2",
		},
		"the oldest is the shortest of prompts that are alike": {
			pace: 60 * ms, rate: 30, waiting: waitingFor(now, 3000, 3010, 3020, 3030),
			want: "1→0 2→1 3→2 4→3",
		},
		"the window is four per rank": {
			change: func(r *GroupRule) { r.Window = 1 },
			pace:   60 * ms, rate: 30, waiting: waitingFor(now,
				slices.Concat(prompts(1, 8000), prompts(14, 300), prompts(2, 8000))...),
			want: "1→0 16→1 2→2 3→3 4→2 5→3 6→2 7→3 8→2 9→3" +
				" 10→2 11→3 12→2 13→3 14→2 15→3",
		},
		"work counts, not tokens: a part behind 100k": {
			pace: 60 * ms, rate: 30, waiting: oldest(waitingFor(now, 104_000, 4000, 4000, 9000), 0,
				Hit{Rank: ID(0, 2), Tokens: 100_000}),
			want: "1→2 4→0 2→1 3→3",
		},
		"a prompt goes where most of it is cached": {
			pace: 60 * ms, rate: 30, waiting: oldest(waitingFor(now, 2000, 1000, 1000, 1000), 0,
				Hit{Rank: ID(0, 3), Tokens: 1000}),
			want: "1→3 2→0 3→1 4→2",
		},
		"a full queue waits for a place on every rank": {
			ranks: with(func(rk *GroupRank) { rk.Slots = rk.ID.Rank() % 2 }),
			pace:  60 * ms, rate: 30, waiting: waitingFor(now, prompts(4, 1000)...), quiet: 100 * ms,
			want: "waits for a place on 2 more or 400 ms", askIn: 400 * ms,
		},
		"but not on one that takes none for another reason": {
			ranks: with(func(rk *GroupRank) { rk.Slots = 2*(rk.ID.Rank()%2) - 1 }),
			pace:  60 * ms, rate: 30, waiting: waitingFor(now, prompts(4, 1000)...), quiet: 100 * ms,
			want: "1→1 2→3",
		},
		"nor if nothing decodes, as in a prefill pool": {
			ranks: with(func(rk *GroupRank) { rk.Slots, rk.Decodes = rk.ID.Rank()%2, 0 }),
			pace:  60 * ms, rate: 30, waiting: waitingFor(now, prompts(4, 1000)...), quiet: 100 * ms,
			want: "1→1 2→3",
		},
		"ranks without a place get none": {
			quiet: 500 * ms,
			ranks: with(func(rk *GroupRank) { rk.Slots = rk.ID.Rank() }),
			pace:  60 * ms, rate: 30, waiting: waitingFor(now, prompts(8, 1000)...),
			want: "1→1 2→2 3→3 4→2 5→3",
		},
		"nor ranks without memory": {
			ranks: with(func(rk *GroupRank) { rk.Context = 999_500 - 500*int64(rk.ID.Rank()) }),
			pace:  60 * ms, rate: 30, waiting: waitingFor(now, prompts(4, 1000)...),
			want: "1→3 2→2 3→1",
		},
		"nothing passes an oldest without room": {
			ranks: with(func(rk *GroupRank) { rk.Context = 950_000 }),
			pace:  60 * ms, rate: 30, waiting: waitingFor(now, 60_000, 1000, 1000, 1000),
			want: "waits for a place and KV memory on a rank",
		},
		"what no rank can hold is the engine's to refuse": {
			pace: 60 * ms, rate: 30, waiting: waitingFor(now, 2_000_000, 1000, 1000, 1000),
			want: "1→0 2→1 3→2 4→3",
		},
		"a short one passes a prompt that waits": {
			pace: 60 * ms, rate: 30, waiting: waitingFor(now, 1000, 100),
			want: "2→0",
		},
		"so does one that is cached, on that rank": {
			pace: 60 * ms, rate: 30, waiting: append(waitingFor(now, 1000), GroupWaiting{
				ID: 2, Tokens: 9000, Hits: []Hit{{Rank: ID(0, 2), Tokens: 8900}},
			}),
			want: "2→2",
		},
		"but not for ever": {
			pace: 60 * ms, rate: 30, waiting: oldest(waitingFor(now, 1000, 100), 256),
			want: "waits for 2 more or 499 ms", askIn: 499 * ms,
		},
		"nor in a full queue": {
			ranks: open,
			pace:  60 * ms, rate: 30, waiting: waitingFor(now, 1000, 100, 100, 100),
			want: "waits for the first tokens of 1",
		},
		"short ones level the decoding": {
			ranks: with(func(rk *GroupRank) { rk.Context = 5000 - 1000*int64(rk.ID.Rank()) }),
			pace:  60 * ms, rate: 30, waiting: waitingFor(now, prompts(6, 250)...),
			want: "1→3 2→3 3→2 4→3 5→2 6→1",
		},
		"a decode pool: the longest that fits": {
			ranks:  with(func(rk *GroupRank) { rk.Context = 10_000 - 3000*int64(rk.ID.Rank()) }),
			change: decode,
			pace:   60 * ms, rate: 30, waiting: waitingFor(now, 500, 8000, 900),
			want: "2→3 1→2 3→2",
		},
		"a decode pool without a place": {
			ranks:  full,
			change: decode,
			pace:   60 * ms, rate: 30, waiting: waitingFor(now, 500),
			want: "waits for a place and KV memory on a rank",
		},
		"no ranks": {
			ranks: []GroupRank{},
			pace:  60 * ms, rate: 30, waiting: waitingFor(now, 500),
			want: "",
		},
		"a model that knows nothing": {
			change: func(r *GroupRule) { r.Model.PromptTokenMS, r.Model.PairMS = 0, 0 },
			pace:   60 * ms, rate: 30, waiting: waitingFor(now, prompts(4, 1000)...),
			want: "1→0 2→1 3→2 4→3",
		},
	} {
		t.Run(name, func(t *testing.T) {
			rule := NewGroupRule(0, 0)
			if c.change != nil {
				c.change(&rule)
			}
			if c.ranks == nil {
				c.ranks = groupOf(4)
			}
			var out GroupLook
			rule.Next(&GroupInput{
				Ranks: c.ranks, Waiting: c.waiting, Now: now, Pace: c.pace, Rate: c.rate,
				Quiet: now - c.quiet,
			}, &out)
			assert.Equal(t, c.want, shown(&out))
			if c.askIn == 0 {
				assert.Zero(t, out.AskAt)
			} else {
				assert.InDelta(t, now+c.askIn, out.AskAt, float64(time.Microsecond))
			}
		})
	}
}

// LG44: the balance of a group is the mean of its ranks' step times over the longest.
func TestDecodeBalance(t *testing.T) {
	t.Parallel()
	rule := GroupRule{Model: steptime.Coefficients{ContextMS: 1}}
	assert.InDelta(t, 1, rule.DecodeBalance(nil), 0)
	assert.InDelta(t, 1, rule.DecodeBalance(groupOf(4)), 0)
	ranks := groupOf(2)
	ranks[0].Context, ranks[1].Context = 1000, 3000
	assert.InDelta(t, 2./3, rule.DecodeBalance(ranks), 1e-9)
}
