package routing

import (
	"slices"
	"time"
)

// EventKind is the closed list of a Router's events.
type EventKind uint8

// The events. Dispatched is raised by Pick itself; Ticket and Undo come from the ingress; the rest from the
// replica's stream.
const (
	EvDispatched EventKind = iota // a bump under (ReqID): W+1, Q+Tokens, Kq+Tokens
	// admission granted with stream number Seq: the bump lives until a record with seq ≥ Seq is applied
	EvTicket
	// attempt refused, failed to connect or was given up before a ticket: the bump goes
	EvUndo
	// stream: the replica counts the request (ReqID is its key in the replica's account, Tokens, Seq)
	EvAdmitted
	EvFirstToken // stream: prefill done, decoding
	EvProgress   // stream: Out output tokens so far
	// stream: request over, whatever the outcome, after Out output tokens (0 = not known)
	EvFinished
	// rank serves: Epoch, Incarnation, MaxOngoing, Local; its account begins as Snapshot (nil = empty) taken
	// at Seq; it is Ready unless EvAccepting says otherwise
	EvRankUp
	EvRankDown   // rank leaves the view; bumps on it go
	EvAccepting  // Ready changes to Accepting
	EvSilent     // Silent changes to Silent
	EvEjected    // Ejected = N: the rank's last answers failed; 0 = a probe came back
	EvOnTheWay   // View.OnTheWay = N
	EvMaxOngoing // MaxOngoing = N
	EvStatus     // the engine's report: KVUsage; Capacity and BlockSize unless 0
	EvConfigured // the application's settings are *Config
	// told by the caller, not by the stream: prefill of the own dispatch ReqID is done
	// (mark_prefill_complete). EvUndo ends it (free)
	EvPrefillDone
	// derived by the Router, to policies that watch: ReqID counts on Rank from now on, with Tokens
	EvOpened
	// derived by the Router, to policies that watch: ReqID no longer counts on Rank, whatever the reason
	EvClosed
)

// Config is what an application sets for all policies.
type Config struct {
	BusyThreshold    *float64 // 0 to 1; nil = off
	PrefixCachingOff bool     // the engines run without prefix caching
}

// Open is one open request of a replica's snapshot.
type Open struct {
	ReqID    uint64
	Tokens   int
	Hit      int // prompt tokens that were cached when it was dispatched
	Out      int
	Decoding bool
}

// Event is one input of a Router. ReqID in stream events is the replica's key for the request: the ingress
// folds its hash and the request id into one uint64, the same value as in Dispatched for its own requests.
type Event struct {
	Kind        EventKind
	Rank        RankID
	ReqID       uint64
	Seq         uint64
	Tokens      int
	Out         int
	Epoch       uint64
	Incarnation uint64
	MaxOngoing  int
	N           int
	Accepting   bool
	Silent      bool
	End         End  // EvFinished
	Assumed     bool // EvFirstToken: the rank has predicted it; it is not measured
	Local       bool
	Machine     string
	Snapshot    []Open

	Now time.Duration // on View.Now's clock; 0 leaves the view's
	// EvAdmitted, EvFirstToken, EvProgress, EvFinished: when it happened, on the rank's own clock; 0 = the
	// rank did not say
	At        time.Duration
	Hit       int     // EvDispatched, EvAdmitted: prompt tokens cached on Rank at dispatch
	Capacity  int64   // EvRankUp, EvStatus: tokens
	BlockSize int     // EvRankUp, EvStatus: tokens
	KVUsage   float64 // EvStatus: 0 to 1
	// EvStatus: the engine reports no usage, or has not for a while; the rank's own account stands
	NoKVUsage bool
	Config    *Config  // EvConfigured
	Request   *Request // EvDispatched by Pick, and the EvOpened of it: what was routed. Not to be kept
	// EvAdmitted: SessionKey of the request's session; 0 = it has none, or its ingress did not say
	Session uint64
	// EvAdmitted, written by the Router for its policy: it did not count the request yet, another router
	// dispatched it
	Elsewhere bool
}

// update applies an event to the view. wake reports that a queued request may get another decision now; ok is
// false if the event is too old and must be dropped.
func (r *Router) update(e *Event) (wake, ok bool) {
	i, found := r.view.findNear(e.Rank, r.width)
	switch e.Kind {
	case EvRankUp:
		return r.rankUp(i, found, e)
	case EvOnTheWay:
		wake, r.view.OnTheWay = e.N != r.view.OnTheWay, e.N
		return wake, true
	case EvConfigured:
		return r.configure(e.Config)
	case EvUndo: // idempotent, also when the rank is gone
		return found && r.accounts[i].undo(&r.view.Ranks[i], e.ReqID), true
	case EvDispatched:
		if found {
			r.accounts[i].bump(&r.view.Ranks[i], e.ReqID, e.Tokens, e.Hit)
		}
		return false, found
	case EvTicket:
		return found && r.ticket(i, e), found
	case EvAdmitted, EvFirstToken, EvProgress, EvFinished:
		if found {
			return r.record(i, e)
		}
	case EvRankDown, EvAccepting, EvEjected, EvSilent, EvMaxOngoing, EvStatus:
		if found {
			return r.rankChange(i, e)
		}
	case EvPrefillDone:
		return false, found && r.accounts[i].prefillDone(&r.view.Ranks[i], e.ReqID)
	case EvOpened, EvClosed: // derived here, never told
	}
	return false, false
}

// rankUp adds a rank or restarts its account. An event with an epoch below the highest one seen comes from an
// earlier start of the rank and is dropped.
func (r *Router) rankUp(i int, found bool, e *Event) (wake, ok bool) {
	if e.Epoch < r.epochs[e.Rank] {
		return false, false
	}
	r.epochs[e.Rank], r.width = e.Epoch, max(r.width, e.Rank.Rank()+1)
	if !found {
		r.view.Ranks = slices.Insert(r.view.Ranks, i, Rank{})
		r.accounts = slices.Insert(r.accounts, i,
			account{
				log: r.log, clock: &r.view.Now, reckons: r.reckons, model: &r.model, service: &r.service,
			})
	}
	rk := &r.view.Ranks[i]
	same := found && rk.Epoch == e.Epoch && rk.Incarnation == e.Incarnation
	before := *rk
	*rk = Rank{
		ID: e.Rank, Epoch: e.Epoch, Incarnation: e.Incarnation, Ready: true, Local: e.Local,
		Machine: e.Machine, MaxOngoing: e.MaxOngoing, Since: r.view.Now,
	}
	if same { // what the engine reported last still holds, and whether it is ejected
		rk.KVUsage, rk.HasKVUsage, rk.Busy, rk.Capacity, rk.BlockSize = before.KVUsage, before.HasKVUsage,
			before.Busy, before.Capacity, before.BlockSize
		rk.Since, rk.Ejected, rk.Lag = before.Since, before.Ejected, before.Lag
		rk.Slow, rk.SlowSpread, rk.Rho = before.Slow, before.SlowSpread, before.Rho
	}
	rk.size(e)
	r.accounts[i].reset(rk, e.Snapshot, e.Seq, same)
	r.view.markLeftOut()
	return true, true
}

// ticket records an admission. A ticket of another incarnation ends the bump, because the view holds another
// account.
func (r *Router) ticket(i int, e *Event) (wake bool) {
	a, rk := &r.accounts[i], &r.view.Ranks[i]
	if e.Incarnation != rk.Incarnation {
		return a.undo(rk, e.ReqID)
	}
	return a.ticket(rk, e.ReqID, e.Seq)
}

// record applies an entry of the replica's stream, in order. Several may share a number.
func (r *Router) record(i int, e *Event) (wake, ok bool) {
	a, rk := &r.accounts[i], &r.view.Ranks[i]
	if e.Incarnation != rk.Incarnation || e.Seq < a.lastSeq {
		return false, false
	}
	a.place(rk, e)
	switch e.Kind {
	case EvAdmitted:
		a.admit(rk, e.ReqID, e.Tokens, e.Hit)
	case EvFirstToken:
		a.firstToken(rk, e.ReqID, !e.Assumed)
	case EvProgress:
		a.progress(rk, e.ReqID, e.Out)
	default: // EvFinished
		wake = a.finish(rk, e)
	}
	a.when = 0
	return a.advanceStream(rk, e.Seq) || wake, true
}

// rankChange applies what concerns a rank as a whole. An incarnation, if given, must be the current one.
// Every change wakes: a rank that goes may turn Queue into Reject, a silent one may be taken whatever its
// load.
func (r *Router) rankChange(i int, e *Event) (wake, ok bool) {
	rk := &r.view.Ranks[i]
	if e.Incarnation != 0 && e.Incarnation != rk.Incarnation {
		return false, false
	}
	before := *rk
	switch e.Kind {
	case EvRankDown:
		r.view.Ranks = slices.Delete(r.view.Ranks, i, i+1)
		r.accounts = slices.Delete(r.accounts, i, i+1)
		r.view.markLeftOut()
		return true, true
	case EvAccepting:
		rk.Ready = e.Accepting
		return r.view.markLeftOut() || *rk != before, true
	case EvEjected:
		rk.Ejected = e.N
		return r.view.markLeftOut() || *rk != before, true
	case EvSilent:
		rk.Silent = e.Silent
	case EvStatus:
		return false, rk.status(e)
	default: // EvMaxOngoing
		rk.MaxOngoing = e.N
	}
	return *rk != before, true
}

// configure applies the application's settings.
func (r *Router) configure(c *Config) (wake, ok bool) {
	if c == nil {
		return false, false
	}
	v := &r.view
	v.PrefixCachingOff, v.HasBusyThreshold, v.BusyThreshold = c.PrefixCachingOff, c.BusyThreshold != nil, 0
	if c.BusyThreshold != nil {
		v.BusyThreshold = *c.BusyThreshold
	}
	for i := range v.Ranks {
		v.Ranks[i].Busy = false
		v.updateBusy(&v.Ranks[i])
	}
	return true, true
}
