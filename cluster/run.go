package cluster

import (
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of the log. State is a few KiB per app, so a snapshot is cheap and a short log keeps restarts and disks small.
const (
	snapshotInterval  = 30 * time.Second // how often raft looks whether a snapshot is due
	snapshotThreshold = 1024             // log entries that make one due
	trailingLogs      = 256              // entries kept behind a snapshot
	snapshotsKept     = 2
)

// run is one raft over the data dir. It ends with Close or with the first write that fails; then another begins over the same
// data dir, as after a restart of the process.
type run struct {
	raft  *raft.Raft
	disk  *disk
	guard *guard
	net   *network // nil: alone
	lead  <-chan bool
	seen  chan raft.Observation // holds one: who leads may have changed
	over  chan struct{}         // closed by stop
}

// newRun opens the disk and starts raft over it. A log without a past gets this node as its only voter, unless it is a member of
// a cluster that will send its own.
func (c *Cluster) newRun() (_ *run, err error) {
	d, err := c.openDisk()
	if err != nil {
		return nil, err
	}
	g := newGuard(d.log, &c.book, guardHooks{uid: c.ident.UID, alone: &c.alone, wrote: c.diskWorks, failed: c.diskFails})
	r := &run{disk: d, guard: g, net: c.net, seen: make(chan raft.Observation, 1), over: make(chan struct{})}
	if err := r.start(c); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return r, nil
}

func (r *run) start(c *Cluster) error {
	rc := raftConfig(c)
	var transport raft.Transport = r.net
	if r.net == nil {
		_, transport = raft.NewInmemTransport(raft.ServerAddress(c.ident.UID))
	} else {
		r.net.wake()
	}
	if !c.cfg.Member {
		if err := r.disk.bootstrap(rc, transport); err != nil {
			return err
		}
	}
	if err := c.readLog(r.disk); err != nil {
		return broken("read the log", err)
	}
	c.fsm.begin(func(why error) {
		c.setFault(why)
		r.guard.end(why)
	})
	var err error
	if r.raft, err = raft.NewRaft(rc, c.fsm, r.guard, r.guard, &guardedSnapshots{r.disk.snaps, r.guard}, transport); err != nil {
		return firstError(r.guard.failure(), fmt.Errorf("start raft: %w", err))
	}
	if err := r.guard.failure(); errors.Is(err, ErrUnreadable) { // raft went on from a snapshot before the one that cannot be read
		return firstError(err, r.raft.Shutdown().Error())
	}
	r.lead = r.raft.LeaderCh()
	r.raft.RegisterObserver(raft.NewObserver(r.seen, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	}))
	return r.electNow(c)
}

func raftConfig(c *Cluster) *raft.Config {
	rc := raft.DefaultConfig()
	rc.LocalID = raft.ServerID(c.ident.UID)
	rc.HeartbeatTimeout = c.cfg.Timers.Heartbeat + suspicion
	rc.ElectionTimeout = c.cfg.Timers.Election + suspicion
	rc.LeaderLeaseTimeout = c.cfg.Timers.Lease
	rc.SnapshotInterval = snapshotInterval
	rc.SnapshotThreshold = snapshotThreshold
	rc.TrailingLogs = trailingLogs
	rc.NoLegacyTelemetry = true
	rc.ShutdownOnRemove = false
	answered := never
	if c.net != nil {
		answered = c.net.answered
	}
	rc.Logger = newRaftLog(c.log, c.nameOf, answered)
	return rc
}

// suspicion is taken off raft's time-outs by electNow: it is the change that makes raft look at its leader at once.
const suspicion = time.Millisecond

// electNow spares the only voter the wait (200 ms to 2 s of every start) for a leader that cannot exist: a follower whose
// heartbeat time-out becomes shorter looks at once whether it has heard of its leader. Where there are other voters the
// time-outs stay, or every restart of a node would begin with an election.
func (r *run) electNow(c *Cluster) error {
	if !c.onlyVoter(r.raft) {
		return r.reachable()
	}
	rc := r.raft.ReloadableConfig()
	rc.HeartbeatTimeout, rc.ElectionTimeout = c.cfg.Timers.Heartbeat, c.cfg.Timers.Election
	if err := r.raft.ReloadConfig(rc); err != nil {
		return fmt.Errorf("set raft's time-outs: %w", err)
	}
	return nil
}

// reachable refuses to start alone over a log that needs other nodes' votes: nobody would ever lead.
func (r *run) reachable() error {
	if r.net != nil {
		return nil
	}
	return errors.Join(problem.New(problem.Conflict, "the log in the data dir has the votes of other nodes").
		WithHint("start this node with --advertise, as it was; if two data dirs were mixed, restore one from a backup"), r.raft.Shutdown().Error())
}

func (c *Cluster) onlyVoter(r *raft.Raft) bool {
	return isOnlyVoter(r.GetConfiguration().Configuration(), c.ident.UID)
}

// isOnlyVoter says whether a node votes and no other does.
func isOnlyVoter(members raft.Configuration, uid string) bool {
	alone := false
	for _, s := range members.Servers {
		if s.Suffrage != raft.Voter {
			continue
		}
		if alone = string(s.ID) == uid; !alone {
			return false
		}
	}
	return alone
}

// stop ends raft and closes the disk; other nodes are told why. It waits for calls of the disk that hang, however long: nothing may
// be closed or opened under them.
func (r *run) stop(why error) error {
	close(r.over)
	if r.net != nil {
		r.net.SetHeartbeatHandler(nil) // a raft that stops would leave heartbeats unanswered
	}
	down := r.raft.Shutdown()
	r.guard.release()
	if r.net != nil {
		r.net.rest(why)
	}
	err := down.Error()
	r.guard.settled()
	return errors.Join(err, r.disk.Close())
}
