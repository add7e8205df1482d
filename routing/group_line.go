package routing

import (
	"cmp"
	"math"
	"slices"
	"time"
)

const (
	// paceMemory and rateMemory are how far the pace and the rate of a GroupLine go back.
	paceMemory = 2 * time.Second
	rateMemory = 10 * time.Second
)

// GroupLine is the queue of one lockstep group with all that its GroupRule decides by: the waiting requests,
// the prompts that are computed, how fast the group decodes and how fast requests arrive. It has no lock and
// no clock.
//
// For every release its owner must say FirstToken and End, and End alone if there is no first token: a
// full queue waits for the first tokens of the last cohort.
type GroupLine struct {
	rule    GroupRule
	waiting []GroupWaiting // by rounds, in a round oldest first
	round   int            // the highest one that the first waiting request was in
	clients map[uint64]groupTurn
	open    map[uint64]groupOpen
	ranks   []groupPrompts // by rank number

	prompts int           // of all ranks
	quiet   time.Duration // since when there are none

	spent, tokens fading // of all requests: time, in ms, and tokens that came in it
	arrived       fading // requests

	in   GroupInput
	step GroupLook
}

// groupOpen is a request that was released and has not ended.
type groupOpen struct {
	rank RankID
	work float64 // ms; 0 = none that other prompts wait for
	out  int     // its tokens at
	at   time.Duration
}

// groupTurn is a client that has waiting requests.
type groupTurn struct {
	n    int
	last int // the highest round of them
}

// groupPrompts are the released prompts of a rank without first tokens.
type groupPrompts struct {
	n    int
	work float64 // ms
}

// fading is a sum whose summands lose weight as they grow old.
type fading struct {
	sum float64
	at  time.Duration
}

func (f *fading) value(now, memory time.Duration) float64 {
	return f.sum * math.Exp(-float64(max(0, now-f.at))/float64(memory))
}

func (f *fading) add(v float64, now, memory time.Duration) {
	f.sum, f.at = f.value(now, memory)+v, max(f.at, now)
}

// NewGroupLine is an empty queue.
func NewGroupLine(rule GroupRule) *GroupLine {
	return &GroupLine{rule: rule, open: make(map[uint64]groupOpen), clients: make(map[uint64]groupTurn)}
}

// SetRule replaces the rule.
func (l *GroupLine) SetRule(rule GroupRule) { l.rule = rule }

// Add puts a request into the queue: into the round after that of the first request, or the round after the
// last one of its own client, and there behind those that arrived before it. One that waited elsewhere so
// keeps its place in time. A request without a client goes before all rounds.
func (l *GroupLine) Add(w GroupWaiting, now time.Duration) {
	w.Round = 0
	if w.Client != 0 {
		if len(l.waiting) > 0 {
			l.round = max(l.round, l.waiting[0].Round)
		}
		c := l.clients[w.Client]
		w.Round = max(l.round, c.last) + 1
		l.clients[w.Client] = groupTurn{n: c.n + 1, last: w.Round}
	}
	i := len(l.waiting)
	for i > 0 && cmp.Or(cmp.Compare(l.waiting[i-1].Round, w.Round),
		cmp.Compare(l.waiting[i-1].Since, w.Since)) > 0 {
		i--
	}
	l.waiting = slices.Insert(l.waiting, i, w)
	l.arrived.add(1, now, rateMemory)
}

// Waiting are the requests of the queue, in its order. The owner may update their Hits. The list is valid
// until the next call.
func (l *GroupLine) Waiting() []GroupWaiting { return l.waiting }

// Remove takes a request out that waits no longer, and reports whether it was there.
func (l *GroupLine) Remove(id uint64) bool {
	i := slices.IndexFunc(l.waiting, func(w GroupWaiting) bool { return w.ID == id })
	if i < 0 {
		return false
	}
	l.leave(l.waiting[i].Client)
	l.waiting = slices.Delete(l.waiting, i, i+1)
	return true
}

// leave says that a request of a client waits no longer.
func (l *GroupLine) leave(client uint64) {
	if c := l.clients[client]; c.n > 1 {
		l.clients[client] = groupTurn{n: c.n - 1, last: c.last}
	} else {
		delete(l.clients, client)
	}
}

// FirstToken says that the first token of a released request is out.
func (l *GroupLine) FirstToken(id uint64, now time.Duration) { l.Progress(id, 1, now) }

// Progress says that a released request has out tokens.
func (l *GroupLine) Progress(id uint64, out int, now time.Duration) {
	o, ok := l.open[id]
	if !ok || out <= o.out {
		return
	}
	if o.out > 0 && now > o.at {
		l.spent.add(float64(now-o.at)/float64(time.Millisecond), now, paceMemory)
		l.tokens.add(float64(out-o.out), now, paceMemory)
	}
	l.computed(&o, now)
	o.out, o.at = out, now
	l.open[id] = o
}

// End says that a released request is over, whatever the outcome, after out tokens (0 = not known).
func (l *GroupLine) End(id uint64, out int, now time.Duration) {
	l.Progress(id, out, now)
	if o, ok := l.open[id]; ok {
		l.computed(&o, now)
		delete(l.open, id)
	}
}

// computed takes a prompt off its rank.
func (l *GroupLine) computed(o *groupOpen, now time.Duration) {
	if o.work == 0 {
		return
	}
	p := &l.ranks[o.rank.Rank()]
	if p.n--; p.n == 0 {
		p.work = 0 // no rounding is left
	} else {
		p.work -= o.work
	}
	o.work = 0
	if l.prompts--; l.prompts == 0 {
		l.quiet = now
	}
}

// Reconcile corrects what is known of the requests that were released before a time, and not heard of since.
// state says whether a request is open on a rank, and whether its prompt is computed.
func (l *GroupLine) Reconcile(before time.Duration, state func(RankID, uint64) (isOpen, isComputed bool)) {
	for id, o := range l.open {
		if o.at > before {
			continue
		}
		switch isOpen, isComputed := state(o.rank, id); {
		case !isOpen:
			l.End(id, 0, before)
		case isComputed && o.out == 0:
			l.FirstToken(id, before)
		}
	}
}

// Released is the number of requests that were released and have not ended.
func (l *GroupLine) Released() int { return len(l.open) }

// Restart forgets what was released: the group's ranks are new ones. What waits, waits.
func (l *GroupLine) Restart() {
	clear(l.open)
	clear(l.ranks)
	l.prompts = 0
}

// Pace is the mean time between the tokens of a request in the last seconds; 0 = not known.
func (l *GroupLine) Pace(now time.Duration) time.Duration {
	tokens := l.tokens.value(now, paceMemory)
	if tokens < 1 {
		return 0
	}
	return time.Duration(l.spent.value(now, paceMemory) / tokens * float64(time.Millisecond))
}

// Rate is how many requests arrive per second.
func (l *GroupLine) Rate(now time.Duration) float64 {
	return l.arrived.value(now, rateMemory) / rateMemory.Seconds()
}

// Look releases what may enter the group now, on ranks that are as Router.GroupRanks has them. It takes the
// releases out of the queue; their Index means nothing then.
func (l *GroupLine) Look(ranks []GroupRank, now time.Duration, out *GroupLook) {
	out.Releases = out.Releases[:0]
	l.fill(ranks, now)
	for {
		l.rule.Next(&l.in, &l.step)
		if len(l.step.Releases) == 0 {
			out.Held, out.AskAt = l.step.Held, l.step.AskAt
			return
		}
		out.Releases = append(out.Releases, l.step.Releases...)
		l.apply(now)
	}
}

// Preview is what one step of Look would release at an instant to come, if nothing happened until then; the
// queue stays as it is. more are requests that would wait behind it. Index is the place in Waiting.
func (l *GroupLine) Preview(ranks []GroupRank, at time.Duration, out *GroupLook, more ...GroupWaiting) {
	l.fill(ranks, at)
	l.in.Waiting = append(slices.Clip(l.waiting), more...)
	l.rule.Next(&l.in, out)
}

// fill gathers what the rule decides by.
func (l *GroupLine) fill(ranks []GroupRank, now time.Duration) {
	l.in = GroupInput{
		Ranks: append(l.in.Ranks[:0], ranks...), Waiting: l.waiting, Now: now, Pace: l.Pace(now),
		Rate: l.Rate(now), Quiet: l.quiet,
	}
	for i := range l.in.Ranks {
		rk := &l.in.Ranks[i]
		for len(l.ranks) <= rk.ID.Rank() {
			l.ranks = append(l.ranks, groupPrompts{})
		}
		rk.Prompts, rk.Work = l.ranks[rk.ID.Rank()].n, l.ranks[rk.ID.Rank()].work
	}
}

// apply counts the releases of a step and takes them out of the queue.
func (l *GroupLine) apply(now time.Duration) {
	last := 0
	for i := range l.step.Releases {
		rel := &l.step.Releases[i]
		w := &l.waiting[rel.Index]
		p := &l.ranks[rel.Rank.Rank()]
		if rel.Work > 0 {
			p.n, p.work = p.n+1, p.work+rel.Work
			l.prompts++
		}
		for k := range l.in.Ranks {
			if rk := &l.in.Ranks[k]; rk.ID == rel.Rank {
				rk.Slots, rk.Open, rk.Context = rk.Slots-1, rk.Open+1, rk.Context+int64(w.Tokens)
				rk.Prompts, rk.Work = p.n, p.work
			}
		}
		l.open[rel.ID] = groupOpen{rank: rel.Rank, work: rel.Work, at: now}
		l.leave(w.Client)
		w.Tokens, last = -1, max(last, rel.Index) // released
	}
	keep, released := last+1, len(l.step.Releases)
	for i, passed := last, 0; i >= 0; i-- { // the requests that stay move up to the younger ones
		if w := l.waiting[i]; w.Tokens < 0 {
			passed++
		} else {
			keep--
			w.Skips += passed
			l.waiting[keep] = w
		}
	}
	clear(l.waiting[:released])
	l.waiting = l.waiting[released:]
	l.in.Waiting = l.waiting
}
