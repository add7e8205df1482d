package state

import (
	"cmp"
	"strings"
	"time"
)

// Machine is the state machine of one unit in the leader's controller. State.Units holds what raft decided; a
// Machine also holds what happens between two decisions. It is a plain value, and only Next changes it.
type Machine struct {
	Phase     Phase // "" = not wanted and never seen
	Epoch     uint64
	Attempt   int  // starts since the last ready, of the grant in hand, from 1
	Failures  int  // failures after ready in a row
	Starts    int  // grants since the unit was wanted anew
	Attach    bool // dpserve did not start the engine: it recovers in place, fenced → ready
	Stopping  bool // the grant in hand is not wanted: its end is followed by a release
	WasReady  bool // the grant in hand was ready once
	Confirmed bool // every node confirmed the last order
	// NodeLost: a node of the grant is lost and the others stop their ranks. A release and another grant
	// follow.
	NodeLost bool
	NodeDied bool      // the last start ended because a node of it, or the dpserve process there, ended
	Died     bool      // that is so of the grant in hand
	ReadyAt  time.Time // when the grant in hand became ready
	Since    time.Time // when Phase began
	Due      time.Time // next tick wanted; zero = none
	StopBy   time.Time // stopping: end of the grace for running streams
	Reason   string    // why the unit is not ready
	LogTail  []string  // lines of the engine's log with it
}

// UnitEventKind is a kind of event of a unit.
type UnitEventKind uint8

// The events. Those of the first block come from the controller, the others from nodes and carry an epoch.
const (
	EvWant UnitEventKind = iota // the committed app wants the unit
	// a deploy of its app, or a node joined: a failed unit gets three more attempts
	EvRedeploy
	EvUnwant  // delete, newer revision or node drain: Grace for running streams
	EvGranted // GrantGroup committed: Epoch, Attempt
	EvLost    // the node's dpserve process that had this grant ended
	// a node of the unit is lost for its TTL + 2 s: its processes count as gone
	EvNodeLost
	EvTick // the time Due has come

	EvStarted  // the nodes accepted StartRank
	EvReady    // every rank is healthy and answered the canary
	EvFenced   // a ready rank failed; it is out of routing already
	EvKilling  // the nodes end the engines
	EvDraining // the nodes accepted StopRank with grace
	EvGone     // the processes are gone, the ports are free
	// a node's dpserve process was replaced, and the next one has the engines: it knows of no order to stop
	EvReturned
)

// Event is one thing that happened to a unit.
type Event struct {
	Kind    UnitEventKind
	Epoch   uint64 // EvGranted: the new one; node events: theirs. Next ignores events of other epochs
	Attempt int    // EvGranted
	Grace   time.Duration
	// EvFenced, EvGone: every node saw its ranks ready (their EvReady may have been lost)
	WasReady bool
	Asked    bool // EvLost: the node's process was told to end, so this is no failed start
	Died     bool // EvKilling, EvGone: the node's process has ended, and was not told to
	// Others: other living nodes of the unit have not reported the same. EvNodeLost, EvGone: their ranks
	// still run.
	Others  bool
	Reason  string
	LogTail []string
}

// EffectKind is a kind of action that a machine asks for.
type EffectKind uint8

// The effects. The controller repeats none of them: a tick, or the machine itself, asks again.
const (
	DoGrant        EffectKind = iota // place the unit and propose GrantGroup with Attempt
	DoStart                          // send StartRank to the nodes
	DoStop                           // send StopRank with Grace to the nodes
	DoStopOthers                     // send StopRank without grace to the nodes that still run ranks
	ProposeReady                     // UnitReady
	ProposeFenced                    // UnitFenced
	ProposeFailed                    // UnitFailed
	ProposeRelease                   // Release
	CountRestart                     // a start after the first one
)

// Effect is one action, for the machine's epoch.
type Effect struct {
	Kind    EffectKind
	Attempt int           // DoGrant
	Grace   time.Duration // DoStop
}

// Next is the unit state machine; DESIGN.md has the drawing. It is total: an event that does not fit the
// phase, or has another epoch, changes nothing. Next does not change the m of its caller.
func Next(m Machine, e Event, now time.Time, t Timers) (Machine, []Effect) {
	if e.Kind >= EvStarted && (e.Epoch != m.Epoch || e.Epoch == 0) {
		return m, nil
	}
	before := m.Phase
	effects := m.handle(e, now, t.WithDefaults())
	if m.Phase != before {
		m.Since = now
	}
	return m, effects
}

func (m *Machine) handle(e Event, now time.Time, t Timers) []Effect {
	switch e.Kind {
	case EvWant:
		return m.handleWant()
	case EvRedeploy:
		return m.handleRedeploy()
	case EvUnwant:
		return m.handleUnwant(e, now, t)
	case EvGranted:
		return m.handleGranted(e, now, t)
	case EvLost, EvNodeLost:
		return m.handleLost(e, now, t)
	case EvTick:
		return m.handleTick(now, t)
	case EvStarted, EvDraining:
		return m.confirmOrder(e)
	case EvReady:
		return m.handleReady(now)
	case EvFenced:
		return m.handleFenced(e, now, t)
	case EvKilling:
		return m.handleKilling(e, now, t)
	case EvGone:
		if e.Others {
			return m.handleKilling(e, now, t)
		}
		return m.handleGone(e, now, t)
	case EvReturned:
		return m.handleReturned(now, t)
	default:
		return nil
	}
}

// mayRun reports whether the grant in hand has, or may have, processes.
func (m *Machine) mayRun() bool {
	switch m.Phase {
	case Starting, Ready, Fenced, Killing, Draining:
		return true
	default:
		return false
	}
}

func (m *Machine) handleWant() []Effect {
	if m.Phase != "" && m.Phase != Gone {
		return nil
	}
	*m = Machine{Phase: Pending, Epoch: m.Epoch, Attach: m.Attach}
	return []Effect{{Kind: DoGrant, Attempt: 1}}
}

// handleRedeploy gives a failed unit three more attempts and lets one in backoff try at once.
func (m *Machine) handleRedeploy() []Effect {
	if m.Phase != Failed && m.Phase != Backoff {
		return nil
	}
	*m = Machine{Phase: Pending, Epoch: m.Epoch, Attach: m.Attach, Starts: m.Starts}
	return []Effect{{Kind: DoGrant, Attempt: 1}}
}

// handleUnwant ends the grant in hand: at once if it has no processes, after its streams if it is ready.
func (m *Machine) handleUnwant(e Event, now time.Time, t Timers) []Effect {
	switch {
	case m.Phase == "" || m.Phase == Gone || m.Stopping:
		return nil
	case !m.mayRun():
		return m.endGrant()
	}
	m.Stopping, m.Confirmed, m.Reason, m.LogTail = true, false, e.Reason, nil
	m.Due, m.StopBy = now.Add(t.Resend), now
	grace := time.Duration(0)
	if m.Phase == Ready || m.Phase == Draining { // draining already: for an earlier leader, or by itself
		grace = max(0, e.Grace)
		m.Phase, m.StopBy = Draining, now.Add(grace)
	} else {
		m.Phase = Killing
	}
	return []Effect{{Kind: DoStop, Grace: grace}}
}

// endGrant clears everything but the epoch.
func (m *Machine) endGrant() []Effect {
	*m = Machine{Phase: Gone, Epoch: m.Epoch, Attach: m.Attach, Reason: m.Reason}
	if m.Epoch == 0 {
		return nil
	}
	return []Effect{{Kind: ProposeRelease}}
}

// handleGranted begins a start. If the unit was given up before the grant committed, it releases the grant,
// which no node knows of.
func (m *Machine) handleGranted(e Event, now time.Time, t Timers) []Effect {
	if e.Epoch <= m.Epoch {
		return nil
	}
	switch m.Phase {
	case Pending, Backoff:
	case Gone, "":
		m.Phase, m.Epoch = Gone, e.Epoch
		return []Effect{{Kind: ProposeRelease}}
	default:
		return nil
	}
	m.Phase, m.Epoch, m.Attempt = Starting, e.Epoch, max(1, e.Attempt)
	m.Starts++
	m.Confirmed, m.WasReady, m.Died, m.ReadyAt, m.Due = false, false, false, time.Time{}, now.Add(t.Resend)
	if m.Starts == 1 {
		return []Effect{{Kind: DoStart}}
	}
	return []Effect{{Kind: DoStart}, {Kind: CountRestart}}
}

// handleLost starts a unit again whose processes are known to be gone. After EvLost the new grant replaces
// the old one. After EvNodeLost the living nodes stop their ranks first, and the old grant is released before
// the new one.
func (m *Machine) handleLost(e Event, now time.Time, t Timers) []Effect {
	switch {
	case !m.mayRun() && (m.Phase != Backoff || e.Kind == EvLost):
		return nil
	case e.Kind == EvNodeLost && e.Others && m.mayRun():
		return m.stopOthers(e, now, t)
	case m.Stopping:
		return m.endGrant()
	case m.Phase == Backoff: // the failed starts before the loss stay counted
		return m.requestGrant(e, m.Attempt+1)
	case !m.WasReady && !m.Attach && !e.Asked:
		return m.countFailedStart(e, now, t)
	}
	return m.requestGrant(e, 1)
}

// requestGrant asks for a grant in place of a lost one. It releases a grant on a lost node first.
func (m *Machine) requestGrant(e Event, attempt int) []Effect {
	*m = Machine{
		Phase: Pending, Epoch: m.Epoch, Attach: m.Attach, Starts: max(1, m.Starts), Failures: m.Failures,
		NodeDied: m.NodeDied, Reason: e.Reason,
	}
	if e.Kind == EvNodeLost {
		return []Effect{{Kind: ProposeRelease}, {Kind: DoGrant, Attempt: attempt}}
	}
	return []Effect{{Kind: DoGrant, Attempt: attempt}}
}

// countFailedStart counts a start as failed if the node, or the dpserve process there, ended during it: the
// start may be the cause. The first one is tried again at once, because a node that ends once most often has
// another reason.
func (m *Machine) countFailedStart(e Event, now time.Time, t Timers) []Effect {
	if m.Phase == Starting {
		m.Died = true
		e.Reason += ", while the unit was starting"
	}
	m.NodeDied = m.NodeDied || m.Died
	if m.Attempt <= 1 {
		return m.requestGrant(e, 2)
	}
	m.enterPhase(Backoff, e, now, t)
	m.NodeLost = false
	if m.Attempt >= MaxStartAttempts {
		m.Phase = Failed
		return []Effect{{Kind: ProposeFailed}}
	}
	m.Due = now.Add(t.startDelay(m.Attempt))
	if e.Kind == EvNodeLost {
		return []Effect{{Kind: ProposeRelease}}
	}
	return nil
}

// stopOthers stops the remaining ranks of a unit that lost a node: its ranks need each other, and the next
// grant needs their slots.
func (m *Machine) stopOthers(e Event, now time.Time, t Timers) []Effect {
	if m.NodeLost || (m.Stopping && m.Phase == Killing) {
		return nil
	}
	fence := m.Phase == Ready
	if m.Phase == Starting {
		m.NodeDied = true
	}
	m.enterPhase(Killing, e, now, t)
	m.NodeLost, m.StopBy = true, now
	if fence {
		return []Effect{{Kind: ProposeFenced}, {Kind: DoStopOthers}}
	}
	return []Effect{{Kind: DoStopOthers}}
}

func (m *Machine) handleTick(now time.Time, t Timers) []Effect {
	if m.Due.IsZero() || now.Before(m.Due) {
		return nil
	}
	m.Due = time.Time{}
	switch {
	case m.Phase == Backoff:
		return []Effect{{Kind: DoGrant, Attempt: m.Attempt + 1}}
	case m.Phase == Starting && !m.Confirmed:
		m.Due = now.Add(t.Resend)
		return []Effect{{Kind: DoStart}}
	case m.mustStop() && !m.Confirmed:
		return m.repeatStop(now, t)
	}
	return nil
}

// mustStop reports whether nodes have the order to stop the grant in hand.
func (m *Machine) mustStop() bool {
	return m.Stopping || m.Phase == Killing || m.Phase == Fenced && !m.Attach
}

func (m *Machine) repeatStop(now time.Time, t Timers) []Effect {
	m.Confirmed, m.Due = false, now.Add(t.Resend)
	if m.Stopping {
		return []Effect{{Kind: DoStop, Grace: max(0, m.StopBy.Sub(now))}}
	}
	return []Effect{{Kind: DoStopOthers}}
}

// confirmOrder records that the nodes accepted an order. A node that drains by itself also stops admitting.
func (m *Machine) confirmOrder(e Event) []Effect {
	switch {
	case e.Kind == EvStarted && m.Phase == Starting, e.Kind == EvDraining && m.Phase == Draining:
		m.markConfirmed(e)
	case e.Kind == EvDraining && m.Phase == Ready:
		m.Phase, m.Confirmed, m.Reason = Draining, true, e.Reason
	}
	return nil
}

// markConfirmed stops the resending, unless some nodes have not confirmed the last order.
func (m *Machine) markConfirmed(e Event) {
	if !e.Others {
		m.Confirmed, m.Due = true, time.Time{}
	}
}

// handleReady admits the unit to routing. A launched unit that was fenced does not come back under the same
// epoch.
func (m *Machine) handleReady(now time.Time) []Effect {
	if m.Phase != Starting && (m.Phase != Fenced || !m.Attach) {
		return nil
	}
	m.Phase, m.WasReady, m.Confirmed, m.NodeDied = Ready, true, true, false
	m.ReadyAt, m.Due, m.Reason, m.LogTail = now, time.Time{}, "", nil
	return []Effect{{Kind: ProposeReady}}
}

// handleFenced records the failure of ranks that were ready. In phase starting the ready reports of the other
// nodes are on their way, or those are not ready: then the start has failed.
func (m *Machine) handleFenced(e Event, now time.Time, t Timers) []Effect {
	if m.Phase != Ready && m.Phase != Starting {
		return nil
	}
	m.enterPhase(Fenced, e, now, t)
	m.WasReady = m.WasReady || e.WasReady
	switch {
	case m.Attach:
		return []Effect{{Kind: ProposeFenced}}
	case !m.WasReady:
		return []Effect{{Kind: DoStopOthers}}
	}
	return []Effect{{Kind: ProposeFenced}, {Kind: DoStopOthers}}
}

func (m *Machine) handleKilling(e Event, now time.Time, t Timers) []Effect {
	was := m.Phase
	m.Died = m.Died || was == Starting && e.Died
	switch was {
	case Starting, Fenced, Draining:
		m.enterPhase(Killing, e, now, t)
	case Ready:
		m.enterPhase(Killing, e, now, t)
		return []Effect{{Kind: ProposeFenced}, {Kind: DoStopOthers}}
	case Killing:
		if strings.HasPrefix(e.Reason, m.Reason) {
			m.Reason = e.Reason // the node adds the name of a process that does not end
		}
		m.markConfirmed(e)
	default:
	}
	if was == Starting {
		return []Effect{{Kind: DoStopOthers}}
	}
	return nil
}

// handleReturned repeats the order to stop that only a node's former process has confirmed. A unit that this
// process drained by itself, because the node was told to end, is ready again.
func (m *Machine) handleReturned(now time.Time, t Timers) []Effect {
	switch {
	case !m.mayRun():
		return nil
	case m.mustStop():
		return m.repeatStop(now, t)
	case m.Phase == Draining:
		m.Phase, m.Reason = Ready, ""
	}
	return nil
}

// enterPhase enters a phase on the way to the end of a grant. It keeps the first reason, to which a node adds
// what the log of the ended engine tells. Nodes that have not confirmed get the order again.
func (m *Machine) enterPhase(p Phase, e Event, now time.Time, t Timers) {
	if m.Phase == Starting || m.Phase == Ready {
		m.Reason, m.LogTail = e.Reason, nil
	}
	if strings.HasPrefix(e.Reason, m.Reason) {
		m.Reason = e.Reason
	}
	if len(e.LogTail) > 0 {
		m.LogTail = Tail(e.LogTail)
	}
	m.Phase, m.Confirmed, m.Due = p, true, time.Time{}
	if e.Others {
		m.Confirmed, m.Due = false, now.Add(t.Resend)
	}
}

// handleGone decides what follows the end of a grant: a release, another start, or failed.
func (m *Machine) handleGone(e Event, now time.Time, t Timers) []Effect {
	if !m.mayRun() {
		return nil
	}
	wasReady := m.WasReady || e.WasReady
	switch {
	case m.Stopping:
		return m.endGrant()
	case m.NodeLost:
		m.WasReady = wasReady
		return m.handleLost(Event{Kind: EvNodeLost, Reason: m.Reason}, now, t)
	}
	m.NodeDied = m.Died
	fence := m.Phase == Ready || (m.Phase == Starting && wasReady)
	m.enterPhase(Backoff, e, now, t)
	switch {
	case wasReady:
		m.scheduleRestart(now, t)
	case m.Attempt >= MaxStartAttempts:
		m.Phase = Failed
		return []Effect{{Kind: ProposeFailed}}
	default:
		m.Due = now.Add(t.startDelay(m.Attempt))
	}
	if fence {
		return []Effect{{Kind: ProposeFenced}}
	}
	return nil
}

// scheduleRestart waits 1, 2, 4 … 64 s. The next start counts as the first attempt again.
func (m *Machine) scheduleRestart(now time.Time, t Timers) {
	if !m.ReadyAt.IsZero() && now.Sub(m.ReadyAt) >= t.RestartReset {
		m.Failures = 0
	}
	m.Failures++
	m.Attempt, m.Due = 0, now.Add(t.restartDelay(m.Failures))
}

// Bounds and waits of the unit state machine.
const (
	MaxStartAttempts    = 3                // starts in a row that may fail before the unit is failed
	DefaultStartRetry   = time.Second      // after the first failed start
	DefaultRestartMin   = time.Second      // before the first restart after ready
	DefaultRestartMax   = 64 * time.Second // before any restart
	DefaultRestartReset = 10 * time.Minute // of being ready, after which restarts count from one again
	DefaultResend       = 2 * time.Second  // of a node's silence, after which an order is sent again
)

// Timers are the waits of the unit state machine. Zero fields mean the defaults.
type Timers struct {
	StartRetry   time.Duration // after a failed start, doubled per attempt
	RestartMin   time.Duration // after a failure of a ready unit, doubled per failure
	RestartMax   time.Duration // upper bound of both
	RestartReset time.Duration // a unit that was ready for this long counts its failures from one again
	Resend       time.Duration // after this silence of a node an order is sent again
}

// WithDefaults replaces zero fields by the defaults.
func (t Timers) WithDefaults() Timers {
	return Timers{
		StartRetry:   orDefault(t.StartRetry, DefaultStartRetry),
		RestartMin:   orDefault(t.RestartMin, DefaultRestartMin),
		RestartMax:   orDefault(t.RestartMax, DefaultRestartMax),
		RestartReset: orDefault(t.RestartReset, DefaultRestartReset),
		Resend:       orDefault(t.Resend, DefaultResend),
	}
}

func orDefault(d, def time.Duration) time.Duration { return cmp.Or(max(0, d), def) }

// startDelay is min(StartRetry * 2^(attempt-1), RestartMax).
func (t Timers) startDelay(attempt int) time.Duration {
	return doubleDelay(t.StartRetry, attempt, t.RestartMax)
}

// restartDelay is min(RestartMin * 2^(failures-1), RestartMax).
func (t Timers) restartDelay(failures int) time.Duration {
	return doubleDelay(t.RestartMin, failures, t.RestartMax)
}

func doubleDelay(d time.Duration, n int, limit time.Duration) time.Duration {
	for ; n > 1 && d < limit; n-- {
		d *= 2
	}
	return min(d, limit)
}
