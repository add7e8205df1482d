package node

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine"
	"github.com/dpserve/dpserve/internal/problem"
)

// spread says whether the unit has ranks on other nodes.
func (u *unit) spread() bool { return len(u.m.AllRanks) > len(u.m.Ranks) }

// meetingHost is where rank 0 of the unit listens for the others, if it runs here.
func (u *unit) meetingHost() string {
	if u.spread() {
		return u.n.cfg.Advertise
	}
	return u.n.cfg.EngineHost
}

func (u *unit) hasRankZero() bool {
	for _, g := range u.m.Ranks {
		if g.Rank == 0 {
			return true
		}
	}
	return false
}

// checkMeeting says whether ranks of other nodes can find rank 0, if it runs here.
func (u *unit) checkMeeting() error {
	if u.attached() || !u.lockstep() || !u.spread() || !u.hasRankZero() || u.n.cfg.Advertise != "" {
		return nil
	}
	return problem.New(problem.InvalidArgument, "ranks of %s on other nodes cannot reach rank 0: node %s has no address that others know", u.m.Unit, u.n.cfg.ID).
		WithHint("start the node with --advertise IP")
}

// rendezvous gives rank 0's address in a coupled unit: its node publishes what its block holds, the others wait for it.
func (u *unit) rendezvous(ctx context.Context, layout engine.Ports) (addr string, port int, err error) {
	if u.attached() || !u.lockstep() {
		return "", 0, nil
	}
	if !u.hasRankZero() {
		return u.meet(ctx)
	}
	p := msg.Publish{Unit: u.m.Unit, Epoch: u.m.Epoch, Rank: 0, Addr: u.meetingHost(), Port: layout.RPC()}
	u.n.cfg.Assigner.Publish(p)
	if u.spread() {
		u.n.running.Go(func() { u.publishAgain(ctx, p) }) // ends with the start
	}
	return p.Addr, p.Port, nil
}

// publishAgain tells rank 0's address as long as the unit starts: a new leader has heard of none.
func (u *unit) publishAgain(ctx context.Context, p msg.Publish) {
	for sleep(ctx, u.n.timers.LeaseRenew) == nil {
		u.n.cfg.Assigner.Publish(p)
	}
}

// meet waits for rank 0's address. Each rank asks: if nothing comes, those that did not are named.
func (u *unit) meet(ctx context.Context) (addr string, port int, err error) {
	ctx, cancel := context.WithTimeout(ctx, u.n.timers.Rendezvous)
	defer cancel()
	err = u.forEach(ctx, func(ctx context.Context, r *rank) error {
		r.setProgress("waiting for the address of rank 0")
		a, p, err := u.n.cfg.Assigner.Await(ctx, u.m.Unit, u.m.Epoch, r.grant.Rank)
		if err == nil && r == u.ranks[0] { // all are told the same
			addr, port = a, p
		}
		return err
	})
	return addr, port, err
}

// groupKey is what the engines of one start of a unit know and others do not: from the cluster's secret, the unit and its epoch.
func (u *unit) groupKey() string {
	var secret []byte
	if u.n.cfg.Store != nil {
		secret = u.n.cfg.Store.State().Secret
	}
	h := hmac.New(sha256.New, secret)
	_, _ = fmt.Fprintf(h, "group %s %d", u.m.Unit, u.m.Epoch) // a hash takes everything
	return hex.EncodeToString(h.Sum(nil))
}
