package api_test

import (
	"context"
	"errors"
	"io"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// viewedNode is a node that answers what a test gives it.
type viewedNode struct {
	ranks  map[string][]client.RankStatus
	queued int
	pairs  map[string]client.PDStatus
	lines  []msg.LogLine
	pages  []*msg.EnginePage
	hangs  bool // EngineMetrics ends with its context
	resets int
	err    error
}

func (n *viewedNode) Statuses(context.Context) (msg.NodeCounts, error) {
	return msg.NodeCounts{
		Ranks: n.ranks, Queued: map[string]int{"a": n.queued, "pd": n.queued}, Pairs: n.pairs,
	}, n.err
}

func (n *viewedNode) Logs(_ context.Context, _ msg.LogQuery, give func(msg.LogLine) error) error {
	for _, l := range n.lines {
		if err := give(l); err != nil {
			return err
		}
	}
	return n.err
}

func (n *viewedNode) CallEngines(_ context.Context, q *msg.EngineCall) ([]client.RankAnswer, error) {
	if n.err != nil {
		return nil, n.err
	}
	return []client.RankAnswer{{Pool: q.App, Rank: n.resets, Status: 200}}, nil
}

func (n *viewedNode) EngineMetrics(ctx context.Context, give func(*msg.EnginePage) error) error {
	for _, p := range n.pages {
		if err := give(p); err != nil {
			return err
		}
	}
	if n.hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	return n.err
}

func (n *viewedNode) ResetRouter(context.Context, string) (int, error) { return n.resets, n.err }

// oneApp is the status of application a as the controller has it: one rank on each of two nodes.
func oneApp() []client.AppStatus {
	rank := func(n int, node string) client.UnitStatus {
		return client.UnitStatus{
			Unit:  "a/0/" + strconv.Itoa(n),
			Ranks: []client.RankStatus{{Rank: n, Node: node, Epoch: 2}},
		}
	}
	return []client.AppStatus{{Name: "a", Units: []client.UnitStatus{rank(0, "n0"), rank(1, "n1")}}}
}

func TestStatusesOfAllNodesAreAddedUp(t *testing.T) {
	cut := errors.New("cut off")
	views := api.NodeViews{
		"n0": &viewedNode{
			queued: 2,
			ranks:  map[string][]client.RankStatus{"a/0/0": {{Rank: 0, Node: "n0", Epoch: 2, InFlight: 5}}},
		},
		"n1": &viewedNode{
			queued: 3,
			ranks:  map[string][]client.RankStatus{"a/0/1": {{Rank: 1, Node: "n1", Epoch: 1, InFlight: 7}}},
		},
		"n2": &viewedNode{err: cut}, "n3": &viewedNode{err: cut},
	}
	s := views.Statuses(t.Context())
	list := oneApp()
	s.AddTo(list)
	assert.Equal(t, 5, list[0].Queued)
	assert.Equal(t, 5, list[0].Units[0].Ranks[0].InFlight)
	assert.Zero(t, list[0].Units[1].Ranks[0].InFlight, "of a replica that is ending")
	assert.Equal(t, map[string]int{"n0": 5, "n1": 7}, s.InFlight())
	silent := s.Unreachable(map[string]time.Duration{
		"n0": time.Minute, "n2": 4300 * time.Millisecond, "n3": 900 * time.Millisecond,
	})
	assert.Equal(t, map[string]string{"n2": "node n2 is silent for 4s"}, silent,
		"n0 answers, and n3 has renewed a moment ago")
}

// TestPairsOfAllIngresses: requests are added up, pairs are those of the ingress that has the fewest, and
// transfers those of all ranks.
func TestPairsOfAllIngresses(t *testing.T) {
	rank := func(pool string, n int, tr *client.TransferStatus) map[string][]client.RankStatus {
		return map[string][]client.RankStatus{"pd." + pool + "/0/0": {{Rank: n, Epoch: 1, Transfer: tr}}}
	}
	views := api.NodeViews{
		"n0": &viewedNode{
			queued: 2, ranks: rank("decode", 0, &client.TransferStatus{Count: 3, TotalMs: 60, Bytes: 1000}),
			pairs: map[string]client.PDStatus{"pd": {
				Transfer: "nixl", Pairs: client.PairsOn, Met: 2, All: 2, Remote: 5, Local: 1,
			}},
		},
		"n1": &viewedNode{
			queued: 1, ranks: rank("prefill", 0, &client.TransferStatus{Count: 1, TotalMs: 20, Bytes: 24}),
			pairs: map[string]client.PDStatus{"pd": {
				Transfer: "nixl", Pairs: "off: no pair is connected", All: 2, Remote: 1, Fallbacks: 4,
			}},
		},
		"n2": &viewedNode{err: errors.New("cut off")},
	}
	newList := func() []client.AppStatus {
		return []client.AppStatus{{Name: "a"}, {
			Name: "pd", Pools: make([]client.PoolStatus, 2),
			Units: []client.UnitStatus{{Unit: "pd.prefill/0/0"}, {Unit: "pd.decode/0/0"}},
		}}
	}
	list := newList()
	views.Statuses(t.Context()).AddTo(list)
	assert.Nil(t, list[0].PD, "it has one pool")
	assert.Equal(t, 3, list[1].Queued)
	assert.Equal(t, &client.PDStatus{
		Transfer: "nixl", Pairs: "off: no pair is connected", Met: 0, All: 2, Remote: 6, Local: 1,
		Fallbacks: 4, TransferMs: 20, TransferBytes: 1024,
	}, list[1].PD)

	list = newList()
	api.NodeViews{"n2": &viewedNode{err: errors.New("cut off")}}.Statuses(t.Context()).AddTo(list)
	assert.Equal(t, &client.PDStatus{Pairs: "off: no ingress has reported"}, list[1].PD)
}

func TestRoutersOfAllNodesAreReset(t *testing.T) {
	views := api.NodeViews{
		"n0": &viewedNode{resets: 2}, "n1": &viewedNode{resets: 4}, "n2": &viewedNode{resets: 1},
	}
	ranks, err := views.ResetRouters(t.Context(), "a")
	require.NoError(t, err)
	assert.Equal(t, 4, ranks)
	views["n3"] = &viewedNode{err: errors.New("cut off")}
	_, err = views.ResetRouters(t.Context(), "a")
	require.EqualError(t, err, "cut off")
}

// readAll reads a stream to its end.
func readAll(t *testing.T, s api.LogStream) (text []string) {
	t.Helper()
	for {
		lines, err := s.Next(t.Context())
		if errors.Is(err, io.EOF) {
			require.NoError(t, s.Close())
			return text
		}
		require.NoError(t, err)
		for _, l := range lines {
			text = append(text, l.Text)
		}
	}
}

// Ranks move, so every node may have lines of any rank. A node that does not answer is left out.
func TestLogsOfAllNodesAreOrderedByTime(t *testing.T) {
	begin := time.Now()
	line := func(s int, unit, text string) msg.LogLine {
		return msg.LogLine{Unit: unit, At: begin.Add(time.Duration(s) * time.Second), Text: text}
	}
	views := api.NodeViews{
		"n0": &viewedNode{lines: []msg.LogLine{line(1, "a/0/0", "one"), line(4, "a/1/0", "four")}},
		"n1": &viewedNode{lines: []msg.LogLine{line(2, "a/0/0", "two"), line(3, "a/0/1", "three")}},
		"n2": &viewedNode{err: errors.New("cut off")},
	}
	status, st := &oneApp()[0], state.New()
	logs := func(q client.LogQuery) (api.LogStream, error) { return views.Logs(t.Context(), st, status, q) }
	all := client.LogQuery{App: "a", Group: client.AllRanks, Rank: client.AllRanks, Tail: 100}
	s, err := logs(all)
	require.NoError(t, err)
	assert.Equal(t, []string{"one", "two", "three", "four"}, readAll(t, s))

	group := all
	group.Group = 0
	s, err = logs(group)
	require.NoError(t, err)
	assert.Equal(t, []string{"one", "two", "three"}, readAll(t, s))

	group.Group = 7
	_, err = logs(group)
	assert.Equal(t, problem.NotFound, problem.CodeOf(err), "an empty stream looks like a silent engine")

	all.Tail = 0
	s, err = logs(all)
	require.NoError(t, err)
	assert.Empty(t, readAll(t, s))
}
