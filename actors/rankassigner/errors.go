package rankassigner

import (
	"errors"
	"fmt"

	"github.com/dpserve/dpserve/cluster"
	"github.com/dpserve/dpserve/internal/problem"
)

// Reasons for a refusal. Each is wrapped in a *problem.Error.
var (
	ErrNotGranted = errors.New("not granted")
	ErrGroupFull  = errors.New("group is full")
	ErrBadReplica = errors.New("malformed replica id")
	ErrRendezvous = errors.New("rendezvous timed out")
	ErrSuperseded = errors.New("superseded by a later call of the same rank")
	ErrPartial    = errors.New("a unit is released whole")
	ErrTooMany    = errors.New("too many commands under way")
)

// ErrStopped says that the assigner was closed: its node no longer leads, and callers should ask the next
// leader. It wraps cluster.ErrNotLeader.
var ErrStopped = fmt.Errorf("rank assigner is stopped: %w", cluster.ErrNotLeader)

func errStopped() error {
	return problem.New(problem.Unavailable, "ask the rank assigner: %w", ErrStopped).
		WithHint("ask the leader; if this node is the only one, after its restart")
}
