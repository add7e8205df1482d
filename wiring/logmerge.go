package wiring

import (
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
)

// collectLogs gives the lines of all nodes: of the past in order of time, new ones as they come. Ranks move, so every node may have
// lines of any; one that does not answer is left out.
func (n *Node) collectLogs(ctx context.Context, q msg.LogQuery, give func(msg.LogLine) error) {
	views := n.views()
	if len(views) == 1 || q.Follow {
		n.interleave(ctx, views, q, give)
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var lines []<-chan msg.LogLine
	for _, id := range slices.Sorted(maps.Keys(views)) {
		ch := make(chan msg.LogLine, logBatch)
		lines = append(lines, ch)
		wg.Go(func() {
			defer close(ch)
			_ = views[id].Logs(ctx, q, func(l msg.LogLine) error { return send(ctx, ch, l) })
		})
	}
	mergeLogs(lines, give)
}

// interleave gives lines as they come.
func (n *Node) interleave(ctx context.Context, views map[string]msg.NodeView, q msg.LogQuery, give func(msg.LogLine) error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, v := range views {
		wg.Go(func() {
			_ = v.Logs(ctx, q, func(l msg.LogLine) error {
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

func send(ctx context.Context, ch chan<- msg.LogLine, l msg.LogLine) error {
	select {
	case ch <- l:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// mergeLogs gives the lines of several ordered sources in order of time, until all are closed or give fails.
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
