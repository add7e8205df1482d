package routing

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

const (
	// modelPeriod is how often the cost model of an application is taken anew from what its ranks have shown,
	// at most.
	modelPeriod = time.Second
	// errorMemory is how many first tokens the cost model's error is the mean of, about.
	errorMemory = 64
	// leastSpan is the shortest time between two reports of a request's tokens that says something about
	// decoding, in ms.
	leastSpan = 50
	// leastSlow and mostSlow bound how much slower than the median of its application's ranks a rank counts.
	leastSlow, mostSlow = 0.25, 8
	// slowMemory is the time after the last sample at which half of a rank's slowness is forgotten: a slow
	// rank gets no requests, so it could never show that it has recovered.
	slowMemory = 30 * time.Second
	// leastSpread is by how much a rank must differ from the median to count as slower or faster: its mix of
	// prompts, and what it decodes beside them, is not its speed.
	leastSpread = 1.5
	// spreadDoubts is how many standard errors of its speed a rank must differ by.
	spreadDoubts = 3
)

// cost model is the cost model of an application's engines: a preset, and two measured factors on its times.
// Both factors are medians over the ranks with samples, so one slow rank does not change them.
type costModel struct {
	preset          string
	base            steptime.Coefficients
	prefill, decode float64 // 1 until measured
	missed          float64 // mean |observed/predicted - 1| of first tokens
	prompts, spans  uint64  // samples
	answers         speed   // of all ranks' decoding, by whole answers
	last            time.Duration
	taken           time.Duration // when it was taken anew
	stale           bool          // there are samples since
	scratch         []float64
}

// The presets of the cost model.
const (
	costDense = "dense"
	costMoE   = "moe"
)

func newCostModel(p Policy) costModel {
	l := costModel{preset: costDense, base: steptime.Reference(), prefill: 1, decode: 1}
	if mex, ok := p.(Mex); ok {
		l.base, l.preset = mex.model(), mex.preset()
	}
	return l
}

// addPromptSample records a first token that took observed ms where the cost model predicted predicted ms.
func (l *costModel) addPromptSample(observed, predicted float64, now time.Duration) {
	l.prompts++
	l.stale, l.last = true, now
	off := min(max(observed/predicted-1, 1-observed/predicted), mostSlow) // |observed/predicted - 1|
	l.missed += (off - l.missed) / float64(min(l.prompts, errorMemory))
}

func (l *costModel) addDecodeSample(now time.Duration) {
	l.spans++
	l.stale, l.last = true, now
}

// addAnswer records an answer whose tokens behind the first one took observed ms where the preset predicts
// predicted ms. Prompts of others may have stalled it, so answers say only how long decoding takes at most.
func (l *costModel) addAnswer(observed, predicted float64, now time.Duration) {
	l.stale = true
	l.answers.learn(observed, predicted, now)
}

// median is the median slowness of the ranks with samples; 1 without any.
func (l *costModel) median(accounts []account, of func(*account) *speed) float64 {
	l.scratch = l.scratch[:0]
	for i := range accounts {
		if s := of(&accounts[i]); s.predicted > 0 {
			l.scratch = append(l.scratch, s.slowness(1))
		}
	}
	if len(l.scratch) == 0 {
		return 1
	}
	return median(l.scratch)
}

// median sorts x, which is not empty. Of two it is the smaller one.
func median(x []float64) float64 {
	slices.Sort(x)
	return x[(len(x)-1)/2]
}

// slow is a rank's slowness relative to the median of all ranks, as far as it is certain (beside).
func (l *costModel) slow(s *speed, now time.Duration) (slow, spread float64) {
	slow, spread = s.beside(l.prefill, slowMemory, now)
	return min(max(slow, leastSlow), mostSlow), spread
}

// beside is the slowness relative to the usual one, and the factor by which it must differ from that. Within
// that factor it is 1. It decays towards 1 while there is no new sample: half of it in memory.
func (s *speed) beside(usual float64, memory, now time.Duration) (slow, spread float64) {
	spread = max(leastSpread, 1+spreadDoubts*s.doubt())
	slow = s.slowness(usual) / usual
	if slow < spread && slow*spread > 1 {
		return 1, spread
	}
	age := float64(max(0, now-s.last)) / float64(memory)
	return 1 + (slow-1)/(1+age*age), spread
}

// decodePace times the tokens of one request of a rank while the rank does nothing but decode: what a step
// takes without prefill.
type decodePace struct {
	key    uint64 // of the request; 0 = none
	out    int32  // its tokens at since
	since  time.Duration
	decode speed

	answer uint64        // the key of a request that is timed from its first token to its end; 0 = none
	first  time.Duration // when that token was
}

const (
	// clockMemory is how long the best sample of a rank's clock stands before a newer one takes its place:
	// clocks drift.
	clockMemory = 30 * time.Second
	// clockSlack is what two samples of one clock may contradict each other by, beside what they are unsure
	// by.
	clockSlack = 2 * time.Millisecond
	// oldestRecord is the age above which a record's time is not believed.
	oldestRecord = 10 * time.Second
	// lagMemory is how many records the lag of a rank's stream is the mean of, about.
	lagMemory = 8
)

// rankClock converts times of a rank's clock to the view's clock. The two clocks have unrelated origins, and
// either may jump. A request of this ingress is a sample: the rank admitted it after the dispatch and before
// the ticket arrived.
//
// Until there is a sample, and after a contradiction until the next one, records count as of their arrival.
type rankClock struct {
	ahead time.Duration // the rank's clock minus the view's
	doubt time.Duration // by how much ahead may be wrong
	taken time.Duration // when the sample was, on the view's clock
	known bool
}

// learn takes a sample: at, on the rank's clock, was between from and to.
func (c *rankClock) learn(at, from, to, now time.Duration) {
	doubt := max(0, to-from) / 2
	ahead := at - (from + doubt)
	apart := max(ahead-c.ahead, c.ahead-ahead)
	if !c.known || doubt <= c.doubt || now-c.taken > clockMemory || apart > doubt+c.doubt+clockSlack {
		*c = rankClock{ahead: ahead, doubt: doubt, taken: now, known: true}
	}
}

// place is the time of a record on the view's clock, at most now. Without a usable sample ok is false and
// when is now.
func (c *rankClock) place(at, now time.Duration) (when time.Duration, ok bool) {
	if at == 0 || !c.known {
		return now, false
	}
	when = at - c.ahead
	if when > now+c.doubt+clockSlack || when < now-oldestRecord { // one of the clocks has jumped
		c.known = false
		return now, false
	}
	return max(1, min(when, now)), true
}

const (
	// workMemory is the time constant with which prefill work that was sent to a rank is forgotten.
	workMemory   = 20 * time.Second
	workMemoryMS = float64(workMemory / time.Millisecond)
	// maxRho bounds the prefill utilisation ρ, and η = ρ/(1-ρ) to 9.
	maxRho = 0.9
	// trafficPeriod is after what time requests count half in the shares of the ingresses.
	trafficPeriod = 5 * time.Second
	// firstAnswer is how long answers are taken to be, in tokens, until there were some; it weighs as much as
	// firstAnswers of them.
	firstAnswer, firstAnswers = 300, 64
	// lastAnswers is how many answers the mean of their length goes back, about: half of it is younger than
	// 1,000 answers.
	lastAnswers = 1443
)

// prefillWork is the prefill work that was sent to a rank lately, as an exponential mean. A Router counts its
// own dispatches at once, and those of other ingresses when the rank's records name them.
type prefillWork struct {
	ms float64
	at time.Duration // View.Now of ms
}

func (w *prefillWork) add(ms float64, now time.Duration) { w.ms, w.at = w.left(now)+ms, now }

// left is what is not forgotten of it: about ms·e^(-age/workMemory).
func (w *prefillWork) left(now time.Duration) float64 {
	x := 1 / (1 + float64(max(0, now-w.at))/float64(8*workMemory))
	x *= x
	x *= x
	return w.ms * x * x
}

// share is the part of the rank's time that the work takes.
func (w *prefillWork) share(now time.Duration) float64 { return min(w.left(now)/workMemoryMS, maxRho) }

// traffic measures what all ingresses together send to an application's ranks, as far as one Router knows.
// Each request counts once.
type traffic struct {
	began       time.Duration // of the running period, View.Now
	own, others float64       // requests, of which those of earlier periods count half, a quarter, …
	answer      float64       // mean output tokens
	answers     float64       // that it is the mean of
}

func newTraffic(v *View) *traffic {
	return &traffic{began: v.Now, answer: firstAnswer, answers: firstAnswers}
}

// observe counts an event.
func (t *traffic) observe(v *View, e *Event) {
	switch {
	case e.Kind == EvDispatched:
		t.own++
	case e.Kind == EvAdmitted && e.Elsewhere:
		t.others++
	case e.Kind == EvFinished && e.Out > 0:
		t.answers = min(t.answers+1, lastAnswers)
		t.answer += (float64(e.Out) - t.answer) / t.answers
	}
	t.nextPeriod(v)
}

// nextPeriod begins the next period when the current one has ended.
func (t *traffic) nextPeriod(v *View) {
	if v.Now-t.began >= trafficPeriod {
		t.own, t.others, t.began = t.own/2, t.others/2, v.Now
	}
}

// delay is η: what a millisecond of prefill delays requests that are still to come, in ms.
func delay(rho float64) float64 {
	rho = min(rho, maxRho)
	return rho / (1 - rho)
}

// share is the part of all requests that this Router dispatches itself; 1 while none is known.
func (t *traffic) share() float64 {
	if t.others == 0 {
		return 1
	}
	return t.own / (t.own + t.others)
}
