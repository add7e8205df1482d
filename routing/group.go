package routing

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

const (
	// shortPrompt is up to how many uncached tokens a prompt does not wait for a cohort: it hardly makes a
	// step longer.
	shortPrompt = 256
	// levelWindow is how many of the oldest waiting requests decode levelling chooses from.
	levelWindow = 8
	// levelSkips is how many younger requests may pass one by decode levelling, groupSkips in all.
	levelSkips = 256
	groupSkips = 512
	// windowPerRank is the smallest window of cohorts, in requests per rank. With less a cohort finds too few
	// prompts that are alike, and the rule loses against no rule.
	windowPerRank = 4
	// prefillWindow is the window of a pool that only computes prompts.
	prefillWindow = 256
	// leastBudget is the prompt, in tokens, whose work a rank may get in one cohort however short the oldest
	// prompt is.
	leastBudget = 2048
	// cohortSlack is how much more than its share a rank may get. layerSlack is how much of a layer of
	// prompts may be missing for the layer to count.
	cohortSlack = 1.05
	layerSlack  = .05
	// workSteps is how finely a cohort levels the ranks' prompts. Ranks that differ by less are levelled by
	// their decodes.
	workSteps = 16
	// paceFrom is the share of the goal of time between tokens from which on prompts are held. They are held
	// for longer the nearer the pace comes to the goal.
	paceFrom = .85
	// queueCost is what decode levelling adds, in ms, for each older request that is passed.
	queueCost = .02
	// holdShare is the part of the goal of the first token for which prompts are held at most.
	holdShare = 4
)

// GroupRule decides which waiting requests enter a lockstep group, when, and on which ranks. The ranks of the
// group step together, so one rank's prompt makes the step of every rank long. The rule therefore releases
// prompts in cohorts: at one instant, the same work for every rank, so that they share steps. While the group
// decodes, prompts wait up to Hold until there is one for every rank. A full queue waits until the first
// tokens of the last cohort are out, and then up to Hold until every rank has a place. Requests with almost
// nothing to compute do not wait: they go where they level the decoding.
//
// It is pure: the same input gives the same releases. A GroupLine keeps its input.
type GroupRule struct {
	Model  steptime.Coefficients // of one rank
	Hold   time.Duration         // the longest wait for a cohort
	Pace   time.Duration         // the goal of time between tokens
	Window int                   // of the oldest requests that a cohort is taken from; at least 4 per rank
	// the prompts come computed (a decode pool): every request goes where it levels the decoding
	Decode bool
}

// NewGroupRule is the rule of a group that computes prompts and decodes, for goals of the first token and of
// the time between tokens. Goals of 0 are 2 s and 50 ms.
func NewGroupRule(ttft, tpot time.Duration) GroupRule {
	if ttft <= 0 {
		ttft = DefaultGoals().TTFT
	}
	if tpot <= 0 {
		tpot = DefaultGoals().TPOT
	}
	model, _ := steptime.DeepSeek(0)
	return GroupRule{Model: model, Hold: ttft / holdShare, Pace: tpot}
}

// OfPrefillPool is the rule for a pool that only computes prompts.
func (r GroupRule) OfPrefillPool() GroupRule {
	r.Window = prefillWindow
	return r
}

// OfDecodePool is the rule for a pool whose prompts come computed.
func (r GroupRule) OfDecodePool() GroupRule {
	r.Decode = true
	return r
}

// GroupRank is one rank of the group.
type GroupRank struct {
	ID       RankID
	Slots    int   // requests that it can still take; below 0: none, and not for lack of places
	Decodes  int   // requests
	Open     int   // requests
	Context  int64 // tokens of the open requests
	Capacity int64 // tokens; 0 = unknown
	// own prompts that were released to it and whose first token is not out, without short ones. A GroupLine
	// fills both
	Prompts int
	Work    float64 // ms: of these
}

// fits reports whether a prompt of tokens may go to the rank. One that no empty rank could hold may: the
// engine refuses it in its own words.
func (rk *GroupRank) fits(tokens int) bool {
	return rk.Slots > 0 &&
		(rk.Capacity <= 0 || rk.Context+int64(tokens) <= rk.Capacity || int64(tokens) > rk.Capacity)
}

// GroupWaiting is one request that waits for the group.
type GroupWaiting struct {
	ID     uint64
	Tokens int           // of its prompt
	Hits   []Hit         // as in Request
	Since  time.Duration // when it arrived
	Client uint64        // equal for the requests of one client
	Round  int           // set by the GroupLine, which has one request of a client in each round
	Skips  int           // younger requests that were released before it
}

// uncached is the number of prompt tokens that a rank would compute. at is where in Hits the rank's entry may
// be: ranks are asked for in ascending order.
func (w *GroupWaiting) uncached(id RankID, at *int) int {
	for *at < len(w.Hits) && w.Hits[*at].Rank < id {
		*at++
	}
	if *at < len(w.Hits) && w.Hits[*at].Rank == id {
		return w.Tokens - max(0, min(int(w.Hits[*at].Tokens), w.Tokens-1))
	}
	return w.Tokens
}

// GroupInput is what a GroupRule decides by.
type GroupInput struct {
	Ranks   []GroupRank    // that serve, ascending
	Waiting []GroupWaiting // oldest first
	Now     time.Duration
	Pace    time.Duration // mean time between the tokens of a request; 0 = not known
	Rate    float64       // arrivals per second
	Quiet   time.Duration // since when no released prompt is being computed
}

// GroupRelease is a request that enters the group.
type GroupRelease struct {
	ID    uint64
	Index int // in GroupInput.Waiting
	Rank  RankID
	Work  float64 // ms of prefill; 0 = none that other prompts wait for
	Skips int     // younger requests that were released before it
}

// GroupReason is why requests are held.
type GroupReason uint8

// The reasons.
const (
	GroupIdle    GroupReason = iota // no request waits, or some were released
	GroupGathers                    // the oldest waits for prompts to share its steps
	GroupPrefill                    // first tokens of the last cohort are not out
	GroupPlaces                     // not every rank has a place
	GroupNoRoom                     // no rank has a place and KV memory for the oldest
)

// GroupHeld says what the oldest waiting request waits for.
type GroupHeld struct {
	Reason GroupReason
	// GroupGathers: requests until each rank has one; GroupPrefill: prompts that are computed; GroupPlaces:
	// ranks without a place
	Count int
	For   time.Duration // GroupGathers, GroupPlaces: until it is released in any case
}

// String is the reason in words.
func (h GroupHeld) String() string {
	switch h.Reason {
	case GroupGathers:
		return fmt.Sprintf("waits for %d more or %d ms", h.Count, h.For.Milliseconds())
	case GroupPrefill:
		return fmt.Sprintf("waits for the first tokens of %d", h.Count)
	case GroupPlaces:
		return fmt.Sprintf("waits for a place on %d more or %d ms", h.Count, h.For.Milliseconds())
	case GroupNoRoom:
		return "waits for a place and KV memory on a rank"
	case GroupIdle:
	}
	return ""
}

// GroupLook is the answer of a GroupRule. The caller owns and reuses it.
type GroupLook struct {
	Releases []GroupRelease
	Held     GroupHeld     // if nothing is released
	AskAt    time.Duration // the rule must be asked again then; 0 = an event will change the answer

	rows  []groupRow
	cands []groupCandidate
	works []float64 // by candidate and rank: ms of prefill
	skips []int     // by waiting request of the window
}

// groupRow is a rank while the rule decides.
type groupRow struct {
	GroupRank
	cost float64 // ms of a step: its decodes
}

// groupCandidate is a waiting request while the rule decides.
type groupCandidate struct {
	index int
	skips int
	works int     // where its row of works begins
	least float64 // ms: its prefill on the rank that computes least of it
	apart float64 // how different its work is from the oldest's, as a factor
}

// Next decides. A caller that was given releases applies them and asks again.
func (r *GroupRule) Next(in *GroupInput, out *GroupLook) {
	*out = GroupLook{
		Releases: out.Releases[:0], rows: out.rows[:0], cands: out.cands[:0], works: out.works[:0],
		skips: out.skips[:0],
	}
	if len(in.Waiting) == 0 || len(in.Ranks) == 0 {
		return
	}
	for i := range in.Ranks {
		rk := &in.Ranks[i]
		out.rows = append(out.rows, groupRow{*rk, r.decodeCost(rk.Open, rk.Context)})
	}
	isShort := r.isShort(&in.Waiting[0], out.rows)
	if r.mayLevel(in, isShort) {
		r.level(in, out)
	}
	if len(out.Releases) > 0 {
		return
	}
	if r.Decode || isShort {
		out.Held = GroupHeld{Reason: GroupNoRoom}
		return
	}
	r.cohort(in, out)
}

func (r *GroupRule) decodeCost(requests int, context int64) float64 {
	return r.Model.DecodeMS*float64(requests) + r.Model.ContextMS*float64(context)
}

// DecodeBalance is the mean time that the ranks' decodes take in a step, over that of the slowest rank; 1 is
// even, and so is idle.
func (r *GroupRule) DecodeBalance(ranks []GroupRank) float64 {
	most, sum := 0.0, 0.0
	for i := range ranks {
		cost := r.decodeCost(ranks[i].Open, ranks[i].Context)
		most, sum = max(most, cost), sum+cost
	}
	if most == 0 {
		return 1
	}
	return sum / (most * float64(len(ranks)))
}

// isShort reports whether a rank that can take w would compute hardly anything.
func (r *GroupRule) isShort(w *GroupWaiting, rows []groupRow) bool {
	at := 0
	for i := range rows {
		if rows[i].fits(w.Tokens) && (r.Decode || w.uncached(rows[i].ID, &at) <= shortPrompt) {
			return true
		}
	}
	return false
}

// mayLevel reports whether short requests may go now. Where the queue is full they do not pass a prompt: they
// would take the places that it waits for.
func (r *GroupRule) mayLevel(in *GroupInput, oldestIsShort bool) bool {
	return r.Decode || oldestIsShort || len(in.Waiting) < len(in.Ranks)
}

// level releases short requests. Of the oldest ones and all ranks it takes the pair that adds least to the
// imbalance of the decoding, which is ranks·(most decode time) less the sum:
//
//	(ranks-1)·over - fill + queueCost·(older requests that are passed)
//
// over is by how much the request makes the slowest rank slower, fill the rest of its own decode time.
func (r *GroupRule) level(in *GroupInput, out *GroupLook) {
	most, next := 0.0, 0
	for i := range out.rows {
		most = max(most, out.rows[i].cost)
	}
	for {
		for ; next < len(in.Waiting) && len(out.cands) < levelWindow; next++ {
			out.cands = append(out.cands, groupCandidate{index: next, skips: in.Waiting[next].Skips})
		}
		best, rank, bestF, bestCost := -1, 0, math.Inf(1), math.Inf(1)
		for k := range out.cands {
			w, at := &in.Waiting[out.cands[k].index], 0
			own := r.decodeCost(1, int64(w.Tokens))
			for i := range out.rows {
				row := &out.rows[i]
				if !row.fits(w.Tokens) || !r.Decode && w.uncached(row.ID, &at) > shortPrompt {
					continue
				}
				over := max(0, row.cost+own-most)
				f := float64(len(out.rows)-1)*over - (own - over) + queueCost*float64(k)
				if f < bestF || f == bestF && row.cost+own < bestCost {
					best, rank, bestF, bestCost = k, i, f, row.cost+own
				}
			}
			if out.cands[k].skips >= levelSkips {
				break // no younger request passes it
			}
		}
		if best < 0 {
			return
		}
		for k := range out.cands[:best] {
			out.cands[k].skips++
		}
		out.release(in, out.cands[best].index, rank, 0)
		most = max(most, bestCost)
		out.rows[rank].cost = bestCost
		out.cands = slices.Delete(out.cands, best, best+1)
	}
}

// release gives a waiting request to a rank.
func (l *GroupLook) release(in *GroupInput, index, rank int, work float64) {
	row, w := &l.rows[rank], &in.Waiting[index]
	row.Slots--
	row.Open++
	row.Context += int64(w.Tokens)
	l.Releases = append(l.Releases, GroupRelease{
		ID: w.ID, Index: index, Rank: row.ID, Work: work, Skips: w.Skips,
	})
}

// cohort releases prompts if the time has come.
func (r *GroupRule) cohort(in *GroupInput, out *GroupLook) {
	decodes, prompts, taken := 0, 0, 0
	for i := range out.rows {
		row := &out.rows[i]
		decodes, prompts = decodes+row.Decodes, prompts+row.Prompts
		if row.Slots == 0 {
			taken++
		}
	}
	missing, isFull := len(out.rows)-len(in.Waiting), len(in.Waiting) >= len(out.rows)
	switch {
	case isFull && prompts > 0:
		out.Held = GroupHeld{Reason: GroupPrefill, Count: prompts}
	case isFull && decodes > 0 && taken > 0:
		out.hold(in.Now, in.Quiet+r.Hold, GroupHeld{Reason: GroupPlaces, Count: taken})
	case !isFull && (decodes > 0 || prompts > 0):
		out.hold(in.Now, in.Waiting[0].Since+r.hold(in), GroupHeld{Reason: GroupGathers, Count: missing})
	}
	if out.Held.Reason != GroupIdle {
		return
	}
	r.gather(in, out)
	if len(out.cands) == 0 {
		out.Held = GroupHeld{Reason: GroupNoRoom}
		return
	}
	budget := r.budget(out)
	room := budget // that the emptiest rank has left
	for k := range out.cands {
		c := &out.cands[k]
		if c.least > room || !out.mayPass(c.index) {
			continue
		}
		if out.place(in, r, c, budget) {
			room = out.roomIn(budget)
		} else if k == 0 { // nothing passes the oldest
			out.Held = GroupHeld{Reason: GroupPrefill, Count: prompts}
			return
		}
	}
}

// hold holds the requests until an instant, unless it has come.
func (l *GroupLook) hold(now, until time.Duration, held GroupHeld) {
	if now < until {
		held.For = until - now
		l.Held, l.AskAt = held, until
	}
}

// hold is how long the oldest prompt may wait for a cohort: not at all while the group is well below its goal
// or if no other prompt is to be expected.
func (r *GroupRule) hold(in *GroupInput) time.Duration {
	if r.Pace <= 0 || in.Rate*r.Hold.Seconds() < 1 {
		return 0
	}
	near := (float64(in.Pace)/float64(r.Pace) - paceFrom) / (1 - paceFrom)
	return time.Duration(float64(r.Hold) * max(0, min(near, 1)))
}

// gather lists the candidates of a cohort: the oldest first, then those of its window by how much their work
// differs from its own. The list is empty if the oldest has no room.
func (r *GroupRule) gather(in *GroupInput, out *GroupLook) {
	out.cands = out.cands[:0] // level had others
	window := max(r.Window, windowPerRank*len(out.rows))
	for i := range min(window, len(in.Waiting)) {
		w := &in.Waiting[i]
		out.skips = append(out.skips, w.Skips)
		c := groupCandidate{index: i, works: len(out.works), least: math.Inf(1)}
		at, tokens, work := 0, -1, 0.0
		for k := range out.rows {
			if u := w.uncached(out.rows[k].ID, &at); u != tokens {
				tokens, work = u, r.Model.Prefill(u, w.Tokens-u)
			}
			out.works = append(out.works, work)
			if work < c.least && out.rows[k].fits(w.Tokens) {
				c.least = work
			}
		}
		if !math.IsInf(c.least, 1) {
			out.cands = append(out.cands, c)
		} else if i == 0 {
			return
		}
	}
	oldest := max(out.cands[0].least, math.SmallestNonzeroFloat64)
	for k := range out.cands {
		c := &out.cands[k]
		c.apart = max(c.least/oldest, oldest/max(c.least, math.SmallestNonzeroFloat64))
	}
	slices.SortFunc(out.cands[1:], func(a, b groupCandidate) int {
		if a.apart != b.apart {
			return cmp.Compare(a.apart, b.apart)
		}
		return a.index - b.index
	})
}

// budget is how many ms of prompts a rank may have after this cohort: as many whole layers as the candidates
// fill, where a layer is one prompt like the oldest on every rank.
func (r *GroupRule) budget(out *GroupLook) float64 {
	oldest, sum := out.cands[0].least, 0.0
	for k := range out.cands {
		sum += min(out.cands[k].least, oldest)
	}
	layers := math.Floor(sum/(float64(len(out.rows))*max(oldest, math.SmallestNonzeroFloat64)) + layerSlack)
	budget := min(max(cohortSlack*oldest, r.Model.Prefill(leastBudget, 0)), cohortSlack*max(1, layers)*oldest)
	return max(budget, math.SmallestNonzeroFloat64)
}

// roomIn is the most work that a rank may still get of a budget.
func (l *GroupLook) roomIn(budget float64) float64 {
	room := -1.0
	for i := range l.rows {
		if row := &l.rows[i]; row.Slots > 0 {
			room = max(room, budget-row.Work)
		}
	}
	return room
}

// mayPass reports whether a request may go before all older ones that wait.
func (l *GroupLook) mayPass(index int) bool {
	for _, skips := range l.skips[:index] {
		if skips >= groupSkips {
			return false
		}
	}
	return true
}

// pass counts that a request goes before all older ones that wait.
func (l *GroupLook) pass(index int) {
	for i := range l.skips[:index] {
		l.skips[i]++
	}
	l.skips[index] = math.MinInt // it waits no longer
}

// place releases a candidate to the rank that has least prompts after it, if one has room within the budget.
func (l *GroupLook) place(in *GroupInput, r *GroupRule, c *groupCandidate, budget float64) bool {
	w, best, bestStep := &in.Waiting[c.index], -1, math.MaxInt
	for i := range l.rows {
		row := &l.rows[i]
		work := row.Work + l.works[c.works+i]
		if work > budget || !row.fits(w.Tokens) {
			continue
		}
		step := int(workSteps * work / budget)
		if step < bestStep || step == bestStep && row.cost < l.rows[best].cost {
			best, bestStep = i, step
		}
	}
	if best < 0 {
		return false
	}
	row, work := &l.rows[best], l.works[c.works+best]
	row.Work += work
	row.cost += r.decodeCost(1, int64(w.Tokens))
	l.pass(c.index)
	l.release(in, c.index, best, work)
	return true
}
