package routing

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/steptime"
)

const (
	// lawPeriod is how often the law of an application is taken anew from what its ranks have shown, at most.
	lawPeriod = time.Second
	// errorMemory is how many first tokens the law's error is the mean of, about.
	errorMemory = 64
	// leastSpan is the shortest time between two reports of a request's tokens that says something about
	// decoding, in ms.
	leastSpan = 50
	// leastSlow and mostSlow bound how much slower than the median of its application's ranks a rank counts.
	leastSlow, mostSlow = 0.25, 8
	// slowMemory is the time after the last sample at which half of a rank's slowness is forgotten: nobody
	// asks a slow rank, so it could never show that it is well again.
	slowMemory = 30 * time.Second
)

// law is the step law of an application's engines: a preset, and how long the engines take beside it. Both
// factors are medians over the ranks that have shown one, so one slow rank does not change them.
type law struct {
	preset          string
	base            steptime.Coefficients
	prefill, decode float64 // 1 until measured
	missed          float64 // mean |observed/predicted - 1| of first tokens
	prompts, spans  uint64  // samples
	last            time.Duration
	taken           time.Duration // when it was taken anew
	stale           bool          // there are samples since
	scratch         []float64
}

// The presets of the law.
const (
	lawDense = "dense"
	lawMoE   = "moe"
)

// lawful is a policy that predicts how long an engine takes.
type lawful interface {
	law() steptime.Coefficients
	preset() string
}

func newLaw(p Policy) law {
	l := law{preset: lawDense, base: steptime.Reference(), prefill: 1, decode: 1}
	if p, ok := p.(lawful); ok {
		l.base, l.preset = p.law(), p.preset()
	}
	return l
}

// LawInfo is what an application's Router knows of its engines' steps.
type LawInfo struct {
	Preset          string        // dense or moe
	Prefill, Decode float64       // measured factor on the preset's milliseconds; 1 = as the preset says
	PrefillSamples  uint64        // prompts whose first token was timed
	DecodeSamples   uint64        // spans in which a rank did nothing but decode
	Age             time.Duration // since the last sample; meaningless without one
	Error           float64       // mean |observed/predicted - 1| of the last first tokens that were timed
}

// Law says what the Router knows of its engines' steps; ok is false if the policy predicts nothing.
func (r *Router) Law() (info LawInfo, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := &r.law
	return LawInfo{
		Preset: l.preset, Prefill: l.prefill, Decode: l.decode, PrefillSamples: l.prompts,
			DecodeSamples: l.spans, Age: r.view.Now - l.last, Error: l.missed,
	}, r.reckons
}

// tookPrompt notes a first token that took observed ms where predicted ms were expected.
func (l *law) tookPrompt(observed, predicted float64, now time.Duration) {
	l.prompts++
	l.stale, l.last = true, now
	off := min(max(observed/predicted-1, 1-observed/predicted), mostSlow) // |observed/predicted - 1|
	l.missed += (off - l.missed) / float64(min(l.prompts, errorMemory))
}

func (l *law) tookSpan(now time.Duration) {
	l.spans++
	l.stale, l.last = true, now
}

// relearn takes the law anew from what the ranks have shown. It is called after events, never at a decision:
// a decision that is only explained must not change the next one.
func (r *Router) relearn() {
	l, now := &r.law, r.view.Now
	if !l.stale || l.taken != 0 && now-l.taken < lawPeriod {
		return
	}
	l.stale, l.taken = false, max(now, 1)
	l.prefill = l.median(r.accounts, func(a *account) *speed { return &a.queue.speed })
	l.decode = l.median(r.accounts, func(a *account) *speed { return &a.pace.decode })
	b := &l.base
	r.view.Law = steptime.Coefficients{
		TokenMS: b.TokenMS * l.prefill, PairMS: b.PairMS * l.prefill,
		WeightMS: b.WeightMS * l.decode, FixedMS: b.FixedMS * l.decode, DecodeMS: b.DecodeMS * l.decode,
			ContextMS: b.ContextMS * l.decode,
	}
}

// median is that of the ranks that have shown a speed, 1 if none has. Of two it is the faster one.
func (l *law) median(accounts []account, of func(*account) *speed) float64 {
	l.scratch = l.scratch[:0]
	for i := range accounts {
		if s := of(&accounts[i]); s.predicted > 0 {
			l.scratch = append(l.scratch, s.slowness(1))
		}
	}
	if len(l.scratch) == 0 {
		return 1
	}
	slices.Sort(l.scratch)
	return l.scratch[(len(l.scratch)-1)/2]
}

// slow is how long a rank takes beside the median of all: what it has shown, which fades while it shows
// nothing new.
func (l *law) slow(s *speed, now time.Duration) float64 {
	age := float64(max(0, now-s.last)) / float64(slowMemory)
	return min(max(1+(s.slowness(l.prefill)/l.prefill-1)/(1+age*age), leastSlow), mostSlow)
}

// decodePace times the tokens of one request of a rank while the rank does nothing but decode: what a step
// takes without prefill.
type decodePace struct {
	key    uint64 // of the request; 0 = none
	out    int32  // its tokens at since
	since  time.Duration
	decode speed
}

// timeTokens learns from a report of o's tokens, n by now, if the rank had no prompt to compute since the
// report before.
func (a *account) timeTokens(rk *Rank, o *open, n int32) {
	p := &a.pace
	if !a.reckons || a.law == nil || a.when == 0 || a.queue.first != 0 {
		p.key = 0
		return
	}
	if p.key != o.key {
		if p.key == 0 || a.opens.get(p.key) == nil {
			p.key, p.out, p.since = o.key, n, a.when
		}
		return
	}
	observed := float64(a.when-p.since) / float64(time.Millisecond)
	if observed < leastSpan {
		return
	}
	b := &a.law.base
	p.decode.learn(observed, float64(n-p.out)*b.Step(0, rk.Load.R, int(rk.Load.K), 0), a.when)
	p.out, p.since = n, a.when
	a.law.tookSpan(*a.clock)
}
