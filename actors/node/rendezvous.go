package node

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/problem"
)

// spansNodes reports whether the unit has ranks on other nodes.
func (u *unit) spansNodes() bool { return len(u.m.AllRanks) > len(u.m.Ranks) }

// meetingHost is the address where rank 0 of the unit listens for the other ranks, if it runs here.
func (u *unit) meetingHost() string {
	if u.spansNodes() {
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

// checkMeeting reports whether ranks of other nodes can reach rank 0, if it runs here.
func (u *unit) checkMeeting() error {
	if u.attached() || !u.lockstep() || !u.spansNodes() || !u.hasRankZero() || u.n.cfg.Advertise != "" {
		return nil
	}
	return problem.New(problem.InvalidArgument,
		"ranks of %s on other nodes cannot reach rank 0: node %s has no address that others know", u.m.Unit,
		u.n.cfg.ID).
		WithHint("start the node with --advertise IP")
}

// rendezvous returns rank 0's address in a coupled unit: rank 0's node publishes it, the other nodes wait for
// it.
func (u *unit) rendezvous(ctx context.Context, layout engine.Ports) (addr string, port int, err error) {
	if u.attached() || !u.lockstep() {
		return "", 0, nil
	}
	if !u.hasRankZero() {
		return u.awaitRankZero(ctx)
	}
	p := msg.Publish{Unit: u.m.Unit, Epoch: u.m.Epoch, Rank: 0, Addr: u.meetingHost(), Port: layout.RPC()}
	u.n.cfg.Assigner.Publish(p)
	if u.spansNodes() {
		u.n.running.Go(func() { u.publishAgain(ctx, p) }) // ends with the start
	}
	return p.Addr, p.Port, nil
}

// publishAgain repeats rank 0's address while the unit starts, because a new leader has an empty table.
func (u *unit) publishAgain(ctx context.Context, p msg.Publish) {
	for sleep(ctx, u.n.timers.LeaseRenew) == nil {
		u.n.cfg.Assigner.Publish(p)
	}
}

// awaitRankZero waits for rank 0's address. Each rank asks, so that the RankAssigner can name the missing
// ranks after a timeout.
func (u *unit) awaitRankZero(ctx context.Context) (addr string, port int, err error) {
	ctx, cancel := context.WithTimeout(ctx, u.n.timers.Rendezvous)
	defer cancel()
	err = u.forEach(ctx, func(ctx context.Context, r *rank) error {
		r.setProgress("waiting for the address of rank 0")
		a, p, err := u.n.cfg.Assigner.Await(ctx, u.m.Unit, u.m.Epoch, r.grant.Rank)
		if err == nil && r == u.ranks[0] { // all ranks get the same answer
			addr, port = a, p
		}
		return err
	})
	return addr, port, err
}

// groupKey is a secret of the engines of one start of a unit, made of the cluster's secret, the unit and its
// epoch.
func (u *unit) groupKey() string {
	var secret []byte
	if u.n.cfg.Store != nil {
		secret = u.n.cfg.Store.State().Secret
	}
	h := hmac.New(sha256.New, secret)
	_, _ = fmt.Fprintf(h, "group %s %d", u.m.Unit, u.m.Epoch) // a hash never fails
	return hex.EncodeToString(h.Sum(nil))
}
