package cluster_test

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

// Timers of consensus: those of package cluster for more than one voter, and hashicorp/raft's heartbeats, a
// tenth to a fifth of the first.
const (
	raftHeartbeat = time.Second
	raftElection  = time.Second
	raftLease     = 500 * time.Millisecond
	raftBeat      = raftHeartbeat / 10
	raftLife      = 2 * time.Second // of a message
	fsyncMax      = 8 * time.Millisecond
	maxEntries    = 64 // in one message
	roundsPerRun  = 1 << 20
)

// entry is one entry of the log: a command, a configuration, or neither (a new leader's first).
type entry struct {
	term    uint64
	command *state.Command
	data    []byte // the encoded command, as the disks have it
	decoded *state.Command
	members []voter
}

func newEntry(term uint64, c *state.Command) *entry {
	data, err := state.EncodeCommand(c)
	if err != nil {
		panic(err)
	}
	return &entry{term: term, command: c, data: data}
}

// voter is a member of consensus.
type voter struct {
	i     int // its machine
	votes bool
}

// disk is what a machine's process leaves to the next one.
type disk struct {
	term     uint64
	votedFor int       // machine, -1: nobody
	snap     *snapshot // the newest, nil: none
	base     int       // entries that a snapshot has taken the place of
	baseTerm uint64    // of the last of them
	log      []*entry  // the others: log[0] is entry base + 1
	// the last entry on disk: what follows is lost, wholly or in part, when the process ends
	synced    int
	afterStop bool          // the last process was told to end
	hungTill  time.Duration // writes that begin before do not return before
	epochs    map[string]uint64
	saved     []byte // a node without role control: its copy of the state, encoded
}

type role uint8

const (
	follower role = iota
	candidate
	leader
)

// raft is a model of hashicorp/raft: elections with pre-vote, a leader's lease, commit by the majority of the
// newest configuration, one change of members at a time, snapshots, a log that they shorten, and a main loop
// that waits for the disk. A run of it ends with the process, or with a write that hangs.
type raft struct {
	c *cluster
	m *machine
	*disk
	role      role
	leads     int // machine that leads as far as is known, -1: nobody
	commit    int
	applied   int
	fsm       *fsm
	compactAt int           // applied at the next snapshot
	heard     time.Duration // of a leader, or of a candidate that got the vote
	forced    bool          // the leader has asked it to take its place
	guard     int           // number of the wait for the leader's silence
	// number of the election or leadership under way: what belongs to an older one is dropped
	round     int
	votes     map[int]bool
	next      []int
	match     []int
	contact   []time.Duration
	confirmed []time.Duration // when the newest message was sent that a member has answered
	verifying []*verifying
	over      bool     // this run has ended
	stuck     bool     // the main loop waits for a write
	writing   int      // number of the write that hung last
	waiting   []func() // for the main loop
	pending   map[int]func(state.Result, error)
	ready     bool    // leads, and has applied what was committed before
	conf      []voter // the newest configuration of the log, at confAt; nil: to be looked up
	confAt    int
}

func newRaft(m *machine) *raft {
	m.runs++
	r := &raft{c: m.c, m: m, disk: m.disk, leads: -1, heard: m.c.now, pending: map[int]func(state.Result,
		error){}, round: m.runs * roundsPerRun}
	r.fsm = &fsm{m: m, work: state.New()}
	if s := r.snap; s != nil {
		r.commit, r.applied = s.at, s.at
		r.fsm.restore(s)
	}
	r.compactAt = r.applied + m.c.IntN(compactMax)
	r.watch()
	return r
}

// watch waits for the leader's silence.
func (r *raft) watch() {
	r.guard++
	guard := r.guard
	r.after(r.c.span(raftHeartbeat, 2*raftHeartbeat), func() {
		switch {
		case r.role != follower || r.guard != guard:
		case r.c.now-r.heard >= raftHeartbeat:
			r.campaign()
		default:
			r.watch()
		}
	})
}

func (d *disk) last() int { return d.base + len(d.log) }

// at is an entry that no snapshot has taken the place of.
func (d *disk) at(i int) *entry { return d.log[i-1-d.base] }

// termAt is the term of an entry from base on.
func (d *disk) termAt(i int) uint64 {
	if i == d.base {
		return d.baseTerm
	}
	return d.at(i).term
}

// has says whether the log holds the entry of this index and term. What a snapshot has taken the place of is
// committed, so every leader has the same there.
func (d *disk) has(i int, term uint64) bool {
	return i < d.base || i <= d.last() && d.termAt(i) == term
}

// members is the newest configuration of the log, committed or not, and where it stands.
func (r *raft) members() ([]voter, int) {
	if r.conf == nil {
		r.conf, r.confAt = r.membersAt(r.last())
	}
	return r.conf, r.confAt
}

// membersAt is the newest configuration up to an entry.
func (d *disk) membersAt(last int) ([]voter, int) {
	for i := last; i > d.base; i-- {
		if m := d.at(i).members; m != nil {
			return m, i
		}
	}
	if d.snap == nil {
		return nil, 0
	}
	return d.snap.members, d.snap.confAt
}

func (r *raft) isVoter(i int) bool {
	all, _ := r.members()
	return slices.Contains(all, voter{i, true})
}

// majority says whether so is true of more than half of the voters.
func (r *raft) majority(so func(i int) bool) bool {
	all, _ := r.members()
	voters, yes := 0, 0
	for _, v := range all {
		if v.votes {
			voters++
			if so(v.i) {
				yes++
			}
		}
	}
	return yes > voters/2
}

// campaign asks whether it would be elected, then to be elected, until it is decided.
func (r *raft) campaign() {
	r.leads, r.role = -1, candidate
	r.m.led()
	if !r.isVoter(r.m.i) {
		r.role = follower
		r.watch()
		return
	}
	r.ballot(true)
	r.retry()
}

// retry asks again if nothing was decided.
func (r *raft) retry() {
	round := r.round
	r.after(r.c.span(raftElection, 2*raftElection), func() {
		if r.role == candidate && r.round <= round+1 {
			r.campaign()
		}
	})
}

func (r *raft) ballot(pre bool) {
	r.round++
	r.votes = map[int]bool{r.m.i: true}
	term := r.term + 1
	if !pre {
		r.term, r.votedFor = term, r.m.i
	}
	r.c.log("ballot", r.m.name, term, pre)
	if force := r.forced; pre {
		r.canvass(pre, force)
	} else {
		round := r.round
		r.write(func() { // its own vote is on disk before it asks for others
			if r.role == candidate && r.round == round {
				r.canvass(pre, force)
			}
		})
	}
}

// canvass asks the others for their votes.
func (r *raft) canvass(pre, force bool) {
	term, round, at, lastTerm := r.term, r.round, r.last(), r.termAt(r.last())
	if pre {
		term++
	}
	all, _ := r.members()
	for _, v := range all {
		if v.votes && v.i != r.m.i {
			to := r.c.machines[v.i]
			r.c.send(r.m, to, raftLife, true, func() {
				to.raft.main(func() {
					to.raft.asked(r.m, term, at, lastTerm, pre, force, func(yes bool, now uint64) {
						r.main(func() { r.counted(to.i, round, pre, yes, now) })
					})
				})
			})
		}
	}
	r.elected(round, pre)
}

// asked answers a candidate.
func (r *raft) asked(from *machine, term uint64, last int, lastTerm uint64, pre, force bool,
	answer func(bool, uint64),
) {
	yes := false
	switch {
	case force && term > r.term:
		r.follow(term, -1)
		if r.upToDate(last, lastTerm) {
			r.votedFor, r.heard, yes = from.i, r.c.now, true
		}
	case r.leads >= 0 && r.leads != from.i, term < r.term: // a leader is known: nobody else is wanted
	case pre:
		yes = r.upToDate(last, lastTerm)
	default:
		if term > r.term {
			r.follow(term, -1)
		}
		if (r.votedFor < 0 || r.votedFor == from.i) && r.upToDate(last, lastTerm) {
			r.votedFor, r.heard, yes = from.i, r.c.now, true
		}
	}
	now := r.term
	r.write(func() { // a vote is on disk before it is given
		r.c.send(r.m, from, raftLife, true, func() { answer(yes, now) })
	})
}

func (r *raft) upToDate(last int, lastTerm uint64) bool {
	own := r.termAt(r.last())
	return lastTerm > own || lastTerm == own && last >= r.last()
}

func (r *raft) counted(i, round int, pre, yes bool, term uint64) {
	if term > r.term {
		r.follow(term, -1)
	}
	if r.role == candidate && r.round == round && yes {
		r.votes[i] = true
		r.elected(round, pre)
	}
}

func (r *raft) elected(round int, pre bool) {
	if r.role != candidate || r.round != round || !r.majority(func(i int) bool { return r.votes[i] }) {
		return
	}
	if pre {
		r.ballot(false)
		return
	}
	r.lead()
}

// follow takes a term over, and a leader.
func (r *raft) follow(term uint64, of int) {
	was := r.role
	if term > r.term {
		r.term, r.votedFor = term, -1
		if r.hangs(r.c.now) && !r.stuck {
			r.write(func() {}) // the term
		}
	}
	r.role = follower
	if was != follower {
		r.round++
		r.stepDown()
		r.watch()
	}
	if of != r.leads {
		r.leads = of
		r.m.led()
	}
}

// stepDown drops the state that only a leader has.
func (r *raft) stepDown() {
	r.ready = false
	pending := r.pending
	r.pending = map[int]func(state.Result, error){}
	for _, i := range sorted(pending) {
		pending[i](state.Result{}, errUnknown)
	}
	waiting := r.verifying
	r.verifying = nil
	for _, v := range waiting {
		v.done(false)
	}
	r.m.led()
}

// transfer asks the voter that has most of the log to take the place of this leader; false if there is none.
func (r *raft) transfer() bool {
	if r.stuck {
		return true
	}
	all, _ := r.members()
	best := -1
	for _, v := range all {
		if v.votes && v.i != r.m.i && (best < 0 || r.match[v.i] > r.match[best]) {
			best = v.i
		}
	}
	if best < 0 {
		return false
	}
	if r.match[best] < r.last() {
		return true // it is sent what it lacks first
	}
	to, term := r.c.machines[best], r.term
	r.c.send(r.m, to, raftLife, false, func() {
		to.raft.main(func() {
			if to.raft.term == term && to.raft.role == follower {
				to.raft.role, to.raft.forced = candidate, true
				to.raft.ballot(false)
				to.raft.forced = false
				to.raft.retry()
			}
		})
	})
	return true
}

func (r *raft) lead() {
	n := len(r.c.machines)
	r.c.canon.elected(r)
	r.role, r.leads = leader, r.m.i
	r.round++
	r.next, r.match, r.contact, r.confirmed = make([]int, n), make([]int, n), make([]time.Duration, n),
		make([]time.Duration, n)
	for i := range n {
		r.next[i], r.contact[i] = r.last()+1, r.c.now
	}
	r.match[r.m.i] = r.synced
	if r.c.cfg.mutant == noBarrier {
		r.ready = true
		r.m.led()
	}
	first := r.append(&entry{term: r.term})
	r.pending[first] = func(_ state.Result, err error) {
		if err == nil {
			r.ready = true
			r.m.led()
		}
	}
	r.beat(r.round)
	r.lease(r.round)
}

// lease ends a leadership that a majority has not confirmed for too long.
func (r *raft) lease(round int) {
	if r.role != leader || r.round != round {
		return
	}
	oldest := time.Duration(0)
	confirmed := r.majority(func(i int) bool {
		silent := r.c.now - r.contact[i]
		if i == r.m.i {
			silent = 0
		}
		if silent <= raftLease {
			oldest = max(oldest, silent)
		}
		return silent <= raftLease
	})
	if !confirmed {
		r.c.log("lease lost", r.m.name)
		r.follow(r.term, -1)
		return
	}
	r.after(max(10*time.Millisecond, raftLease-oldest), func() { r.lease(round) })
}

// advance commits what a majority has.
func (r *raft) advance() {
	for i := r.synced; i > r.commit && r.termAt(i) == r.term; i-- {
		if r.majority(func(m int) bool { return r.match[m] >= i }) {
			r.learn(i)
			r.spread()
			break
		}
	}
}

// learn applies what is committed, publishes it, and answers who waits.
func (r *raft) learn(commit int) {
	if commit <= r.commit {
		return
	}
	r.commit = commit
	changed, answers := false, []func(){}
	for r.applied < commit {
		r.applied++
		at, e := r.applied, r.at(r.applied)
		r.c.canon.commit(r, at, e)
		res, err := r.fsm.apply(at, e)
		changed = changed || e.command != nil && err == nil && !res.Unchanged
		if done := r.pending[at]; done != nil {
			delete(r.pending, at)
			answers = append(answers, func() { done(res, err) })
		}
	}
	if changed {
		r.m.publish(r.fsm.work.Clone())
	}
	for _, answer := range answers {
		answer()
	}
	r.compact()
	if _, at := r.members(); r.role == leader && at <= commit && !r.isVoter(r.m.i) {
		r.follow(r.term, -1) // it was taken out
	}
}

// maxPending bounds proposals in flight, as cluster does.
const maxPending = 256

// propose appends a command at the leader. ok is false elsewhere: nothing was done.
func (r *raft) propose(c *state.Command, done func(state.Result, error)) (ok bool) {
	if r == nil || r.role != leader || len(r.pending)+len(r.waiting) >= maxPending {
		return false
	}
	asked := r.c.now
	r.main(func() {
		switch {
		case r.c.now-asked > proposeLimit: // nobody waits for it any more
		case r.role != leader:
			done(state.Result{}, errNotLeader)
		default:
			r.pending[r.append(newEntry(r.term, c))] = done
		}
	})
	return true
}

// change appends a configuration, if the one before is committed.
func (r *raft) change(members []voter) {
	if _, at := r.members(); r.role == leader && !r.stuck && at <= r.commit {
		r.append(&entry{term: r.term, members: members})
		r.c.log("members", members)
	}
}
