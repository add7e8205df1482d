package cluster_test

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

// votersEvery is how often the leader looks at the votes.
const votersEvery = time.Second

// keepVoters changes the voters, one step at a time, as long as this machine leads.
func (l *shell) keepVoters() {
	if l.closed {
		return
	}
	l.changeVoters()
	l.m.c.after(l.m.process, votersEvery, l.keepVoters)
}

func (l *shell) changeVoters() {
	if l.closed {
		return
	}
	members, _ := l.m.raft.members()
	change := state.NextVoterChange(l.electors(members), l.m.uid)
	i := l.m.c.byUID[change.UID]
	next := slices.Clone(members)
	at := slices.IndexFunc(next, func(v voter) bool { return v.i == i })
	switch {
	case change.Kind == state.NoChange:
		return
	case change.Kind == state.AddStandby && at < 0:
		next = append(next, voter{i, false})
	case change.Kind == state.Promote && at >= 0:
		if !l.answers(l.m.c.machines[i]) {
			return
		}
		next[at].votes = true
	case change.Kind == state.Demote && at >= 0:
		next[at].votes = false
	case change.Kind == state.RemoveMember && at >= 0:
		next = slices.Delete(next, at, at+1)
	default:
		return
	}
	l.m.raft.change(next)
}

// answers is cluster's question to a standby before it gets a vote. It takes no time here.
func (l *shell) answers(m *machine) bool {
	cuts := l.m.c.net.cuts
	return m.alive && !m.frozen && !cuts[l.m.i][m.i] && !cuts[m.i][l.m.i]
}

// electors are the control nodes, and what consensus still has of others.
func (l *shell) electors(members []voter) []state.Elector {
	var out []state.Elector
	known := map[int]bool{}
	for _, id := range sorted(l.m.view.Nodes) {
		n := l.m.view.Nodes[id]
		i := l.m.c.byUID[n.UID]
		known[i] = true
		at := slices.IndexFunc(members, func(v voter) bool { return v.i == i })
		control := n.Has(state.RoleControl)
		if !control && at < 0 {
			continue
		}
		heard, ever := l.heard[id]
		out = append(out, state.Elector{
			UID: n.UID, Node: n.ID, Control: control, Lost: n.Lost, Member: at >= 0, Voter: at >= 0 &&
				members[at].votes,
			Live: !n.Lost && (i == l.m.i || ever && l.m.c.now-heard <= l.m.c.cfg.ttl/2),
		})
	}
	for _, v := range members {
		if !known[v.i] {
			out = append(out, state.Elector{UID: uidOf(v.i), Member: true, Voter: v.votes})
		}
	}
	return out
}
