package noderpc

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
)

func TestProblemsSurviveTheWire(t *testing.T) {
	want := problem.New(problem.Conflict, "put app chat: %w: revision 4, not 3",
		state.ErrStaleRevision).WithHint("look again").WithDetails("a", "b")
	want.Doc = "https://example.org/x"
	got := fromStatus("b", toStatus(want))
	require.EqualError(t, got, want.Error())
	require.ErrorIs(t, got, state.ErrStaleRevision)
	require.NotErrorIs(t, got, state.ErrStaleEpoch)
	var p *problem.Error
	require.ErrorAs(t, got, &p)
	assert.Equal(t, []any{want.Code, want.Hint, want.Doc, want.Details},
		[]any{p.Code, p.Hint, p.Doc, p.Details})
	assert.NoError(t, fromStatus("b", toStatus(nil)))
}

// TestEveryKnownErrorSurvives: also over a second round trip, wrapped in between.
func TestEveryKnownErrorSurvives(t *testing.T) {
	names := map[string]bool{}
	for _, s := range sentinels() {
		assert.False(t, names[s.name], s.name)
		names[s.name] = true
		once := fromStatus("b", toStatus(problem.New(problem.Conflict, "x: %w", s.err)))
		require.ErrorIs(t, once, s.err, s.name)
		require.ErrorIs(t, fromStatus("c", toStatus(fmt.Errorf("y: %w", once))), s.err, s.name)
	}
	for _, code := range []problem.Code{
		problem.InvalidArgument, problem.Timeout, problem.Unplaceable,
		problem.Overloaded,
	} {
		assert.Equal(t, code, problem.CodeOf(fromStatus("b", toStatus(problem.New(code, "x")))))
	}
}

// TestNoSentinelIsForgotten reads the errors of the packages whose errors cross the wire: one that is missing
// in the table would lose its identity.
func TestNoSentinelIsForgotten(t *testing.T) {
	names := map[string]bool{}
	for _, s := range sentinels() {
		names[strings.ReplaceAll(s.name, "_", "")] = true
	}
	sources, err := filepath.Glob("../cluster/*.go")
	require.NoError(t, err)
	found := 0
	for _, source := range append(sources, "../state/errors.go") {
		file, err := parser.ParseFile(token.NewFileSet(), source, nil, 0)
		require.NoError(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			if v, ok := n.(*ast.ValueSpec); ok {
				for _, id := range v.Names {
					if after, ok := strings.CutPrefix(id.Name, "Err"); ok {
						found++
						assert.True(t, names[strings.ToLower(after)], id.Name)
					}
				}
			}
			return true
		})
	}
	assert.Greater(t, found, 25)
}

func TestNotLeaderNamesTheLeader(t *testing.T) {
	st := toStatus(refuseNotLeader("c"))
	assert.Equal(t, codes.FailedPrecondition, status.Code(st))
	got := fromStatus("b", st)
	require.ErrorIs(t, got, cluster.ErrNotLeader)
	assert.Equal(t, "c", leaderOf(got))
	assert.Equal(t, problem.Unavailable, problem.CodeOf(got))
	require.EqualError(t, got, "this node is not the leader; it is c")
	got = fromStatus("b", toStatus(problem.New(problem.Unavailable, "propose: %w", cluster.ErrNotLeader)))
	require.ErrorIs(t, got, cluster.ErrNotLeader)
	assert.Empty(t, leaderOf(got))
}

func TestForeignErrorsDegrade(t *testing.T) {
	plain := fromStatus("b", toStatus(errors.New("boom")))
	assert.Equal(t, problem.Internal, problem.CodeOf(plain))
	require.EqualError(t, plain, "boom")
	assert.Equal(t, problem.Timeout,
		problem.CodeOf(fromStatus("b", toStatus(fmt.Errorf("propose: %w", context.DeadlineExceeded)))))
	assert.Equal(t, problem.Unavailable, problem.CodeOf(fromStatus("b", toStatus(context.Canceled))))

	later := fromProblem(&dpservev1.Problem{
		Code: "of_the_future", Message: "m",
		Is: []string{"unheard_of", "stale_epoch"},
	})
	assert.Equal(t, problem.Internal, problem.CodeOf(later))
	require.ErrorIs(t, later, state.ErrStaleEpoch)
	assert.Equal(t, codes.Internal, status.Code(toStatus(later)))
	unknown := toStatus(&problem.Error{Code: "of_the_future", Message: "m"})
	assert.Equal(t, codes.Internal, status.Code(unknown))
}

func TestTransportErrors(t *testing.T) {
	for code, want := range map[codes.Code]problem.Code{
		codes.Unavailable: problem.Unavailable, codes.DeadlineExceeded: problem.Timeout,
		codes.Unimplemented:     problem.Unavailable,
		codes.ResourceExhausted: problem.TooLarge, codes.PermissionDenied: problem.PermissionDenied,
		codes.DataLoss: problem.Internal,
	} {
		got := fromStatus("b", status.Error(code, "why"))
		assert.Equal(t, want, problem.CodeOf(got), code)
		assert.Contains(t, got.Error(), "node b")
	}
	require.ErrorIs(t, fromStatus("b", status.Error(codes.Unavailable, "connection refused")), errUnreachable)
	require.ErrorIs(t, fromStatus("b", status.Error(codes.DeadlineExceeded, "")), context.DeadlineExceeded)
}

func TestLongErrorsAreCut(t *testing.T) {
	long := strings.Repeat("ä", 1<<20)
	p := toProblem(problem.New(problem.Internal, "%s", long).WithHint("%s",
		long).WithDetails(strings.Split(strings.Repeat(long[:4000]+"\n", 100), "\n")...))
	assert.LessOrEqual(t, len(p.GetMessage())+len(p.GetHint()), maxMessage+maxHint)
	assert.Len(t, p.GetDetails(), maxDetails)
	_, err := proto.Marshal(p)
	require.NoError(t, err, "valid UTF-8")
}
