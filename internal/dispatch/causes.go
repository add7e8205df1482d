package dispatch

// Cause is how a leg ended: the closed list. Its name goes to logs, metrics and the rank.
type Cause uint8

// The causes.
const (
	OK     Cause = iota
	Passed       // 4xx, 501, 505: the engine judged the request, and each would say the same

	// The rank's DPServer refused, so that no engine was asked.

	Full
	StaleEpoch
	NotReady
	Fenced
	Draining
	NoLease
	Gone
	Overloaded // it did not answer in time
	Expired    // the request's own deadline

	// No engine was asked, for reasons of this process or this node.

	NoMemory // of the bodies
	NoFiles  // this node, or the rank's, has no file descriptor left
	NoPeer   // nothing is known of the other rank of the pair
	TooLate  // the parameters of a prefill were too old directly before the write
	Unused   // another leg ended the request before

	// Before the first byte of an answer.

	Unreachable // the data port of the rank's node is lost, before the first byte or after it
	ConnRefused // no connection
	NotResent   // the engine lives and was closing the idle connection; the leg must not be sent twice
	Reset       // the connection ended without an answer, after the request was written
	UnitLost    // the rank was fenced or is gone
	Malformed   // no HTTP answer, or a status below 200
	Redirected  // 3xx: its Location is an internal address
	RankError   // 401, 403, 404, 405, while another rank answers that model well
	Timeout     // 408
	Busy        // the engine's own admission limit, in any dialect
	EngineDead  // the engine reports that its core is dead
	EngineError // any other 5xx
	Empty       // 2xx without content
	Aborted     // finish_reason abort without a token, of a rank that ends
	FirstToken  // no first token in time
	StoodStill  // this process stood still meanwhile
	KVFailure   // a decode leg whose prompt another rank computed ended without a first byte
	// NotContinued: the engine was to go on with an answer that the client has the beginning of, and began
	// another one. After the first byte, too.
	NotContinued

	// After the first byte.

	UpstreamLost
	Stalled    // no further token, and the engine failed its probe, or nobody probes it any more
	Silent     // no further token in time, though the engine answers probes
	ErrorEvent // an error event was passed on

	// Of the client or of this process, before or after the first byte.

	ClientGone
	SlowReader
	Deadline
	Drained
	GivenUp // the request goes another way

	numCauses
)

// Again says who gets the request next, if nothing of the answer has reached the client.
type Again uint8

// The values of Again.
const (
	Nobody Again = iota
	Other        // another rank
	Any          // any rank with room, the same one too
)

// Cost is what counts against a request when it is asked again.
type Cost uint8

// The values of Cost.
const (
	Nothing Cost = iota
	Refusal      // one of Config.Refusals
	Run          // one of Config.Attempts
)

// Outcome is what the rank's DPServer hears of its ticket.
type Outcome uint8

// The outcomes, in the order of msg.Outcome.
const (
	DoneOK Outcome = iota
	DoneFailed
	DoneCancelled
	DoneRefused
)

// Row is what follows from a cause.
type Row struct {
	Name string
	// before the first byte

	Again       Again
	Cost        Cost
	Pays        bool // a retry that must wait for room draws from the retry budget
	Charge      bool // counts towards the rank's ejection
	Death       bool // the engine died, or its connection did, while it had the request
	CheckHealth bool // the DPServer checks its engine at once
	Busy        bool // the DPServer counts the rank as full for a while
	Unit        bool // excludes the whole unit of a lockstep application
	Words       bool // the engine has answered: at the end the client gets its status, body and Retry-After
	Same        bool // the same text of two ranks is about the request

	Own   string // code of dpserve's own answer at the end
	Begun string // code of the error event that ends a stream; "": the stream ends as the engine says
	Moves bool   // a stream that ends so may go on from another rank
	Done  Outcome
}

// Codes of dpserve's own answers, as docs/api.md lists them.
const (
	upstreamFailed = "upstream_failed"
	noReadyRank    = "no_ready_rank"
	overloaded     = "overloaded"
	deadlineOver   = "deadline_exceeded"
	upstreamLost   = "upstream_lost"
	drained        = "drained"
	stalled        = "stalled"
)

// Causes is the table.
var Causes = [numCauses]Row{
	OK:     {Name: "ok"},
	Passed: {Name: "client_error", Words: true}, // the engine did its work

	Full:       {Name: "full", Again: Any, Own: noReadyRank, Done: DoneRefused},
	StaleEpoch: {Name: "stale_epoch", Again: Other, Cost: Refusal, Own: noReadyRank, Done: DoneRefused},
	NotReady:   {Name: "not_ready", Again: Other, Cost: Refusal, Own: noReadyRank, Done: DoneRefused},
	Fenced: {
		Name: "fenced", Again: Other, Cost: Refusal, Unit: true, Own: noReadyRank, Done: DoneRefused,
	},
	Draining: {Name: "draining", Again: Other, Cost: Refusal, Own: noReadyRank, Done: DoneRefused},
	NoLease:  {Name: "no_lease", Again: Other, Cost: Refusal, Own: noReadyRank, Done: DoneRefused},
	Gone: {
		Name: "gone", Again: Other, Cost: Refusal, Unit: true, Own: noReadyRank, Done: DoneRefused,
	},
	Overloaded: {Name: "overloaded", Again: Other, Cost: Run, Own: noReadyRank, Done: DoneRefused},
	Expired:    {Name: "expired", Own: deadlineOver, Done: DoneRefused},

	NoMemory: {Name: "no_memory", Own: overloaded, Done: DoneCancelled},
	NoFiles:  {Name: "no_files", Own: "no_files", Done: DoneCancelled},
	NoPeer:   {Name: "no_peer", Again: Any, Own: noReadyRank, Done: DoneCancelled},
	TooLate:  {Name: "params_late", Again: Any, Own: noReadyRank, Done: DoneCancelled},
	Unused:   {Name: "unused", Done: DoneRefused},

	Unreachable: {
		Name: "node_unreachable", Again: Other, Cost: Refusal, Own: noReadyRank, Begun: upstreamLost,
		Moves: true, Done: DoneFailed,
	},
	ConnRefused: {
		Name: "connection_refused", Again: Other, Cost: Run, CheckHealth: true, Own: upstreamFailed,
		Done: DoneFailed,
	},
	NotResent: {Name: "not_resent", Again: Any, Own: noReadyRank, Done: DoneCancelled},
	Reset: {
		Name: "reset", Again: Other, Cost: Run, Death: true, CheckHealth: true, Unit: true,
		Own:  upstreamFailed,
		Done: DoneFailed,
	},
	UnitLost: {
		Name: "unit_lost", Again: Other, Cost: Run, Death: true, Unit: true, Own: upstreamFailed,
		Begun: upstreamLost, Moves: true, Done: DoneCancelled,
	},
	Malformed: {
		Name: "malformed_answer", Again: Other, Cost: Run, Pays: true, Charge: true, Own: upstreamFailed,
		Begun: upstreamLost, Done: DoneFailed,
	},
	Redirected: {
		Name: "redirect", Again: Other, Cost: Run, Pays: true, Charge: true, Own: upstreamFailed,
		Done: DoneFailed,
	},
	RankError: {
		Name: "rank_error", Again: Other, Cost: Run, Charge: true, Words: true, Same: true,
		Own: upstreamFailed, Done: DoneFailed,
	},
	Timeout: {
		Name: "engine_timeout", Again: Other, Cost: Run, Pays: true, Words: true, Own: upstreamFailed,
		Done: DoneFailed,
	},
	Busy: {
		Name: "engine_busy", Again: Any, Busy: true, Words: true, Own: overloaded, Done: DoneFailed,
	},
	EngineDead: {
		Name: "engine_dead", Again: Other, Cost: Run, Death: true, CheckHealth: true, Unit: true, Words: true,
		Own: upstreamFailed, Begun: upstreamLost, Done: DoneFailed,
	},
	EngineError: {
		Name: "engine_error", Again: Other, Cost: Run, Pays: true, Charge: true, Words: true, Same: true,
		Own: upstreamFailed, Done: DoneFailed,
	},
	Empty: {
		Name: "empty", Again: Other, Cost: Run, Pays: true, Charge: true, Own: upstreamFailed,
		Done: DoneFailed,
	},
	Aborted: {Name: "aborted", Again: Other, Cost: Run, Own: upstreamFailed, Done: DoneFailed},
	FirstToken: {
		Name: "first_token_timeout", Again: Other, Cost: Run, Pays: true, Charge: true,
		Own: "first_token_timeout", Done: DoneFailed,
	},
	StoodStill: {Name: "stood_still", Again: Any, Own: noReadyRank, Done: DoneCancelled},
	KVFailure: {
		Name: "kv_failure", Again: Any, Cost: Run, Words: true, Own: upstreamFailed, Done: DoneCancelled,
	},
	NotContinued: {
		Name: "not_continued", Own: upstreamFailed, Begun: upstreamLost, Done: DoneCancelled,
	},

	UpstreamLost: {
		Name: "upstream_lost", Charge: true, Death: true, CheckHealth: true, Unit: true, Own: upstreamFailed,
		Begun: upstreamLost, Moves: true, Done: DoneFailed,
	},
	Stalled: { // it is fenced
		Name: "stalled", Death: true, Unit: true, Own: upstreamFailed, Begun: stalled, Moves: true,
		Done: DoneFailed,
	},
	Silent:     {Name: "silent_stream", Own: upstreamFailed, Begun: stalled, Done: DoneFailed},
	ErrorEvent: {Name: "error_event", CheckHealth: true, Own: upstreamFailed, Done: DoneFailed},

	ClientGone: {Name: "client_gone", Done: DoneCancelled},
	SlowReader: {Name: "slow_reader", Done: DoneCancelled},
	Deadline: {
		Name: "deadline_exceeded", Own: deadlineOver, Begun: deadlineOver, Done: DoneCancelled,
	},
	Drained: {Name: "drained", Own: noReadyRank, Begun: drained, Moves: true, Done: DoneCancelled},
	GivenUp: {Name: "given_up", Own: noReadyRank, Done: DoneCancelled},
}

func (c Cause) String() string { return Causes[c].Name }

// Row is what follows from the cause.
func (c Cause) Row() *Row { return &Causes[c] }

// CauseOf is the cause with a name.
func CauseOf(name string) (c Cause, ok bool) {
	for c = range numCauses {
		if Causes[c].Name == name {
			return c, true
		}
	}
	return OK, false
}
