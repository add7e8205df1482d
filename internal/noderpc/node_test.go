package noderpc

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

func order() *msg.StartRank {
	return &msg.StartRank{
		App: &app.Application{Name: "chat"}, Unit: "chat/0", Epoch: 3,
		Ranks:    []state.RankGrant{{Node: "b", Slot: 2}},
		AllRanks: []state.RankGrant{{Node: "b", Slot: 2}},
	}
}

func TestOrdersReachTheNode(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		b := w.nodes["a"].conns.Node("b")
		agent := w.nodes["b"].agent
		require.NoError(t, b.StartRank(t.Context(), order()))
		require.NoError(t, b.StopRank(t.Context(),
			&msg.StopRank{Unit: "chat/0", Epoch: 3, Grace: time.Minute, Reason: "drained"}))
		assert.Equal(t, []*msg.StartRank{order()}, agent.started)
		assert.Equal(t, []*msg.StopRank{{Unit: "chat/0", Epoch: 3, Grace: time.Minute, Reason: "drained"}},
			agent.stopped)

		agent.err = problem.New(problem.Conflict, "unit chat/0: %w", state.ErrStaleEpoch)
		require.ErrorIs(t, b.StartRank(t.Context(), order()), state.ErrStaleEpoch)
		agent.hang = true
		began := time.Now()
		err := b.StartRank(t.Context(), order())
		assert.Equal(t, problem.Timeout, problem.CodeOf(err))
		assert.Equal(t, orderLimit, time.Since(began), "fake time")
		why := errors.New("leadership lost")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(why) })
		require.ErrorIs(t, b.StartRank(ctx, order()), why)

		require.ErrorIs(t, w.nodes["a"].conns.Node("x").StartRank(t.Context(), order()), state.ErrUnknownNode)
		w.nodes["b"].server.Stop()
		require.ErrorIs(t, b.StopRank(t.Context(), &msg.StopRank{Unit: "chat/0", Epoch: 3}), errUnreachable)
	}, "a", "b")
}

// TestOnlyControlNodesOrder: an order names the program to start.
func TestOnlyControlNodesOrder(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		b := w.nodes["ingress"].conns.Node("b")
		assert.Equal(t, problem.PermissionDenied, problem.CodeOf(b.StartRank(t.Context(), order())))
		assert.Equal(t, problem.PermissionDenied,
			problem.CodeOf(b.StopRank(t.Context(), &msg.StopRank{Unit: "chat/0", Epoch: 3})))
		assert.Empty(t, w.nodes["b"].agent.started)
		_, err := b.Statuses(t.Context())
		require.NoError(t, err)
	}, "ingress", "b")
}

func TestViewOfAnotherNode(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		b, view := w.nodes["a"].conns.Node("b"), w.nodes["b"].view
		counts, err := b.Statuses(t.Context())
		require.NoError(t, err)
		assert.Equal(t, map[string][]client.RankStatus{"chat/0": {{
			Rank: 1, Node: "b", Phase: "ready",
			TokensPerS: 2.5,
		}}}, counts.Ranks)
		assert.Equal(t, map[string]int{"chat": 4}, counts.Queued)
		assert.Equal(t, map[string]client.PDStatus{
			"pd": {Transfer: "nixl", Pairs: client.PairsOn, Met: 2, Remote: 7},
		}, counts.Pairs)
		answers, err := b.CallEngines(t.Context(), &msg.EngineCall{
			App: "chat", Method: "POST", Path: "/sleep?level=1", Body: []byte("{}"),
		})
		require.NoError(t, err)
		assert.Equal(t, []client.RankAnswer{{Pool: "chat", Body: "POST /sleep?level=1 {}"}}, answers)
		view.pages = 2
		var ranks []int
		keep := func(p *msg.EnginePage) error {
			got := fmt.Sprint(p.App, " ", p.Ranks[0].Series, " ", p.Text, " ", p.Epoch)
			assert.Equal(t, "chat 0 up 1\n 3", got)
			ranks = append(ranks, p.Ranks[0].Number)
			return nil
		}
		require.NoError(t, b.EngineMetrics(t.Context(), keep))
		assert.Equal(t, []int{0, 1}, ranks)
		full := errors.New("no room")
		require.ErrorIs(t, b.EngineMetrics(t.Context(), func(*msg.EnginePage) error { return full }), full)
		n, err := b.ResetRouter(t.Context(), "chat")
		require.NoError(t, err)
		assert.Equal(t, 3, n)
		view.err = problem.New(problem.NotFound, "no app")
		_, err = b.ResetRouter(t.Context(), "chat")
		require.EqualError(t, err, "no app")
		_, err = b.Statuses(t.Context())
		require.EqualError(t, err, "no app")
		require.EqualError(t, b.EngineMetrics(t.Context(), keep), "metrics of engines: no app")
		assert.Equal(t, []int{0, 1, 0, 1}, ranks, "the pages before an error are not lost")
	}, "a", "b")
}

func TestLogsComeInOrderAndInBatches(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		b, view := w.nodes["a"].conns.Node("b"), w.nodes["b"].view
		view.lines = 10 * maxBatch
		got := 0
		require.NoError(t, b.Logs(t.Context(), msg.LogQuery{Unit: "chat/0", Rank: -1},
			func(l msg.LogLine) error {
				assert.Equal(t, got, l.Rank)
				assert.Equal(t, "chat/0", l.Unit)
				got++
				return nil
			}))
		assert.Equal(t, view.lines, got)

		enough := errors.New("enough")
		require.ErrorIs(t, b.Logs(t.Context(), msg.LogQuery{Rank: -1, Follow: true},
			func(msg.LogLine) error { return enough }), enough)
		synctest.Wait() // the far end goes on with what it reads for a moment after its reader has left
		view.lines, view.err = 0, problem.New(problem.NotFound, "no such unit")
		require.ErrorContains(t, b.Logs(t.Context(), msg.LogQuery{Rank: -1}, nil), "no such unit")
	}, "a", "b")
}

func TestLogsThatStandStill(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		b, view := w.nodes["a"].conns.Node("b"), w.nodes["b"].view
		view.lines, view.stall = 1, true
		began := time.Now()
		take := func(msg.LogLine) error { return nil }
		err := b.Logs(t.Context(), msg.LogQuery{Rank: -1}, take)
		require.ErrorIs(t, err, errLogIdle)
		assert.Equal(t, problem.Timeout, problem.CodeOf(err))
		assert.Equal(t, logsIdle, time.Since(began), "fake time")
		synctest.Wait()
		assert.True(t, view.ended.Load(), "the far end has stopped reading")

		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		require.NoError(t, b.Logs(ctx, msg.LogQuery{Rank: -1, Follow: true}, take),
			"followed until its reader leaves")
	}, "a", "b")
}

// TestSlowReaderOfLogsBuffersLittle: a stalled reader stops the sender when the stream's window is full.
func TestSlowReaderOfLogsBuffersLittle(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		b, view := w.nodes["a"].conns.Node("b"), w.nodes["b"].view
		view.lines = 1 << 20
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		require.NoError(t, b.Logs(ctx, msg.LogQuery{Rank: -1, Follow: true},
			func(msg.LogLine) error { <-ctx.Done(); return nil }))
		synctest.Wait()
		assert.Less(t, view.sent.Load(), int64(1<<20))
	}, "a", "b")
}
