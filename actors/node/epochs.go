package node

import (
	"maps"
	"path/filepath"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// ErrStaleEpoch refuses a command below the highest epoch this node has seen of a unit.
var ErrStaleEpoch = state.ErrStaleEpoch

// epochs is the highest epoch seen per unit; it outlives the node's process. Only the node's actor uses it.
type epochs struct {
	path    string // "" = memory only
	seen    map[string]uint64
	earlier map[string]uint64 // seen by earlier processes
}

// loadEpochs reads the file of dir. A file that cannot be read is an error: a node that forgets epochs may serve an old one.
func loadEpochs(dir string) (*epochs, error) {
	e := &epochs{seen: map[string]uint64{}}
	if dir == "" {
		return e, nil
	}
	e.path = filepath.Join(dir, epochsFile)
	if err := readJSON(e.path, &e.seen); err != nil {
		return nil, problem.New(problem.Internal, "%w", err).WithHint("restore the file, or remove it if no other node serves this cluster's units")
	}
	if e.seen == nil {
		e.seen = map[string]uint64{}
	}
	e.earlier = maps.Clone(e.seen)
	return e, nil
}

// begin is admit for a start, which needs an epoch of its own: one that this node has seen, and has no unit of, is over.
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

// admit refuses an epoch below the highest, and records a higher one on disk before it counts.
func (e *epochs) admit(unit string, epoch uint64) error {
	highest := e.seen[unit]
	if epoch < highest {
		return problem.New(problem.Conflict, "unit %s: %w: epoch %d was asked for, %d has been seen", unit, ErrStaleEpoch, epoch, highest)
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
		return problem.New(problem.Internal, "unit %s: cannot record epoch %d: %w", unit, epoch, err).WithHint("free space in the data dir")
	}
	return nil
}
