//go:build !dpserve_next

package state

import "github.com/dpserve/dpserve/internal/problem"

// What next_version.go adds to the build that stands for the next version in the test of upgrades. Here there is nothing.
type (
	nextCommand struct{}
	nextNode    struct{}
	nextState   struct{} //nolint:unused // embedded in State for next_version.go
)

const nextLevels = 0

func (nextCommand) addNext(map[string]kind) {}

func (nextNode) cutNext(int) {}

func (s *State) applyNext(*Command) (Result, error) {
	return Result{}, problem.New(problem.InvalidArgument, "%w: it cannot be applied", ErrUnknownCommand)
}
