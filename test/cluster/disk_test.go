package cluster_test

import (
	"slices"
	"time"
)

// A write of a hung disk takes until the hang is over. hashicorp/raft writes in its main loop, so a node that
// waits for a write answers nothing but heartbeats, and a leader sends nothing but heartbeats: those have
// goroutines of their own.
const (
	hangMax = 30 * time.Second
	// as diskLimit in cluster: a write that takes longer ends this node's run of raft
	writeLimit  = 1500 * time.Millisecond
	faultPause  = time.Second // as in cluster: between a run that ended and the next one
	maxMainLoop = 1024        // messages and timers that wait for raft's main loop
)

// hangs says whether writes do not return now.
func (d *disk) hangs(now time.Duration) bool { return now < d.hungTill }

// write does something when what was written is on disk. While the disk hangs the main loop waits for that.
func (r *raft) write(then func()) {
	if !r.hangs(r.c.now) {
		r.c.after(r.m.process, r.c.span(0, fsyncMax), func() {
			if !r.over {
				then()
			}
		})
		return
	}
	r.writing++
	number := r.writing
	r.stuck = true
	r.c.log("write hangs", r.m.name)
	r.c.after(r.m.process, r.hungTill-r.c.now, func() { r.written(number, then) })
	if r.c.cfg.mutant != noWriteLimit {
		r.c.after(r.m.process, writeLimit, func() {
			if r.stuck && r.writing == number {
				r.end()
			}
		})
	}
}

// written is the end of a write that hung: the main loop takes up what has waited.
func (r *raft) written(number int, then func()) {
	if r.over || r.writing != number {
		return
	}
	r.stuck = false
	then()
	for len(r.waiting) > 0 && !r.stuck && !r.over {
		next := r.waiting[0]
		r.waiting = r.waiting[1:]
		next()
	}
}

// main does something in the main loop: at once, or when the write that hangs has returned.
func (r *raft) main(do func()) {
	switch {
	case r == nil || r.over:
	case r.stuck && len(r.waiting) < maxMainLoop:
		r.waiting = append(r.waiting, do)
	case !r.stuck:
		do()
	}
}

// after is a timer of the main loop.
func (r *raft) after(d time.Duration, do func()) {
	r.c.after(r.m.process, d, func() { r.main(do) })
}

// end ends this run of raft after a write that took too long. The node leaves consensus until its disk works
// again. No machine can lead in the place of an only voter, so the only voter goes on prolonging leases.
func (r *raft) end() {
	r.c.log("run ends", r.m.name)
	r.m.holds = r.m.shell != nil && r.ready && r.isOnlyVoter()
	if r.role != follower {
		r.role = follower
		r.stepDown()
	}
	r.over, r.stuck, r.waiting = true, false, nil
	r.leads = -1
	r.m.led()
	r.again()
}

func (r *raft) isOnlyVoter() bool {
	all, _ := r.members()
	return !slices.ContainsFunc(all, func(v voter) bool { return v.votes && v.i != r.m.i })
}

// again begins another run over what the disk has, as soon as the disk works.
func (r *raft) again() {
	m := r.m
	r.c.after(m.process, max(faultPause, m.disk.hungTill-r.c.now), func() {
		if m.disk.hangs(r.c.now) {
			r.again()
			return
		}
		m.disk.lose(r.c.sim)
		m.raft = newRaft(m)
		m.holds = m.holds && m.raft.isOnlyVoter()
		m.led()
	})
}

// lose drops a part of what was not on disk for certain, when a run or its process ends.
func (d *disk) lose(s *sim) {
	if d.synced < d.last() {
		kept := d.synced + s.IntN(d.last()-d.synced+1)
		d.log, d.synced = d.log[:kept-d.base:kept-d.base], kept
	}
}
