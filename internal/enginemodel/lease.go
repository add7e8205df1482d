package enginemodel

import "time"

// Lease times, as parts of Config.Lease.
const (
	// DefaultLease is how long the blocks of an ended request are kept for another engine.
	DefaultLease = 30 * time.Second
	// HeartbeatsPerLease is how often in the time of a lease a waiting reader says that it still waits.
	HeartbeatsPerLease = 6
)

// extension is how long a lease runs at least after a heartbeat.
func extension(lease time.Duration) time.Duration { return lease * 2 / 3 }

// leases are the blocks of ended requests that another engine may still read, by the name that the request
// gave. They count as used until they are read, or until their time is over.
type leases struct {
	lasts  time.Duration
	byName map[string]lease
	next   time.Duration // no lease ends before it
	blocks int
}

type lease struct {
	blocks []int32
	ends   time.Duration
}

func newLeases(lasts time.Duration) leases {
	return leases{lasts: lasts, byName: map[string]lease{}, next: Never}
}

func (l *leases) keep(name string, blocks []int32, now time.Duration) {
	e := lease{blocks: blocks, ends: now + l.lasts}
	l.byName[name] = e
	l.blocks += len(blocks)
	l.next = min(l.next, e.ends)
}

// extend is a heartbeat; a lease that is gone stays gone.
func (l *leases) extend(name string, now time.Duration) {
	if e, ok := l.byName[name]; ok {
		e.ends = max(e.ends, now+extension(l.lasts))
		l.byName[name] = e
	}
}

// remove ends a lease and returns its blocks; false = there is none of that name.
func (l *leases) remove(name string) ([]int32, bool) {
	e, ok := l.byName[name]
	delete(l.byName, name)
	l.blocks -= len(e.blocks)
	return e.blocks, ok
}

// over lists the leases whose time is over at now.
func (l *leases) over(now time.Duration) (names []string) {
	if now < l.next {
		return nil
	}
	l.next = Never
	for name, e := range l.byName {
		if e.ends <= now {
			names = append(names, name)
			continue
		}
		l.next = min(l.next, e.ends)
	}
	return names
}
