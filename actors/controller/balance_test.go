package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
)

// TestImbalanceBeginsAndEnds: which loads over time are an imbalance, and when it begins and ends. Every 2 s
// each rank reports.
func TestImbalanceBeginsAndEnds(t *testing.T) {
	even := func(int) []int { return []int{9000, 11000, 10000, 10000} }
	long := func(int) []int { return []int{2000, 2000, 100_000, 2000} }
	idle := func(int) []int { return []int{0, 0, 0, 0} }
	after := func(seconds int, before, then func(int) []int) func(int) []int {
		return func(at int) []int {
			if at < seconds {
				return before(at)
			}
			return then(at)
		}
	}
	for name, c := range map[string]struct {
		loads      func(second int) []int
		begin, end [2]int // seconds: from, to; 0, 0: never
	}{
		"even":                             {loads: even},
		"idle":                             {loads: idle},
		"a long request from the start on": {loads: long, begin: [2]int{20, 30}},
		"one that comes later":             {loads: after(100, even, long), begin: [2]int{105, 125}},
		"one that ends, others go on":      {after(120, long, even), [2]int{20, 30}, [2]int{150, 180}},
		"one that ends, and all are idle":  {after(120, long, idle), [2]int{20, 30}, [2]int{150, 180}},
		"one much longer": {
			after(120, func(int) []int { return []int{0, 0, 0, 4_000_000} }, idle),
			[2]int{20, 30},
			[2]int{150, 180},
		},
		"a long request of some seconds": {loads: after(100, even, after(106, long, even))},
		"few tokens":                     {loads: func(int) []int { return []int{16_000, 0, 0, 0} }},
		"one rank":                       {loads: func(int) []int { return []int{100_000} }},
		"each rank in its turn": {
			loads: func(at int) []int {
				out := make([]int, 4)
				out[at/2%4] = 100_000
				return out
			},
		},
		"a rank that has just come": {
			loads: func(at int) []int {
				if at < 290 {
					return []int{10_000, 10_000}
				}
				return []int{10_000, 10_000, 200_000}
			},
		},
		"near the ratio, where it does not flicker": {
			loads: func(at int) []int {
				if at%10 < 5 {
					return []int{100_000, 40_000, 40_000, 40_000}
				}
				return []int{100_000, 60_000, 60_000, 60_000}
			},
			begin: [2]int{20, 40},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := &balance{loads: map[string]*loadWindow{}}
			var changes []int
			for at := 0; at < 300; at += 2 {
				now := start.Add(time.Duration(at) * time.Second)
				for i, tokens := range c.loads(at) {
					b.add(now, fmt.Sprint(i), tokens)
				}
				if b.update(now) {
					changes = append(changes, at)
				}
			}
			never := func(span [2]int) bool { return span[1] == 0 }
			want := slices.DeleteFunc([][2]int{c.begin, c.end}, never)
			require.Len(t, changes, len(want), "%v", changes)
			for i, span := range want {
				assert.GreaterOrEqual(t, changes[i], span[0])
				assert.LessOrEqual(t, changes[i], span[1])
			}
		})
	}
}

// TestImbalanceOfAnApplication: status and events name the ranks and the policies; one event when it begins,
// one when it ends.
func TestImbalanceOfAnApplication(t *testing.T) {
	w := newWorld(t)
	a := sim("demo", 4, app.Independent)
	a.Routing.Policy = "power-of-two"
	w.deploy(a)
	w.up("demo/0/0", "demo/0/1", "demo/0/2", "demo/0/3")
	var events []Event
	w.auto = func(_ *world, e Effect) bool {
		if e, ok := e.(ChangeEffect); ok && e.Unit == "" && e.Node == "" {
			events = append(events, e.Event)
		}
		return false
	}
	report := func(seconds, tokens int) {
		for range seconds {
			w.now = w.now.Add(time.Second)
			r := &msg.NodeReport{Node: *w.state.Nodes["a"], Incarnation: w.starts}
			for _, unit := range []string{"demo/0/0", "demo/0/1", "demo/0/3", "gone/0/0"} {
				rank := int(unit[len(unit)-1] - '0')
				r.Units = append(r.Units, w.hears["a"][unit])
				r.Loads = append(r.Loads, msg.RankLoad{Unit: unit, Rank: rank, Tokens: 2000})
			}
			r.Units = append(r.Units, w.hears["a"]["demo/0/2"])
			r.Loads = append(r.Loads, msg.RankLoad{Unit: "demo/0/2", Rank: 2, Tokens: tokens})
			w.step(NodeReported{r})
		}
	}
	imbalances := func() []client.Imbalance { return view{w.core}.Status()[0].Imbalances }
	report(120, 102_000)
	require.Len(t, imbalances(), 1)
	const text = "uneven load, max/mean 3.8: demo/0/2 (102000 tokens); the mean of its ranks is 27000 " +
		"tokens in flight; policy mex, kv, least-kv or scoring would balance it"
	assert.Equal(t, text, imbalances()[0].String())
	report(60, 2000)
	assert.Empty(t, imbalances())
	require.Len(t, events, 2)
	assert.Equal(t, [][2]string{{"load-even", "load-uneven"}, {"load-uneven", "load-even"}},
		[][2]string{{events[0].From, events[0].To}, {events[1].From, events[1].To}})
	assert.Contains(t, events[0].Reason, "demo/0/2 (102000 tokens)")

	b := balance{since: start}
	a.Routing.Policy = "least-kv"
	assert.Contains(t, b.status(a).String(), "its policy least-kv knows this load")
	a.DataParallel.Coupling = app.Lockstep
	assert.Contains(t, b.status(a).String(), "policy cohorts would balance it")
}
