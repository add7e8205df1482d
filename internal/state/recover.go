package state

import (
	"maps"
	"slices"

	"github.com/dpserve/dpserve/internal/problem"
)

// epochJump is how far Recover raises the next epochs: more grants than the lost voters can have made of one
// unit after the last entry that this copy has.
const epochJump = 1000

// Recover makes a node the only control node of its cluster, because the other voters are lost for good. The
// other control nodes are removed with their ranks: they have an old log, and must not come back with it. All
// other nodes, their grants and their engines stay. The lost voters may have granted more than this copy has,
// so the next grant of every unit gets an epoch that they cannot have given; grants in force keep theirs.
func Recover(s *State, uid string, now int64) error {
	if self := s.nodeByUID(uid); self == nil || !self.Has(RoleControl) {
		return problem.New(problem.Conflict, "this node is no control node of its cluster").
			WithHint("recover another control node")
	}
	for _, epoch := range s.Epochs {
		s.EpochLeast = max(s.EpochLeast, epoch)
	}
	s.EpochLeast = max(s.EpochLeast, s.EpochFloor) + epochJump
	for _, n := range OtherControl(s, uid) {
		for _, unit := range s.UnitsOn(n.ID) {
			if err := s.release(&UnitRef{Unit: unit, Epoch: s.Units[unit].Epoch}); err != nil {
				return err
			}
		}
		if err := s.forgetNode(n, now); err != nil {
			return err
		}
	}
	return nil
}

// OtherControl returns the control nodes without the one with a UID, by name.
func OtherControl(s *State, uid string) []*Node {
	var out []*Node
	for _, id := range slices.Sorted(maps.Keys(s.Nodes)) {
		if n := s.Nodes[id]; n.UID != uid && n.Has(RoleControl) {
			out = append(out, n)
		}
	}
	return out
}

// CountRanks counts the ranks that are granted to a node.
func CountRanks(s *State, node string) (ranks int) {
	for _, unit := range s.UnitsOn(node) {
		for _, r := range s.Units[unit].Ranks {
			if r.Node == node {
				ranks++
			}
		}
	}
	return ranks
}
