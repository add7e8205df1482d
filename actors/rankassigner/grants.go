package rankassigner

import (
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// parseReplicaID returns the slot of a replica id. The id must be spelled as msg.ReplicaID does: two
// spellings would make two replicas with one rank.
func parseReplicaID(app string, group int, replicaID string) (int, error) {
	slot, err := strconv.Atoi(replicaID[strings.LastIndexByte(replicaID, '.')+1:])
	if err != nil || slot < 0 || replicaID != msg.ReplicaID(app, group, slot) {
		return 0, problem.New(problem.InvalidArgument, "assign rank: %w %q", ErrBadReplica, replicaID).
			WithHint("it is APP.GROUP.SLOT, here %s", msg.ReplicaID(app, group, 0))
	}
	return slot, nil
}

// assign reads a replica's rank from the grants. It writes nothing, so a repeated question gets the same
// answer.
func assign(s *state.State, app string, group int, replicaID string) msg.AssignReply {
	slot, err := parseReplicaID(app, group, replicaID)
	if err != nil {
		return msg.AssignReply{Err: err}
	}
	ranks, err := groupRanks(s, app, group)
	if err != nil {
		return msg.AssignReply{Err: err}
	}
	size := len(ranks)
	if !slices.Contains(ranks, slot) {
		return msg.AssignReply{
			DPSize: size,
			Err: problem.New(problem.Conflict,
				"assign rank: %w: group %s/%d has %d ranks, %s would be one more",
				ErrGroupFull, app, group, size, replicaID).
				WithHint("raise data_parallel.dp_size or num_replicas and deploy again"),
		}
	}
	u := unitOfRank(s, app, group, slot)
	if u == nil {
		return msg.AssignReply{
			DPSize: size,
			Err: problem.New(problem.Unavailable, "assign rank: rank %d of group %s/%d: %w",
				slot, app, group, ErrNotGranted).
				WithHint("it is placed by the controller; ask again when it is"),
		}
	}
	return msg.AssignReply{Rank: slot, Epoch: u.Epoch, DPSize: size}
}

// groupRanks returns the rank numbers of a group of the committed application.
func groupRanks(s *state.State, name string, group int) ([]int, error) {
	a, ok := s.Apps[name]
	if !ok {
		return nil, problem.New(problem.NotFound, "assign rank: %w %q", state.ErrUnknownApp, name)
	}
	spec, err := a.Application()
	if err != nil {
		return nil, problem.New(problem.Internal, "assign rank: read the spec of %q: %w", name, err)
	}
	if group < 0 || group >= spec.NumGroups {
		return nil, problem.New(problem.NotFound, "assign rank: application %q has no group %d: %w", name,
			group, ErrNotGranted)
	}
	return spec.RankNumbers(group), nil
}

// unitOfRank is the granted unit that holds a rank. The state ensures that there is at most one.
func unitOfRank(s *state.State, name string, group, rank int) *state.Unit {
	for _, u := range s.Units {
		if u.App == name && u.Group == group && u.Holds() && hasRank(u, rank) {
			return u
		}
	}
	return nil
}

func hasRank(u *state.Unit, rank int) bool {
	for i := range u.Ranks {
		if u.Ranks[i].Rank == rank {
			return true
		}
	}
	return false
}

// checkWholeUnit refuses to release a part of a unit. The state itself refuses unknown units and epochs.
func checkWholeUnit(s *state.State, m *msg.ReleaseRank) error {
	u := s.Units[m.Unit]
	if m.Rank < 0 || u == nil || (len(u.Ranks) == 1 && hasRank(u, m.Rank)) {
		return nil
	}
	return problem.New(problem.InvalidArgument, "release rank %d of %s: %w: it has %d ranks", m.Rank,
		m.Unit, ErrPartial, len(u.Ranks)).
		WithHint("release rank -1, all ranks of the unit")
}
