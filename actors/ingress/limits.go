package ingress

import (
	"time"

	"github.com/dpserve/dpserve/routing/kvindex"
)

// Limits bound what clients may send and what an ingress holds. A zero field means its default.
type Limits struct {
	MaxBody int64 // bytes of a request's body; more is 413
	// memory of all bodies together, until their answers begin; more is 503. 0: bodyBudget
	BodyBytes       int64
	MaxHeaderBytes  int // request line and header fields; more is 431
	MaxHeaderFields int // header fields; more is 431
	MaxConns        int // client connections; more wait in the kernel's backlog
	// estimated prompt tokens in one application's queue; more is 503, except for the only request in the
	// queue
	MaxQueueTokens int64
	IndexBytes     int // memory of one application's index of its ranks' caches
	TokenizeBytes  int // memory of one application's tokenized prompts
}

// Defaults of Limits.
const (
	DefaultMaxBody         = 16 << 20
	LargestMaxBody         = 64 << 20 // for requests with images; other nodes accept no larger ones
	defaultMaxHeaderBytes  = 64 << 10
	defaultMaxHeaderFields = 100
	defaultMaxConns        = 16_000
	defaultMaxQueueTokens  = 4 << 20
	defaultIndexBytes      = kvindex.DefaultBytes
	defaultTokenizeBytes   = 64 << 20
)

// Timers of an ingress. A zero field means its default. Those of an application are in its
// app.yaml.
type Timers struct {
	ReadHeader time.Duration // for a request's header
	Idle       time.Duration // a client connection without a request
	// longest wait for the next byte of a body, and the window of bodyRate; else 408
	BodyStall  time.Duration
	SlowReader time.Duration // for one write to a client, and the window over which it must take bodyRate
	Admit      time.Duration // for a DPServer's reply; after it the rank counts as overloaded
	LateTicket time.Duration // how long an abandoned admission is waited for, to return its ticket
	Doubt      time.Duration // how long a node gets no requests after its data port was not reached
	// how long a rank that refused as full counts as full if its stream reports nothing new
	FullRecheck time.Duration
	// for the end of an engine's body after [DONE], so that its connection can be reused
	Tail         time.Duration
	Dial         time.Duration // for a connection to an engine
	IdleOwned    time.Duration // idle connections to engines that dpserve started (their keep-alive is 120 s)
	IdleAttached time.Duration // idle connections to other engines: vLLM closes at 5 s
	BudgetWindow time.Duration // window of the retry budget
	Outage       time.Duration // how long requests wait for attached engines while none of them is ready
	Reservation  time.Duration // after which an unused reservation of the router's own API ends
}

// Defaults of Timers.
const (
	defaultReadHeader   = 10 * time.Second
	defaultIdle         = 120 * time.Second
	defaultBodyStall    = 30 * time.Second
	defaultSlowReader   = 60 * time.Second
	defaultAdmit        = 5 * time.Second
	defaultLateTicket   = 10 * time.Second
	defaultDoubt        = 500 * time.Millisecond
	defaultFullRecheck  = time.Second
	defaultTail         = time.Second
	defaultDial         = 5 * time.Second
	defaultIdleOwned    = 100 * time.Second
	defaultIdleAttached = 4 * time.Second
	defaultBudgetWindow = 10 * time.Second
	defaultOutage       = 5 * time.Second
	defaultReservation  = 300 * time.Second
)

// Numbers that cannot be configured.
const (
	// ranks that may refuse one request at admission; a refusal is no attempt, because no engine was asked
	maxRefusals = 16
	// bytes per second that a client must send of a body, or take of an answer, over a window
	bodyRate = 1024
	// bytes of a body that must arrive within wholeWindows windows of BodyStall (2 min)
	wholeBody    = 16 << 20
	wholeWindows = 4       // see wholeBody
	bodyShare    = 32      // the memory of all bodies holds this many of the largest …
	memoryShare  = 4       // … but at most this part (1/4) of a memory limit …
	leastBodies  = 4       // … and at least this many of the largest
	budgetShare  = 10      // one retry per this many requests …
	budgetFloor  = 20      // … or this many retries per window
	maxWhole     = 1 << 20 // bytes of an answer that is held before its header is sent
	// bytes of role-only chunks and empty deltas held back before the first byte
	maxHeld = 16 << 10
	// initial bytes of a relay's buffer: one read of the engine is one write to the client
	relayBuffer   = 16 << 10
	maxPooledBody = 1 << 20 // bytes of a prompt's memory that is kept for reuse
	// socket buffers: the most that collects for a client that does not read
	kernelBuffer = 256 << 10
	// between two Progress messages of a stream; DPServers accept 50 ms or more
	progressEvery = 500 * time.Millisecond
	maxRetryAfter = 60  // seconds
	maxRequestID  = 128 // bytes of x-request-id
	// output tokens assumed for the deadline of an answer that is not streamed
	unknownTokens = 120
)

func (l Limits) withDefaults() Limits {
	orDefault(&l.MaxBody, DefaultMaxBody)
	orDefault(&l.MaxHeaderBytes, defaultMaxHeaderBytes)
	orDefault(&l.MaxHeaderFields, defaultMaxHeaderFields)
	orDefault(&l.MaxConns, defaultMaxConns)
	orDefault(&l.MaxQueueTokens, defaultMaxQueueTokens)
	orDefault(&l.IndexBytes, defaultIndexBytes)
	orDefault(&l.TokenizeBytes, defaultTokenizeBytes)
	return l
}

// bodyBudget is the memory of all bodies together, for a process with a memory limit (0: none). It is 512 MiB
// with the default MaxBody.
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

// wholeBody is the time for a body of up to wholeBody bytes.
func (t Timers) wholeBody() time.Duration { return wholeWindows * t.BodyStall }

func (t Timers) withDefaults() Timers {
	orDefault(&t.ReadHeader, defaultReadHeader)
	orDefault(&t.Idle, defaultIdle)
	orDefault(&t.BodyStall, defaultBodyStall)
	orDefault(&t.SlowReader, defaultSlowReader)
	orDefault(&t.Admit, defaultAdmit)
	orDefault(&t.LateTicket, defaultLateTicket)
	orDefault(&t.Doubt, defaultDoubt)
	orDefault(&t.FullRecheck, defaultFullRecheck)
	orDefault(&t.Tail, defaultTail)
	orDefault(&t.Dial, defaultDial)
	orDefault(&t.IdleOwned, defaultIdleOwned)
	orDefault(&t.IdleAttached, defaultIdleAttached)
	orDefault(&t.BudgetWindow, defaultBudgetWindow)
	orDefault(&t.Outage, defaultOutage)
	orDefault(&t.Reservation, defaultReservation)
	return t
}

func orDefault[T int | int64 | time.Duration](v *T, value T) {
	if *v <= 0 {
		*v = value
	}
}
