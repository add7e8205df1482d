package simulate

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/enginemodel"
)

// GroupResult is what a group came to between From and Until.
type GroupResult struct {
	Offered int             // requests that arrived then
	TTFT    []time.Duration // ascending, of those that ended
	TPOT    []time.Duration // ascending, of those that had more than one token

	PerSecond float64         // tokens
	Step      time.Duration   // mean of the steps with tokens
	Prefill   float64         // ranks with prompt tokens, mean over the steps that have any
	Balance   float64         // time of the ranks, mean over most, mean over the steps without prompts
	ITL       []time.Duration // ascending: time between tokens, of every thousandth
	LongWait  time.Duration   // the longest until an engine began with the prompt
	Skips     int             // the most

	Whole *Result // of all requests

	ended []served
}

// served is the time to the first token, and per token behind it.
type served struct{ ttft, tpot time.Duration }

// groupMeter measures a group.
type groupMeter struct {
	cfg *GroupConfig
	out GroupResult

	began   time.Duration   // of the step under way
	took    []time.Duration // by rank
	prompts int             // ranks with prompt tokens
	tokens  int             // of all ranks

	all, prefills, decodes int           // steps
	sum                    time.Duration // of all
	produced               int           // tokens
	gaps                   [8192]int     // of these, by the ms since the one before
}

func (m *groupMeter) covers(at time.Duration) bool { return at >= m.cfg.From && at < m.cfg.Until }

func (m *groupMeter) report(rank int, e *enginemodel.Effect) {
	m.took[rank] = e.Took
	m.tokens += e.Tokens
	if e.Prompt > 0 {
		m.prompts++
	}
}

func (m *groupMeter) endStep(now time.Duration) {
	if m.tokens > 0 && m.covers(m.began) {
		m.all++
		m.sum += now - m.began
		if m.prompts > 0 {
			m.prefills++
			m.out.Prefill += float64(m.prompts)
		} else {
			m.decodes++
			most, all := 0.0, 0.0
			for _, took := range m.took {
				most, all = max(most, ms(took)), all+ms(took)
			}
			m.out.Balance += all / most / float64(len(m.took))
		}
	}
	m.prompts, m.tokens = 0, 0
}

func (m *groupMeter) token(r *enginemodel.Request, now time.Duration) {
	if !m.covers(now) {
		return
	}
	m.produced++
	if t := r.Times(); r.Produced() > 1 {
		m.gaps[min(int((t.Last-t.Previous)/time.Millisecond), len(m.gaps)-1)]++
	}
}

func (m *groupMeter) skip(c *call, skips int) {
	if m.covers(c.At) {
		m.out.Skips = max(m.out.Skips, skips)
	}
}

// gap is how much time is between tokens, at share p of them.
func (m *groupMeter) gap(p float64) time.Duration {
	all, below := 0, 0
	for _, n := range m.gaps {
		all += n
	}
	for i, n := range m.gaps {
		if below += n; float64(below) >= p*float64(all) {
			return time.Duration(i) * time.Millisecond
		}
	}
	return 0
}

func (m *groupMeter) result(s *sim) *GroupResult {
	r := &m.out
	r.Whole = s.result()
	r.PerSecond = float64(m.produced) / (m.cfg.Until - m.cfg.From).Seconds()
	r.Step = m.sum / time.Duration(max(m.all, 1))
	r.Prefill /= float64(max(m.prefills, 1))
	r.Balance /= float64(max(m.decodes, 1))
	for p := range 100 {
		r.ITL = append(r.ITL, m.gap(float64(p)/99))
	}
	for i := range s.calls {
		c := &s.calls[i]
		if !m.covers(c.At) {
			continue
		}
		if c.own != nil { // it has not ended
			c.keep(c.own)
		}
		r.Offered++
		r.LongWait = max(r.LongWait, c.times.Scheduled-c.At)
		if !c.finished {
			continue
		}
		ttft, tpot := c.latency()
		if c.Output > 1 {
			r.TPOT = append(r.TPOT, tpot)
		}
		r.ended = append(r.ended, served{ttft, tpot})
		r.TTFT = append(r.TTFT, ttft)
	}
	slices.Sort(r.TTFT)
	slices.Sort(r.TPOT)
	return r
}
