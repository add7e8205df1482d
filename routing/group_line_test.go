package routing

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// groupModel is a group around a GroupLine: what it released, and what the ranks hold.
type groupModel struct {
	t       *rapid.T
	line    *GroupLine
	ranks   []GroupRank
	waiting map[uint64]*GroupWaiting
	running map[uint64]GroupRelease
	tokens  map[uint64]int // of prompts
	now     time.Duration
}

func newGroupModel(t *rapid.T, rule GroupRule, ranks []GroupRank) *groupModel {
	return &groupModel{
		t: t, line: NewGroupLine(rule), ranks: ranks, waiting: map[uint64]*GroupWaiting{},
		running: map[uint64]GroupRelease{}, tokens: map[uint64]int{}, now: time.Hour,
	}
}

func (m *groupModel) arrive(tokens int, hits ...Hit) {
	w := GroupWaiting{ID: uint64(len(m.tokens)) + 1, Tokens: tokens, Hits: hits, Since: m.now}
	m.waiting[w.ID], m.tokens[w.ID] = &w, tokens
	m.line.Add(w, m.now)
}

// look lets the queue release, and checks each release against what is known of the ranks.
func (m *groupModel) look() GroupHeld {
	var out GroupLook
	var oldest uint64
	if w := m.line.Waiting(); len(w) > 0 {
		oldest = w[0].ID
	}
	m.line.Look(m.ranks, m.now, &out)
	for _, rel := range out.Releases {
		w, waits := m.waiting[rel.ID]
		require.True(m.t, waits, "a request is released once")
		delete(m.waiting, rel.ID)
		m.running[rel.ID] = rel
		rk := &m.ranks[rel.Rank.Rank()]
		assert.Positive(m.t, rk.Slots, "a rank's places")
		rk.Slots, rk.Open, rk.Context = rk.Slots-1, rk.Open+1, rk.Context+int64(w.Tokens)
		if int64(w.Tokens) <= rk.Capacity {
			assert.LessOrEqual(m.t, rk.Context, rk.Capacity, "a rank's memory")
		}
		assert.LessOrEqual(m.t, rel.Skips, groupSkips)
	}
	for _, rel := range out.Releases {
		for id, w := range m.waiting {
			if id < rel.ID {
				w.Skips++
			}
		}
		assert.True(m.t, rel.Work == 0 || m.waiting[oldest] == nil, "the oldest is in every cohort")
	}
	require.Len(m.t, m.line.Waiting(), len(m.waiting))
	for i, w := range m.line.Waiting() {
		assert.Equal(m.t, *m.waiting[w.ID], w)
		assert.True(m.t, i == 0 || m.line.Waiting()[i-1].ID < w.ID, "in the order of arrival")
	}
	return out.Held
}

func (m *groupModel) end(id uint64) {
	rel := m.running[id]
	m.line.End(id, 0, m.now)
	rk := &m.ranks[rel.Rank.Rank()]
	rk.Slots, rk.Open, rk.Context = rk.Slots+1, rk.Open-1, rk.Context-int64(m.tokens[id])
	delete(m.running, id)
}

// drawGroupRule is a rule of any pool.
func drawGroupRule(t *rapid.T) GroupRule {
	rule := NewGroupRule(0, 0)
	switch rapid.SampledFrom([]string{"mixed", "prefill", "decode"}).Draw(t, "pool") {
	case "prefill":
		return rule.OfPrefillPool()
	case "decode":
		return rule.OfDecodePool()
	}
	return rule
}

func drawGroupRanks(t *rapid.T) []GroupRank {
	ranks := make([]GroupRank, rapid.IntRange(1, 6).Draw(t, "ranks"))
	for i := range ranks {
		ranks[i] = GroupRank{
			ID: ID(0, i), Slots: rapid.IntRange(0, 20).Draw(t, "slots"), Capacity: 200_000,
			Decodes: rapid.IntRange(0, 3).Draw(t, "decodes"),
		}
	}
	ranks[0].Slots++
	return ranks
}

func drawPrompt(t *rapid.T) int {
	tokens := []int{1, 100, 256, 300, 1000, 1024, 4000, 16_384, 120_000, 300_000}
	return rapid.SampledFrom(tokens).Draw(t, "tokens")
}

// LG2, LG36: Whatever comes, waits, leaves and ends when: no rank gets more than it can hold, every request
// is released once, the oldest is in every cohort, no request is passed more than 512 times, and once
// arrivals end, the queue does.
func TestGroupLineKeepsItsLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newGroupModel(t, drawGroupRule(t), drawGroupRanks(t))
		for range rapid.IntRange(1, 30).Draw(t, "rounds") {
			for range rapid.IntRange(0, 12).Draw(t, "arrivals") {
				var hits []Hit
				tokens := drawPrompt(t)
				for i := range m.ranks {
					if rapid.IntRange(0, 5).Draw(t, "hit") == 0 {
						of := rapid.IntRange(0, tokens).Draw(t, "of")
						hits = append(hits, Hit{Rank: ID(0, i), Tokens: int32(of)})
					}
				}
				m.arrive(tokens, hits...)
			}
			for id := uint64(1); id <= uint64(len(m.tokens)); id++ {
				switch _, runs := m.running[id]; {
				case runs:
					switch rapid.IntRange(0, 3).Draw(t, "does") {
					case 0:
						m.end(id)
					case 1:
						m.line.Progress(id, rapid.IntRange(0, 50).Draw(t, "out"), m.now)
					case 2:
						m.line.FirstToken(id, m.now)
					}
				case m.waiting[id] != nil && rapid.IntRange(0, 9).Draw(t, "leaves") == 0:
					assert.True(t, m.line.Remove(id))
					delete(m.waiting, id)
				}
			}
			m.now += time.Duration(rapid.IntRange(0, 700).Draw(t, "ms")) * time.Millisecond
			if rapid.IntRange(0, 19).Draw(t, "jumps") == 0 { // the process or the machine was stopped
				m.now += time.Hour
			}
			m.look()
		}
		for rounds := len(m.waiting) + 1; len(m.waiting) > 0; rounds-- {
			require.Positive(t, rounds, "the queue comes to an end")
			for id := range m.running {
				m.end(id)
			}
			m.now += m.line.rule.Hold
			m.look()
		}
		for id := range m.running {
			m.end(id)
		}
		for _, p := range m.line.ranks {
			assert.Zero(t, p)
		}
		assert.Empty(t, m.line.open)
	})
}

// LG2: The same input gives the same answer, whatever the answer's memory was used for before.
func TestGroupRuleRepeats(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rule, used := drawGroupRule(t), GroupLook{}
		for range 3 {
			in := GroupInput{
				Ranks: drawGroupRanks(t), Now: time.Hour, Rate: rapid.Float64Range(0, 100).Draw(t, "rate"),
				Pace: time.Duration(rapid.IntRange(0, 80).Draw(t, "pace")) * time.Millisecond,
			}
			for i := range rapid.IntRange(0, 70).Draw(t, "waiting") {
				in.Waiting = append(in.Waiting, GroupWaiting{
					ID: uint64(i), Tokens: drawPrompt(t), Since: time.Hour,
				})
			}
			var fresh GroupLook
			rule.Next(&in, &fresh)
			rule.Next(&in, &used)
			assert.Equal(t, fresh.Held, used.Held)
			assert.Equal(t, fresh.AskAt, used.AskAt)
			require.Len(t, used.Releases, len(fresh.Releases))
			for i := range fresh.Releases {
				assert.Equal(t, fresh.Releases[i], used.Releases[i])
			}
		}
	})
}

// LG2: A queue that is always full of requests that suit it better passes one at most 512 times, and one that
// is unlike all others is served in its turn at the latest.
func TestGroupLineStarvesNoRequest(t *testing.T) {
	const waiting = 256
	for name, rule := range map[string]GroupRule{
		"mixed": NewGroupRule(0, 0), "prefill": NewGroupRule(0, 0).OfPrefillPool(),
		"decode": NewGroupRule(0, 0).OfDecodePool(),
	} {
		for _, odd := range []int{257, 180_000} {
			line, ranks, now, ids := NewGroupLine(rule), groupOf(4), time.Hour, uint64(0)
			arrive := func(tokens int) {
				ids++
				line.Add(GroupWaiting{ID: ids, Tokens: tokens, Since: now}, now)
			}
			for range waiting - 1 {
				arrive(1000)
			}
			arrive(odd)
			var out GroupLook
			served, most := false, 0
			for round := 0; !served; round++ {
				require.Less(t, round, waiting+groupSkips, name)
				for i := range ranks { // one place becomes free in each round
					ranks[i].Slots, ranks[i].Capacity = 0, 1<<40
				}
				ranks[round%4].Slots = 1
				now += rule.Hold
				line.Look(ranks, now, &out)
				require.Len(t, out.Releases, 1, "no place stays free")
				line.End(out.Releases[0].ID, 1, now)
				most = max(most, out.Releases[0].Skips)
				served = out.Releases[0].ID == waiting
				arrive(1000)
			}
			assert.LessOrEqual(t, most, groupSkips)
		}
	}
}

// LG2: The pace is the mean time between tokens of the last seconds, the rate what arrived in the last ten.
func TestGroupLineMeasures(t *testing.T) {
	line, now := NewGroupLine(NewGroupRule(0, 0)), time.Hour
	var out GroupLook
	assert.Zero(t, line.Pace(now))
	for i := range uint64(2000) { // 20 per s
		line.Add(GroupWaiting{ID: i, Tokens: 1000, Since: now}, now)
		ranks := groupOf(4)
		line.Look(ranks, now, &out)
		for _, rel := range out.Releases {
			line.FirstToken(rel.ID, now)
			line.Progress(rel.ID, 11, now+600*time.Millisecond)
			line.Progress(rel.ID, 5, now+700*time.Millisecond) // an old record
			line.End(rel.ID, 11+10, now+time.Second)
		}
		now += 50 * time.Millisecond
	}
	assert.InDelta(t, 50*time.Millisecond, line.Pace(now), float64(time.Millisecond))
	assert.InDelta(t, 20, line.Rate(now), .2)
	assert.Zero(t, line.Pace(now+time.Minute), "nothing decodes")
	assert.Less(t, line.Rate(now+time.Minute), .1)
	assert.InDelta(t, 20, line.Rate(now-time.Minute), .2, "a clock that jumps back")
}

// LG2, LG44: A request that waited elsewhere keeps its place in time, a restart of the group what waits, and
// a preview everything.
func TestGroupLineKeepsPlaces(t *testing.T) {
	line, now := NewGroupLine(NewGroupRule(0, 0)), time.Hour
	for _, since := range []time.Duration{5, 7, 6, 7, 4} {
		line.Add(GroupWaiting{ID: uint64(since), Tokens: 9000, Since: now + since}, now+10)
	}
	order := func() (ids []uint64) {
		for _, w := range line.Waiting() {
			ids = append(ids, w.ID)
		}
		return ids
	}
	assert.Equal(t, []uint64{4, 5, 6, 7, 7}, order())
	var out GroupLook
	line.Preview(groupOf(4), now+10, &out)
	assert.Equal(t, "4→0 5→1 6→2 7→3", shown(&out))
	line.Preview(groupOf(6), now+10, &out, GroupWaiting{ID: 9, Tokens: 9000, Since: now + 10})
	assert.Equal(t, "4→0 5→1 6→2 7→3 7→4 9→5", shown(&out), "with one that would wait behind them")
	assert.Equal(t, []uint64{4, 5, 6, 7, 7}, order())
	line.Look(groupOf(4), now+10, &out)
	assert.Equal(t, "4→0 5→1 6→2 7→3", shown(&out))
	for i := range uint64(3) {
		line.Add(GroupWaiting{ID: 10 + i, Tokens: 9000, Since: now + 11}, now+11)
	}
	line.Look(groupOf(4), now+time.Minute, &out)
	assert.Equal(t, "waits for the first tokens of 4", shown(&out))
	assert.False(t, line.Remove(4), "it was released")
	line.Restart()
	assert.Equal(t, []uint64{7, 10, 11, 12}, order())
	line.Look(groupOf(4), now+time.Minute, &out)
	assert.Equal(t, "7→0 10→1 11→2 12→3", shown(&out))
	line.FirstToken(4, now) // of the time before the restart
	line.End(4, 1, now)
	line.Look(groupOf(4), now+time.Minute, &out)
	assert.Equal(t, GroupHeld{}, out.Held, "nothing waits")
	assert.Equal(t, "waits for a place and KV memory on a rank", GroupHeld{Reason: GroupNoRoom}.String())
}

// LG2: After the first tokens of a cohort a full queue waits for a place on every rank, for as long as a
// prompt may be held.
func TestGroupLineWaitsForPlaces(t *testing.T) {
	line, now := NewGroupLine(NewGroupRule(0, 0)), time.Hour
	add := func(first uint64) {
		for i := range uint64(4) {
			line.Add(GroupWaiting{ID: first + i, Tokens: 1000, Since: now}, now)
		}
	}
	var out GroupLook
	add(1)
	line.Look(groupOf(4), now, &out)
	require.Len(t, out.Releases, 4)
	add(5)
	ranks := groupOf(4)
	ranks[2].Slots = 0
	for id := range uint64(4) {
		line.Look(ranks, now, &out)
		assert.Equal(t, GroupPrefill, out.Held.Reason)
		now += 100 * time.Millisecond
		line.FirstToken(1+id, now)
	}
	line.Look(ranks, now+time.Millisecond, &out)
	assert.Equal(t, "waits for a place on 1 more or 499 ms", shown(&out))
	assert.Equal(t, now+line.rule.Hold, out.AskAt)
	line.Preview(groupOf(4), now+time.Millisecond, &out)
	assert.Equal(t, "5→0 6→1 7→2 8→3", shown(&out))
	line.Look(ranks, now+line.rule.Hold, &out)
	assert.Equal(t, "5→0 6→1 7→3", shown(&out))
}

// LG2: A Router's ranks as the queue sees them: those of the group, without the ones that do not serve; no
// place on busy ones, nor on silent ones while others are heard.
func TestGroupRanks(t *testing.T) {
	r := NewRouter(LeastLoaded{}, 1)
	for _, id := range []RankID{ID(0, 3), ID(1, 0), ID(1, 1), ID(1, 2), ID(1, 3), ID(2, 0)} {
		r.Observe(&Event{Kind: EvRankUp, Rank: id, Epoch: 1, Incarnation: 1, MaxOngoing: 2, Capacity: 1000})
	}
	r.Observe(&Event{Kind: EvAccepting, Rank: ID(1, 0)})
	r.Observe(&Event{Kind: EvSilent, Rank: ID(1, 3), Silent: true})
	busy := .5
	r.Observe(&Event{Kind: EvConfigured, Config: &Config{BusyThreshold: &busy}})
	r.Observe(&Event{Kind: EvStatus, Rank: ID(1, 2), KVUsage: .9})
	var d Decision
	for key := range uint64(3) {
		r.Pick(&Request{ID: key, Tokens: 100, HasDirect: true, Force: true, Direct: ID(1, 1)}, &d)
		assert.Equal(t, key < 2, d.Kind == Route, "no release goes above a rank's places")
	}
	one := GroupRank{ID: ID(1, 1), Open: 2, Context: 200, Capacity: 1000}
	two := GroupRank{ID: ID(1, 2), Slots: -1, Capacity: 1000}
	three := GroupRank{ID: ID(1, 3), Slots: -1, Capacity: 1000}
	assert.Equal(t, []GroupRank{one, two, three}, r.GroupRanks(1, nil))
	for _, id := range []RankID{one.ID, two.ID} {
		r.Observe(&Event{Kind: EvSilent, Rank: id, Silent: true})
	}
	three.Slots = 2
	assert.Equal(t, []GroupRank{one, two, three}, r.GroupRanks(1, nil))
	assert.Empty(t, r.GroupRanks(7, nil))
}

// groupBench is a queue of n requests before 16 ranks, with prompts that are cached on every other rank.
func groupBench(n int) (*GroupLine, []GroupRank, time.Duration) {
	line, now := NewGroupLine(NewGroupRule(0, 0)), time.Hour
	for i := range n {
		w := GroupWaiting{ID: uint64(i), Tokens: 1000 + 7919*i%16_000, Since: now}
		for rank := i % 2; rank < 16; rank += 2 {
			w.Hits = append(w.Hits, Hit{Rank: ID(0, rank), Tokens: int32(16 * rank)})
		}
		line.Add(w, now)
	}
	return line, groupOf(16), now
}

// LG3: a look at 16 ranks and 64 waiting requests with hits, that releases, and one that holds: 0
// allocations; the time is printed by the benchmark.
func TestGroupLineDoesNotAllocate(t *testing.T) {
	line, ranks, now := groupBench(64)
	var out GroupLook
	preview := func() { line.Preview(ranks, now, &out) }
	preview()
	require.NotEmpty(t, out.Releases)
	assert.InDelta(t, 0, testing.AllocsPerRun(100, preview), 0)
	line.Look(ranks, now, &out)
	look := func() { line.Look(ranks, now, &out) }
	assert.InDelta(t, 0, testing.AllocsPerRun(100, look), 0)
	assert.Equal(t, GroupPrefill, out.Held.Reason)
}

// LG3: BenchmarkGroupRule is a cohort of 16 ranks from 64 and 10,000 waiting requests.
func BenchmarkGroupRule(b *testing.B) {
	for _, n := range []int{64, 10_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			line, ranks, now := groupBench(n)
			var out GroupLook
			b.ReportAllocs()
			for b.Loop() {
				line.Preview(ranks, now, &out)
			}
		})
	}
}

// LG32: each round of a queue has one request of each client, in the order of arrival, and a request that had
// its turn goes before all of them.
func TestClientsTakeTurns(t *testing.T) {
	t.Parallel()
	line := NewGroupLine(NewGroupRule(0, 0))
	add := func(id, client uint64) {
		line.Add(GroupWaiting{ID: id, Tokens: 9000, Client: client, Since: time.Duration(id)}, time.Second)
	}
	ids := func() (out []uint64) {
		for _, w := range line.Waiting() {
			out = append(out, w.ID)
		}
		return out
	}
	for id := range uint64(4) {
		add(id, 1)
	}
	add(4, 2)
	add(5, 3)
	add(6, 2)
	assert.Equal(t, []uint64{0, 1, 4, 5, 2, 6, 3}, ids())
	add(7, 0)
	assert.Equal(t, []uint64{7, 0, 1, 4, 5, 2, 6, 3}, ids())
	for _, id := range []uint64{7, 0, 1, 4, 5} {
		assert.True(t, line.Remove(id))
	}
	add(8, 3)
	assert.Equal(t, []uint64{2, 6, 3, 8}, ids(), "client 3 has no other request")
	for _, id := range []uint64{2, 6, 3, 8} {
		assert.True(t, line.Remove(id))
	}
	assert.False(t, line.Remove(8))
	assert.Empty(t, line.clients)
}

// TestALineFollowsTheRouter: a released request whose end was missed ends when the Router does not count it
// any more, and one whose first token was missed is computed.
func TestALineFollowsTheRouter(t *testing.T) {
	t.Parallel()
	line, look := NewGroupLine(NewGroupRule(0, 0)), GroupLook{}
	ranks := []GroupRank{{ID: ID(0, 0), Slots: 9}, {ID: ID(0, 1), Slots: 9}}
	for id := range uint64(2) {
		line.Add(GroupWaiting{ID: id, Tokens: 9000}, time.Second)
	}
	line.Look(ranks, time.Second, &look)
	assert.Equal(t, 2, line.Released())
	state := func(_ RankID, id uint64) (isOpen, isComputed bool) { return id == 1, true }
	line.Reconcile(time.Second-1, state)
	assert.Equal(t, 2, line.Released(), "they were released later")
	line.Reconcile(time.Second, state)
	assert.Equal(t, 1, line.Released())
	line.Add(GroupWaiting{ID: 3, Tokens: 9000}, time.Second)
	line.Add(GroupWaiting{ID: 4, Tokens: 9000}, time.Second)
	line.Look(ranks, time.Second, &look)
	assert.Len(t, look.Releases, 2, "the queue is full, and no prompt is computed any more")
}
