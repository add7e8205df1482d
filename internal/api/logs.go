package api

import (
	"context"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// logBatch bounds the lines between the node's ring and a reader. A slower reader slows the copy, not the
// engine.
const logBatch = 256

// Logs opens the log lines of one application, of which status is the status, over all nodes that can be
// asked.
func (v NodeViews) Logs(ctx context.Context, st *state.State, status *client.AppStatus,
	q client.LogQuery) (LogStream,
	error,
) {
	if err := checkRankExists(st, status, q); err != nil {
		return nil, err
	}
	nq := msg.LogQuery{App: q.App, Rank: q.Rank, Since: q.Since, Follow: q.Follow, Tail: q.Tail}
	if q.Group != client.AllRanks && len(status.Pools) == 0 { // else it may be a group of either pool
		nq.Unit = unitOfQuery(st, q)
	}
	s := &logStream{group: q.Group, lines: make(chan client.LogLine, logBatch)}
	if q.Tail == 0 && !q.Follow {
		close(s.lines)
		return s, nil
	}
	// Close ends it, not the call that opened it
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	s.copying.Go(func() {
		defer close(s.lines)
		v.collectLogs(run, nq, func(l msg.LogLine) error { return s.push(run, l) })
	})
	return s, nil
}

// checkRankExists refuses a group or rank that the application never had. An empty stream would look like an
// engine without a log.
func checkRankExists(st *state.State, a *client.AppStatus, q client.LogQuery) error {
	if q.Group == client.AllRanks {
		return nil
	}
	for i := range a.Units {
		for _, r := range a.Units[i].Ranks {
			if r.Group == q.Group && (r.Rank == q.Rank || q.Rank == client.AllRanks) {
				return nil
			}
		}
	}
	group := q.App + "/" + strconv.Itoa(q.Group)
	// the rank existed, and its lines may still be stored
	if q.Rank != client.AllRanks && st.Epochs[group+"/"+strconv.Itoa(q.Rank)] > 0 {
		return nil
	}
	what := "group " + group
	if q.Rank != client.AllRanks {
		what = "rank " + group + "/" + strconv.Itoa(q.Rank)
	}
	return problem.New(problem.NotFound, "there is no %s", what).
		WithHint("`dpserve status %s` lists the ranks", q.App)
}

// unitOfQuery names the unit that a group and rank of a query belong to; "" for all units of a group.
func unitOfQuery(st *state.State, q client.LogQuery) string {
	group := q.App + "/" + strconv.Itoa(q.Group)
	if st.Units[group] != nil || st.Epochs[group] > 0 { // lockstep: the group is the unit
		return group
	}
	if q.Rank == client.AllRanks {
		return ""
	}
	return group + "/" + strconv.Itoa(q.Rank)
}

// logStream implements LogStream over the node's callback.
type logStream struct {
	group   int // AllRanks, or the only group to return
	lines   chan client.LogLine
	cancel  context.CancelFunc
	copying sync.WaitGroup
}

func (s *logStream) push(ctx context.Context, l msg.LogLine) error {
	app, group := splitUnit(l.Unit)
	if s.group != client.AllRanks && s.group != group {
		return nil
	}
	return sendLine(ctx, s.lines, client.LogLine{
		Time: l.At, App: app, Group: group, Rank: l.Rank, Stream: l.Stream, Text: l.Text,
	})
}

// splitUnit reads a unit's name, app/group or app/group/rank.
func splitUnit(unit string) (app string, group int) {
	app, rest, _ := strings.Cut(unit, "/")
	number, _, _ := strings.Cut(rest, "/")
	group, _ = strconv.Atoi(number) // names are made by app.Units
	return app, group
}

// Next implements LogStream.
func (s *logStream) Next(ctx context.Context) ([]client.LogLine, error) {
	var out []client.LogLine
	select {
	case l, ok := <-s.lines:
		if !ok {
			return nil, io.EOF
		}
		out = append(out, l)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	for len(out) < logBatch {
		select {
		case l, ok := <-s.lines:
			if !ok {
				return out, nil
			}
			out = append(out, l)
		default:
			return out, nil
		}
	}
	return out, nil
}

// Close implements LogStream.
func (s *logStream) Close() error {
	if s.cancel != nil {
		s.cancel()
	}
	s.copying.Wait()
	return nil
}

// collectLogs passes the lines of all nodes to give: past lines ordered by time, new ones as they arrive.
// Ranks move, so every node may have lines of any rank. A node that does not answer is left out.
func (v NodeViews) collectLogs(ctx context.Context, q msg.LogQuery, give func(msg.LogLine) error) {
	if len(v) == 1 || q.Follow {
		v.followLogs(ctx, q, give)
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var lines []<-chan msg.LogLine
	for _, id := range slices.Sorted(maps.Keys(v)) {
		ch := make(chan msg.LogLine, logBatch)
		lines = append(lines, ch)
		wg.Go(func() {
			defer close(ch)
			_ = v[id].Logs(ctx, q, func(l msg.LogLine) error { return sendLine(ctx, ch, l) })
		})
	}
	mergeLogs(lines, give)
}

// followLogs passes lines to give as they arrive.
func (v NodeViews) followLogs(ctx context.Context, q msg.LogQuery, give func(msg.LogLine) error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, view := range v {
		wg.Go(func() {
			_ = view.Logs(ctx, q, func(l msg.LogLine) error {
				mu.Lock()
				defer mu.Unlock()
				err := give(l)
				if err != nil {
					cancel()
				}
				return err
			})
		})
	}
	wg.Wait()
}

func sendLine[L any](ctx context.Context, ch chan<- L, l L) error {
	select {
	case ch <- l:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// mergeLogs passes the lines of several ordered sources to give, ordered by time, until all sources are
// closed or give fails.
func mergeLogs(sources []<-chan msg.LogLine, give func(msg.LogLine) error) {
	heads := make([]*msg.LogLine, len(sources))
	for {
		first := -1
		for i, ch := range sources {
			if heads[i] == nil {
				if l, ok := <-ch; ok {
					heads[i] = &l
				}
			}
			if heads[i] != nil && (first < 0 || heads[i].At.Before(heads[first].At)) {
				first = i
			}
		}
		if first < 0 || give(*heads[first]) != nil {
			return
		}
		heads[first] = nil
	}
}
