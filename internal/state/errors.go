package state

import (
	"errors"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/nearest"
	"github.com/dpserve/dpserve/internal/problem"
)

// Reasons of a refusal. Each comes wrapped in a *problem.Error that names the objects.
var (
	ErrUnknownCommand = errors.New("unknown command")
	ErrWrongCluster   = errors.New("wrong cluster")
	ErrBadCommand     = errors.New("malformed command")
	ErrUnknownApp     = errors.New("there is no application")
	ErrUnknownUnit    = errors.New("unknown unit")
	ErrStaleRevision  = errors.New("stale revision")
	ErrNoRevision     = errors.New("there is no revision")
	ErrStaleEpoch     = errors.New("stale epoch")
	ErrWrongPhase     = errors.New("not possible in this phase")
	ErrNameTaken      = errors.New("model name taken")
	ErrDeleting       = errors.New("application is being deleted")
	ErrNotDeleting    = errors.New("application is not being deleted")
	ErrUnitsLeft      = errors.New("units are left")
	ErrRankTaken      = errors.New("rank taken")
	ErrSlotTaken      = errors.New("slot taken")
	ErrDeviceTaken    = errors.New("device taken")
	ErrPortTaken      = errors.New("ports taken")
	ErrUnknownNode    = errors.New("there is no node")
	ErrNodeTaken      = errors.New("node name taken")
	ErrNodeRemoved    = errors.New("node was removed")
	ErrNodeGone       = errors.New("node takes no ranks")
	ErrNodeInUse      = errors.New("node is in use")
	ErrVoteNeeded     = errors.New("the voters that remain have no living majority")
	ErrLastControl    = errors.New("last control node")
	ErrRolesFixed     = errors.New("roles are fixed when a node joins")
	ErrTooManyRemoved = errors.New("too many nodes were removed")
	ErrTokenUnknown   = errors.New("unknown join token")
	ErrTokenUsed      = errors.New("join token is used up")
	ErrTokenExpired   = errors.New("join token has expired")
	ErrTokenRevoked   = errors.New("join token was revoked")
	ErrTokenRoles     = errors.New("join token is not for these roles")

	// ErrNewer is in the error of a command or snapshot with a kind or field of a later version. If this node
	// ignored it, its copy of the state would differ from the copies of nodes that can read it.
	ErrNewer = errors.New("a newer version of dpserve wrote it")
	// ErrControlTooOld refuses a command that a control node could not read.
	ErrControlTooOld = errors.New("not every control node can read this command yet")
)

// UnknownApp refuses the name of an application. The hint lists those that exist.
func UnknownApp(name string, exist []string) error {
	e := problem.New(problem.NotFound, "%w %q", ErrUnknownApp, name)
	if len(exist) == 0 {
		return e.WithHint("nothing is deployed; `dpserve deploy FILE` deploys a file")
	}
	return e.WithHint("%s", didYouMean(name, "applications", exist))
}

// UnknownNode refuses the name of a node. The hint lists those that exist.
func UnknownNode(name string, exist []string) error {
	return problem.New(problem.NotFound, "%w %q", ErrUnknownNode, name).
		WithHint("%s", didYouMean(name, "nodes", exist))
}

// maxListed is how many names a hint lists.
const maxListed = 10

// didYouMean names the word that was probably meant, else all that there are.
func didYouMean(found, plural string, exist []string) string {
	if near := nearest.Word(found, exist); near != "" && near != found {
		return "did you mean " + strconv.Quote(near) + "?"
	}
	list := strings.Join(exist[:min(len(exist), maxListed)], ", ")
	if more := len(exist) - maxListed; more > 0 {
		list += " and " + strconv.Itoa(more) + " more"
	}
	return plural + " are " + list
}

func staleEpochError(verb, unit string, got, have uint64) error {
	return problem.New(problem.Conflict, "%s: %w: %s is at epoch %d, the command is for epoch %d", verb,
		ErrStaleEpoch, unit, have, got).
		WithHint("read the state again: the unit was started anew meanwhile")
}

func removedNodeError(verb, id string) error {
	return problem.New(problem.PermissionDenied, "%s: %w: %q does not come back with this data dir", verb,
		ErrNodeRemoved, id).
		WithHint("join with a new --data-dir and a new token")
}

func lastControlError(verb, id string) error {
	return problem.New(problem.Conflict, "%s: %w: without %q no node keeps the cluster's state", verb,
		ErrLastControl, id).
		WithHint("join another node with --roles control first")
}
