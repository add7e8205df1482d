package api

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

const (
	// viewTimeout bounds how long a listing waits for a node. A node that does not answer is shown without
	// the statuses of its ranks.
	viewTimeout = time.Second
	// recentRenewal is how recent a renewal must be for a node to count as reachable although it has not
	// answered a question: a restarted node may not be connected yet. It is at most a second, because
	// `status` shows a dead node within a second.
	recentRenewal = time.Second
	// resetTimeout bounds a reset of the routers of all nodes.
	resetTimeout = 5 * time.Second
	// engineCallTimeout bounds a control call of all engines. It is below the time of an API call.
	engineCallTimeout = 25 * time.Second
)

// NodeViews are the nodes that can be asked, by name.
type NodeViews map[string]msg.NodeView

// ask asks every node at once, each for at most limit. It returns the first error by node name, after all
// nodes were asked.
func (v NodeViews) ask(ctx context.Context, limit time.Duration,
	question func(ctx context.Context, id string, v msg.NodeView) error,
) error {
	ids := slices.Sorted(maps.Keys(v))
	errs := make([]error, len(ids))
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var wg sync.WaitGroup
	for i, id := range ids {
		wg.Go(func() { errs[i] = question(ctx, id, v[id]) })
	}
	wg.Wait()
	return cmp.Or(errs...)
}

// ResetRouters resets an application's router on every ingress. It returns the ranks that are asked for a
// snapshot.
func (v NodeViews) ResetRouters(ctx context.Context, app string) (ranks int, err error) {
	var mu sync.Mutex
	err = v.ask(ctx, resetTimeout, func(ctx context.Context, _ string, node msg.NodeView) error {
		k, err := node.ResetRouter(ctx, app)
		mu.Lock()
		defer mu.Unlock()
		ranks = max(ranks, k)
		return err
	})
	return ranks, err
}

// CallEngines makes a control call to the engines of an application on every node. The answers are in the
// order of the ranks. A node that cannot be asked is an error, because its ranks are not known.
func (v NodeViews) CallEngines(ctx context.Context, q *msg.EngineCall) ([]client.RankAnswer, error) {
	var mu sync.Mutex
	var out []client.RankAnswer
	err := v.ask(ctx, engineCallTimeout, func(ctx context.Context, _ string, node msg.NodeView) error {
		answers, err := node.CallEngines(ctx, q)
		mu.Lock()
		defer mu.Unlock()
		out = append(out, answers...)
		return err
	})
	slices.SortFunc(out, func(a, b client.RankAnswer) int {
		return cmp.Or(cmp.Compare(a.Pool, b.Pool), a.Group-b.Group, a.Rank-b.Rank)
	})
	return out, err
}

// ClusterStatus is what the nodes report about their ranks and queues.
type ClusterStatus struct {
	ranks    map[string][]client.RankStatus // by unit
	queued   map[string]int                 // in the queues of all ingresses, by application
	pairs    map[string]*client.PDStatus    // of all ingresses, by application with two pools
	traffic  map[string]*client.Traffic     // of all ingresses, by application
	answered map[string]bool                // the nodes that replied
}

// Statuses asks every node for its ranks and queues.
func (v NodeViews) Statuses(ctx context.Context) *ClusterStatus {
	s := &ClusterStatus{
		map[string][]client.RankStatus{},
		map[string]int{},
		map[string]*client.PDStatus{},
		map[string]*client.Traffic{},
		map[string]bool{},
	}
	var mu sync.Mutex
	_ = v.ask(ctx, viewTimeout, func(ctx context.Context, id string, node msg.NodeView) error {
		counts, err := node.Statuses(ctx)
		mu.Lock()
		defer mu.Unlock()
		s.answered[id] = err == nil
		for unit, list := range counts.Ranks {
			s.ranks[unit] = append(s.ranks[unit], list...)
		}
		for app, k := range counts.Queued {
			s.queued[app] += k
		}
		for name, pd := range counts.Pairs {
			s.addPairs(name, &pd)
		}
		for name, t := range counts.Traffic {
			if s.traffic[name] == nil {
				s.traffic[name] = &client.Traffic{}
			}
			s.traffic[name].Add(t)
		}
		return err
	})
	return s
}

// addPairs adds what one ingress counts of an application with two pools. Each ingress makes its own pairs:
// shown are those of the ingress that has the fewest.
func (s *ClusterStatus) addPairs(name string, pd *client.PDStatus) {
	sum := s.pairs[name]
	if sum == nil {
		s.pairs[name] = pd
		return
	}
	sum.Remote, sum.Local, sum.Fallbacks = sum.Remote+pd.Remote, sum.Local+pd.Local,
		sum.Fallbacks+pd.Fallbacks
	if pd.Met < sum.Met || pd.Met == sum.Met && pd.Pairs != client.PairsOn {
		sum.Pairs, sum.Met, sum.All = pd.Pairs, pd.Met, pd.All
	}
}

// AddTo completes the statuses of applications by what the nodes report. A status of another epoch belongs to
// a replica that is ending and is ignored.
func (s *ClusterStatus) AddTo(apps []client.AppStatus) {
	for i := range apps {
		apps[i].Queued, apps[i].Traffic = s.queued[apps[i].Name], s.traffic[apps[i].Name]
		for j := range apps[i].Units {
			u := &apps[i].Units[j]
			for k, r := range u.Ranks {
				for _, a := range s.ranks[u.Unit] {
					if a.Rank == r.Rank && a.Epoch == r.Epoch {
						a.Group, a.Node, a.Devices, a.Phase = r.Group, r.Node, r.Devices, r.Phase
						a.Share = r.Share
						u.Ranks[k] = a
					}
				}
			}
		}
		if len(apps[i].Pools) > 0 {
			apps[i].PD = s.pdStatus(&apps[i])
		}
	}
}

// pdStatus is what the ingresses and the ranks of an application with two pools count.
func (s *ClusterStatus) pdStatus(a *client.AppStatus) *client.PDStatus {
	pd := client.PDStatus{Pairs: "off: no ingress has reported"}
	if known := s.pairs[a.Name]; known != nil {
		pd = *known
	}
	count, total := uint64(0), 0.0
	for i := range a.Units {
		for _, r := range s.ranks[a.Units[i].Unit] {
			if t := r.Transfer; t != nil {
				count, total, pd.TransferBytes = count+t.Count, total+t.TotalMs, pd.TransferBytes+t.Bytes
			}
		}
	}
	if count > 0 {
		pd.TransferMs = total / float64(count)
	}
	return &pd
}

// FindApp returns the named application, or the named pool of one. The error lists the existing applications.
func FindApp(apps []client.AppStatus, name string) (client.AppStatus, error) {
	names := make([]string, 0, len(apps))
	for i := range apps {
		if apps[i].Name == name {
			return apps[i], nil
		}
		if pool, ok := apps[i].OfPool(name); ok {
			return pool, nil
		}
		names = append(names, apps[i].Name)
	}
	return client.AppStatus{}, state.UnknownApp(name, names)
}

// InFlight returns the requests in flight at the ranks of each node.
func (s *ClusterStatus) InFlight() map[string]int {
	out := map[string]int{}
	for _, unit := range s.ranks {
		for i := range unit {
			out[unit[i].Node] += unit[i].InFlight
		}
	}
	return out
}

// Unreachable returns the nodes that have not answered and have not renewed their lease recently, each with
// the reason that users see. silentFor is the time since each node's last renewal. A node whose process died
// refuses the question at once; a node that is cut off lets it time out. A node with one late renewal still
// answers and is not listed.
func (s *ClusterStatus) Unreachable(silentFor map[string]time.Duration) map[string]string {
	out := map[string]string{}
	for id, silence := range silentFor {
		if !s.answered[id] && silence >= recentRenewal {
			out[id] = "node " + id + " is silent for " + silence.Truncate(time.Second).String()
		}
	}
	return out
}
