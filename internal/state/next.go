//go:build !dpserve_next

package state

import "github.com/dpserve/dpserve/internal/problem"

// These types and functions are empty in a normal build. next_version.go has the ones of the upgrade test.
type (
	nextCommand struct{}
	nextNode    struct{}
	nextState   struct{} //nolint:unused // embedded in State for next_version.go
)

const nextLevels = 0

func (nextCommand) addNext(map[string]kind) {}

func (nextNode) cutNext(int) {}

func applyNext(*State, *Command) (Result, error) {
	return Result{}, problem.New(problem.InvalidArgument, "%w: it cannot be applied", ErrUnknownCommand)
}
