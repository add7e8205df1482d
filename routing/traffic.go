package routing

import (
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

const (
	// trafficPeriod is how often the prefill utilisation ρ is measured: ρ ← ½ρ + ½·(prefill ms that all
	// ingresses sent)/(N·Δt).
	trafficPeriod = 5 * time.Second
	// maxRho bounds η = ρ/(1-ρ) to 9.
	maxRho = 0.9
	// firstAnswer is how long answers are taken to be, in tokens, until there were some; it weighs as much as
	// firstAnswers of them.
	firstAnswer, firstAnswers = 300, 64
	// lastAnswers is how many answers the mean of their length goes back, about: half of it is younger than
	// 1,000 answers.
	lastAnswers = 1443
)

// traffic measures what all ingresses together send to an application's ranks, as far as one Router knows: it
// counts its own dispatches at once, and those of other ingresses when a rank's records name them. Each
// request counts once.
type traffic struct {
	began       time.Duration // of the running period, View.Now
	work        float64       // ms of prefill that all ingresses sent to ranks in it
	rho         float64       // the share of the ranks' time that prefill takes
	own, others float64       // requests, of which those of earlier periods count half, a quarter, …
	answer      float64       // mean output tokens
	answers     float64       // that it is the mean of
}

func newTraffic(v *View) traffic {
	return traffic{began: v.Now, answer: firstAnswer, answers: firstAnswers}
}

// observe counts an event; law gives the prefill time of its prompt.
func (t *traffic) observe(v *View, e *Event, law *steptime.Coefficients) {
	switch {
	case e.Kind == EvDispatched:
		t.own++
		t.addPrefill(e, law)
	case e.Kind == EvAdmitted && e.Elsewhere:
		t.others++
		t.addPrefill(e, law)
	case e.Kind == EvFinished && e.Out > 0:
		t.answers = min(t.answers+1, lastAnswers)
		t.answer += (float64(e.Out) - t.answer) / t.answers
	}
	t.turn(v)
}

// addPrefill counts the work of a prompt.
func (t *traffic) addPrefill(e *Event, law *steptime.Coefficients) {
	tokens, hit := int(clampTokens(e.Tokens)), int(clampHit(e.Hit, e.Tokens))
	t.work += law.Prefill(tokens-hit, hit)
}

// turn begins the next period when the current one has ended.
func (t *traffic) turn(v *View) {
	spent := v.Now - t.began
	if spent < trafficPeriod || len(v.Ranks) == 0 {
		return
	}
	t.rho = t.rho/2 + t.work/(2*float64(len(v.Ranks))*float64(spent)/float64(time.Millisecond))
	t.own, t.others = t.own/2, t.others/2
	t.began, t.work = v.Now, 0
}

// later is η: what a millisecond of prefill delays requests that are still to come, in ms.
func (t *traffic) later() float64 {
	rho := min(t.rho, maxRho)
	return rho / (1 - rho)
}

// share is the part of all requests that this Router dispatches itself; 1 while none is known.
func (t *traffic) share() float64 {
	if t.others == 0 {
		return 1
	}
	return t.own / (t.own + t.others)
}
