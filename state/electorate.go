package state

import (
	"cmp"
	"slices"
)

// Elector is a control node, or what consensus still has of one, as the leader sees it.
type Elector struct {
	UID     string
	Node    string // its name; "" = no node of the cluster any more
	Zone    string
	Control bool // a node of the cluster with role control
	Lost    bool // as in Node
	Live    bool // it answers the leader and its log is close behind; who is not in consensus: it answers
	Member  bool // it is in consensus, as voter or standby
	Voter   bool
}

// ChangeKind is what to do next about who decides.
type ChangeKind uint8

// The changes of consensus.
const (
	NoChange ChangeKind = iota
	AddStandby
	Promote // standby to voter
	Demote  // voter to standby
	RemoveMember
)

// String names the change.
func (k ChangeKind) String() string {
	names := [...]string{"none", "add standby", "give vote", "take vote", "remove"}
	if int(k) < len(names) {
		return names[k]
	}
	return "unknown"
}

// Change is one change of consensus.
type Change struct {
	Kind ChangeKind
	UID  string
}

// maxVoters is the most that vote: more make commits slower and tolerate no likelier failure.
const maxVoters = 5

// votersFor is how many of n control nodes vote: the greatest of 1, 3 and 5 that they can fill.
func votersFor(n int) int {
	n = min(n, maxVoters)
	return max(1, n-1+n%2)
}

// Electorate says what the leader should change next, one change at a time; it is asked again when that one is committed. The leader
// stays a voter whatever it is; leader "" protects nobody. No change takes the quorum away from voters that live.
//
// Nodes that were removed go at once. 1, 3 or 5 vote, by the number of control nodes that are not lost; but lost nodes alone never
// bring a cluster of three or more down to one voter, as that one's disk would then be the only true copy. Lost voters are replaced
// when a standby lives, first in, then out. Zones that vote the least, then lower names, are preferred.
func Electorate(members []Elector, leader string) Change {
	e := newElectorate(members, leader)
	for _, next := range []func() Change{e.expel, e.admit, e.promote, e.demote} {
		if c := next(); c.Kind != NoChange {
			return c
		}
	}
	return Change{}
}

type electorate struct {
	all    []Elector // by name
	leader string
	target int
	leaves bool // the leader itself is no control node any more
}

func newElectorate(members []Elector, leader string) *electorate {
	e := &electorate{all: slices.Clone(members), leader: leader}
	slices.SortFunc(e.all, func(a, b Elector) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.UID, b.UID)) })
	control, present := 0, 0
	for i := range e.all {
		m := &e.all[i]
		if m.UID == leader {
			m.Lost, m.Live, e.leaves = false, true, !m.Control
		}
		if m.Control {
			control++
		}
		if m.Control && !m.Lost {
			present++
		}
	}
	e.target = max(votersFor(present), min(votersFor(control), 3))
	return e
}

// quorumWithout says whether voters that live are a majority when m does not vote.
func (e *electorate) quorumWithout(m *Elector) bool {
	voters, live := 0, 0
	for i := range e.all {
		o := &e.all[i]
		if !o.Voter || o.UID == m.UID {
			continue
		}
		voters++
		if o.Live {
			live++
		}
	}
	return live > voters/2
}

// expel takes out who is no control node any more.
func (e *electorate) expel() Change {
	for i := range e.all {
		m := &e.all[i]
		if m.Member && !m.Control && m.UID != e.leader && (!m.Voter || e.quorumWithout(m)) {
			return Change{RemoveMember, m.UID}
		}
	}
	return Change{}
}

// admit takes a control node in, without a vote.
func (e *electorate) admit() Change {
	for i := range e.all {
		if m := &e.all[i]; m.Control && !m.Member && !m.Lost {
			return Change{AddStandby, m.UID}
		}
	}
	return Change{}
}

// promote gives a standby a vote, if enough of them live to come to an odd number: two voters are worse than one.
func (e *electorate) promote() Change {
	good, ready := 0, 0
	var best *Elector
	for i := range e.all {
		m := &e.all[i]
		switch {
		case !m.Control || m.Lost:
		case m.Voter:
			good++
		case m.Member && m.Live:
			ready++
			if best == nil || e.votesIn(m.Zone) < e.votesIn(best.Zone) {
				best = m
			}
		}
	}
	odd := good + 1 + good%2
	if best == nil || good >= e.target || good+ready < odd {
		return Change{}
	}
	return Change{Promote, best.UID}
}

// votesIn counts the voters of a zone that are not lost.
func (e *electorate) votesIn(zone string) int {
	n := 0
	for i := range e.all {
		if m := &e.all[i]; m.Voter && !m.Lost && m.Zone == zone {
			n++
		}
	}
	return n
}

// demote takes a vote too many: of a lost node, of one that does not answer, of the zone that votes the most, of the last name. A
// leader that goes takes none: those who stay would be left with its vote, and without it.
func (e *electorate) demote() Change {
	if e.leaves {
		return Change{}
	}
	voters := 0
	var worst *Elector
	for i := range e.all {
		m := &e.all[i]
		if !m.Voter || !m.Control {
			continue
		}
		voters++
		if m.UID != e.leader && (worst == nil || e.worse(m, worst) >= 0) {
			worst = m
		}
	}
	if voters <= e.target || worst == nil || !e.quorumWithout(worst) {
		return Change{}
	}
	return Change{Demote, worst.UID}
}

func (e *electorate) worse(a, b *Elector) int {
	return cmp.Or(btoi(a.Lost)-btoi(b.Lost), btoi(b.Live)-btoi(a.Live), e.votesIn(a.Zone)-e.votesIn(b.Zone))
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}
