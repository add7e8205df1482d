package noderpc

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
)

// Errors of the transport, not of the answer. Each comes inside a *problem.Error.
var (
	errUnreachable = errors.New("cannot be reached")
	errNoAddress   = errors.New("has no node port")
)

// Bounds of an error on the wire: it travels in the trailer of its call.
const (
	maxMessage = 8 << 10
	maxHint    = 2 << 10
	maxDetails = 64 // lines
	maxDetail  = 1 << 10
	maxName    = 1 << 10 // of a node, an address
)

// sentinel is an error that errors.Is finds on both sides of the wire.
type sentinel struct {
	name string
	err  error
}

const notLeaderName = "not_leader"

// sentinels are the known errors by their names on the wire. A name is never given to another error.
func sentinels() []sentinel {
	return []sentinel{
		{"unknown_command", state.ErrUnknownCommand},
		{"wrong_cluster", state.ErrWrongCluster},
		{"bad_command", state.ErrBadCommand},
		{"unknown_app", state.ErrUnknownApp},
		{"unknown_unit", state.ErrUnknownUnit},
		{"no_revision", state.ErrNoRevision},
		{"stale_revision", state.ErrStaleRevision},
		{"stale_epoch", state.ErrStaleEpoch},
		{"wrong_phase", state.ErrWrongPhase},
		{"name_taken", state.ErrNameTaken},
		{"deleting", state.ErrDeleting},
		{"not_deleting", state.ErrNotDeleting},
		{"units_left", state.ErrUnitsLeft},
		{"rank_taken", state.ErrRankTaken},
		{"slot_taken", state.ErrSlotTaken},
		{"device_taken", state.ErrDeviceTaken},
		{"port_taken", state.ErrPortTaken},
		{"unknown_node", state.ErrUnknownNode},
		{"node_taken", state.ErrNodeTaken},
		{"node_removed", state.ErrNodeRemoved},
		{"node_gone", state.ErrNodeGone},
		{"node_in_use", state.ErrNodeInUse},
		{"vote_needed", state.ErrVoteNeeded},
		{"last_control", state.ErrLastControl},
		{"roles_fixed", state.ErrRolesFixed},
		{"too_many_removed", state.ErrTooManyRemoved},
		{"token_unknown", state.ErrTokenUnknown},
		{"token_used", state.ErrTokenUsed},
		{"token_expired", state.ErrTokenExpired},
		{"token_revoked", state.ErrTokenRevoked},
		{"token_roles", state.ErrTokenRoles},
		{"newer", state.ErrNewer},
		{"control_too_old", state.ErrControlTooOld},
		{notLeaderName, cluster.ErrNotLeader},
		{"closed", cluster.ErrClosed},
		{"outcome_unknown", cluster.ErrOutcomeUnknown},
		{"disk", cluster.ErrDisk},
		{"unreadable", cluster.ErrUnreadable},
		{"no_majority", cluster.ErrNoMajority},
		{"overloaded", inbox.ErrOverloaded},
		{"stopped", inbox.ErrStopped},
		{"node_stopping", msg.ErrNodeStopping},
		{"deadline", context.DeadlineExceeded},
	}
}

// statuses are the gRPC codes of our problem codes, for tools that read the wire; dpserve reads the Problem
// in the details.
var statuses = map[problem.Code]codes.Code{
	problem.InvalidArgument: codes.InvalidArgument, problem.Unauthenticated: codes.Unauthenticated,
	problem.PermissionDenied: codes.PermissionDenied,
	problem.NotFound:         codes.NotFound, problem.SlowRequest: codes.DeadlineExceeded,
	problem.Conflict: codes.FailedPrecondition,
	problem.TooLarge: codes.ResourceExhausted, problem.Unplaceable: codes.FailedPrecondition,
	problem.QuotaExceeded:  codes.ResourceExhausted,
	problem.HeaderTooLarge: codes.ResourceExhausted, problem.Internal: codes.Internal,
	problem.Upstream:   codes.Internal,
	problem.Overloaded: codes.ResourceExhausted, problem.Unavailable: codes.Unavailable,
	problem.Timeout: codes.DeadlineExceeded,
}

// notLeaderError refuses a question that only the leader can answer, and names the leader ("" = not known).
// It is cluster.ErrNotLeader.
type notLeaderError struct{ leader string }

func (e *notLeaderError) Error() string {
	if e.leader == "" {
		return cluster.ErrNotLeader.Error() + "; no node leads at the moment"
	}
	return cluster.ErrNotLeader.Error() + "; it is " + e.leader
}

func (*notLeaderError) Is(target error) bool { return target == cluster.ErrNotLeader }

func refuseNotLeader(leader string) error {
	return problem.New(problem.Unavailable, "%w",
		&notLeaderError{leader}).WithHint("wait for the election and try again")
}

// wireError is an error that came over the wire: its text, and the known errors of its chain.
type wireError struct {
	text string
	is   []error
}

func (e *wireError) Error() string   { return e.text }
func (e *wireError) Unwrap() []error { return e.is }

// toStatus encodes an error as a gRPC status: its problem in the details, with the names of the known errors
// in its chain. nil stays nil, and so does a status, that of a method without a handler.
func toStatus(err error) error {
	if _, ok := status.FromError(err); ok {
		return err
	}
	p := toProblem(err)
	code := statuses[problem.Code(p.GetCode())]
	if p.GetLeader() != "" || errors.Is(err, cluster.ErrNotLeader) {
		code = codes.FailedPrecondition
	}
	st, bad := status.New(code, p.GetMessage()).WithDetails(p)
	if bad != nil {
		return status.Error(code, p.GetMessage())
	}
	return st.Err()
}

func toProblem(err error) *dpservev1.Problem {
	p := &dpservev1.Problem{Code: string(codeOf(err)), Message: cleanText(err.Error(), maxMessage)}
	if e, ok := errors.AsType[*problem.Error](err); ok {
		p.Hint, p.Doc = cleanText(e.Hint, maxHint), cleanText(e.Doc, maxHint)
		for _, line := range e.Details[:min(len(e.Details), maxDetails)] {
			p.Details = append(p.Details, cleanText(line, maxDetail))
		}
	}
	for _, s := range sentinels() {
		if errors.Is(err, s.err) {
			p.Is = append(p.Is, s.name)
		}
	}
	p.Leader = cleanText(leaderOf(err), maxName)
	return p
}

// codeOf is the code of an error. A context that ended at its server is not an internal error of the server.
func codeOf(err error) problem.Code {
	var e *problem.Error
	switch {
	case errors.As(err, &e):
		if _, ok := statuses[e.Code]; ok {
			return e.Code
		}
	case errors.Is(err, context.DeadlineExceeded):
		return problem.Timeout
	case errors.Is(err, context.Canceled):
		return problem.Unavailable
	}
	return problem.Internal
}

// fromStatus decodes the error of a call to a node. A code of a later version becomes Internal, and a name of
// a later version is ignored.
func fromStatus(node string, err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok { // its answer cannot be read
		return problem.New(problem.CodeOf(err), "node %s: %w", node, err)
	}
	for _, d := range st.Details() {
		if p, ok := d.(*dpservev1.Problem); ok {
			return fromProblem(p)
		}
	}
	return transportError(node, st)
}

// transportError is the error of a status that none of our handlers made.
func transportError(node string, st *status.Status) error {
	switch st.Code() {
	case codes.DeadlineExceeded:
		return problem.New(problem.Timeout, "node %s did not answer in time: %w", node,
			context.DeadlineExceeded).
			WithHint("look at `dpserve nodes`; the node may be overloaded or cut off")
	case codes.Unavailable, codes.Canceled, codes.Aborted:
		return problem.New(problem.Unavailable, "node %s %w: %s", node, errUnreachable, st.Message()).
			WithHint("look at `dpserve nodes`, and whether its node port can be reached from here")
	case codes.Unimplemented:
		return problem.New(problem.Unavailable, "node %s does not know this call: %s", node, st.Message()).
			WithHint("run the same version of dpserve on every node")
	case codes.ResourceExhausted:
		return problem.New(problem.TooLarge, "node %s: %s", node, st.Message())
	case codes.PermissionDenied, codes.Unauthenticated:
		return problem.New(problem.PermissionDenied, "node %s: %s", node, st.Message())
	default:
		return problem.New(problem.Internal, "node %s: %s", node, st.Message())
	}
}

func fromProblem(p *dpservev1.Problem) error {
	code := problem.Code(p.GetCode())
	if _, ok := statuses[code]; !ok {
		code = problem.Internal
	}
	w := &wireError{text: p.GetMessage()}
	for _, name := range p.GetIs()[:min(len(p.GetIs()), maxDetails)] {
		w.is = append(w.is, knownErrors(name, p.GetLeader())...)
	}
	e := problem.New(code, "%w", w)
	e.Hint, e.Doc, e.Details = p.GetHint(), p.GetDoc(), p.GetDetails()
	return e
}

// knownErrors is the error of a name on the wire; none if this version does not know it.
func knownErrors(name, leader string) []error {
	if name == notLeaderName {
		return []error{&notLeaderError{leader}}
	}
	for _, s := range sentinels() {
		if s.name == name {
			return []error{s.err}
		}
	}
	return nil
}

// leaderOf is the node that a refusal names as the leader.
func leaderOf(err error) string {
	if n, ok := errors.AsType[*notLeaderError](err); ok {
		return n.leader
	}
	return ""
}

// cleanText makes a string valid for a protobuf field of type string, which must be UTF-8, and cuts it to
// limit bytes.
func cleanText(s string, limit int) string {
	return strings.ToValidUTF8(s[:min(len(s), limit)], "�")
}
