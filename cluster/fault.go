package cluster

import (
	"errors"
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// faultPause is the pause before raft is started again after a failed write, and between further attempts.
const faultPause = time.Second

// ErrDisk is in every error of a disk that refuses writes or does not answer. The data was not acknowledged.
var ErrDisk = errors.New("the disk of the data dir refuses writes")

// ErrUnreadable is in every error of a log entry or snapshot that this version cannot read. This node has
// left consensus until it is started with a version that can read it.
var ErrUnreadable = errors.New("this node has left consensus")

// unreadableError names what cannot be read and what to do. The list of nodes shows messages without hints,
// so the message itself says it too.
func unreadableError(what string, err error) error {
	if !errors.Is(err, state.ErrNewer) {
		err = fmt.Errorf("it is damaged, or a newer version of dpserve wrote it: %w", err)
	}
	return problem.New(problem.Unavailable, "%w",
		fmt.Errorf("%w, upgrade its dpserve: %s cannot be read: %w", ErrUnreadable, what, err)).
		WithHint("start a newer version of dpserve on this node's data dir: it goes on from its log; until " +
			"then it serves with the state it has")
}

// Fault returns why this node takes no part in consensus, nil while it does. The error is a *problem.Error.
// It wraps ErrDisk while the disk of the data dir refuses writes; the node recovers by itself. It wraps
// ErrUnreadable if the log has entries that this version cannot read; that lasts until another version is
// started. While there is a fault this node neither leads nor votes.
func (c *Cluster) Fault() error {
	if !c.faulty.Load() {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fault == nil {
		return nil
	}
	if errors.Is(c.fault, ErrUnreadable) {
		return c.fault
	}
	return c.diskProblem(c.fault)
}

func (c *Cluster) diskProblem(err error) error {
	if errors.Is(err, errDiskHangs) {
		return problem.New(problem.Unavailable, "data dir %s: %w", c.cfg.DataDir, err).
			WithHint("look at the disk of the data dir, it is broken or very slow: dpserve goes on by " +
				"itself when it answers; " +
				"look at the state before you repeat the command")
	}
	return problem.New(problem.Unavailable, "data dir %s: %w", c.cfg.DataDir, err).
		WithHint("free disk space or make the data dir writable: dpserve goes on by itself; look at the " +
			"state before you repeat the command")
}

func (c *Cluster) setFault(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fault = err
	c.faulty.Store(err != nil)
}

// onDiskFailure handles the first failure of a run. The guard calls it before it tells raft, so that a reader
// who sees that raft does not lead any more also sees the fault.
func (c *Cluster) onDiskFailure(err error) {
	c.setFault(err)
	if c.leader.Load() && c.alone.Load() && c.endError() == nil {
		c.holds.Store(true)
	}
}

// Holds reports that this node led when its disk failed, and that no other node can lead meanwhile: this node
// is the only voter, so every possible majority needs its vote, and without a disk it does not vote. Its
// decisions stay valid and leases may be prolonged, but nothing can be proposed. Holds ends when raft leads
// again, or when the log on disk turns out to have other voters.
func (c *Cluster) Holds() bool { return c.holds.Load() }

// readLog reads addresses and voters from the log on disk, before raft starts over it.
func (c *Cluster) readLog(d *disk) error {
	members, index, err := c.book.readAll(d.log)
	if err != nil {
		return err
	}
	snaps, err := d.snaps.List()
	if err != nil {
		return err
	}
	if len(snaps) > 0 && snaps[0].ConfigurationIndex > index {
		members = snaps[0].Configuration
	}
	if c.alone.Store(isOnlyVoter(members, c.ident.UID)); !c.alone.Load() && c.holds.Swap(false) {
		c.wakeLeadership()
	}
	return nil
}

// onDiskWrite handles every successful write.
func (c *Cluster) onDiskWrite() {
	if c.faulty.Load() && errors.Is(c.Fault(), ErrDisk) {
		c.log.Info("the disk of the data dir takes writes again", "room", "cluster")
		c.setFault(nil)
	}
}

// superviseRuns ends a run whose disk refused a write, begins the next one, and ends the last one at Close.
func (c *Cluster) superviseRuns() {
	for c.awaitRunEnd(c.run.Load()) {
		next := c.startNextRun()
		if next == nil {
			return
		}
		c.run.Store(next)
		c.loops.Go(func() { c.watchLeadership(next) })
	}
}

// awaitRunEnd waits for the end of a run and stops it. It returns true if the disk failed: then another run
// should begin. It returns false for an unreadable log, because the next run could not read it either.
func (c *Cluster) awaitRunEnd(r *run) bool {
	select {
	case <-c.done:
		c.stopped = r.stop(ErrClosed)
		return false
	case <-r.guard.failed:
	}
	err, why := r.guard.failure(), ErrDisk
	again := !errors.Is(err, ErrUnreadable)
	if again {
		c.log.Error("the disk refuses writes or does not answer: this node leaves consensus until it takes "+
			"them again", "room", "cluster", "err", err)
	} else {
		why = ErrUnreadable
		c.log.Error("this node leaves consensus until a newer version of dpserve runs on it", "room",
			"cluster", "err", err)
	}
	if err := r.stop(why); err != nil {
		c.log.Warn("stopped with an error", "room", "cluster", "err", err)
	}
	return again
}

// startNextRun begins a run over the log, which it reads again; nil after Close.
func (c *Cluster) startNextRun() *run {
	for {
		select {
		case <-time.After(faultPause):
		case <-c.done:
			return nil
		}
		r, err := c.newRun()
		if err == nil {
			return r
		}
		if errors.Is(err, ErrUnreadable) {
			c.setFault(err)
			c.holds.Store(false)
			c.wakeLeadership()
			if c.net != nil {
				c.net.rejectMessages(ErrUnreadable)
			}
			return nil
		}
		c.setFault(fmt.Errorf("%w: %w", ErrDisk, err))
		c.log.Debug("consensus cannot start again yet", "room", "cluster", "err", err)
	}
}
