package ingress

import (
	"fmt"
	"os"
	"time"
)

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
