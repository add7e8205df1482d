package ingress

import (
	"fmt"
	"os"
	"time"
)

// errSlowReader is a client that takes its answer too slowly, although no write of it has run into its deadline.
var errSlowReader = fmt.Errorf("the client reads fewer than %d bytes per second: %w", bodyRate, os.ErrDeadlineExceeded)

// readerPace holds a client that reads its answer to bodyRate, as uploads are: where the ingress has waited for the client for more
// than half of a window, the client must have taken bodyRate over the time of the wait. Without it a client that takes a few bytes a
// minute would keep its place on a rank for hours, since each write has a deadline of its own. A slow engine is not waited for here.
// The zero value is at the beginning of an answer.
type readerPace struct {
	since  time.Time     // of the present window; zero: none has begun
	began  time.Time     // of a write; zero: none runs
	waited time.Duration // what writes have taken in this window
	bytes  int           // that they have written
}

// beginWrite notes a write of n bytes; false: the client was too slow over the window that has ended.
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

// endWrite notes that the last write is over, if one runs.
func (p *readerPace) endWrite(now time.Time) {
	if !p.began.IsZero() {
		p.waited += now.Sub(p.began)
		p.began = time.Time{}
	}
}
