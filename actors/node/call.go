package node

import (
	"context"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/state"
)

const callsAtOnce = 16 // engines that a node asks at the same time

// CallEngines makes a control call to the engines of an application's ranks on this node. An engine that
// hosts several ranks is called once. The ranks hear what the call does to their engine: a rank whose engine
// is put to sleep takes no request from before the call on.
func (n *Node) CallEngines(ctx context.Context, q *msg.EngineCall) []client.RankAnswer {
	engines := n.engines(q)
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

// engines are the ranks that a call is for, by the engine that hosts them.
func (n *Node) engines(q *msg.EngineCall) [][]*rank {
	var out [][]*rank
	for _, u := range n.list() {
		if u.m.App.Name != q.App && u.m.App.PoolName() != q.App || u.currentPhase() == state.Gone {
			continue
		}
		n.mu.Lock()
		for _, r := range u.ranks {
			if r.client == nil { // it is not started here yet
				continue
			}
			if len(q.Ranks) > 0 && !slices.Contains(q.Ranks, client.RankName(u.m.Group, r.grant.Rank)) {
				continue
			}
			i := slices.IndexFunc(out, func(of []*rank) bool { return of[0].target.URL == r.target.URL })
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
	case effect == openai.ClearsCache && isDone:
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
