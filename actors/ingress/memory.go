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
)

// Shares of the memory limit, in percent.
const (
	fullShare     = 85 // above it new requests are refused
	overfullShare = 95 // above it new connections are refused too
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

// refusesConns reports whether new connections are closed at once.
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
