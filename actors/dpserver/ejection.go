package dpserver

import (
	"log/slog"
	"math/bits"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// answers are the last answers of a rank that say something about it: those that its ingresses count towards
// the ejection, and the good ones. The zero value is a rank that has not answered yet.
type answers struct {
	inRow int    // the newest ones that failed
	last  uint32 // the last ejectionWindow, the newest in the lowest bit; 1: it failed
}

// add notes an answer.
func (a *answers) add(failed bool) {
	a.last = a.last << 1 & (1<<ejectionWindow - 1)
	if !failed {
		a.inRow = 0
		return
	}
	a.inRow++
	a.last |= 1
}

// pardon takes the newest failure back.
func (a *answers) pardon() {
	a.inRow = max(0, a.inRow-1)
	a.last &= a.last - 1
}

// failed is how many of the last answers have failed.
func (a *answers) failed() int { return bits.OnesCount32(a.last) }

// areBad reports whether the rank is ejected: some failures in a row, or more than half of the last answers,
// whatever good ones lie between them.
func (a *answers) areBad() bool { return a.inRow >= ejectAfter || a.failed() > ejectionWindow/2 }

// isGood reports whether the engine has answered a request. A refusal of a request shows nothing: front ends
// refuse requests alone.
func isGood(m *msg.Done) bool { return m.Outcome == msg.OK && m.Cause != msg.CauseClientError }

// ejection judges a rank by its answers. Ejected is a flag and not a phase: the rank runs and admits. The
// stream says that it is ejected until a probe succeeds, and the Routers leave it out unless too many ranks
// of the application are ejected (routing/DESIGN.md, Ejected ranks).
type ejection struct {
	r           *replica
	answers     answers
	isEjected   bool
	awaitsProbe bool // a probe was due, and has not ended
	backoff     time.Duration
	timer       *time.Timer
}

// ejectionTimer says that the next probe of an ejection is due.
type ejectionTimer struct{ incarnation uint64 }

// note notes an answer. An attached engine cannot be restarted, so failed probes never fence it.
func (p *ejection) note(failed bool) {
	p.answers.add(failed)
	if !failed || !p.answers.areBad() || p.isEjected || p.r.state.phase != phaseOpen {
		return
	}
	p.isEjected, p.backoff = true, p.r.timers.EjectionBackoff
	if p.r.spec.Target.Owned {
		p.r.monitor.gate.report(ejected, "", time.Now())
	}
	p.r.publishState("ejected")
	p.r.log.Warn("rank is ejected: its last answers failed", slog.Int("in_a_row", p.answers.inRow),
		slog.Int("failed", p.answers.failed()), slog.Int("of_last", ejectionWindow))
	p.armTimer()
}

// pardon takes a failure back, and ends an ejection that came of it.
func (p *ejection) pardon() {
	if p.answers.pardon(); p.isEjected && !p.answers.areBad() {
		p.r.monitor.gate.suspicions[ejected] = suspicionState{}
		p.end()
	}
}

// armTimer waits one backoff step: 1, 2, 4 … 64 s.
func (p *ejection) armTimer() {
	p.timer = p.r.sendAfter(p.backoff, ejectionTimer{p.r.state.incarnation})
	p.backoff = min(2*p.backoff, p.r.timers.EjectionCeiling)
}

func (p *ejection) onTimer(m ejectionTimer) {
	if p.isEjected && m.incarnation == p.r.state.incarnation && p.r.state.phase == phaseOpen {
		p.awaitsProbe = true
		p.r.sendProbe()
	}
}

// end ends the ejection, and forgets the answers before.
func (p *ejection) end() {
	if !p.isEjected || p.r.state.phase != phaseOpen {
		return
	}
	stopTimer(p.timer)
	*p = ejection{r: p.r}
	p.r.log.Info("rank is no longer ejected")
	p.r.publishState("")
}

// awaitNext waits for the next probe after one that failed.
func (p *ejection) awaitNext() {
	if p.awaitsProbe && p.r.state.phase == phaseOpen {
		p.awaitsProbe = false
		p.armTimer()
	}
}
