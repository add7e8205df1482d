package node

import (
	"maps"
	"path/filepath"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// ErrStaleEpoch refuses a command below the highest epoch this node has seen of a unit.
var ErrStaleEpoch = state.ErrStaleEpoch

// epochs holds the highest epoch seen per unit. It survives the node's process. Only the node's actor uses
// it.
type epochs struct {
	path    string            // "" = memory only
	seen    map[string]uint64 // and, as indexName, the state index of the last prune
	earlier map[string]uint64 // seen by earlier processes
}

// loadEpochs reads the file of dir. An unreadable file is an error: a node that forgets epochs may serve an
// old one.
func loadEpochs(dir string) (*epochs, error) {
	e := &epochs{seen: map[string]uint64{}}
	if dir == "" {
		return e, nil
	}
	e.path = filepath.Join(dir, epochsFile)
	if err := readJSON(e.path, &e.seen); err != nil {
		return nil, problem.New(problem.Internal, "%w", err).
			WithHint("restore the file, or remove it if no other node serves this cluster's units")
	}
	if e.seen == nil {
		e.seen = map[string]uint64{}
	}
	e.earlier = maps.Clone(e.seen)
	return e, nil
}

// indexName cannot be a unit, because unit names have a slash.
const indexName = "index"

// prune removes units that a copy of the state shows superseded and that keeps does not want. That copy and
// every later one refuse them. An earlier one might not, so starts need a copy that is as new (isBehind).
func (e *epochs) prune(s *state.State, keeps func(unit string) bool) {
	before := len(e.seen)
	maps.DeleteFunc(e.seen, func(unit string, epoch uint64) bool {
		return unit != indexName && superseded(s, unit, epoch) && !keeps(unit)
	})
	if len(e.seen) < before {
		e.seen[indexName] = max(e.seen[indexName], s.Index)
	}
}

// isBehind reports whether a copy of the state is older than the copy of the last prune.
func (e *epochs) isBehind(s *state.State) bool { return s.Index < e.seen[indexName] }

// begin is admit for a start, which needs a new epoch: an epoch that this node has seen without having the
// unit is over.
func (e *epochs) begin(unit string, epoch uint64) error {
	if epoch == 0 || epoch != e.seen[unit] {
		return e.admit(unit, epoch)
	}
	what := "has ended on this node"
	if epoch == e.earlier[unit] {
		what = "was started by an earlier process of this node"
	}
	return problem.New(problem.Conflict, "unit %s: %w: epoch %d %s", unit, ErrStaleEpoch, epoch, what)
}

// admit refuses an epoch below the highest, and writes a higher one to disk before it counts.
func (e *epochs) admit(unit string, epoch uint64) error {
	highest := e.seen[unit]
	if epoch < highest {
		return problem.New(problem.Conflict, "unit %s: %w: epoch %d was asked for, %d has been seen", unit,
			ErrStaleEpoch, epoch, highest)
	}
	if epoch == highest {
		return nil
	}
	e.seen[unit] = epoch
	if e.path == "" {
		return nil
	}
	if err := writeJSON(e.path, e.seen); err != nil {
		e.seen[unit] = highest
		return problem.New(problem.Internal, "unit %s: cannot record epoch %d: %w", unit, epoch, err).
			WithHint("free space in the data dir")
	}
	return nil
}
