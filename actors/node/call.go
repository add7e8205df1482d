package node

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/promtext"
	"github.com/dpserve/dpserve/internal/state"
)

const callsAtOnce = 16 // engines that a node asks at the same time

// CallEngines makes a control call to the engines of an application's ranks on this node. An engine that
// hosts several ranks is called once. The ranks hear what the call does to their engine: a rank whose engine
// is put to sleep takes no request from before the call on.
func (n *Node) CallEngines(ctx context.Context, q *msg.EngineCall) []client.RankAnswer {
	engines := n.engines(func(r *rank) bool {
		u := r.unit
		return (u.m.App.Name == q.App || u.m.App.PoolName() == q.App) &&
			(len(q.Ranks) == 0 || slices.Contains(q.Ranks, client.RankName(u.m.Group, r.grant.Rank)))
	}, func(a, b *rank) bool { return a.target.URL == b.target.URL })
	answers := make([][]client.RankAnswer, len(engines))
	var calls errgroup.Group
	calls.SetLimit(callsAtOnce)
	for i, ranks := range engines {
		calls.Go(func() error {
			answers[i] = callEngine(ctx, ranks, q)
			return nil
		})
	}
	_ = calls.Wait() // no call returns an error
	return slices.Concat(answers...)
}

// engines are the ranks on this node that wanted selects, by the engine that hosts them. isSame reports
// whether two ranks are of one engine.
func (n *Node) engines(wanted func(*rank) bool, isSame func(a, b *rank) bool) [][]*rank {
	var out [][]*rank
	for _, u := range n.list() {
		if u.currentPhase() == state.Gone {
			continue
		}
		n.mu.Lock()
		for _, r := range u.ranks {
			if r.client == nil || !wanted(r) { // without a client it is not started here yet
				continue
			}
			i := slices.IndexFunc(out, func(of []*rank) bool { return isSame(of[0], r) })
			if i < 0 {
				out = append(out, []*rank{r})
			} else {
				out[i] = append(out[i], r)
			}
		}
		n.mu.Unlock()
	}
	return out
}

func callEngine(ctx context.Context, ranks []*rank, q *msg.EngineCall) []client.RankAnswer {
	tell := func(effect openai.Effect) {
		for _, r := range ranks {
			r.replica.Controlled(effect)
		}
	}
	path, _, _ := strings.Cut(q.Path, "?")
	effect := openai.NoEffect
	if control := openai.ControlOf(path); control != nil {
		effect = control.Effect
	}
	if effect == openai.Sleeps {
		tell(effect)
	}
	begun := time.Now()
	status, body, err := ranks[0].client.Call(ctx, q.Method, q.Path, q.Body)
	answer := client.RankAnswer{Status: status, Body: string(body), TookMs: time.Since(begun).Milliseconds()}
	isDone := err == nil && status/100 == 2
	if err != nil {
		answer.Error = err.Error()
	}
	switch {
	case effect == openai.Sleeps && err == nil && !isDone:
		tell(openai.Wakes) // it refused to sleep
	case effect == openai.Wakes && (isDone || err != nil): // without an answer the health check says more
		tell(effect)
	case (effect == openai.ClearsCache || effect == openai.ChangesModels) && isDone:
		tell(effect)
	}
	out := make([]client.RankAnswer, len(ranks))
	for i, r := range ranks {
		out[i] = answer
		out[i].Pool, out[i].Group, out[i].Rank = r.unit.m.App.PoolName(), r.unit.m.Group, r.grant.Rank
		out[i].Node, out[i].URL = r.unit.n.cfg.ID, r.target.URL
	}
	return out
}

// pageTimeout is how long an engine may take for its metrics page. It is below the default time of a scrape.
const pageTimeout = 3 * time.Second

// EngineMetrics passes the metrics page of each engine on this node to give, one after the other. An engine
// that gives no page within pageTimeout is left out. An error of give ends it.
func (n *Node) EngineMetrics(ctx context.Context, give func(*msg.EnginePage) error) error {
	all := func(*rank) bool { return true }
	engines := n.engines(all, func(a, b *rank) bool {
		return a.target.URL == b.target.URL && a.unit.m.Group == b.unit.m.Group &&
			a.unit.m.App.PoolName() == b.unit.m.App.PoolName()
	})
	calls, ctx := errgroup.WithContext(ctx)
	calls.SetLimit(callsAtOnce)
	var mu sync.Mutex
	for _, ranks := range engines {
		calls.Go(func() error {
			page := askPage(ctx, ranks)
			if page == nil {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			return give(page)
		})
	}
	return calls.Wait()
}

// askPage asks the engine of ranks for its metrics page; nil if it gives none.
func askPage(ctx context.Context, ranks []*rank) *msg.EnginePage {
	ctx, cancel := context.WithTimeout(ctx, pageTimeout)
	defer cancel()
	text, err := ranks[0].client.MetricsPage(ctx)
	if err != nil {
		return nil
	}
	slices.SortFunc(ranks, func(a, b *rank) int { return a.grant.Rank - b.grant.Rank })
	m := ranks[0].unit.m
	page := &msg.EnginePage{Epoch: m.Epoch}
	page.App, page.Pool, page.Group, page.Text = m.App.Name, m.App.Pool, m.Group, string(text)
	for _, r := range ranks {
		page.Ranks = append(page.Ranks, promtext.Rank{
			Number: r.grant.Rank, Series: r.client.SeriesName(text),
		})
	}
	return page
}
