package routing

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// RP45: a failed answer counts as the prompt and then as the decode that its request would have been.
func TestWhatAFailedAnswerCountsAs(t *testing.T) {
	const ms = time.Millisecond
	prompt := Load{W: 1, Q: 70, Kq: 100}
	decode := Load{R: 1, K: 100}
	for _, x := range []struct {
		name string
		mean service
		age  time.Duration
		want Load
	}{
		{"its prompt is computed", service{prefill: 20 * ms, whole: 100 * ms}, 0, prompt},
		{"until the mean time of a prefill", service{prefill: 20 * ms, whole: 100 * ms}, 19 * ms, prompt},
		{"then it decodes", service{prefill: 20 * ms, whole: 100 * ms}, 20 * ms, decode},
		{"until the mean time of an answer", service{prefill: 20 * ms, whole: 100 * ms}, 99 * ms, decode},
		{"then it is over", service{prefill: 20 * ms, whole: 100 * ms}, 100 * ms, Load{}},
		{"no rank reports the end of a prefill", service{whole: 100 * ms}, 99 * ms, prompt},
		{"there was no good answer", service{}, firstService - 1, prompt},
		{"there was no good answer, later", service{}, firstService, Load{}},
		{"answers take very long", service{prefill: ms, whole: time.Hour}, longestService - 1, decode},
		{"answers take very long, later", service{prefill: ms, whole: time.Hour}, longestService, Load{}},
	} {
		began := time.Hour
		assert.Equal(t, x.want, x.mean.loadOf(failure{began, 100, 30}, began+x.age), x.name)
	}
}

// RP45: a rank whose answers fail has as much room as before, and its load is what it was once their time is
// over.
func TestFailedAnswersTakeNoRoom(t *testing.T) {
	r := routerWith(LeastLoaded{}, 1, 2)
	id, now := ID(0, 0), time.Second
	for n := range uint64(5) {
		q := Request{ID: n + 1, Tokens: 100, Now: now}
		d := pick(r, q)
		assert.Equal(t, Route, d.Kind, "request %d", n)
		for step, kind := range []EventKind{EvAdmitted, EvFinished} {
			r.Observe(&Event{
				Kind: kind, Rank: id, Incarnation: 7, Seq: 2*n + uint64(step) + 1, ReqID: q.ID, Tokens: 100,
				End: EndFailed,
			})
		}
	}
	at := func(now time.Duration) Rank {
		_, v := r.Why(&Request{ID: 9, Tokens: 100, Now: now})
		return v.Ranks[0]
	}
	rk := at(now)
	assert.Equal(t, Load{W: 4, F: 1, Q: 500, Kq: 500}, rk.Load)
	assert.Equal(t, [2]int{0, 5}, [2]int{rk.Open(), rk.ongoing()})
	rk = at(now + firstService)
	assert.Equal(t, [2]Load{}, [2]Load{rk.Load, rk.Failed})
	rk = at(now)
	assert.Equal(t, 5, rk.ongoing(), "a question changes nothing")
	r.Reset()
	rk = at(now)
	assert.Equal(t, [2]Load{}, [2]Load{rk.Load, rk.Failed}, "forgotten")
}

// RP45: 12 clients, three ranks; one fails each request after 2 ms, the others answer in 100 ms. Whatever the
// policy, it gets hardly more than its share of the requests.
func TestLawARankThatFailsAtOnceIsNoBlackHole(t *testing.T) {
	for _, name := range Names() {
		if name == nameDirect {
			continue
		}
		for _, tokens := range []int{20, 4000} {
			assert.LessOrEqual(t, shareOfFailing(t, name, tokens), 0.45, "%s, %d tokens", name, tokens)
		}
	}
}

// shareOfFailing is the share of the requests that the failing rank gets.
func shareOfFailing(t *testing.T, policy string, tokens int) float64 {
	type running struct {
		id    uint64
		rank  RankID
		steps []time.Duration // of its first token, and of its end
	}
	const requests = 2000
	r := routerWith(newPolicy(t, policy), 3, 64)
	bad, now := ID(0, 1), time.Second
	var seqs [3]uint64
	var open []running
	tell := func(e Event, x *running) {
		seqs[x.rank.Rank()]++
		e.Rank, e.Incarnation, e.Seq = x.rank, 7, seqs[x.rank.Rank()]
		e.ReqID, e.Tokens, e.Now = x.id, tokens, now
		r.Observe(&e)
	}
	var d Decision
	toBad := 0
	for id := uint64(1); id <= requests; id++ {
		r.Pick(&Request{
			ID: id, Tokens: tokens, Now: now, Session: fmt.Sprint(id),
			Text: fmt.Appendf(nil, "%d is new", id),
		}, &d)
		x := running{id: id, rank: d.Ranked[0]}
		tell(Event{Kind: EvAdmitted}, &x)
		x.steps = []time.Duration{now + 20*time.Millisecond, now + 100*time.Millisecond}
		if id > 100 && x.rank == bad { // by then the Router knows how long answers take
			x.steps = []time.Duration{now + 2*time.Millisecond}
			toBad++
		}
		for open = append(open, x); len(open) == 12; { // the next step of all
			least := 0
			for i := range open {
				if open[i].steps[0] < open[least].steps[0] {
					least = i
				}
			}
			x := &open[least]
			now = x.steps[0]
			if len(x.steps) == 2 {
				tell(Event{Kind: EvFirstToken}, x)
				x.steps = x.steps[1:]
				continue
			}
			end := Event{Kind: EvFinished, End: EndGood}
			if x.rank == bad && x.id > 100 {
				end.End = EndFailed
			}
			tell(end, x)
			open = append(open[:least], open[least+1:]...)
		}
	}
	assert.Equal(t, 100*time.Millisecond, r.AnswerTime(), policy)
	return float64(toBad) / (requests - 100)
}
