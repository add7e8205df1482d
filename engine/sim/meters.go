package sim

import (
	"time"

	em "github.com/dpserve/dpserve/enginemodel"
)

// meter names a histogram of the engine.
type meter uint8

const (
	meterPrompt meter = iota
	meterGenerated
	meterStepTokens
	meterMaxGenerated
	meterN
	meterMaxTokens
	meterFirstToken
	meterBetween
	meterPerToken
	meterEndToEnd
	meterQueue
	meterInference
	meterPrefill
	meterDecode
	meterPreemptions
	meterComputed
	meterCount
)

// meters are the histograms of one rank. Guarded by the rank's mutex.
type meters struct {
	h     [meterCount]histogram
	steps uint64
}

func newMeters() meters {
	var m meters
	tokens := tokenBounds(em.DefaultMaxModelLen)
	for k, bounds := range [meterCount][]float64{
		meterPrompt: tokens, meterGenerated: tokens, meterStepTokens: stepTokens, meterMaxGenerated: tokens,
			meterN: smallCounts,
		meterMaxTokens: tokens, meterFirstToken: secondsFirst, meterBetween: secondsToken,
			meterPerToken: secondsToken,
		meterEndToEnd: secondsRequest, meterQueue: secondsRequest, meterInference: secondsRequest,
			meterPrefill: secondsRequest,
		meterDecode: secondsRequest, meterPreemptions: smallCounts, meterComputed: tokens,
	} {
		m.h[k] = newHistogram(bounds)
	}
	return m
}

// step books the tokens of a step, if one ended since the last call.
func (m *meters) step(s em.Stats) {
	if s.Steps != m.steps {
		m.steps = s.Steps
		m.h[meterStepTokens].observe(float64(s.StepTokens))
	}
}

func (m *meters) token(r *em.Request) {
	t := r.Times()
	if r.Produced() == 1 {
		m.seconds(meterFirstToken, t.First-t.Arrived)
		return
	}
	m.seconds(meterBetween, t.Last-t.Previous)
}

func (m *meters) seconds(k meter, d time.Duration) { m.h[k].observe(max(0, d).Seconds()) }

func (m *meters) finished(r *em.Request) {
	if r.Finish() == em.FinishError || r.Produced() == 0 {
		return
	}
	t, n := r.Times(), r.Produced()
	m.h[meterPrompt].observe(float64(r.Prompt))
	m.h[meterGenerated].observe(float64(n))
	m.h[meterMaxGenerated].observe(float64(r.Output))
	m.h[meterPreemptions].observe(float64(r.Preemptions()))
	m.h[meterComputed].observe(float64(r.Prompt - r.Cached()))
	m.seconds(meterEndToEnd, t.Last-t.Arrived)
	m.seconds(meterQueue, t.Scheduled-t.Arrived)
	m.seconds(meterInference, t.Last-t.Scheduled)
	m.seconds(meterPrefill, t.First-t.Scheduled)
	m.seconds(meterDecode, t.Last-t.First)
	if n > 1 {
		m.seconds(meterPerToken, (t.Last-t.First)/time.Duration(n-1))
	}
}

// params books what a call asked for.
func (r *rank) params(c *call) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.meters.h[meterN].observe(float64(c.plan.n))
	r.meters.h[meterMaxTokens].observe(float64(c.choices[0].req.Output))
}
