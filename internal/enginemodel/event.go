package enginemodel

import "time"

// InputKind is the closed list of inputs of a core.
type InputKind uint8

// The inputs.
const (
	InputAdd      InputKind = iota // Req arrives
	InputAbort                     // Req's client left: it ends at once, without an effect
	InputAbortAll                  // every request ends with FinishAbort (shutdown without drain)
	InputKill                      // the core dies: every request ends with FinishError, EffectDied follows
	// no step ends any more, until InputRecover; aborts still free what they hold
	InputHang
	InputSlow       // steps take Factor times as long from the next one on
	InputRecover    // ends hang and slow
	InputGroupBegin // lockstep: a wave begins, report a step
	// lockstep: the group's step ended; Continue = the wave goes on, report the next one
	InputGroupEnd
	InputPeerLost // lockstep: a rank of the group is gone

	InputLoaded     // KV are the blocks that the EffectLoad of Req asked for
	InputLoadFailed // they do not come
	// the reader of the lease Name still waits
	InputLeaseExtend
	InputLeaseRead // the lease Name is not needed any more
	InputLeaseTime // leases that begin from now on last For
)

// Input is one event for a core.
type Input struct {
	Kind     InputKind
	Req      *Request
	Factor   float64
	Continue bool
	Name     string
	KV       []BlockKV
	For      time.Duration
}

// EffectKind is the closed list of effects that a core returns to its shell.
type EffectKind uint8

// The effects.
const (
	EffectToken EffectKind = iota // Req has one more token (Produced)
	// Req ended (Finish); the token that ended it came in the EffectToken before
	EffectFinished
	EffectRejected // Req was never queued: Reject says which limit
	EffectDied     // the core is dead
	EffectWave     // lockstep: this rank has work, ask the group for a wave
	// lockstep: this rank's step takes Took (Tokens, Prompt); Unfinished = it will still have work then
	EffectReport
	EffectBlocks // a step ended that changed the prefix cache: Blocks, in their order
	// Req has blocks for its prompt: InputLoaded must bring the KV of the last LoadBlocks of them
	EffectLoad
	EffectLeaseOver // the lease Name was not read in its time
)

// Reject is the admission limit that turned a request away.
type Reject uint8

// The limits.
const (
	RejectNone Reject = iota
	RejectRequests
	RejectTokens
)

// Effect is one result of a step that the shell has to pass on.
type Effect struct {
	Kind       EffectKind
	Req        *Request
	Reject     Reject
	Took       time.Duration
	Tokens     int
	Prompt     int          // of Tokens: of prompts
	Blocks     []BlockEvent // valid until the next Step
	Name       string
	Unfinished bool
}

// Stats are counters since the start, and gauges.
type Stats struct {
	Running, Waiting int
	UsedBlocks       int
	Blocks           int
	Steps            uint64
	StepTokens       int // of the step that ended last
	PromptTokens     uint64
	PromptCached     uint64 // of them in the prefix cache
	GeneratedTokens  uint64
	Preemptions      uint64
	CacheQueries     uint64 // tokens looked up in the prefix cache
	CacheHits        uint64 // tokens found there
	Aborted          uint64 // by InputAbort
	Rejected         [RejectTokens + 1]uint64
	Finished         [finishReasons]uint64
	TransferStats
}

// TransferStats are the part of Stats that concerns blocks of other engines.
type TransferStats struct {
	Loading      int    // of the waiting ones: their KV is on its way
	Leases       int    // ended requests whose blocks another engine may read
	PromptLoaded uint64 // of the prompt tokens: they came from another engine
	LeasesOver   uint64 // that nobody had read
	LateReads    uint64 // of blocks that were no longer leased
	WrongAnswers uint64 // requests whose first token rested on KV of other tokens
}

// BlockEventKind is what happened to blocks of the prefix cache.
type BlockEventKind uint8

// The kinds.
const (
	BlocksCleared BlockEventKind = iota // every cached block was dropped
	BlockRemoved                        // one copy of one block lost its memory
	BlocksStored                        // consecutive blocks of one request entered the cache
)

// BlockEvent is one change of the prefix cache, as an EffectBlocks carries it.
type BlockEvent struct {
	Kind  BlockEventKind
	Hash  uint64   // BlockRemoved
	Req   *Request // BlocksStored: its blocks First to First+Count-1
	First int
	Count int
}

// blockLog collects the changes of a step, in the order in which the effect reports them: cleared, removals,
// stores. Stores follow removals because memory is taken before it is filled; no block that was stored in a
// step can be removed in the same one.
type blockLog struct {
	on      bool
	cleared bool
	removed []uint64
	stored  []BlockEvent
	events  []BlockEvent // of the effect; valid until the next Step
}

func (l *blockLog) remove(hash uint64) {
	if l.on {
		l.removed = append(l.removed, hash)
	}
}

func (l *blockLog) store(r *Request, first, count int) {
	if l.on && count > 0 {
		l.stored = append(l.stored, BlockEvent{Kind: BlocksStored, Req: r, First: first, Count: count})
	}
}

// clear records a reset: changes that were not reported yet are dropped, and the next step reports the clear.
func (l *blockLog) clear(silent bool) {
	l.removed, l.stored = l.removed[:0], l.stored[:0]
	l.cleared = l.on && !silent
}

// flush returns the changes of the step that ends now; nil = none.
func (l *blockLog) flush() []BlockEvent {
	l.events = l.events[:0]
	if l.cleared {
		l.events = append(l.events, BlockEvent{Kind: BlocksCleared})
	}
	for _, hash := range l.removed {
		l.events = append(l.events, BlockEvent{Kind: BlockRemoved, Hash: hash})
	}
	l.events = append(l.events, l.stored...)
	clear(l.stored)
	l.removed, l.stored, l.cleared = l.removed[:0], l.stored[:0], false
	if len(l.events) == 0 {
		return nil
	}
	return l.events
}
