package routing

import (
	"math"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

const (
	// stepTokens is how many tokens a step of an engine that prefills is taken to have: vLLM's
	// max_num_batched_tokens.
	stepTokens = 8192
	// speedMemory is what every older prompt weighs beside the next newer one in a rank's measured speed: the
	// last ten prompts are two thirds of it.
	speedMemory = 0.9
	// leastSample is the shortest predicted prefill, in ms, that says something about a rank's speed: the
	// first token of a shorter one waits mostly for the end of a step.
	leastSample = 50
	// maxSlowness bounds a rank's measured speed to both sides of the cost model's.
	maxSlowness = 64
)

// prefills is a rank's queue of prompts to compute, in the order of their arrival at the rank, and the
// computed part of the first one.
//
// An engine computes prompts first come first served and reports only the end of each. In between the Router
// reckons: the computed share of the first prompt follows from the cost model, the time since its turn came
// and the rank's measured speed. The prompts behind it count whole until the rank reports the first one's
// end, except for the work that fits into the records' delay (Lag). So a wrong cost model is wrong by one
// prompt and that delay, and never empties a queue.
type prefills struct {
	slots       []queuedPrompt
	first, last int32         // numbers of slots, from 1 on; 0 = none
	spare       int32         // the first free slot, linked by next
	lastEnd     time.Duration // when the last first prompt ended
	speed       speed

	front         front // what a pick needs to know of the first prompt
	tokens, pairs int64 // of the first prompt: what is taken off the row as computed
}

// front is the first prompt as every pick reads it for every rank: its share of u tokens and of the pairs is
// computed.
type front struct {
	rate  float64       // share per nanosecond; 0 = nothing here is known
	began time.Duration // when its turn came
	u     int64         // tokens to compute in all
	pairs int64         // their attention, × 2
	twice int64         // 2 × the prompt's tokens; 0 = beyond what pairs can be reckoned of
}

// queuedPrompt is one of them.
type queuedPrompt struct {
	since       time.Duration // when the rank had it
	tokens, hit int32
	prev, next  int32 // numbers of slots
}

// front is the prompt's front but for its times.
func (q *queuedPrompt) front() front {
	f := front{u: int64(q.tokens - q.hit), twice: 2 * int64(q.tokens)}
	f.pairs = attention(f.u, int64(q.hit))
	if q.tokens > longestPrompt {
		f.twice = 0
	}
	return f
}

func (p *prefills) at(slot int32) *queuedPrompt { return &p.slots[slot-1] }

// join appends a prompt to the queue.
func (p *prefills) join(tokens, hit int32, now time.Duration) (slot int32) {
	if slot = p.spare; slot != 0 {
		p.spare = p.at(slot).next
	} else {
		p.slots = append(p.slots, queuedPrompt{})
		slot = int32(len(p.slots))
	}
	*p.at(slot) = queuedPrompt{since: now, tokens: tokens, hit: hit, prev: p.last}
	if p.last == 0 {
		p.first = slot
	} else {
		p.at(p.last).next = slot
	}
	p.last = slot
	return slot
}

// leave removes a prompt. If it was the first, the next prompt's turn begins.
func (p *prefills) leave(slot int32, now time.Duration) {
	f := p.at(slot)
	if slot == p.first {
		p.first, p.lastEnd = f.next, now
	} else {
		p.at(f.prev).next = f.next
	}
	if slot == p.last {
		p.last = f.prev
	} else {
		p.at(f.next).prev = f.prev
	}
	f.next, p.spare = p.spare, slot
}

// renew replaces a prompt's token counts and arrival; its place in the queue stays.
func (p *prefills) renew(slot, tokens, hit int32, now time.Duration) {
	f := p.at(slot)
	f.since, f.tokens, f.hit = now, tokens, hit
}

// clear forgets all prompts, and the rank's speed unless it is the same incarnation.
func (p *prefills) clear(same bool) {
	old := *p
	*p = prefills{slots: old.slots[:0]}
	if same {
		p.speed = old.speed
	}
}

// begun is the time at which the rank began to compute the first prompt.
func (p *prefills) begun() time.Duration { return max(p.lastEnd, p.at(p.first).since) }

// predict is how long the preset of the cost model gives the first prompt, in ms, beside what the rank
// decodes.
func (p *prefills) predict(rk *Rank, model *steptime.Coefficients) float64 {
	f := p.at(p.first)
	n, context := rk.decodes()
	return model.Prefill(int(f.tokens-f.hit), int(f.hit)) * model.Stretch(n, context, stepTokens)
}

// setFront computes front from the first prompt.
func (p *prefills) setFront(rk *Rank, model *costModel) {
	f := p.at(p.first)
	p.front = f.front()
	p.front.began = p.begun()
	takes := p.predict(rk, &model.base) * p.speed.slowness(model.prefill)
	p.front.rate = 1 / (takes * float64(time.Millisecond))
}

// reckon sets the row's Q, Pairs and Computed to their values at now. The queue must not be empty.
func (p *prefills) reckon(rk *Rank, model *costModel, now time.Duration) {
	if p.front.rate == 0 {
		p.setFront(rk, model)
	}
	f, tokens, pairs := &p.front, int64(0), int64(0)
	rk.Computed = Prompts{}
	switch share := float64(now-f.began) * f.rate; {
	case share >= 1:
		tokens, pairs = f.u, f.pairs
		rk.Computed = Prompts{N: 1, Tokens: int64(p.at(p.first).tokens)}
		if rk.Lag > 0 && p.first != p.last {
			left := min(now-f.began-time.Duration(1/f.rate), rk.Lag)
			tokens, pairs = p.computedUnreported(rk, model, left, tokens, pairs)
		}
	case share > 0: // neither negative nor no number
		tokens, pairs = f.computed(share)
	}
	rk.Load.Q += p.tokens - tokens
	rk.Pairs += p.pairs - pairs
	p.tokens, p.pairs = tokens, pairs
}

// computed is the share of a prompt that is computed.
func (f *front) computed(share float64) (tokens, pairs int64) {
	tokens = int64(float64(f.u) * share)
	if left := f.u - tokens; f.twice > 0 {
		// what is left attends to all before it: left² + 2·left·(tokens-left)
		pairs = f.pairs - left*(f.twice-left)
	}
	return tokens, pairs
}

// mostUnreported is the most prompts that computedUnreported looks at.
const mostUnreported = 16

// computedUnreported adds the work behind the first prompt that the rank can have computed during left: the
// first prompt has ended by the cost model, and the record of its end is still on its way.
func (p *prefills) computedUnreported(rk *Rank, model *costModel, left time.Duration,
	tokens, pairs int64,
) (int64, int64) {
	n, context := rk.decodes()
	slowness := p.speed.slowness(model.prefill) * model.base.Stretch(n, context,
		stepTokens) * float64(time.Millisecond)
	slot := p.at(p.first).next
	for n := 0; n < mostUnreported && slot != 0 && left > 0; n++ {
		q := p.at(slot)
		f := q.front()
		takes := time.Duration(model.base.Prefill(int(f.u), int(q.hit)) * slowness)
		if takes > left {
			t, x := f.computed(float64(left) / float64(takes))
			return tokens + t, pairs + x
		}
		rk.Computed.N++
		rk.Computed.Tokens += int64(q.tokens)
		tokens, pairs, left, slot = tokens+f.u, pairs+f.pairs, left-takes, q.next
	}
	return tokens, pairs
}

// restore adds the work that reckon subtracted to the row again.
func (p *prefills) restore(rk *Rank) {
	rk.Load.Q += p.tokens
	rk.Pairs += p.pairs
	p.tokens, p.pairs = 0, 0
	rk.Computed = Prompts{}
}

// measure learns the rank's speed from the first token of the prompt in slot, if that is the first of the
// queue: for others the time at which their turn came is unknown.
func (p *prefills) measure(slot int32, rk *Rank, now time.Duration, model *costModel) {
	if slot == 0 || slot != p.first {
		return
	}
	if predicted := p.predict(rk, &model.base); predicted >= leastSample {
		observed := float64(now-p.begun()) / float64(time.Millisecond)
		model.addPromptSample(max(0, observed), predicted*p.speed.slowness(model.prefill), now)
		p.speed.learn(observed, predicted, now)
	}
}

// speed compares a rank's measured prefill times with the cost model's, in ms. Both are sums in which older
// prompts decay: prompts that end in one step are right in their sum only.
type speed struct {
	observed, predicted float64
	squares             float64       // of what the speed before predicted wrongly, ms²
	last                time.Duration // when it was shown
}

func (s *speed) learn(observed, predicted float64, now time.Duration) {
	s.last = now
	if s.predicted == 0 {
		s.observed, s.predicted = leastSample, leastSample
	}
	off := max(0, observed) - predicted*s.observed/s.predicted
	s.squares = s.squares*speedMemory*speedMemory + off*off
	s.observed = s.observed*speedMemory + max(0, observed)
	s.predicted = s.predicted*speedMemory + predicted
}

// slowness is 1 at the preset's speed, and usual until the rank has shown its own.
func (s *speed) slowness(usual float64) float64 {
	if s.predicted == 0 {
		return usual
	}
	return min(max(s.observed/s.predicted, 1.0/maxSlowness), maxSlowness)
}

// doubt is the standard error of the slowness, as a share of it.
func (s *speed) doubt() float64 {
	if s.observed <= 0 {
		return 0
	}
	return math.Sqrt(s.squares) / s.observed
}

// readsWork reports whether a policy may read the prefill work of ranks. For the policies listed here the
// Router does not reckon, so their picks do not cost more with every rank. A test checks the list.
func readsWork(p Policy) bool {
	switch p.(type) {
	case RoundRobin, Random, Direct, PowerOfTwo, LeastLoaded, LeastKV, Scoring, CacheAware, PrefixAware,
		SessionAffinity:
		return false
	}
	return true
}
