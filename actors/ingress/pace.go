package ingress

import (
	"fmt"
	"os"
	"time"
)

// deadlineSteps is how often the read deadline is moved within a window; the deadline is exact to
// 1/deadlineSteps of it.
const deadlineSteps = 30

// bodyPace enforces the least rates of an upload: bodyRate over each window, and wholeBody bytes within whole
// since the upload began. So a body of up to wholeBody bytes must be complete after whole, and the least rate
// grows with the memory that a body takes.
type bodyPace struct {
	window time.Duration
	whole  time.Duration
	began  time.Time // start of the body
	since  time.Time // start of the current window
	had    int       // bytes that had arrived by then
}

// isTooSlow reports whether n bytes by now are too few.
func (p *bodyPace) isTooSlow(now time.Time, n int) bool {
	if passed := now.Sub(p.since); passed >= p.window {
		if float64(n-p.had) < bodyRate*passed.Seconds() {
			return true
		}
		p.since, p.had = now, n
	}
	passed := now.Sub(p.began)
	return passed >= p.whole && float64(n) < wholeBody*passed.Seconds()/p.whole.Seconds()
}

// deadline is when the next byte must arrive after the n bytes that have arrived by now.
func (p *bodyPace) deadline(now time.Time, n int) time.Time {
	due, last := now.Add(p.window), p.began.Add(p.whole)
	if n < wholeBody && last.Before(due) {
		return last
	}
	return due
}

// errSlowReader is the cause when a client takes its answer too slowly, although no single write has exceeded
// its deadline.
var errSlowReader = fmt.Errorf("the client reads fewer than %d bytes per second: %w", bodyRate,
	os.ErrDeadlineExceeded)

// readerPace enforces bodyRate for a client that reads its answer, as bodyPace does for uploads: if the
// ingress has waited for the client for more than half of a window, the client must have taken bodyRate over
// the time of the wait. Each write has a deadline of its own, so without this rule a client that takes a few
// bytes a minute would keep its place on a rank for hours. A slow engine does not count as waiting. The zero
// value is the beginning of an answer.
type readerPace struct {
	since  time.Time     // start of the current window; zero: none has begun
	began  time.Time     // start of the current write; zero: none
	waited time.Duration // time in writes in this window
	bytes  int           // written in this window
}

// beginWrite records a write of n bytes; false: the client was too slow in the window that has ended.
func (p *readerPace) beginWrite(now time.Time, n int, window time.Duration) bool {
	isTooSlow := false
	if passed := now.Sub(p.since); p.since.IsZero() || passed >= window {
		isTooSlow = 2*p.waited > passed && float64(p.bytes) < bodyRate*p.waited.Seconds()
		*p = readerPace{since: now}
	}
	p.began = now
	p.bytes += n
	return !isTooSlow
}

// endWrite records that the current write, if any, is over.
func (p *readerPace) endWrite(now time.Time) {
	if !p.began.IsZero() {
		p.waited += now.Sub(p.began)
		p.began = time.Time{}
	}
}
