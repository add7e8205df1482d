package state

import (
	"cmp"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// Elector is a control node, or a member of consensus that is no control node any more, as the leader sees
// it.
type Elector struct {
	UID     string
	Node    string // its name; "" = not a node of the cluster any more
	Zone    string
	Control bool // a node of the cluster with role control
	Lost    bool // as in Node
	Live    bool // it answers the leader and its log is close behind; outside consensus: it answers
	Member  bool // it is in consensus, as voter or standby
	Voter   bool
}

// ChangeKind is a kind of change of the members of consensus.
type ChangeKind uint8

// The changes of consensus.
const (
	NoChange ChangeKind = iota
	AddStandby
	Promote // standby to voter
	Demote  // voter to standby
	RemoveMember
	HandOver // the leader gives the leadership to another voter
)

// String returns the name of the change.
func (k ChangeKind) String() string {
	names := [...]string{"none", "add standby", "give vote", "take vote", "remove", "hand over"}
	if int(k) < len(names) {
		return names[k]
	}
	return "unknown"
}

// Change is one change of the members of consensus.
type Change struct {
	Kind ChangeKind
	UID  string
}

// maxVoters is the highest number of voters: more voters make commits slower and guard only against unlikely
// failures.
const maxVoters = 5

// votersFor returns how many of n control nodes vote: the largest of 1, 3 and 5 that they can fill.
func votersFor(n int) int {
	n = min(n, maxVoters)
	return max(1, n-1+n%2)
}

// NextVoterChange returns the change that the leader should make next. The leader asks again when that change
// is committed. The leader always stays a voter; with leader == "" no member is exempt from removal. No
// change takes the quorum away from the living voters.
//
// Removed nodes leave consensus at once. 1, 3 or 5 nodes vote, by the number of control nodes that are not
// lost. But losses alone never bring a cluster of three or more down to one voter, because that voter's disk
// would then be the only true copy. Lost voters are replaced when a standby lives: first the new voter joins,
// then the lost one leaves. Zones with the fewest votes come first, then lower names.
func NextVoterChange(members []Elector, leader string) Change {
	e := newElectorate(members, leader)
	for _, next := range []func() Change{e.removeMember, e.addStandby, e.promoteStandby, e.demoteVoter} {
		if c := next(); c.Kind != NoChange {
			return c
		}
	}
	return Change{}
}

type electorate struct {
	all          []Elector // sorted by name
	leader       string
	target       int  // how many should vote
	leaderLeaves bool // the leader itself is no control node any more
}

func newElectorate(members []Elector, leader string) *electorate {
	e := &electorate{all: slices.Clone(members), leader: leader}
	slices.SortFunc(e.all, func(a, b Elector) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.UID, b.UID))
	})
	control, present := 0, 0
	for i := range e.all {
		m := &e.all[i]
		if m.UID == leader {
			m.Lost, m.Live, e.leaderLeaves = false, true, !m.Control
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

// hasQuorumWithout reports whether the living voters are a majority when m does not vote.
func (e *electorate) hasQuorumWithout(m *Elector) bool {
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

// removeMember removes a member that is no control node any more.
func (e *electorate) removeMember() Change {
	for i := range e.all {
		m := &e.all[i]
		if m.Member && !m.Control && m.UID != e.leader && (!m.Voter || e.hasQuorumWithout(m)) {
			return Change{RemoveMember, m.UID}
		}
	}
	return Change{}
}

// addStandby adds a control node to consensus, without a vote.
func (e *electorate) addStandby() Change {
	for i := range e.all {
		if m := &e.all[i]; m.Control && !m.Member && !m.Lost {
			return Change{AddStandby, m.UID}
		}
	}
	return Change{}
}

// promoteStandby gives a standby a vote if enough standbys live to reach an odd number: two voters tolerate
// less than one.
func (e *electorate) promoteStandby() Change {
	good, ready := 0, 0
	for i := range e.all {
		switch m := &e.all[i]; {
		case m.Voter && m.Control && !m.Lost:
			good++
		case m.canGetVote():
			ready++
		}
	}
	odd := good + 1 + good%2
	if ready == 0 || good >= e.target || good+ready < odd {
		return Change{}
	}
	return Change{Promote, e.bestStandby().UID}
}

// canGetVote reports whether a member is a standby that lives.
func (m *Elector) canGetVote() bool { return m.Control && m.Member && !m.Voter && m.Live && !m.Lost }

// bestStandby returns the standby that gets the next vote, also in place of a voter that leaves: a living one
// of the zone with the fewest votes, then the first by name; nil if there is none.
func (e *electorate) bestStandby() *Elector {
	var best *Elector
	for i := range e.all {
		m := &e.all[i]
		if m.canGetVote() && (best == nil || e.votesIn(m.Zone) < e.votesIn(best.Zone)) {
			best = m
		}
	}
	return best
}

func (e *electorate) votesIn(zone string) int {
	n := 0
	for i := range e.all {
		if m := &e.all[i]; m.Voter && !m.Lost && m.Zone == zone {
			n++
		}
	}
	return n
}

// demoteVoter takes one vote when too many nodes vote. It prefers a lost node, then one that does not answer,
// then one of the zone with the most votes, then the last name. A leader that leaves demotes none: the
// remaining voters must have a quorum with its vote and without it.
func (e *electorate) demoteVoter() Change {
	if e.leaderLeaves {
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
		if m.UID != e.leader && (worst == nil || e.compareForDemotion(m, worst) >= 0) {
			worst = m
		}
	}
	if voters <= e.target || worst == nil || !e.hasQuorumWithout(worst) {
		return Change{}
	}
	return Change{Demote, worst.UID}
}

func (e *electorate) compareForDemotion(a, b *Elector) int {
	return cmp.Or(boolToInt(a.Lost)-boolToInt(b.Lost), boolToInt(b.Live)-boolToInt(a.Live),
		e.votesIn(a.Zone)-e.votesIn(b.Zone))
}

func boolToInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// CheckUnvote returns the changes, in order, by which the node with the given UID gives up its vote for good:
// a successor gets a vote if one is needed, then the node loses its own. A leader that leaves hands the
// leadership over instead, and the next leader continues. A node without a vote needs no change.
//
// A removal asks before it changes any vote, because a change that leaves the voters without a living
// majority cannot be undone: every change needs a leader, and then there is none. The error is typed and
// names the voters in the way: Conflict if one is lost, Unavailable if all of them may still answer.
func CheckUnvote(members []Elector, leader, uid string) ([]Change, error) {
	e := newElectorate(members, leader)
	i := slices.IndexFunc(e.all, func(m Elector) bool { return m.UID == uid })
	if i < 0 || !e.all[i].Voter {
		return nil, nil
	}
	leaves, last := e.all[i], Change{Demote, uid}
	if uid == leader {
		last.Kind = HandOver
	}
	if e.hasQuorumWithout(&leaves) {
		return []Change{last}, nil
	}
	if next := e.bestStandby(); next != nil {
		next.Voter = true
		// The majority must hold while the leaving node still votes, and afterwards.
		if e.hasQuorumWithout(&leaves) && e.hasQuorumWithout(&Elector{}) {
			return []Change{{Promote, next.UID}, last}, nil
		}
		next.Voter = false
	}
	return nil, e.voteNeededError(&leaves)
}

// voteNeededError refuses to take a vote. It lists the voters that would remain.
func (e *electorate) voteNeededError(leaves *Elector) error {
	var remain, lost, silent []string
	for i := range e.all {
		m := &e.all[i]
		if !m.Voter || m.UID == leaves.UID {
			continue
		}
		name, word := m.Node, "alive"
		switch {
		case m.Node == "":
			name, word = "a removed node", "not there"
		case m.Lost:
			word, lost = "lost", append(lost, m.Node)
		case !m.Live:
			word, silent = "silent", append(silent, m.Node)
		}
		remain = append(remain, name+" is "+word)
	}
	who := strings.Join(remain, ", ")
	if len(remain) == 0 {
		who = "no other node votes"
	}
	code, hint := problem.Unavailable,
		"wait until another control node answers and has a copy of the state; look at dpserve nodes"
	switch {
	case len(lost) > 0:
		code = problem.Conflict
		hint = strings.Join(lost, ", ") + oneOrMany(lost,
			" is lost and votes: bring it back or remove it first",
			" are lost and vote: bring them back or remove them first") + ": dpserve nodes remove " + lost[0]
	case len(silent) > 0:
		hint = strings.Join(silent, ", ") + oneOrMany(silent,
			" votes and does not answer: wait until it answers or is lost",
			" vote and do not answer: wait until they answer or are lost")
	}
	return problem.New(code, "take the vote of node %q: %w: %s", leaves.Node, ErrVoteNeeded, who).
		WithHint("%s", hint)
}

func oneOrMany(list []string, one, many string) string {
	if len(list) == 1 {
		return one
	}
	return many
}
