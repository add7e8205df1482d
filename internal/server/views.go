package server

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/msg"
)

// viewTimeout bounds how long a listing waits for a node. A node that does not answer is shown without the
// statuses of its ranks.
const viewTimeout = time.Second

// recentRenewal is how recent a renewal must be for a node to count as reachable although it has not answered
// a question: a restarted node may not be connected yet. It is at most a second, because `status` shows a
// dead node within a second.
const recentRenewal = time.Second

// localView implements msg.NodeView for this node.
type localView struct{ n *Node }

var _ msg.NodeView = localView{}

// Statuses implements msg.NodeView.
func (v localView) Statuses(context.Context) (ranks map[string][]msg.RankStatus, queued map[string]int,
	err error,
) {
	queued = map[string]int{}
	if in := v.n.ingress; in != nil {
		for name := range v.n.store.State().Apps {
			queued[name] = in.QueueLen(name)
		}
	}
	return v.n.node.RankStatuses(), queued, nil
}

// Logs implements msg.NodeView.
func (v localView) Logs(ctx context.Context, q msg.LogQuery, give func(msg.LogLine) error) error {
	return v.n.node.Logs(ctx, q, give)
}

// ResetRouter implements msg.NodeView.
func (v localView) ResetRouter(_ context.Context, app string) (ranks int, err error) {
	if v.n.ingress == nil {
		return 0, nil
	}
	res, err := v.n.ingress.ResetRouter(app)
	return res.Ranks, err
}

// views returns the nodes that can be asked, by name. The leader leaves out nodes that have been silent for
// half of their lease, so that no listing waits for them.
func (n *Node) views() map[string]msg.NodeView {
	out := map[string]msg.NodeView{n.cfg.NodeID: localView{n}}
	var silences map[string]controller.Silence
	if l, leads := n.leading.Current(); leads {
		silences = l.control.Silences()
	}
	for id, node := range n.store.State().Nodes {
		if id != n.cfg.NodeID && !node.Lost && node.Address != "" && !silences[id].Long {
			out[id] = n.conns.Node(id)
		}
	}
	return out
}

// fanOut asks every node at once, each for at most limit. It returns the first error by node name, after all
// nodes were asked.
func (n *Node) fanOut(
	ctx context.Context, limit time.Duration, ask func(ctx context.Context, id string, v msg.NodeView) error,
) error {
	views := n.views()
	ids := slices.Sorted(maps.Keys(views))
	errs := make([]error, len(ids))
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var wg sync.WaitGroup
	for i, id := range ids {
		wg.Go(func() { errs[i] = ask(ctx, id, views[id]) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// collectStatus returns the statuses of the ranks of all nodes by unit, and the queue lengths of all
// ingresses by application. answered says which nodes replied.
func (n *Node) collectStatus(ctx context.Context) (
	ranks map[string][]msg.RankStatus, queued map[string]int, answered map[string]bool,
) {
	ranks, queued, answered = map[string][]msg.RankStatus{}, map[string]int{}, map[string]bool{}
	var mu sync.Mutex
	_ = n.fanOut(ctx, viewTimeout, func(ctx context.Context, id string, v msg.NodeView) error {
		r, q, err := v.Statuses(ctx)
		mu.Lock()
		defer mu.Unlock()
		answered[id] = err == nil
		for unit, list := range r {
			ranks[unit] = append(ranks[unit], list...)
		}
		for app, k := range q {
			queued[app] += k
		}
		return err
	})
	return ranks, queued, answered
}

// unreachable returns the nodes that have not answered the leader's question and have not renewed their lease
// recently, each with the reason that users see. A node whose process died refuses the question at once; a
// node that is cut off lets it time out. A node with one late renewal still answers and is not listed.
func unreachable(l *leaderActors, answered map[string]bool) map[string]string {
	out := map[string]string{}
	for id, silence := range l.control.Silences() {
		if !answered[id] && silence.For >= recentRenewal {
			out[id] = "node " + id + " is silent for " + silence.For.Truncate(time.Second).String()
		}
	}
	return out
}
