package state

import (
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// CheckUnvote checks whether the node with the given UID can give up its vote for good. A removal calls it
// before it changes any vote, because a change that leaves the voters without a living majority cannot be
// undone: every change needs a leader, and then there is none.
//
// successor is the UID of the standby that must get a vote first; "" = none. The error is typed and names the
// voters in the way: Conflict if one is lost, Unavailable if all of them may still answer.
func CheckUnvote(members []Elector, leader, uid string) (successor string, err error) {
	e := newElectorate(members, leader)
	i := slices.IndexFunc(e.all, func(m Elector) bool { return m.UID == uid })
	if i < 0 || !e.all[i].Voter {
		return "", nil
	}
	leaves := e.all[i]
	if e.hasQuorumWithout(&leaves) {
		return "", nil
	}
	if next := e.findSuccessor(uid); next != nil {
		next.Voter = true
		// The majority must hold while the leaving node still votes, and afterwards.
		if e.hasQuorumWithout(&leaves) && e.hasQuorumWithout(&Elector{}) {
			return next.UID, nil
		}
		next.Voter = false
	}
	return "", e.voteNeededError(&leaves)
}

// findSuccessor returns the standby that takes over the vote of the node with the given UID: a living one of
// the zone with the fewest votes; nil if there is none.
func (e *electorate) findSuccessor(uid string) *Elector {
	var best *Elector
	for i := range e.all {
		m := &e.all[i]
		fit := m.UID != uid && m.Control && m.Member && !m.Voter && m.Live && !m.Lost
		if fit && (best == nil || e.votesIn(m.Zone) < e.votesIn(best.Zone)) {
			best = m
		}
	}
	return best
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
