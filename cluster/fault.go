package cluster

import (
	"errors"
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// faultPause is the pause before raft is started again over a disk that refused a write, and between further attempts.
const faultPause = time.Second

// ErrDisk is in every error that comes of a disk that refuses writes or does not answer. What was to be written has not been
// acknowledged.
var ErrDisk = errors.New("the disk of the data dir refuses writes")

// ErrUnreadable is in every error that comes of an entry of the log, or a snapshot, that this version cannot read. This node has left
// consensus until it is started again with a version that can.
var ErrUnreadable = errors.New("this node has left consensus")

// unreadable says what cannot be read, and what to do. The list of nodes shows the message without its hint, so the message says it too.
func unreadable(what string, err error) error {
	if !errors.Is(err, state.ErrNewer) {
		err = fmt.Errorf("it is damaged, or a newer version of dpserve wrote it: %w", err)
	}
	return problem.New(problem.Unavailable, "%w", fmt.Errorf("%w, upgrade its dpserve: %s cannot be read: %w", ErrUnreadable, what, err)).
		WithHint("start a newer version of dpserve on this node's data dir: it goes on from its log; until then it serves with the state it has")
}

// Fault is why this node takes no part in consensus, nil while it does: a *problem.Error. It wraps ErrDisk while the disk of the data
// dir takes no writes; that heals by itself. It wraps ErrUnreadable when the log has what this version cannot read; that lasts until
// another version is started. While there is a fault this node neither leads nor votes.
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
			WithHint("look at the disk of the data dir, it is broken or very slow: dpserve goes on by itself when it answers; " +
				"look at the state before you repeat the command")
	}
	return problem.New(problem.Unavailable, "data dir %s: %w", c.cfg.DataDir, err).
		WithHint("free disk space or make the data dir writable: dpserve goes on by itself; look at the state before you repeat the command")
}

func (c *Cluster) setFault(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fault = err
	c.faulty.Store(err != nil)
}

// diskFails is told of the first failure of a run, before raft is: whoever sees that raft leads no more sees the fault too.
func (c *Cluster) diskFails(err error) {
	c.setFault(err)
	if c.leader.Load() && c.alone.Load() && c.ended() == nil {
		c.holds.Store(true)
	}
}

// Holds says that this node led when its disk failed, and that nobody else can lead meanwhile: it is the only voter, so every
// majority there can be needs its vote, and it gives none without a disk. What it decided goes on to be true, and leases may be
// prolonged; nothing can be proposed. It ends when raft leads again, or the log on disk turns out to have other voters.
func (c *Cluster) Holds() bool { return c.holds.Load() }

// readLog takes up what the log on disk says of addresses and voters, before raft starts over it.
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

// diskWorks is told of every successful write.
func (c *Cluster) diskWorks() {
	if c.faulty.Load() && errors.Is(c.Fault(), ErrDisk) {
		c.log.Info("the disk of the data dir takes writes again", "room", "cluster")
		c.setFault(nil)
	}
}

// keep watches over the runs: it ends one whose disk refused a write and begins the next, and ends the last at Close.
func (c *Cluster) keep() {
	for c.serve(c.run.Load()) {
		next := c.renew()
		if next == nil {
			return
		}
		c.run.Store(next)
		c.loops.Go(func() { c.watch(next) })
	}
}

// serve waits for the end of a run and stops it. True: the disk failed, there should be another run. None follows one that met what
// this version cannot read: it would meet that again.
func (c *Cluster) serve(r *run) bool {
	select {
	case <-c.done:
		c.stopped = r.stop(ErrClosed)
		return false
	case <-r.guard.failed:
	}
	err, why := r.guard.failure(), ErrDisk
	again := !errors.Is(err, ErrUnreadable)
	if again {
		c.log.Error("the disk refuses writes or does not answer: this node leaves consensus until it takes them again", "room", "cluster", "err", err)
	} else {
		why = ErrUnreadable
		c.log.Error("this node leaves consensus until a newer version of dpserve runs on it", "room", "cluster", "err", err)
	}
	if err := r.stop(why); err != nil {
		c.log.Warn("stopped with an error", "room", "cluster", "err", err)
	}
	return again
}

// renew begins a run over the log that is read anew; nil after Close.
func (c *Cluster) renew() *run {
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
				c.net.rest(ErrUnreadable)
			}
			return nil
		}
		c.setFault(fmt.Errorf("%w: %w", ErrDisk, err))
		c.log.Debug("consensus cannot start again yet", "room", "cluster", "err", err)
	}
}
