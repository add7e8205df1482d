package wiring

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/cluster"
	"github.com/dpserve/dpserve/cluster/membership"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// Pace of the leader's care for who votes.
const (
	votersEvery = time.Second // what changes without a change of the state: a standby catches up, a node falls silent
	votersCall  = 10 * time.Second
)

// keepOrder lets the leader change who votes and go on with a change of the gossip key, one step at a time, until ctx ends.
func (n *Node) keepOrder(ctx context.Context) {
	tick := time.NewTicker(votersEvery)
	defer tick.Stop()
	for {
		changed := n.store.Changed()
		n.next(ctx)
		for n.store.Leader() && (n.changeVoters(ctx) || n.turnKey(ctx)) && ctx.Err() == nil { //nolint:revive // one change after the other
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// changeVoters makes the next change there is; false: there is none, or it failed and is tried again with the next tick.
func (n *Node) changeVoters(ctx context.Context) bool {
	n.voting.Lock()
	defer n.voting.Unlock()
	change := state.Electorate(n.electors(n.heard()), n.ident.UID)
	ctx, cancel := context.WithTimeout(ctx, votersCall)
	defer cancel()
	var err error
	switch change.Kind {
	case state.NoChange:
		return false
	case state.AddStandby:
		err = n.consensus.AddStandby(ctx, change.UID)
	case state.Promote:
		if !n.answers(ctx, change.UID) {
			return false
		}
		err = n.consensus.Promote(ctx, change.UID)
	case state.Demote:
		err = n.consensus.Demote(ctx, change.UID)
	case state.RemoveMember:
		if !n.saidFarewell(change.UID, time.Now()) {
			return false
		}
		err = n.consensus.Remove(ctx, change.UID)
	}
	if errors.Is(err, cluster.ErrNotLeader) || err != nil && !n.store.Leader() {
		return false // the next leader makes it
	}
	if err != nil {
		n.log.Warn("voters could not be changed, trying again", slog.String("change", change.Kind.String()),
			slog.String("peer", n.nameOf(change.UID)), slog.Any("err", err))
		return false
	}
	n.log.Info("consensus changed", slog.String("change", change.Kind.String()), slog.String("peer", n.nameOf(change.UID)))
	return true
}

// leaving is the node that consensus loses next, and since when this leader knows that the node is no longer a member of the cluster.
type leaving struct {
	uid   string
	since time.Time
}

// saidFarewell reports whether consensus has gone on sending to a node for long enough after the leader saw that the node is no longer
// a member of the cluster: the node learns that it was removed, and ends, only by an entry that is committed there too. Raft stops
// sending when the node is taken out of its members, also in the middle of that.
func (n *Node) saidFarewell(uid string, now time.Time) bool {
	if n.leaving.uid != uid {
		n.leaving = leaving{uid, now}
	}
	return now.Sub(n.leaving.since) >= farewell
}

// answers asks a standby for a sign of life: its lease speaks of seconds ago, and the vote of a node that has died meanwhile takes a
// young cluster's majority away.
func (n *Node) answers(ctx context.Context, uid string) bool {
	ctx, cancel := context.WithTimeout(ctx, votersEvery)
	defer cancel()
	for id, rec := range n.store.State().Nodes {
		if rec.UID != uid {
			continue
		}
		_, _, err := n.mesh.view(id).Statuses(ctx)
		if err != nil {
			n.log.Debug("a standby gets no vote yet", slog.String("standby", id), slog.Any("err", err))
		}
		return err == nil
	}
	return false
}

// electors are the control nodes, and what consensus still has of others. heard are the nodes, by name, that answer.
func (n *Node) electors(heard map[string]bool) []state.Elector {
	in := map[string]cluster.Member{}
	for _, m := range n.consensus.Members() {
		in[m.UID] = m
	}
	var out []state.Elector
	known := map[string]bool{}
	for _, rec := range n.store.State().Nodes {
		m, member := in[rec.UID]
		known[rec.UID] = true
		control := hasRole(rec, state.RoleControl)
		if !control && !member {
			continue
		}
		out = append(out, state.Elector{
			UID: rec.UID, Node: rec.ID, Zone: rec.Zone, Control: control, Lost: rec.Lost, Member: member, Voter: m.Voter,
			Live: !rec.Lost && heard[rec.ID] && (!member || n.consensus.IsCloseBehind(rec.UID)),
		})
	}
	for uid, m := range in {
		if !known[uid] {
			out = append(out, state.Elector{UID: uid, Member: true, Voter: m.Voter})
		}
	}
	return out
}

// heard are the nodes that renew their leases, and this one.
func (n *Node) heard() map[string]bool {
	out := map[string]bool{n.cfg.NodeID: true}
	l := n.leads.Load()
	if l == nil {
		return out
	}
	list := l.control.Nodes()
	for i := range list {
		if s := list[i].State; s == "alive" || s == "draining" || s == "drained" {
			out[list[i].Node] = true
		}
	}
	return out
}

// votes says whether a node is a voter.
func (n *Node) votes(uid string) bool {
	for _, m := range n.members() {
		if m.UID == uid {
			return m.Voter
		}
	}
	return false
}

// whoVotes is a hint for people when no node leads: the voters, and those that the gossip does not hear.
func (n *Node) whoVotes() string {
	var all, silent []string
	for _, m := range n.members() {
		if !m.Voter {
			continue
		}
		name := n.nameOf(m.UID)
		all = append(all, name)
		if g, ok := n.mesh.seen(m.UID); m.UID != n.ident.UID && n.mesh != nil && n.mesh.gossip != nil && (!ok || g.State != membership.Alive) {
			silent = append(silent, name)
		}
	}
	slices.Sort(all)
	slices.Sort(silent)
	switch {
	case len(all) == 0:
		return "a majority of the voters has to be there"
	case len(silent) == 0:
		return "votes: " + strings.Join(all, ", ")
	case len(silent) == 1:
		return "votes: " + strings.Join(all, ", ") + "; " + silent[0] + " is not heard"
	}
	return "votes: " + strings.Join(all, ", ") + "; " + strings.Join(silent, ", ") + " are not heard"
}

// nameOf is the name of a node that takes part in consensus, or its UID if the state does not have it (any more).
func (n *Node) nameOf(uid string) string {
	for id, rec := range n.store.State().Nodes {
		if rec.UID == uid {
			return id
		}
	}
	return uid
}

// noLeader is the answer to what only a leader can do while no node leads.
func (n *Node) noLeader() error {
	return problem.New(problem.Unavailable, "no node leads the cluster at this moment").
		WithHint("an election takes a second or two; if it stays so, a majority of the voters is not there (%s): "+
			"start those that are down", n.whoVotes())
}

func hasRole(rec *state.Node, role state.Role) bool {
	for _, r := range rec.Roles {
		if r == role {
			return true
		}
	}
	return false
}
