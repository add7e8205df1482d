package wiring

import (
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
)

// collectLogs passes the lines of all nodes to give: past lines ordered by time, new ones as they arrive.
// Ranks move, so every node may have lines of any rank. A node that does not answer is left out.
func (n *Node) collectLogs(ctx context.Context, q msg.LogQuery, give func(msg.LogLine) error) {
	views := n.views()
	if len(views) == 1 || q.Follow {
		n.followLogs(ctx, views, q, give)
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
			_ = views[id].Logs(ctx, q, func(l msg.LogLine) error { return sendLine(ctx, ch, l) })
		})
	}
	mergeLogs(lines, give)
}

// followLogs passes lines to give as they arrive.
func (n *Node) followLogs(ctx context.Context, views map[string]msg.NodeView, q msg.LogQuery,
	give func(msg.LogLine) error) {
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

func sendLine(ctx context.Context, ch chan<- msg.LogLine, l msg.LogLine) error {
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
