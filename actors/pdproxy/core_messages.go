package pdproxy

import (
	"time"

	"github.com/dpserve/dpserve/routing"
)

// Side is one of the two pools of an application.
type Side uint8

// The sides.
const (
	Prefill Side = iota
	Decode
)

// EventKind is the closed list of what a Core is told.
type EventKind uint8

// The events. Number is that of the command which they answer. Every Choose is answered with EvChosen or
// EvNoRank, every Reserve with EvReserved or EvRefused, also after a Cancel.
const (
	EvTick   EventKind = iota // time has passed
	EvStart                   // the request begins
	EvChosen                  // Remote, Prefill, Decode, as far as they were asked for
	EvNoRank                  // no decode rank can take the request, now or soon
	EvReserved
	EvRefused // the rank does not admit the request, or the reservation was given up

	EvSent       // decode leg: the whole request is written
	EvTooLate    // decode leg: the Fence was not usable directly before the write; nothing was written
	EvFirstByte  // decode leg: the first event of the answer is there, and it is no error
	EvDone       // the answer is complete. Prefill leg: Params, 0 = the engine gave none
	EvDialFailed // no byte of the request was sent
	EvRejected   // 4xx: the fault of the request
	EvBusy       // the engine's own admission limit
	EvError      // 5xx, an error as first event, an answer without content, an error event in a stream
	EvCut        // the connection broke

	EvFenced     // Side, Rank: the incarnation serves no longer
	EvClientGone // nobody waits for the answer
	EvDeadline   // the client's own time limit is over
)

// Event is one input of a Core.
type Event struct {
	Kind     EventKind
	Number   uint32
	Side     Side
	Rank     routing.RankRef
	Remote   bool // EvChosen: a pair; else Prefill is not set
	Fallback bool // EvChosen, not Remote: there should have been a pair
	Whole    bool // EvStart: the answer comes as a whole, so its first byte comes with its last
	Prefill  routing.RankRef
	Decode   routing.RankRef
	Params   uint64 // handle of a prefill's parameters
}

// CommandKind is the closed list of what a Core asks of its shell.
type CommandKind uint8

// The commands.
const (
	// CmdChoose: choose ranks: a prefill rank if WantPrefill, a decode rank if WantDecode. Prefill or Decode
	// is the rank that stays, so that the pair has met. Core.Tried lists the ranks that must not be chosen.
	// Unlike has for each side a rank to take only if there is no other.
	CmdChoose CommandKind = iota
	// CmdUndoChoice: a choice came too late: nothing uses its ranks. With Rank, nothing uses that rank: its
	// reservation was dropped before it began.
	CmdUndoChoice
	// CmdReserve: take a ticket at Rank, a prefill rank's with the tokens that it will hold.
	CmdReserve
	// CmdStartPrefill, CmdStartLocal: send the leg to Rank.
	CmdStartPrefill
	CmdStartLocal
	// CmdStartDecode: send the leg with the Params of Prefill, if Fence.IsUsable directly before the write,
	// else answer EvTooLate. With Params 0 the transfer needs none: there is no Fence, the leg names Prefill.
	CmdStartDecode
	// CmdPassOn: the client gets the decode leg's answer from its first byte on.
	CmdPassOn
	// CmdCancel: end the choice, reservation or leg Number; its connection is closed.
	CmdCancel
	// CmdRelease: give the ticket back, as Ending says. A prefill rank holds the prompt until HeldUntil.
	CmdRelease
	// CmdDiscard: Params are over.
	CmdDiscard
	// CmdAlarm: parameters may have been read too late. The prefix cache of decode rank Rank may hold wrong
	// blocks: reset it after the Cancel.
	CmdAlarm
	// CmdAnswer: the client gets Answer; Number is the leg whose answer is passed on, if that is meant.
	CmdAnswer
	// CmdCount: the request is over: Way, Outcome.
	CmdCount
	// CmdNote: count Note.
	CmdNote
)

// Command is one output of a Core.
type Command struct {
	Kind        CommandKind
	Number      uint32
	Side        Side
	Attempt     uint32 // legs of one pair have the same number: every attempt needs fresh ids
	Rank        routing.RankRef
	Prefill     routing.RankRef
	Decode      routing.RankRef
	Unlike      [2]routing.RankRef
	WantPrefill bool
	WantDecode  bool
	Params      uint64
	Fence       Fence
	Ending      Ending
	HeldUntil   time.Duration // 0 = it holds nothing
	Answer      Answer
	Way         Way
	Outcome     Outcome
	Note        Note
}

// Ending is how a reservation ended.
type Ending uint8

// The endings. Those from EndDial on are charged to the rank.
const (
	EndUnused    Ending = iota // no engine was asked
	EndOK                      // the engine did its work
	EndCancelled               // whatever happened is not this rank's fault
	EndBusy                    // the engine's own limit: the rank counts as full
	EndDial
	EndCut // the engine may have died
	EndError
	EndLate // the engine did not answer in time
)

// Answer is what the client gets instead of a decode leg's answer.
type Answer uint8

// The answers.
const (
	AnswerNone       Answer = iota // the client has left, or has the whole answer
	AnswerPassOn                   // the 4xx of the leg Number as it is
	AnswerNoRank                   // 503: no rank takes the request
	AnswerNoPrefill                // 503 at once: fallback fail, and no prefill rank computes the prompt
	AnswerFailed                   // 502: every rank that was asked failed
	AnswerTwoDied                  // 502: two ranks died with the request, it is not sent to a third
	AnswerDeadline                 // 504, or the end of the stream
	AnswerStreamLost               // the stream ends with an error event
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

// Outcome is the end of a request.
type Outcome uint8

// The outcomes.
const (
	OutcomeOK Outcome = iota
	OutcomeRejected
	OutcomeFailed
	OutcomeStreamLost
	OutcomeDeadline
	OutcomeClientGone
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
