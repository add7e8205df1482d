package state

import (
	"strings"
	"time"
)

// Machine is the state machine of one unit in the leader's controller. State.Units holds what raft decided; a
// Machine also holds what happens between two decisions. It is a plain value, and only Next changes it.
type Machine struct {
	Phase     Phase // "" = not wanted and never seen
	Epoch     uint64
	Launch    string // Unit.Launch of the grant in hand
	Served    string // what the unit was ready with last, also before this leader and this grant
	Attempt   int    // starts since the last ready, of the grant in hand, from 1
	Failures  int    // ends in a row of a unit that has served, failed starts included
	Refusals  int    // starts in a row that found ports of the block taken; they are no attempts
	Attach    bool   // dpserve did not start the engine: it recovers in place, fenced → ready
	Stopping  bool   // the grant in hand is not wanted: its end is followed by a release
	WasReady  bool   // the grant in hand was ready once
	Confirmed bool   // every node confirmed the last order
	// NodeLost: a node of the grant is lost and the others stop their ranks. A release and another grant
	// follow.
	NodeLost bool
	deaths
	ReadyAt time.Time // when the grant in hand became ready
	Since   time.Time // when Phase began
	Due     time.Time // next tick wanted; zero = none
	StopBy  time.Time // stopping: end of the grace for running streams
	Reason  string    // why the unit is not ready
	LogTail []string  // lines of the engine's log with it
	Exit    string    // with it: how the engine ended by itself, as in LastEnd
	LastEnd *LastEnd  // of an earlier grant, or of this one if it has ended; nil = there was none
}

// deaths are starts that ended because a node, or the dpserve process there, ended.
type deaths struct {
	NodeDied bool // the last start
	Died     bool // the grant in hand
}

// UnitEventKind is a kind of event of a unit.
type UnitEventKind uint8

// The events. Those of the first block come from the controller, the others from nodes and carry an epoch.
const (
	EvWant UnitEventKind = iota // the committed app wants the unit
	// a deploy of its app, or a node joined: a failed unit gets three more attempts at once
	EvRedeploy
	EvUnwant  // delete, newer revision or node drain: Grace for running streams
	EvGranted // GrantGroup committed: Epoch, Attempt
	EvLost    // the node's dpserve process that had this grant ended
	// a node of the unit is lost for its TTL + 2 s: its processes count as gone
	EvNodeLost
	// a node of the unit takes no ranks any more: the next start is on another one, and need not wait
	EvLeave
	EvTick // the time Due has come

	EvStarted  // the nodes accepted StartRank
	EvReady    // every rank is healthy and answered the probe
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
	Epoch   uint64  // EvGranted: the new one; node events: theirs. Next ignores events of other epochs
	Launch  string  // EvGranted: Unit.Launch
	Attempt int     // EvGranted
	Spread  float64 // random, from 0 to 1, another one for each unit: how much shorter a wait is
	Grace   time.Duration
	// EvFenced, EvGone: every node saw its ranks ready (their EvReady may have been lost)
	WasReady bool
	Asked    bool // EvLost: the node's process was told to end, so this is no failed start
	Taken    bool // EvGone: another program holds ports of the unit's block, so this is no failed start
	Died     bool // EvKilling, EvGone: the node's process has ended, and was not told to
	// EvDraining, EvKilling, EvGone: with it no part of the unit has requests. A part that has none waits for
	// that, because an engine that ends breaks the requests of the other nodes' ranks
	Idle bool
	// Others: other living nodes of the unit have not reported the same. EvNodeLost, EvGone: their ranks
	// still run.
	Others  bool
	Reason  string
	LogTail []string
	Exit    string // as in LastEnd
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
	case EvLeave:
		return m.handleLeave()
	case EvTick:
		return m.handleTick(now, t)
	case EvStarted, EvDraining:
		return m.confirmOrder(e, now, t)
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
	m.forget(Pending)
	return []Effect{{Kind: DoGrant, Attempt: 1}}
}

// forget keeps of a unit without a grant what its next grant needs and how it ended last, and enters a phase.
func (m *Machine) forget(p Phase) {
	*m = Machine{Phase: p, Epoch: m.Epoch, Served: m.Served, Attach: m.Attach, LastEnd: m.LastEnd}
}

// handleRedeploy gives a failed unit three more attempts and lets one in backoff try at once. The start under
// way of a unit that has failed is the first of the three.
func (m *Machine) handleRedeploy() []Effect {
	if m.HasFailed() && m.mayRun() {
		m.Attempt = 1
	}
	if m.Phase != Failed && m.Phase != Backoff {
		return nil
	}
	m.forget(Pending)
	return []Effect{{Kind: DoGrant, Attempt: 1}}
}

// hasServed reports whether the unit was ever ready with what the grant in hand starts: then it is started
// for ever.
func (m *Machine) hasServed() bool { return m.Launch != "" && m.Launch == m.Served }

// HasFailed reports whether the first attempts of a unit that has never served have failed, and no later one
// has made it ready.
func (m *Machine) HasFailed() bool {
	return m.Phase == Failed || m.Attempt > MaxStartAttempts && !m.WasReady && !m.hasServed()
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
	reason := m.Reason
	m.forget(Gone)
	m.Reason = reason
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
	case Pending, Backoff, Failed:
	case Gone, "":
		m.Phase, m.Epoch = Gone, e.Epoch
		return []Effect{{Kind: ProposeRelease}}
	default:
		return nil
	}
	m.Phase, m.Epoch, m.Launch, m.Attempt = Starting, e.Epoch, e.Launch, max(1, e.Attempt)
	m.Confirmed, m.WasReady, m.Died, m.ReadyAt, m.Due = false, false, false, time.Time{}, now.Add(t.Resend)
	return []Effect{{Kind: DoStart}}
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
	}
	isFailedStart := !m.WasReady && !m.Attach && !e.Asked
	if isFailedStart && m.Phase == Starting {
		m.Died = true
		e.Reason += ", while the unit was starting"
	}
	m.noteLoss(now, e.Reason)
	if isFailedStart {
		return m.countLostStart(e, now, t)
	}
	return m.requestGrant(e, 1)
}

// requestGrant asks for a grant in place of a lost one. It releases a grant on a lost node first.
func (m *Machine) requestGrant(e Event, attempt int) []Effect {
	was := *m
	m.forget(Pending)
	m.Failures, m.NodeDied, m.Reason = was.Failures, was.NodeDied, e.Reason
	if e.Kind == EvNodeLost {
		return []Effect{{Kind: ProposeRelease}, {Kind: DoGrant, Attempt: attempt}}
	}
	return []Effect{{Kind: DoGrant, Attempt: attempt}}
}

// countLostStart counts a start as failed if the node, or the dpserve process there, ended during it: the
// start may be the cause. The first one is tried again at once, because a node that ends once most often has
// another reason.
func (m *Machine) countLostStart(e Event, now time.Time, t Timers) []Effect {
	m.NodeDied = m.NodeDied || m.Died
	if m.Attempt <= 1 {
		return m.requestGrant(e, 2)
	}
	m.enterPhase(Backoff, e, now, t)
	m.NodeLost = false
	if effects := m.countFailedStart(e, now, t); effects != nil || e.Kind != EvNodeLost {
		return effects
	}
	return []Effect{{Kind: ProposeRelease}}
}

// countFailedStart decides what follows a failed start. A unit that has never served has failed after three;
// then it is tried again now and then. One that has served is tried for ever. If the node ended with three
// starts of it, it waits for long at once, because each start may end a node with all of its ranks.
func (m *Machine) countFailedStart(e Event, now time.Time, t Timers) []Effect {
	last := m.Attempt >= MaxStartAttempts
	switch {
	case last && !m.hasServed():
		m.Phase, m.Due = Failed, now.Add(t.FailedWait(e.Spread))
		return []Effect{{Kind: ProposeFailed}}
	case !m.hasServed():
		m.Due = now.Add(t.startDelay(m.Attempt))
	case last && m.NodeDied:
		m.Due = now.Add(shorten(t.RestartMax, e.Spread))
	default:
		m.Failures++
		m.Due = now.Add(shorten(t.restartDelay(m.Failures), e.Spread))
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

// handleLeave ends a wait, unless the unit's starts ended its node: it might end the next one as well.
func (m *Machine) handleLeave() []Effect {
	if m.Phase != Backoff || m.Due.IsZero() || m.NodeDied {
		return nil
	}
	m.Due = time.Time{}
	return []Effect{{Kind: DoGrant, Attempt: m.Attempt + 1}}
}

func (m *Machine) handleTick(now time.Time, t Timers) []Effect {
	if limit := now.Add(t.longestWait(m.Phase)); m.Due.After(limit) {
		m.Due = limit // the clock was set back
	}
	if m.Due.IsZero() || now.Before(m.Due) {
		return nil
	}
	m.Due = time.Time{}
	switch {
	case m.Phase == Backoff || m.Phase == Failed:
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
// Once every part of a unit that drains is idle or ends, those that wait are told to end.
func (m *Machine) confirmOrder(e Event, now time.Time, t Timers) []Effect {
	switch {
	case e.Kind == EvStarted && m.Phase == Starting, e.Kind == EvDraining && m.Phase == Draining:
		m.markConfirmed(e)
	case e.Kind == EvDraining && m.Phase == Ready:
		m.Phase, m.Confirmed, m.Reason = Draining, true, e.Reason
	}
	if e.Idle && (m.Phase == Draining || m.Phase == Killing) {
		m.StopBy = now
		return m.repeatStop(now, t)
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
	m.Phase, m.WasReady, m.Served, m.Confirmed, m.NodeDied = Ready, true, m.Launch, true, false
	m.Refusals = 0
	m.ReadyAt, m.Due, m.Reason, m.LogTail, m.Exit = now, time.Time{}, "", nil, ""
	return []Effect{{Kind: ProposeReady}}
}

// handleFenced records the failure of ranks that were ready. In phase starting the ready reports of the other
// nodes are on their way, or those are not ready: then the start has failed.
func (m *Machine) handleFenced(e Event, now time.Time, t Timers) []Effect {
	if m.Phase != Ready && m.Phase != Starting {
		return nil
	}
	m.enterPhase(Fenced, e, now, t)
	m.noteReady(e)
	switch {
	case m.Attach:
		return []Effect{{Kind: ProposeFenced}}
	case !m.WasReady:
		return []Effect{{Kind: DoStopOthers}}
	}
	return []Effect{{Kind: ProposeFenced}, {Kind: DoStopOthers}}
}

// noteReady notes that the grant in hand was ready if the event says so: its EvReady may have been lost.
func (m *Machine) noteReady(e Event) {
	if e.WasReady && !m.WasReady {
		m.WasReady, m.Served = true, m.Launch
	}
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
	if was == Starting || was == Draining && e.Idle && e.Others && now.Before(m.StopBy) {
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
		m.Reason, m.LogTail, m.Exit = e.Reason, nil, e.Exit
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
	m.noteReady(e)
	switch {
	case m.Stopping:
		return m.endGrant()
	case m.NodeLost:
		return m.handleLost(Event{Kind: EvNodeLost, Reason: m.Reason, Spread: e.Spread}, now, t)
	}
	m.NodeDied = m.Died
	fence := m.WasReady && (m.Phase == Ready || m.Phase == Starting)
	m.enterPhase(Backoff, e, now, t)
	m.noteEnd(now)
	if !m.WasReady {
		if e.Taken && m.Refusals < MaxRefusals { // the next grant has other ports
			m.Refusals++
			m.Attempt, m.Due = m.Attempt-1, now.Add(t.StartRetry)
			return nil
		}
		if e.Taken && !m.hasServed() {
			m.Attempt = MaxStartAttempts
		}
		return m.countFailedStart(e, now, t)
	}
	m.scheduleRestart(e, now, t)
	if fence {
		return []Effect{{Kind: ProposeFenced}}
	}
	return nil
}

// scheduleRestart waits 1, 2, 4 … 300 s. The next start counts as the first attempt again.
func (m *Machine) scheduleRestart(e Event, now time.Time, t Timers) {
	if !m.ReadyAt.IsZero() && now.Sub(m.ReadyAt) >= t.RestartReset {
		m.Failures = 0
	}
	m.Failures++
	m.Attempt, m.Due = 0, now.Add(shorten(t.restartDelay(m.Failures), e.Spread))
}
