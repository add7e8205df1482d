package cluster_test

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// network carries messages between machines. A cut and a loss cost what they cost a TCP connection: the
// message is sent again, after 200 ms and twice that each time, until its life is over. drop loses without
// that, as a reset connection does.
type network struct {
	cuts    [][]bool // from, to
	changed [][]time.Duration
	loss    float64
	drop    float64
	double  float64       // of what may come twice
	lag     float64       // of messages that take up to maxLag more, and are overtaken
	maxLag  time.Duration // at most a second
}

// Times of a network without faults.
const (
	latencyMin   = 200 * time.Microsecond
	latencyMax   = 2 * time.Millisecond
	retransmit   = 200 * time.Millisecond
	refusalAfter = 2 * latencyMax
)

func newNetwork(n int) *network {
	net := &network{maxLag: 400 * time.Millisecond}
	for range n {
		net.cuts = append(net.cuts, make([]bool, n))
		net.changed = append(net.changed, make([]time.Duration, n))
	}
	return net
}

// message is on its way.
type message struct {
	from, to *machine
	until    time.Duration // end of its life
	tries    int
	do       func()
}

// send carries a message. It comes once, or twice if it may, or never.
func (c *cluster) send(from, to *machine, life time.Duration, twice bool, do func()) {
	if from == to {
		c.arrive(to.process, 0, do)
		return
	}
	if c.chance(c.net.drop) {
		return
	}
	c.try(&message{from: from, to: to, until: c.now + life, do: do})
	if twice && c.chance(c.net.double) {
		c.try(&message{from: from, to: to, until: c.now + life, do: do})
	}
}

func (c *cluster) try(m *message) {
	if m.from.shuns(m.to) || m.to.shuns(m.from) {
		return
	}
	if c.net.cuts[m.from.i][m.to.i] || c.chance(c.net.loss) {
		wait := retransmit << min(m.tries, 4)
		m.tries++
		if c.now+wait < m.until {
			c.after(nil, wait, func() { c.try(m) })
		}
		return
	}
	d := c.span(latencyMin, latencyMax)
	if c.chance(c.net.lag) {
		d += c.span(0, c.net.maxLag)
	}
	c.arrive(m.to.process, d, m.do)
}

// farewell is how long the connections of a removed machine live on.
const farewell = time.Second

// shuns says whether a machine's copy of the state has shown for a while that the other one was removed:
// their node ports refuse each other.
func (m *machine) shuns(o *machine) bool {
	since, gone := m.gone[o.uid]
	return gone && m.alive && m.c.now-since > farewell
}

// set cuts a way, or heals it.
func (c *cluster) set(from, to *machine, cut bool) {
	if c.net.cuts[from.i][to.i] != cut {
		c.net.cuts[from.i][to.i] = cut
		c.net.changed[from.i][to.i] = c.now
		c.log("cut", from.name, to.name, cut)
	}
}

// Errors of calls, as package remote returns them.
var (
	errLate        = problem.New(problem.Timeout, "no answer: %w", context.DeadlineExceeded)
	errUnreachable = problem.New(problem.Unavailable, "unreachable")
	errNotLeader   = problem.New(problem.Unavailable, "not the leader")
	errUnknown     = problem.New(problem.Unavailable, "the outcome is not known")
)

// call asks another machine. done is called once, unless the caller ends: with the answer, or with an error
// after limit, or at once if nobody listens there. twice: the question may arrive a second time.
func call[R any](c *cluster, from, to *machine, limit time.Duration, twice bool,
	ask func(answer func(R, error)), done func(R, error),
) {
	var none R
	over := false
	finish := func(r R, err error) {
		if !over {
			over = true
			done(r, err)
		}
	}
	gen := to.gen
	c.after(from.process, limit, func() { finish(none, errLate) })
	if !to.alive {
		if !to.dark && !c.net.cuts[from.i][to.i] && !c.net.cuts[to.i][from.i] { // its kernel answers
			c.after(from.process, refusalAfter, func() { finish(none, errUnreachable) })
		}
		return
	}
	sent, callerGen := c.now, from.gen
	c.send(from, to, limit, twice, func() {
		// A question that its asker has given up is withdrawn: it is looked at only by who wakes and finds
		// both.
		if gen != to.gen || c.now-sent > limit && c.IntN(4) > 0 {
			return
		}
		ask(func(r R, err error) {
			if from.gen == callerGen {
				c.send(to, from, limit, false, func() { finish(r, err) })
			}
		})
	})
}

// inOrder is the reader's end of a stream: what overtakes waits, as TCP has it. A stream that has lost
// something says nothing more.
type inOrder struct {
	last  int
	early map[int]func()
}

func (o *inOrder) take(seq int, do func()) {
	if o.early == nil {
		o.early = map[int]func(){}
	}
	o.early[seq] = do
	for next := o.early[o.last+1]; next != nil; next = o.early[o.last+1] {
		o.last++
		delete(o.early, o.last)
		next()
	}
}
