package ingress

import (
	"log/slog"
	"math"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/internal/engine/openai"
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
	IndexBytes      int // memory of one application's index of its ranks' caches
	TokenizeBytes   int // memory of one application's tokenized prompts
}

// Defaults of Limits.
const (
	DefaultMaxBody  = 16 << 20
	LargestMaxBody  = 1 << 30 // for requests with films; other nodes accept no larger ones
	DefaultMaxConns = 16_000
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

// Defaults of Timers that tests wait for.
const (
	defaultSlowReader = 60 * time.Second
	defaultOutage     = 5 * time.Second
)

// Numbers that cannot be configured.
const (
	// ranks that may refuse one request at admission; a refusal is no attempt, because no engine was asked
	maxRefusals = 16
	// bytes per second that a client must send of a body, or take of an answer, over a window
	bodyRate = 1024
	// bytes of a body that must arrive within wholeWindows windows of BodyStall (2 min)
	wholeBody    = 16 << 20
	wholeWindows = 4        // see wholeBody
	bodyShare    = 32       // the memory of all bodies holds this many of the largest …
	sharedBody   = 64 << 20 // … but a MaxBody above this counts as this …
	memoryShare  = 4        // … and at most this part (1/4) of a memory limit …
	leastBodies  = 4        // … and at least this many of the largest
	budgetShare  = 10       // one retry per this many requests …
	budgetFloor  = 20       // … or this many retries per window
	maxWhole     = 1 << 20  // bytes of an answer that is held before its header is sent
	maxWords     = 64 << 10 // bytes of an engine's error that is kept until no rank is left to ask
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
	orDefault(&l.MaxHeaderBytes, 64<<10)
	orDefault(&l.MaxHeaderFields, 100)
	orDefault(&l.MaxConns, DefaultMaxConns)
	orDefault(&l.IndexBytes, kvindex.DefaultBytes)
	orDefault(&l.TokenizeBytes, 64<<20)
	return l
}

// bodyBudget is the memory of all bodies together, for a process with a memory limit (0: none). It is 512 MiB
// with the default MaxBody, and at most 2 GiB.
func (l Limits) bodyBudget(memory int64) int64 {
	if l.BodyBytes > 0 {
		return l.BodyBytes
	}
	most := min(l.MaxBody, sharedBody)
	budget := bodyShare * max(most, DefaultMaxBody)
	if memory > 0 {
		budget = min(budget, memory/memoryShare)
	}
	return max(budget, leastBodies*most)
}

// heldBody is the largest body that is held: half of the budget of all bodies, because a buffer that grows is
// there twice.
func (l Limits) heldBody(budget int64) int64 { return min(l.MaxBody, max(sharedBody, budget/2)) }

// queueBytesPerToken is how many bytes of the memory of bodies stand for one token of a queue, where the file
// does not set max_queued_tokens: 4 bytes of text, and as many for a body that is cut or held twice.
const queueBytesPerToken = 8

// queueTokens is the default of max_queued_tokens for a budget of bodies.
func queueTokens(budget int64) int64 { return budget / queueBytesPerToken }

// wholeBody is the time for a body of up to wholeBody bytes.
func (t Timers) wholeBody() time.Duration { return wholeWindows * t.BodyStall }

func (t Timers) withDefaults() Timers {
	orDefault(&t.ReadHeader, 10*time.Second)
	orDefault(&t.Idle, 120*time.Second)
	orDefault(&t.BodyStall, 30*time.Second)
	orDefault(&t.SlowReader, defaultSlowReader)
	orDefault(&t.Admit, 5*time.Second)
	orDefault(&t.LateTicket, 10*time.Second)
	orDefault(&t.Doubt, 500*time.Millisecond)
	orDefault(&t.FullRecheck, time.Second)
	orDefault(&t.Tail, time.Second)
	orDefault(&t.Dial, 5*time.Second)
	orDefault(&t.IdleOwned, 100*time.Second)
	orDefault(&t.IdleAttached, 4*time.Second)
	orDefault(&t.BudgetWindow, 10*time.Second)
	orDefault(&t.Outage, defaultOutage)
	orDefault(&t.Reservation, 300*time.Second)
	return t
}

func orDefault[T int | int64 | time.Duration](v *T, value T) {
	if *v <= 0 {
		*v = value
	}
}

// Shares of the memory limit, in percent.
const (
	fullShare     = 85 // above it new requests are refused
	overfullShare = 95 // above it new connections are refused too, but for probeConns
)

const (
	memorySampleEvery = 100 * time.Millisecond // all requests of this time share one sample
	// if requests are refused this long without a collection, one is started
	collectAfter = 5 * time.Second
)

// pressure is how near the process is to its memory limit.
type pressure int32

const (
	pressureNone pressure = iota
	pressureFull
	pressureOverfull
)

// pressureOf is the pressure of a use under a limit; a limit of 0 means none.
func pressureOf(used, limit int64) pressure {
	switch share := float64(used) / float64(limit) * 100; {
	case limit <= 0 || share <= fullShare:
		return pressureNone
	case share <= overfullShare:
		return pressureFull
	default:
		return pressureOverfull
	}
}

// memoryUse is what the process needs, in bytes: what the last garbage collection has left, and what is not
// on the heap. Garbage is none of it: the runtime lets it grow up to the limit and frees it there.
type memoryUse struct {
	bytes       int64
	collections uint64 // garbage collections since the process began
}

// readMemory reads the runtime's own metrics. It takes some microseconds and stops no other goroutine.
func readMemory() memoryUse {
	s := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"},
		{Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
		{Name: "/memory/classes/heap/released:bytes"},
		{Name: "/gc/cycles/total:gc-cycles"},
	}
	metrics.Read(s)
	n := func(i int) int64 {
		return int64(min(s[i].Value.Uint64(), math.MaxInt64))
	}
	heap := n(2) + n(3) + n(4) + n(5)
	return memoryUse{bytes: n(0) + n(1) - heap, collections: s[6].Value.Uint64()}
}

// memoryLimit is the runtime's memory limit (GOMEMLIMIT); 0: none.
func memoryLimit() int64 {
	if limit := debug.SetMemoryLimit(-1); limit < math.MaxInt64 {
		return limit
	}
	return 0
}

// memoryGuard keeps the process below its memory limit, where the runtime would spend its time on garbage
// collection and the kernel would kill the process. It refuses new requests first, then new connections.
// Requests trigger its samples, at most one per memorySampleEvery, so an idle node does nothing. Safe for
// concurrent use.
type memoryGuard struct {
	limit   int64 // bytes; 0: none, and the guard never refuses
	read    func() memoryUse
	collect func() // starts a garbage collection and does not wait for it
	log     *slog.Logger
	base    time.Time

	next  atomic.Int64 // time of the next sample, in ns since base
	level atomic.Int32 // pressure of the last sample
	used  atomic.Int64 // bytes of the last sample

	mu          sync.Mutex
	collections uint64        // number of collections when it last changed
	counted     time.Duration // when it last changed, since base
}

// pressure is the current pressure, or that of the last sample.
func (g *memoryGuard) pressure(now time.Time) pressure {
	if g.limit == 0 {
		return pressureNone
	}
	if at := now.Sub(g.base); int64(at) >= g.next.Load() && g.mu.TryLock() {
		g.sample(at)
		g.next.Store(int64(at + memorySampleEvery))
		g.mu.Unlock()
	}
	return pressure(g.level.Load())
}

// sample reads and judges the memory in use. While requests are refused, little garbage is made, so the
// runtime may not collect for minutes and would not notice that memory is free; then sample asks for a
// collection. The caller holds mu.
func (g *memoryGuard) sample(at time.Duration) {
	use := g.read()
	g.used.Store(use.bytes)
	level := pressureOf(use.bytes, g.limit)
	if old := pressure(g.level.Swap(int32(level))); old != level {
		g.report(level, use.bytes)
	}
	switch {
	case use.collections != g.collections:
		g.collections, g.counted = use.collections, at
	case level != pressureNone && at-g.counted >= collectAfter:
		g.counted = at
		g.collect()
	}
}

// report logs a change of the pressure.
func (g *memoryGuard) report(level pressure, used int64) {
	attrs := []any{slog.Int64("used_bytes", used), slog.Int64("limit_bytes", g.limit)}
	switch level {
	case pressureNone:
		g.log.Info("memory is below its limit again, requests are served", attrs...)
	case pressureFull:
		g.log.Warn("memory is near its limit, new requests are refused", attrs...)
	case pressureOverfull:
		g.log.Warn("memory is at its limit, new requests and connections are refused", attrs...)
	}
}

// refusesConns reports whether only probeConns new connections are taken.
func (g *memoryGuard) refusesConns() bool { return g.pressure(time.Now()) == pressureOverfull }

// refuse is the answer to a request that arrives near the memory limit; nil: the request may go on.
func (g *memoryGuard) refuse(now time.Time) *failure {
	if g.pressure(now) == pressureNone {
		return nil
	}
	f := newFailure(openai.CodeOverloaded,
		"this node is near its memory limit; try again later").withRetryAfter(1)
	f.cause = "memory_limit"
	return f
}

// budgetSlots divide the window. One additional slot covers the slot that is still filling, so that no window
// of the full length holds more retries than allowed.
const budgetSlots = 10 + 1

// budget limits retries to a share of the requests over a sliding window, with a floor, so that retries
// cannot multiply an outage. Safe for concurrent use. The time is an argument.
type budget struct {
	slot time.Duration // length of one slot

	mu       sync.Mutex
	now      int64 // number of the newest slot
	requests [budgetSlots]int
	retries  [budgetSlots]int
}

func newBudget(window time.Duration) *budget {
	return &budget{slot: max(window/(budgetSlots-1), 1)}
}

// request counts an incoming request.
func (b *budget) request(at time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests[b.advance(at)]++
}

// draw takes one retry from the budget; it returns false if the budget is empty.
func (b *budget) draw(at time.Duration) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := b.advance(at)
	if sumSlots(&b.retries) >= max(sumSlots(&b.requests)/budgetShare, budgetFloor) {
		return false
	}
	b.retries[i]++
	return true
}

// advance clears the slots that have left the window and returns the current one. The caller holds mu.
func (b *budget) advance(at time.Duration) int {
	n := int64(at / b.slot)
	for i := max(b.now+1, n-budgetSlots+1); i <= n; i++ {
		b.requests[i%budgetSlots], b.retries[i%budgetSlots] = 0, 0
	}
	b.now = max(b.now, n)
	return int(b.now % budgetSlots)
}

func sumSlots(slots *[budgetSlots]int) int {
	n := 0
	for _, v := range slots {
		n += v
	}
	return n
}
