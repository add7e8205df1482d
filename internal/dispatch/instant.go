package dispatch

import (
	"time"

	"github.com/dpserve/dpserve/routing"
)

// Transfer parameters name memory of a prefill engine, which may give that memory to another prompt when its
// lease has ended. Neither engine notices: the decode engine answers 200 with a wrong text. So the age of
// parameters must never be underestimated. The proxy learns of a prefill's answer when it reads it, and that
// may be much later than it came if the process stood still meanwhile.

const (
	// WatchPeriod is how often the process must call Watch.At.
	WatchPeriod = 250 * time.Millisecond
	// maxGap is how long the process may be silent before it counts as having stood still. It is well within
	// the margin of a lease.
	maxGap = 2 * time.Second
)

// Instant is a time with what is known about the process.
type Instant struct {
	// since an arbitrary origin, on a clock that goes on while the process is stopped or the machine sleeps
	Now time.Duration
	// when the process was last seen to run again after it had stood still for more than maxGap; 0 = never
	Gap time.Duration
}

// Watch notices that the process stood still: stopped by a signal, frozen with its machine, starved. There is
// one per process. The caller serializes its calls.
type Watch struct{ last, gap time.Duration }

// At is the present instant. It must be called at least every WatchPeriod, and for every Step.
func (w *Watch) At(now time.Duration) Instant {
	if now-w.last > maxGap {
		w.gap = now
	}
	w.last = max(w.last, now)
	return Instant{Now: w.last, Gap: w.gap}
}

// Fence bounds the use of one prefill's parameters: to its incarnation, to a deadline below its lease, and to
// a process that did not stand still since the prefill began.
type Fence struct {
	Prefill  routing.RankRef
	Since    time.Duration // when the prefill leg was started
	Deadline time.Duration // of the write
	// of the first byte of the answer to it: a decode engine may begin to read long after it has the request,
	// and nothing renews the lease before
	ReadBy time.Duration
}

// IsUsable reports whether the parameters may be sent at that instant. The Plan asks when it decides; its
// shell asks again directly before it writes the request.
func (f *Fence) IsUsable(at Instant) bool { return at.Now < f.Deadline && at.Gap <= f.Since }

func newFence(p routing.RankRef, since, answered, lease time.Duration) Fence {
	r := Usable(lease)
	return Fence{Prefill: p, Since: since, Deadline: answered + r, ReadBy: answered + (r+lease)/2}
}

const (
	// DefaultLease is how long vLLM keeps the blocks of an answered prefill leg (kv_lease_duration).
	DefaultLease = 30 * time.Second
	// leaseMargin is what the decode leg's way to its engine may take at the end of a lease.
	leaseMargin = 5 * time.Second
)

// Usable is how long after its begin a lease may be relied on: 25 s of 30 s, half of a shorter lease.
func Usable(lease time.Duration) time.Duration {
	if lease < DefaultLease {
		return lease / 2
	}
	return lease - leaseMargin
}
