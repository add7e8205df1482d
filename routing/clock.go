package routing

import "time"

const (
	// clockMemory is how long the best sample of a rank's clock stands before a newer one takes its place:
	// clocks drift.
	clockMemory = 30 * time.Second
	// clockSlack is what two samples of one clock may contradict each other by, beside what they are unsure
	// by.
	clockSlack = 2 * time.Millisecond
	// oldestRecord is the age above which a record's time is not believed.
	oldestRecord = 10 * time.Second
	// lagMemory is how many records the lag of a rank's stream is the mean of, about.
	lagMemory = 8
)

// rankClock places what a rank says of the time on the view's clock. The two have nothing in common, and
// either may jump. An own request is the sample: the rank admits it after it was dispatched and before the
// ticket was here.
//
// Until there is a sample, and after a contradiction until the next one, records count as of their arrival.
type rankClock struct {
	ahead time.Duration // the rank's clock minus the view's
	doubt time.Duration // by how much ahead may be wrong
	taken time.Duration // when the sample was, on the view's clock
	known bool
}

// learn takes a sample: at, on the rank's clock, was between from and to.
func (c *rankClock) learn(at, from, to, now time.Duration) {
	doubt := max(0, to-from) / 2
	ahead := at - (from + doubt)
	apart := max(ahead-c.ahead, c.ahead-ahead)
	if !c.known || doubt <= c.doubt || now-c.taken > clockMemory || apart > doubt+c.doubt+clockSlack {
		*c = rankClock{ahead: ahead, doubt: doubt, taken: now, known: true}
	}
}

// place is the instant of a record on the view's clock, at most now. ok is false if it can only be guessed:
// it is now then.
func (c *rankClock) place(at, now time.Duration) (when time.Duration, ok bool) {
	if at == 0 || !c.known {
		return now, false
	}
	when = at - c.ahead
	if when > now+c.doubt+clockSlack || when < now-oldestRecord { // one of the clocks has jumped
		c.known = false
		return now, false
	}
	return max(1, min(when, now)), true
}
