package ingress

import (
	"time"

	"github.com/dpserve/dpserve/routing/kvindex"
)

// Limits bound what clients may send and what an ingress holds. A zero field means its default.
type Limits struct {
	MaxBody         int64 // bytes of a request's body; more is 413
	BodyBytes       int64 // memory of all bodies together, until their answers begin; more is 503. 0: bodyBudget
	MaxHeaderBytes  int   // request line and header fields; more is 431
	MaxHeaderFields int   // header fields; more is 431
	MaxConns        int   // client connections; more wait in the kernel's backlog
	MaxQueueTokens  int64 // estimated prompt tokens in one application's queue; more is 503, but for the only one that waits
	IndexBytes      int   // memory of one application's picture of what its ranks have cached
	TokenizeBytes   int   // memory of one application's tokenized prompts
}

// Defaults of Limits.
const (
	DefaultMaxBody         = 16 << 20
	LargestMaxBody         = 64 << 20 // requests with images and the like; other nodes take no larger ones
	DefaultMaxHeaderBytes  = 64 << 10
	DefaultMaxHeaderFields = 100
	DefaultMaxConns        = 16_000
	DefaultMaxQueueTokens  = 4 << 20
	DefaultIndexBytes      = kvindex.DefaultBytes
	DefaultTokenizeBytes   = 64 << 20
)

// Timers of an ingress. A zero field means its default. Per-application times are in app.yaml.
type Timers struct {
	ReadHeader   time.Duration // for a request's header
	Idle         time.Duration // a client connection without a request
	BodyStall    time.Duration // longest wait for the next byte of a body, and the window of bodyRate; else 408
	SlowReader   time.Duration // for one write to a client that does not read, and the window in which one that reads must take bodyRate
	Admit        time.Duration // for a DPServer's answer; longer counts as overloaded
	LateTicket   time.Duration // how long a given-up admission is waited for, to hand its ticket back
	Doubt        time.Duration // how long a node whose data port was not reached is left alone
	FullRecheck  time.Duration // how long a rank that said full counts as full if its stream says nothing new
	Tail         time.Duration // for the end of an engine's body behind [DONE], so that the connection can be used again
	Dial         time.Duration // for a connection to an engine
	IdleOwned    time.Duration // idle connections to engines that dpserve started (their keep-alive is 120 s)
	IdleAttached time.Duration // idle connections to other engines: vLLM closes at 5 s
	BudgetWindow time.Duration // window of the retry budget
	Queue        time.Duration // timeouts.queue_s when the file leaves it out
	FirstToken   time.Duration // timeouts.first_token_s when the file leaves it out
	BetweenToken time.Duration // timeouts.between_tokens_s when the file leaves it out
	Outage       time.Duration // how long requests wait for attached engines while none of them is ready
	Reservation  time.Duration // for a reservation of the router's own API that nobody frees
}

// Defaults of Timers.
const (
	DefaultReadHeader   = 10 * time.Second
	DefaultIdle         = 120 * time.Second
	DefaultBodyStall    = 30 * time.Second
	DefaultSlowReader   = 60 * time.Second
	DefaultAdmit        = 5 * time.Second
	DefaultLateTicket   = 10 * time.Second
	DefaultDoubt        = 500 * time.Millisecond
	DefaultFullRecheck  = time.Second
	DefaultTail         = time.Second
	DefaultDial         = 5 * time.Second
	DefaultIdleOwned    = 100 * time.Second
	DefaultIdleAttached = 4 * time.Second
	DefaultBudgetWindow = 10 * time.Second
	DefaultQueue        = 60 * time.Second
	DefaultFirstToken   = 300 * time.Second
	DefaultBetweenToken = 30 * time.Second
	DefaultOutage       = 5 * time.Second
	DefaultReservation  = 300 * time.Second
)

// Numbers without a knob.
const (
	defaultAttempts = 3                      // retries.attempts when the file leaves it out
	bodyRate        = 1024                   // bytes per second that a client must send of a body, or take of an answer, over a window
	wholeBody       = 16 << 20               // bytes of a body that must be there after wholeWindows windows of BodyStall (2 min)
	wholeWindows    = 4                      // see wholeBody
	bodyShare       = 32                     // largest bodies that fit into the memory of bodies, unless a memory limit is near …
	memoryShare     = 4                      // … of which bodies take a quarter at most …
	leastBodies     = 4                      // … but room for this many of the largest is always there
	budgetShare     = 10                     // retries may be one in this many requests …
	budgetFloor     = 20                     // … or this many per window
	maxWhole        = 1 << 20                // bytes of an answer that is held before its header goes out
	maxHeld         = 16 << 10               // bytes of role-only chunks and empty deltas held back before the first byte
	relayBuffer     = 16 << 10               // bytes of a relay's buffer at first: one read of the engine is one write to the client
	maxPooledBody   = 1 << 20                // bytes of a prompt's memory; larger memory is left to the garbage collector
	kernelBuffer    = 256 << 10              // socket buffers: what a stuck reader can pile up
	progressEvery   = 500 * time.Millisecond // between two Progress messages of a stream; the contract's least is 50 ms
	maxRetryAfter   = 60                     // seconds
	maxRequestID    = 128                    // bytes of x-request-id
	unknownTokens   = 120                    // output tokens assumed for the deadline of an answer that is not streamed
)

func (l Limits) withDefaults() Limits {
	orDefault(&l.MaxBody, DefaultMaxBody)
	orDefault(&l.MaxHeaderBytes, DefaultMaxHeaderBytes)
	orDefault(&l.MaxHeaderFields, DefaultMaxHeaderFields)
	orDefault(&l.MaxConns, DefaultMaxConns)
	orDefault(&l.MaxQueueTokens, DefaultMaxQueueTokens)
	orDefault(&l.IndexBytes, DefaultIndexBytes)
	orDefault(&l.TokenizeBytes, DefaultTokenizeBytes)
	return l
}

// bodyBudget is the memory of all bodies together, for a process with a memory limit (0: none): 512 MiB with the default MaxBody.
func (l Limits) bodyBudget(memory int64) int64 {
	if l.BodyBytes > 0 {
		return l.BodyBytes
	}
	budget := bodyShare * max(l.MaxBody, DefaultMaxBody)
	if memory > 0 {
		budget = min(budget, memory/memoryShare)
	}
	return max(budget, leastBodies*l.MaxBody)
}

// wholeBody is how long a body of up to wholeBody bytes may take.
func (t Timers) wholeBody() time.Duration { return wholeWindows * t.BodyStall }

func (t Timers) withDefaults() Timers {
	orDefault(&t.ReadHeader, DefaultReadHeader)
	orDefault(&t.Idle, DefaultIdle)
	orDefault(&t.BodyStall, DefaultBodyStall)
	orDefault(&t.SlowReader, DefaultSlowReader)
	orDefault(&t.Admit, DefaultAdmit)
	orDefault(&t.LateTicket, DefaultLateTicket)
	orDefault(&t.Doubt, DefaultDoubt)
	orDefault(&t.FullRecheck, DefaultFullRecheck)
	orDefault(&t.Tail, DefaultTail)
	orDefault(&t.Dial, DefaultDial)
	orDefault(&t.IdleOwned, DefaultIdleOwned)
	orDefault(&t.IdleAttached, DefaultIdleAttached)
	orDefault(&t.BudgetWindow, DefaultBudgetWindow)
	orDefault(&t.Queue, DefaultQueue)
	orDefault(&t.FirstToken, DefaultFirstToken)
	orDefault(&t.BetweenToken, DefaultBetweenToken)
	orDefault(&t.Outage, DefaultOutage)
	orDefault(&t.Reservation, DefaultReservation)
	return t
}

func orDefault[T int | int64 | time.Duration](v *T, value T) {
	if *v <= 0 {
		*v = value
	}
}
