package state

import (
	"cmp"
	"strings"
	"time"
)

// Machine is one unit's life as the leader's controller sees it: State.Units holds what raft decided, a Machine also what
// happens between two decisions. It is a plain value; Next is its only writer.
type Machine struct {
	Phase     Phase // "" = not wanted and never seen
	Epoch     uint64
	Attempt   int       // starts since the last ready, of the grant in hand, from 1
	Failures  int       // failures after ready in a row
	Starts    int       // grants since the unit was wanted anew
	Attach    bool      // engine of someone else: it recovers in place, fenced → ready
	Stopping  bool      // nobody wants the grant in hand: after its end comes release
	WasReady  bool      // the grant in hand was ready once
	Confirmed bool      // every node confirmed the last order
	NodeLost  bool      // a node of the grant is lost and the others end their parts: after that comes a release, then another grant
	NodeDied  bool      // the last start ended because the process of its node, or the whole node, ended during it
	ReadyAt   time.Time // when the grant in hand became ready
	Since     time.Time // when Phase began
	Due       time.Time // next tick wanted; zero = none
	StopBy    time.Time // stopping: end of the grace for running streams
	Reason    string    // why the unit is not ready
	LogTail   []string  // the engine's last log lines with it
}

// UnitEventKind is the closed list of what happens to a unit.
type UnitEventKind uint8

// The events. Those of the first block come from the controller, the others from nodes and carry an epoch.
const (
	EvWant     UnitEventKind = iota // the committed app wants the unit
	EvRedeploy                      // its app was deployed again, or a node joined: a failed unit gets three more attempts
	EvUnwant                        // delete, newer revision or node drain: Grace for running streams
	EvGranted                       // GrantGroup committed: Epoch, Attempt
	EvLost                          // the process of the unit's node that had this grant is no more
	EvNodeLost                      // a node of the unit is lost for its TTL + 2 s: whatever it had counts as gone
	EvTick                          // Due has passed

	EvStarted  // StartRank taken
	EvReady    // every rank healthy, canary answered
	EvFenced   // a ready rank failed; out of routing already
	EvKilling  // engines are being ended
	EvDraining // StopRank with grace taken
	EvGone     // processes gone, ports free
)

// Event is one thing that happened to a unit.
type Event struct {
	Kind     UnitEventKind
	Epoch    uint64 // EvGranted: the new one; node events: theirs, others than the machine's are ignored
	Attempt  int    // EvGranted
	Grace    time.Duration
	WasReady bool // EvGone: the node saw it ready (its EvReady may have been lost)
	Asked    bool // EvLost: the node's process was told to end, so its end is no failed start
	Others   bool // other nodes of the unit live and have not said the same; EvNodeLost, EvGone: their parts are not gone
	Reason   string
	LogTail  []string
}

// EffectKind is the closed list of what a machine asks for.
type EffectKind uint8

// The effects. The controller repeats none of them: what is silent or refused is asked for again by a tick or by itself.
const (
	DoGrant        EffectKind = iota // place the unit and propose GrantGroup with Attempt
	DoStart                          // tell the nodes StartRank
	DoStop                           // tell the nodes StopRank with Grace
	DoStopOthers                     // tell the nodes that still run ranks of a failed unit StopRank without grace
	ProposeReady                     // UnitReady
	ProposeFenced                    // UnitFenced
	ProposeFailed                    // UnitFailed
	ProposeRelease                   // Release
	CountRestart                     // a start after the first one
)

// Effect is one thing to do, for the machine's epoch.
type Effect struct {
	Kind    EffectKind
	Attempt int           // DoGrant
	Grace   time.Duration // DoStop
}

// Next is the unit state machine (the drawing is in DESIGN.md). It is total: an event that does not belong into the phase,
// or carries another epoch, changes nothing. m is not changed.
func Next(m Machine, e Event, now time.Time, t Timers) (Machine, []Effect) {
	if e.Kind >= EvStarted && (e.Epoch != m.Epoch || e.Epoch == 0) {
		return m, nil
	}
	before := m.Phase
	effects := m.on(e, now, t.WithDefaults())
	if m.Phase != before {
		m.Since = now
	}
	return m, effects
}

func (m *Machine) on(e Event, now time.Time, t Timers) []Effect {
	switch e.Kind {
	case EvWant:
		return m.want()
	case EvRedeploy:
		return m.redeploy()
	case EvUnwant:
		return m.unwant(e, now, t)
	case EvGranted:
		return m.grant(e, now, t)
	case EvLost, EvNodeLost:
		return m.lost(e, now, t)
	case EvTick:
		return m.tick(now, t)
	case EvStarted, EvDraining:
		return m.confirm(e)
	case EvReady:
		return m.ready(now)
	case EvFenced:
		return m.fenced(e, now, t)
	case EvKilling:
		return m.killing(e, now, t)
	case EvGone:
		if e.Others {
			return m.killing(e, now, t)
		}
		return m.gone(e, now, t)
	default:
		return nil
	}
}

// up says whether the grant in hand has, or may have, processes.
func (m *Machine) up() bool {
	switch m.Phase {
	case Starting, Ready, Fenced, Killing, Draining:
		return true
	default:
		return false
	}
}

func (m *Machine) want() []Effect {
	if m.Phase != "" && m.Phase != Gone {
		return nil
	}
	*m = Machine{Phase: Pending, Epoch: m.Epoch, Attach: m.Attach}
	return []Effect{{Kind: DoGrant, Attempt: 1}}
}

// redeploy gives a failed unit three more attempts and lets one in backoff try at once.
func (m *Machine) redeploy() []Effect {
	if m.Phase != Failed && m.Phase != Backoff {
		return nil
	}
	*m = Machine{Phase: Pending, Epoch: m.Epoch, Attach: m.Attach, Starts: m.Starts}
	return []Effect{{Kind: DoGrant, Attempt: 1}}
}

// unwant ends the grant in hand: without processes at once, a ready unit after its streams.
func (m *Machine) unwant(e Event, now time.Time, t Timers) []Effect {
	switch {
	case m.Phase == "" || m.Phase == Gone || m.Stopping:
		return nil
	case !m.up():
		return m.end()
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

// end leaves nothing but the epoch.
func (m *Machine) end() []Effect {
	*m = Machine{Phase: Gone, Epoch: m.Epoch, Attach: m.Attach, Reason: m.Reason}
	if m.Epoch == 0 {
		return nil
	}
	return []Effect{{Kind: ProposeRelease}}
}

// grant begins a start. A grant that commits after the unit was given up is released: no node was told of it.
func (m *Machine) grant(e Event, now time.Time, t Timers) []Effect {
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
	m.Confirmed, m.WasReady, m.ReadyAt, m.Due = false, false, time.Time{}, now.Add(t.Resend)
	if m.Starts == 1 {
		return []Effect{{Kind: DoStart}}
	}
	return []Effect{{Kind: DoStart}, {Kind: CountRestart}}
}

// lost starts a unit anew whose processes are known to be no more. After EvLost the new grant takes the place of the old
// one, after EvNodeLost the old one is released first, and before that the nodes that live have ended their parts.
func (m *Machine) lost(e Event, now time.Time, t Timers) []Effect {
	switch {
	case !m.up() && (m.Phase != Backoff || e.Kind == EvLost):
		return nil
	case e.Kind == EvNodeLost && e.Others && m.up():
		return m.endOthers(e, now, t)
	case m.Stopping:
		return m.end()
	case m.Phase == Backoff: // the failed starts before it stay counted
		return m.anew(e, m.Attempt+1)
	case !m.WasReady && !m.Attach && !e.Asked:
		return m.diedStarting(e, now, t)
	}
	return m.anew(e, 1)
}

// anew asks for a grant in place of one that is lost; a grant on a lost node is released first.
func (m *Machine) anew(e Event, attempt int) []Effect {
	*m = Machine{
		Phase: Pending, Epoch: m.Epoch, Attach: m.Attach, Starts: max(1, m.Starts), Failures: m.Failures, NodeDied: m.NodeDied, Reason: e.Reason,
	}
	if e.Kind == EvNodeLost {
		return []Effect{{Kind: ProposeRelease}, {Kind: DoGrant, Attempt: attempt}}
	}
	return []Effect{{Kind: DoGrant, Attempt: attempt}}
}

// diedStarting counts a start during which the node's process, or the node, ended as a failed one: the start may be what ended
// it. The first one is tried again at once, because a node that ends once has most often another reason.
func (m *Machine) diedStarting(e Event, now time.Time, t Timers) []Effect {
	if m.Phase == Starting {
		m.NodeDied = true
		e.Reason += ", while the unit was starting"
	}
	if m.Attempt <= 1 {
		return m.anew(e, 2)
	}
	m.because(Backoff, e, now, t)
	m.NodeLost = false
	switch {
	case m.Attempt >= MaxStartAttempts:
		m.Phase = Failed
		return []Effect{{Kind: ProposeFailed}}
	case e.Kind == EvNodeLost:
		m.Due = now.Add(t.startRetry(m.Attempt))
		return []Effect{{Kind: ProposeRelease}}
	default:
		m.Due = now.Add(t.startRetry(m.Attempt))
		return nil
	}
}

// endOthers ends what is left of a unit that has lost a node: its ranks need each other, and their slots are wanted again.
func (m *Machine) endOthers(e Event, now time.Time, t Timers) []Effect {
	if m.NodeLost || (m.Stopping && m.Phase == Killing) {
		return nil
	}
	fence := m.Phase == Ready
	if m.Phase == Starting {
		m.NodeDied = true
	}
	m.because(Killing, e, now, t)
	m.NodeLost, m.StopBy = true, now
	if fence {
		return []Effect{{Kind: ProposeFenced}, {Kind: DoStopOthers}}
	}
	return []Effect{{Kind: DoStopOthers}}
}

func (m *Machine) tick(now time.Time, t Timers) []Effect {
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
	case m.Stopping && !m.Confirmed:
		m.Due = now.Add(t.Resend)
		return []Effect{{Kind: DoStop, Grace: max(0, m.StopBy.Sub(now))}}
	case !m.Confirmed && (m.Phase == Killing || (m.Phase == Fenced && !m.Attach)):
		m.Due = now.Add(t.Resend)
		return []Effect{{Kind: DoStopOthers}}
	}
	return nil
}

// confirm notes that the nodes took an order. A node that drains by itself stops admitting like one that was told to.
func (m *Machine) confirm(e Event) []Effect {
	switch {
	case e.Kind == EvStarted && m.Phase == Starting, e.Kind == EvDraining && m.Phase == Draining:
		m.settle(e)
	case e.Kind == EvDraining && m.Phase == Ready:
		m.Phase, m.Confirmed, m.Reason = Draining, true, e.Reason
	}
	return nil
}

// settle needs no further order, unless some nodes have not confirmed the last one.
func (m *Machine) settle(e Event) {
	if !e.Others {
		m.Confirmed, m.Due = true, time.Time{}
	}
}

// ready admits the unit to routing. A launched unit that was fenced does not come back under the same epoch.
func (m *Machine) ready(now time.Time) []Effect {
	if m.Phase != Starting && (m.Phase != Fenced || !m.Attach) {
		return nil
	}
	m.Phase, m.WasReady, m.Confirmed, m.NodeDied = Ready, true, true, false
	m.ReadyAt, m.Due, m.Reason, m.LogTail = now, time.Time{}, "", nil
	return []Effect{{Kind: ProposeReady}}
}

// fenced follows a failure of a ready unit. In the phase starting the node's ready report is still on its way.
func (m *Machine) fenced(e Event, now time.Time, t Timers) []Effect {
	if m.Phase != Ready && m.Phase != Starting {
		return nil
	}
	m.because(Fenced, e, now, t)
	m.WasReady = true
	if m.Attach {
		return []Effect{{Kind: ProposeFenced}}
	}
	return []Effect{{Kind: ProposeFenced}, {Kind: DoStopOthers}}
}

func (m *Machine) killing(e Event, now time.Time, t Timers) []Effect {
	was := m.Phase
	switch was {
	case Starting, Fenced, Draining:
		m.because(Killing, e, now, t)
	case Ready:
		m.because(Killing, e, now, t)
		return []Effect{{Kind: ProposeFenced}, {Kind: DoStopOthers}}
	case Killing:
		if strings.HasPrefix(e.Reason, m.Reason) {
			m.Reason = e.Reason // a node names what does not end
		}
		m.settle(e)
	default:
	}
	if was == Starting {
		return []Effect{{Kind: DoStopOthers}}
	}
	return nil
}

// because enters a phase on the way to the end of a grant and keeps the first reason given for it. Nodes that have not confirmed
// are told again.
func (m *Machine) because(p Phase, e Event, now time.Time, t Timers) {
	if m.Phase == Starting || m.Phase == Ready {
		m.Reason, m.LogTail = e.Reason, nil
	}
	m.Reason = cmp.Or(m.Reason, e.Reason)
	if len(e.LogTail) > 0 {
		m.LogTail = Tail(e.LogTail)
	}
	m.Phase, m.Confirmed, m.Due = p, true, time.Time{}
	if e.Others {
		m.Confirmed, m.Due = false, now.Add(t.Resend)
	}
}

// gone decides what follows the end of a grant: release, another start, or failed.
func (m *Machine) gone(e Event, now time.Time, t Timers) []Effect {
	if !m.up() {
		return nil
	}
	wasReady := m.WasReady || e.WasReady
	switch {
	case m.Stopping:
		return m.end()
	case m.NodeLost:
		m.WasReady = wasReady
		return m.lost(Event{Kind: EvNodeLost, Reason: m.Reason}, now, t)
	}
	m.NodeDied = false
	fence := m.Phase == Ready || (m.Phase == Starting && wasReady)
	m.because(Backoff, e, now, t)
	switch {
	case wasReady:
		m.afterReady(now, t)
	case m.Attempt >= MaxStartAttempts:
		m.Phase = Failed
		return []Effect{{Kind: ProposeFailed}}
	default:
		m.Due = now.Add(t.startRetry(m.Attempt))
	}
	if fence {
		return []Effect{{Kind: ProposeFenced}}
	}
	return nil
}

// afterReady waits 1, 2, 4 … 64 s; the next start is the first attempt again.
func (m *Machine) afterReady(now time.Time, t Timers) {
	if !m.ReadyAt.IsZero() && now.Sub(m.ReadyAt) >= t.RestartReset {
		m.Failures = 0
	}
	m.Failures++
	m.Attempt, m.Due = 0, now.Add(t.restart(m.Failures))
}
