package rankassigner

import (
	"errors"

	"github.com/dpserve/dpserve/internal/problem"
)

// Why a question was refused; each comes wrapped in a *problem.Error.
var (
	ErrNotGranted = errors.New("not granted")
	ErrGroupFull  = errors.New("group is full")
	ErrBadReplica = errors.New("malformed replica id")
	ErrRendezvous = errors.New("rendezvous timed out")
	ErrSuperseded = errors.New("superseded by a later call of the same rank")
	ErrPartial    = errors.New("a unit is released whole")
	ErrStopped    = errors.New("rank assigner is stopped")
	ErrTooMany    = errors.New("too many commands under way")
)

func errStopped() error {
	return problem.New(problem.Unavailable, "ask the rank assigner: %w", ErrStopped).WithHint("this node is stopping; ask again after its restart")
}
