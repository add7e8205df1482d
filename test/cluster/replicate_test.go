package cluster_test

import (
	"slices"
	"time"
)

// append puts an entry behind the log. It counts when it is on disk.
func (r *raft) append(e *entry) int {
	r.add(e)
	at, round := r.last(), r.round
	r.write(func() {
		if r.role != leader || r.round != round {
			return
		}
		r.synced = max(r.synced, at)
		r.match[r.m.i] = r.synced
		r.spread()
		r.advance()
	})
	return at
}

func (r *raft) add(e *entry) {
	r.log = append(r.log, e)
	if e.members != nil {
		r.conf, r.confAt = e.members, r.last()
	}
}

func (r *raft) beat(round int) {
	if r.over || r.role != leader || r.round != round {
		return
	}
	r.spread()
	r.c.after(r.m.process, r.c.span(raftBeat, 2*raftBeat), func() { r.beat(round) })
}

// spread sends everybody what is missing there, or a heartbeat.
func (r *raft) spread() {
	all, _ := r.members()
	for _, v := range all {
		if v.i != r.m.i {
			r.replicate(r.c.machines[v.i])
		}
	}
}

func (r *raft) replicate(to *machine) {
	prev := r.next[to.i] - 1
	a := &appendEntries{from: r.m, sent: r.c.now, term: r.term, round: r.round, commit: r.commit}
	if prev < r.base {
		a.snapshot = r.snap
	} else {
		a.prev, a.prevTerm = prev, r.termAt(prev)
		if end := min(r.synced, prev+maxEntries); end > prev {
			a.entries = slices.Clone(r.log[prev-r.base : end-r.base])
		}
	}
	r.c.send(r.m, to, raftLife, true, func() {
		if to.raft != nil {
			to.raft.beaten(a)
			to.raft.main(func() { to.raft.taken(a) })
		}
	})
}

// appendEntries is a leader's message.
type appendEntries struct {
	from     *machine
	sent     time.Duration
	term     uint64
	round    int
	prev     int
	prevTerm uint64
	entries  []*entry
	commit   int
	snapshot *snapshot // in place of entries that the leader's log has no more
}

// beaten answers the heartbeat in a message while the main loop waits for the disk.
func (r *raft) beaten(a *appendEntries) {
	if r.stuck && r.role == follower && a.term == r.term && a.from.i == r.leads {
		r.heard = r.c.now
		r.c.send(r.m, a.from, raftLife, true, func() { a.from.raft.alive(r.m.i, a) })
	}
}

// taken is a follower's part.
func (r *raft) taken(a *appendEntries) {
	if a.term < r.term {
		r.reply(a, false, 0)
		return
	}
	r.follow(a.term, a.from.i)
	r.heard = r.c.now
	if a.snapshot != nil {
		r.install(a)
		return
	}
	if !r.has(a.prev, a.prevTerm) {
		r.reply(a, false, min(r.last(), a.prev-1))
		return
	}
	for k, e := range a.entries {
		at := a.prev + k + 1
		if r.has(at, e.term) {
			continue
		}
		if at <= r.last() {
			if at <= r.commit {
				r.c.violate("%s drops the committed entry %d", r.m.name, at)
			}
			r.log, r.synced, r.conf, r.confAt = slices.Clone(r.log[:at-1-r.base]), min(r.synced, at-1), nil, 0
		}
		r.add(e)
	}
	match := a.prev + len(a.entries)
	acknowledge := func() {
		if r.has(match, a.lastTerm()) {
			r.flushed(match)
			r.learn(min(a.commit, match))
			r.reply(a, true, match)
		}
	}
	if match > r.synced && r.c.cfg.mutant != noFsync {
		r.write(acknowledge)
	} else {
		r.after(0, acknowledge)
	}
}

// flushed notes what is on disk.
func (r *raft) flushed(at int) {
	if r.c.cfg.mutant == noFsync {
		r.c.after(r.m.process, lazyFsync, func() { r.synced = max(r.synced, min(at, r.last())) })
		return
	}
	r.synced = max(r.synced, at)
}

// lazyFsync is how late a mutant writes what it has acknowledged.
const lazyFsync = 3 * time.Second

// lastTerm is the term of the last entry that a message vouches for.
func (a *appendEntries) lastTerm() uint64 {
	if len(a.entries) == 0 {
		return a.prevTerm
	}
	return a.entries[len(a.entries)-1].term
}

func (r *raft) reply(a *appendEntries, ok bool, at int) {
	term, to := r.term, a.from
	r.c.send(r.m, to, raftLife, true, func() {
		if to.raft != nil && term <= to.raft.term {
			to.raft.alive(r.m.i, a)
		}
		to.raft.main(func() { to.raft.replied(r.m.i, a, term, ok, at) })
	})
}

// alive notes a follower's answer, which comes to a goroutine of its own: it counts for the leader's lease,
// and for whoever asked whether this leads before the message was sent.
func (r *raft) alive(i int, a *appendEntries) {
	if r.over || r.role != leader || r.round != a.round {
		return
	}
	r.contact[i] = r.c.now
	r.confirmed[i] = max(r.confirmed[i], a.sent)
	r.verified()
}

// replied handles a follower's answer at the leader.
func (r *raft) replied(i int, a *appendEntries, term uint64, ok bool, at int) {
	if term > r.term {
		r.follow(term, -1)
		return
	}
	if r.role != leader || r.round != a.round {
		return
	}
	if !ok {
		r.next[i] = max(1, min(r.next[i]-1, at+1), r.match[i]+1)
		r.replicate(r.c.machines[i])
		return
	}
	if at > r.match[i] {
		r.match[i] = at
		r.next[i] = max(r.next[i], at+1)
		r.advance()
		if r.next[i] <= r.synced {
			r.replicate(r.c.machines[i])
		}
	}
}

// verifying waits until a majority has answered something that was sent later. cluster sends heartbeats of
// its own for that, so it does not wait for the disk.
type verifying struct {
	since time.Duration
	done  func(bool)
}

// verify asks a majority whether this still leads.
func (r *raft) verify(done func(bool)) {
	if r != nil && r.m.holds {
		done(true) // nobody else can lead
		return
	}
	if r == nil || r.over || r.role != leader {
		done(false)
		return
	}
	r.verifying = append(r.verifying, &verifying{r.c.now, done})
	r.spread()
	r.verified()
}

func (r *raft) verified() {
	for len(r.verifying) > 0 && !r.over {
		v := r.verifying[0]
		if !r.majority(func(i int) bool { return i == r.m.i || r.confirmed[i] >= v.since }) {
			return
		}
		r.verifying = r.verifying[1:]
		if !r.stuck {
			r.c.led = r.c.now
		}
		v.done(true)
	}
}
