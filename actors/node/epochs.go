package node

import (
	"maps"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// ErrStaleEpoch refuses a command below the highest epoch this node has seen of a unit.
var ErrStaleEpoch = state.ErrStaleEpoch

// epochs holds the highest epoch seen per unit. It survives the node's process. It is pure: begin and with
// return what must be on disk before it becomes seen.
type epochs struct {
	seen    map[string]uint64 // and, as indexName, the state index of the last prune
	earlier map[string]uint64 // seen by earlier processes
}

func newEpochs(seen map[string]uint64) epochs {
	e := epochs{seen: map[string]uint64{}, earlier: seen}
	maps.Copy(e.seen, seen)
	return e
}

// indexName cannot be a unit, because unit names have a slash.
const indexName = "index"

// isBehind reports whether a copy of the state is older than the copy of the last prune.
func (e *epochs) isBehind(s *state.State) bool { return s.Index < e.seen[indexName] }

// begin returns the epochs with that of a start, without units that are over. A start needs a new epoch: an
// epoch that this node has seen without having the unit is over.
func (e *epochs) begin(s *state.State, unit string, epoch uint64,
	keeps func(unit string) bool,
) (map[string]uint64, error) {
	if epoch > 0 && epoch == e.seen[unit] {
		what := "has ended on this node"
		if epoch == e.earlier[unit] {
			what = "was started by an earlier process of this node"
		}
		return nil, problem.New(problem.Conflict, "unit %s: %w: epoch %d %s", unit, ErrStaleEpoch, epoch,
			what)
	}
	if err := e.admit(unit, epoch); err != nil {
		return nil, err
	}
	next := e.with(unit, epoch)
	prune(next, s, keeps)
	return next, nil
}

// prune removes units that a copy of the state shows superseded and that keeps does not want. That copy and
// every later one refuse them. An earlier one might not, so starts need a copy that is as new (isBehind).
func prune(seen map[string]uint64, s *state.State, keeps func(unit string) bool) {
	before := len(seen)
	maps.DeleteFunc(seen, func(unit string, epoch uint64) bool {
		return unit != indexName && Superseded(s, unit, epoch) && !keeps(unit)
	})
	if len(seen) < before {
		seen[indexName] = max(seen[indexName], s.Index)
	}
}

// admit refuses an epoch below the highest.
func (e *epochs) admit(unit string, epoch uint64) error {
	if highest := e.seen[unit]; epoch < highest {
		return problem.New(problem.Conflict, "unit %s: %w: epoch %d was asked for, %d has been seen", unit,
			ErrStaleEpoch, epoch, highest)
	}
	return nil
}

// with returns the epochs with another one.
func (e *epochs) with(unit string, epoch uint64) map[string]uint64 {
	next := maps.Clone(e.seen)
	next[unit] = epoch
	return next
}
