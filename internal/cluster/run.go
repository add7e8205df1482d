package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of the log. The state has a few KiB per app, so a snapshot is cheap. A short log keeps restarts
// short and disks small.
const (
	snapshotInterval  = 30 * time.Second // how often raft checks whether a snapshot is due
	snapshotThreshold = 1024             // log entries that make one due
	trailingLogs      = 256              // entries kept behind a snapshot
	snapshotsKept     = 2
)

// run is one raft over the data dir. It ends with Close or with the first write that fails. After a failed
// write another run begins over the same data dir, as after a restart of the process.
type run struct {
	raft  *raft.Raft
	disk  *disk
	guard *guard
	net   *network // nil = this node is alone
	lead  <-chan bool
	seen  chan raft.Observation // has room for one: the leader may have changed
	over  chan struct{}         // closed by stop
}

func (r *run) start(c *Cluster) error {
	rc := raftConfig(c)
	var transport raft.Transport = r.net
	if r.net == nil {
		_, transport = raft.NewInmemTransport(raft.ServerAddress(c.ident.UID))
	} else {
		r.net.acceptMessages()
	}
	if !c.cfg.Member {
		if err := r.disk.bootstrap(rc, transport); err != nil {
			return err
		}
	}
	if err := c.readLog(r.disk); err != nil {
		return diskError("read the log", err)
	}
	c.fsm.startRun(func(why error) {
		c.setFault(why)
		r.guard.refuseWrites(why)
	})
	var err error
	if r.raft, err = raft.NewRaft(rc, c.fsm, r.guard, r.guard, &guardedSnapshots{r.disk.snaps, r.guard},
		transport); err != nil {
		return cmp.Or(r.guard.failure(), fmt.Errorf("start raft: %w", err))
	}
	// Raft has started from an older snapshot than the one that this version cannot read.
	if err := r.guard.failure(); errors.Is(err, ErrUnreadable) {
		return cmp.Or(err, r.raft.Shutdown().Error())
	}
	r.lead = r.raft.LeaderCh()
	r.raft.RegisterObserver(raft.NewObserver(r.seen, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	}))
	return r.skipElectionWait(c)
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
		answered = c.net.lastAnswer
	}
	rc.Logger = newRaftLog(c.log, c.book.nameOf, answered)
	return rc
}

// suspicion is the time by which skipElectionWait shortens raft's time-outs: a change makes raft check its
// leader at once.
const suspicion = time.Millisecond

// skipElectionWait spares the only voter the wait for a leader that cannot exist (200 ms to 2 s of every
// start): a follower whose heartbeat time-out becomes shorter checks its leader at once. If there are other
// voters, the time-outs stay, or every restart of a node would cause an election.
func (r *run) skipElectionWait(c *Cluster) error {
	if !isOnlyVoter(r.raft.GetConfiguration().Configuration(), c.ident.UID) {
		return r.refuseAlone()
	}
	rc := r.raft.ReloadableConfig()
	rc.HeartbeatTimeout, rc.ElectionTimeout = c.cfg.Timers.Heartbeat, c.cfg.Timers.Election
	if err := r.raft.ReloadConfig(rc); err != nil {
		return fmt.Errorf("set raft's time-outs: %w", err)
	}
	return nil
}

// refuseAlone refuses to start without a network over a log that needs votes of other nodes: there would
// never be a leader.
func (r *run) refuseAlone() error {
	if r.net != nil {
		return nil
	}
	return errors.Join(problem.New(problem.Conflict, "the log in the data dir has the votes of other nodes").
		WithHint("start this node with --advertise, as it was; if two data dirs were mixed, restore one "+
			"from a backup"), r.raft.Shutdown().Error())
}

// isOnlyVoter reports whether the node votes and no other does.
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

// stop ends raft, gives other nodes the reason, and closes the disk. It waits for calls of the disk that
// hang, however long: nothing may be closed or opened during such a call.
func (r *run) stop(why error) error {
	close(r.over)
	if r.net != nil {
		r.net.SetHeartbeatHandler(nil) // a raft that stops would not answer heartbeats
	}
	down := r.raft.Shutdown()
	r.guard.release()
	if r.net != nil {
		r.net.rejectMessages(why)
	}
	err := down.Error()
	r.guard.awaitCalls()
	return errors.Join(err, r.disk.Close())
}

func (r *run) waitRetry() {
	select {
	case <-time.After(leadRetry):
	case <-r.over:
	}
}
