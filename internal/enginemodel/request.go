package enginemodel

import "time"

// FinishReason says how a request ended.
type FinishReason uint8

// The finish reasons. FinishError stands for a dead engine core; the process turns it into HTTP 500 or an
// error event.
const (
	FinishNone FinishReason = iota
	FinishStop
	FinishLength
	FinishAbort
	FinishError
	finishReasons
)

var finishNames = [finishReasons]string{
	FinishStop: "stop", FinishLength: "length", FinishAbort: "abort", FinishError: "error",
}

// String is the word of the wire.
func (r FinishReason) String() string { return finishNames[r] }

// Request is one sequence. The caller fills the exported fields and hands it in with InputAdd; until its
// EffectFinished or EffectRejected it belongs to the core, which alone writes it; after InputAbort until the
// running step has ended. A request is added once: it is not for reuse.
type Request struct {
	Prompt int // prompt tokens, at least 1
	// tokens until it ends by itself, at least 1; Prompt+Output must fit the model length
	Output  int
	Ending  FinishReason // FinishLength or FinishStop: how it ends after Output tokens
	Content Content      // nil = no prefix reuse
	User    any          // the caller's own

	// with Config.Transfer. Lease keeps the blocks under this name when the request ends with FinishLength or
	// FinishStop, until InputLeaseRead or until the lease is over; names are not used twice. "" frees them.
	Lease  string
	Remote bool // the prompt's KV comes from another engine: EffectLoad asks for it

	state    requestState
	computed int // tokens whose KV is in blocks, once the running step ends
	produced int
	cached   int
	preempts int
	blocks   []int32
	hashed   int // leading blocks that are in the cache
	finish   FinishReason
	times    Times
	kv       requestKV
}

// Times are instants of a request on the core's clock; zero before they happen.
type Times struct {
	Arrived   time.Duration
	Scheduled time.Duration // first taken into a step
	First     time.Duration // first token
	Last      time.Duration // newest token
	Previous  time.Duration // the token before it
}

type requestState uint8

const (
	stateNew requestState = iota
	stateWaiting
	stateRunning
	stateLoading
	stateDone
)

// isActive reports whether the core has r and has not ended it.
func (r *Request) isActive() bool {
	return r.state == stateWaiting || r.state == stateRunning || r.state == stateLoading
}

// Produced is the number of output tokens so far.
func (r *Request) Produced() int { return r.produced }

// Cached is the number of prompt tokens that were not computed here: they came from the prefix cache or from
// another engine.
func (r *Request) Cached() int { return r.cached }

// Wrong is not 0 if the KV that the answer rests on is not that of the prompt. The answer is wrong then.
func (r *Request) Wrong() uint64 { return r.kv.wrong }

// LoadBlocks is how many blocks EffectLoad asks for: those at the end of the prompt.
func (r *Request) LoadBlocks() int { return len(r.blocks) - r.hashed }

// LoadFailed reports whether the prompt's KV could not be loaded.
func (r *Request) LoadFailed() bool { return r.kv.load == loadFailed }

// Kept are the blocks that a lease keeps after the end of r; nil = none.
func (r *Request) Kept() []int32 {
	if r.Lease == "" || r.state != stateDone {
		return nil
	}
	return r.blocks
}

// Computed is the number of tokens whose KV is in its blocks.
func (r *Request) Computed() int { return r.computed }

// Preemptions is how often it lost its blocks.
func (r *Request) Preemptions() int { return r.preempts }

// Finish is how it ended, FinishNone while it lives.
func (r *Request) Finish() FinishReason { return r.finish }

// Times are its instants so far.
func (r *Request) Times() Times { return r.times }

// total is the number of tokens that exist: prompt and answer so far.
func (r *Request) total() int { return r.Prompt + r.produced }

// decoding: the next token needs one token of work and is not the first.
func (r *Request) decoding() bool { return r.produced > 0 && r.computed == r.total()-1 }
