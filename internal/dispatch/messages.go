package dispatch

import (
	"time"

	"github.com/dpserve/dpserve/routing"
)

// Side is one of the two pools of an application. One pool alone is Decode.
type Side uint8

// The sides.
const (
	Prefill Side = iota
	Decode
)

// EventKind is the closed list of what a Plan is told.
type EventKind uint8

// The events. Number is that of the command which they answer. Every Pick is answered with EvPicked or
// EvNoRank, every Reserve with EvReserved or EvRefused, also after a Cancel. An Ask is answered with
// EvRefused or EvEnded.
const (
	EvTick   EventKind = iota // time has passed
	EvStart                   // the request begins
	EvPicked                  // IsRemote, Prefill, Decode, as far as they were asked for
	EvNoRank                  // Cause: no rank can take the request, now or soon
	EvReserved
	EvRefused // Cause: the rank does not admit the request, or the reservation was given up

	EvSent     // decode leg: the whole request is written
	EvAnswered // Cause: the engine's answer is an error, and waits to be passed on
	EvContent  // the first content of an answer is there, and waits to be passed on
	EvEnded    // Cause, OK too. Of a prefill leg: Params, 0 = the engine gave none

	EvFenced     // Side, Rank: the incarnation serves no longer
	EvClientGone // nobody waits for the answer
	EvDeadline   // the client's own time limit is over
)

// Event is one input of a Plan.
type Event struct {
	Kind     EventKind
	Side     Side
	Cause    Cause
	Number   uint32
	Rank     routing.RankRef // of the leg or the refusal
	Unit     uint64          // of Rank; any number that is equal for the ranks of one incarnation of a unit
	Text     uint64          // hash of what the engine said; 0: nothing that tells one failure from another
	Params   uint64          // handle of a prefill's parameters
	Prefill  routing.RankRef // EvPicked
	Decode   routing.RankRef // EvPicked
	IsRemote bool            // EvPicked: a pair; else Prefill is not set
	Fallback bool            // EvPicked, not IsRemote: there should have been a pair

	HasWaited    bool // EvNoRank: the request has waited for room as long as it may, or may not wait
	EngineFailed bool // EvFenced, UnitLost: because its engine failed
	IsLost       bool // the rank serves no longer: what it did counts against nobody
	IsSpent      bool // EvAnswered, EvEnded: the body was passed on as it came, and cannot be sent again
	CanContinue  bool // EvEnded: what the client has of the answer is kept, so that another rank may go on
}

// CommandKind is the closed list of what a Plan asks of its shell.
type CommandKind uint8

// The commands. The shell carries out in order; those from CmdPick to CmdSend may wait.
const (
	// CmdPick: pick ranks of the sides in Want. Prefill or Decode is
	// the rank that stays, so that the pair has met. Plan.Tried lists the ranks that must not be picked.
	// Unlike has for each side a rank to take only if there is no other. Pays: if the request must wait for
	// room, that costs the retry budget.
	CmdPick CommandKind = iota
	// CmdAsk: take a ticket at Rank and send the request, which has no other leg.
	CmdAsk
	// CmdReserve: take a ticket at Rank, a prefill rank's with the tokens that it will hold.
	CmdReserve
	// CmdSend: send the leg to Rank. Of a prefill leg that is all. A decode leg is remote or not; a remote
	// one has the Params of Prefill, if Fence.IsUsable directly before the write, else the answer is
	// TooLate. With Params 0 the transfer needs none: there is no Fence, the leg names Prefill.
	CmdSend
	// CmdUndo: a pick came too late, or a rank refused: nothing uses its ranks. With Rank, nothing uses that
	// rank.
	CmdUndo
	// CmdRelay: the client gets the leg's answer from its first byte on.
	CmdRelay
	// CmdCancel: end the pick, reservation or leg Number; its connection is closed.
	CmdCancel
	// CmdRelease: give the ticket back: Cause, and whether it is a Charge of the rank. A prefill rank holds
	// the prompt until HeldUntil.
	CmdRelease
	// CmdPardon: take the Charge of Rank back. Another rank has said the same.
	CmdPardon
	// CmdSuspect: the node of Rank cannot be reached.
	CmdSuspect
	// CmdDiscard: Params are over.
	CmdDiscard
	// CmdAlarm: parameters may have been read too late. The prefix cache of decode rank Rank may hold wrong
	// blocks: reset it after the Cancel.
	CmdAlarm
	// CmdPairFailed: a decode leg of the pair of Prefill and Rank ended without a first byte, and it is not
	// known whose fault that is.
	CmdPairFailed
	// CmdAnswer: the client gets Answer; Cause is that of an answer of dpserve's own.
	CmdAnswer
	// CmdCount: the request is over: Way, Outcome.
	CmdCount
	// CmdNote: count Note.
	CmdNote
)

// Command is one output of a Plan.
type Command struct {
	Kind      CommandKind
	Side      Side
	Cause     Cause
	Answer    AnswerKind
	Way       Way
	Result    Result
	Note      Note
	Want      [2]bool // CmdPick: of each side
	Pays      bool
	IsRemote  bool
	Charge    bool
	Number    uint32
	Attempt   uint32 // legs of one pair have the same number: every attempt needs fresh ids
	Rank      routing.RankRef
	Prefill   routing.RankRef
	Decode    routing.RankRef
	Unlike    [2]routing.RankRef
	Params    uint64
	Fence     Fence
	HeldUntil time.Duration // 0 = it holds nothing
}

// AnswerKind is what the client gets if no leg's answer was passed on.
type AnswerKind uint8

// The answers.
const (
	AnswerNone       AnswerKind = iota // the client has left, or has its answer
	AnswerWords                        // the status, body and Retry-After of the last engine that answered
	AnswerOwn                          // what dpserve says of Cause
	AnswerNoRank                       // why no rank was picked
	AnswerNoPrefill                    // 503 at once: fallback fail, and no prefill rank computes the prompt
	AnswerTwoDied                      // 502: two ranks died with the request, it is not sent to a third
	AnswerDeadline                     // 504, or the end of the stream
	AnswerStreamLost                   // the stream ends with an error event
	AnswerTickets                      // of a reservation: its tickets, which are the shell's from now on
)

// Way is how the prompt was computed.
type Way uint8

// The ways.
const (
	WayNone     Way = iota // nothing was decided
	WayRemote              // by a prefill rank
	WayLocal               // by the decode rank, as decided
	WayFallback            // by the decode rank, because a prefill rank was not to be had
)

// Result is the end of a request.
type Result uint8

// The results.
const (
	ResultOK Result = iota
	ResultRejected
	ResultFailed
	ResultStreamLost
	ResultDeadline
	ResultClientGone
)

// Note is something that is counted on the way.
type Note uint8

// The notes.
const (
	NoteRedo          Note = iota // the prompt is computed a second time
	NotePrefillFailed             // a prefill leg failed
	NoteNullParams                // a prefill engine gave no parameters
	NoteParamsLate                // parameters were dropped because their lease may be over
	NoteKVFailure                 // a decode leg with parameters failed
	NoteDecodeLate                // a decode leg with parameters had no first byte in time
	NoteFallback                  // the decode rank computes the prompt after all
	NoteStoodStill                // an answer without a prefill was asked for again
)
