package server

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// backend implements the admin API's interfaces with the parts of a node.
type backend struct{ n *Node }

var (
	_ api.Backend  = (*backend)(nil)
	_ api.Ranks    = (*backend)(nil)
	_ api.Nodes    = (*backend)(nil)
	_ api.Restarts = (*backend)(nil)
)

func (b *backend) Validate(file string, text []byte) ([]app.Warning, error) {
	_, warnings, err := app.Parse(app.Default(), file, text)
	return warnings, err
}

func (b *backend) Deploy(ctx context.Context, req client.DeployRequest) (api.DeployResult, error) {
	file, warnings, err := app.Parse(app.Default(), req.File, req.Text)
	if err != nil {
		return api.DeployResult{}, err
	}
	l, err := b.n.requireLeader()
	if err != nil {
		return api.DeployResult{}, err
	}
	r, changes, err := l.control.Deploy(ctx, controller.Deployment{
		Apps: file.Applications, Seen: req.Revision, Prune: req.Prune, Partial: req.Partial,
	})
	if err != nil {
		return api.DeployResult{}, err
	}
	return api.DeployResult{Revision: r.Revision, Apps: r.Apps, Changes: changes, Warnings: warnings}, nil
}

func (b *backend) Plan(_ context.Context, req client.DeployRequest) (client.Plan, []app.Warning, error) {
	file, warnings, err := app.Parse(app.Default(), req.File, req.Text)
	if err != nil {
		return client.Plan{}, nil, err
	}
	l, err := b.n.requireLeader()
	if err != nil {
		return client.Plan{}, nil, err
	}
	p, err := l.control.Plan(file.Applications, req.Prune)
	return p, warnings, err
}

func (b *backend) Apps(ctx context.Context) ([]client.AppStatus, error) {
	l, err := b.n.requireLeader()
	if err != nil {
		return nil, err
	}
	views, silences := b.views()
	list := l.control.StatusWithout(nil) // before the nodes are asked: a ready rank has its status by then
	reported := views.Statuses(ctx)
	if gone := reported.Unreachable(silences); len(gone) > 0 {
		list = l.control.StatusWithout(gone)
	}
	reported.AddTo(list)
	for i := range list {
		answers := list[i].Name // the pool that answers requests
		if n := len(list[i].Pools); n > 0 {
			answers = list[i].Pools[n-1].Name
		}
		if in := b.n.ingress; in != nil {
			list[i].Index, list[i].Identity = in.Index(answers), in.Identity(answers)
		}
	}
	return list, nil
}

// specs returns the stored applications with all of their pools, without those that this version cannot read.
func (b *backend) specs() []*app.Application {
	var out []*app.Application
	for _, a := range b.n.store.State().Apps {
		if pools, err := a.Pools(); err == nil {
			out = append(out, pools...)
		}
	}
	return out
}

func (b *backend) Logs(ctx context.Context, q client.LogQuery) (api.LogStream, error) {
	status, err := b.App(ctx, q.App)
	if err != nil {
		return nil, err
	}
	views, _ := b.views()
	return views.Logs(ctx, b.n.store.State(), &status, q)
}

// views returns the nodes that can be asked, and on the leader the time since each node's last renewal. The
// leader leaves out nodes that have been silent for half of their lease, so that no listing waits for them.
func (b *backend) views() (views api.NodeViews, silences map[string]time.Duration) {
	views, silences = api.NodeViews{b.n.cfg.NodeID: localView{b.n}}, map[string]time.Duration{}
	long := map[string]bool{}
	if l, leads := b.n.leading.Current(); leads {
		for id, s := range l.control.Silences() {
			silences[id], long[id] = s.For, s.Long
		}
	}
	for id, node := range b.n.store.State().Nodes {
		if id != b.n.cfg.NodeID && !node.Lost && node.Address != "" && !long[id] {
			views[id] = b.n.conns.Node(id)
		}
	}
	return views, silences
}

func (b *backend) CallEngines(ctx context.Context, q *msg.EngineCall) ([]client.RankAnswer, error) {
	if _, err := b.App(ctx, q.App); err != nil {
		return nil, err
	}
	views, _ := b.views()
	return views.CallEngines(ctx, q)
}

// engineMetrics returns /metrics/engines.
func (b *backend) engineMetrics() http.Handler {
	views := func() api.NodeViews {
		views, _ := b.views()
		return views
	}
	return api.NewEngineMetrics(views, b.n.store.State)
}

func (b *backend) AddRank(ctx context.Context, name string, rank []byte) (client.RankChange, error) {
	l, err := b.n.requireLeader()
	if err != nil {
		return client.RankChange{}, err
	}
	if err := checkLoop(ctx, b.n, rank); err != nil {
		return client.RankChange{}, err
	}
	return controller.AttachedRanks{Controller: l.control}.Add(ctx, name, rank)
}

func (b *backend) RemoveRank(ctx context.Context, name string, r api.RankRemoval) (client.RankChange, error) {
	l, err := b.n.requireLeader()
	if err != nil {
		return client.RankChange{}, err
	}
	return controller.AttachedRanks{Controller: l.control}.Remove(ctx, name, r.Rank, r.Deadline)
}

func (b *backend) Workers(_ context.Context, name string) ([]string, error) {
	return controller.AttachedURLs(b.n.store.State(), name)
}

func (b *backend) App(ctx context.Context, name string) (client.AppStatus, error) {
	list, err := b.Apps(ctx)
	if err != nil {
		return client.AppStatus{}, err
	}
	return api.FindApp(list, name)
}

func (b *backend) Delete(ctx context.Context, name string) error {
	if _, err := b.App(ctx, name); err != nil {
		return err
	}
	l, err := b.n.requireLeader()
	if err != nil {
		return err
	}
	_, err = l.control.Delete(ctx, name)
	return err
}

func (b *backend) History(_ context.Context, name string) ([]client.Revision, error) {
	if _, err := b.n.requireLeader(); err != nil {
		return nil, err
	}
	return controller.History(b.n.store.State(), name)
}

func (b *backend) AppFile(_ context.Context, name string, revision uint64) (client.AppFile, error) {
	if _, err := b.n.requireLeader(); err != nil {
		return client.AppFile{}, err
	}
	text, at, err := controller.PastFile(b.n.store.State(), name, revision)
	return client.AppFile{App: name, Revision: at, Text: string(text)}, err
}

func (b *backend) Rollback(ctx context.Context, name string, to uint64) (api.DeployResult, error) {
	l, err := b.n.requireLeader()
	if err != nil {
		return api.DeployResult{}, err
	}
	r, changes, err := l.control.Rollback(ctx, name, to)
	return api.DeployResult{Revision: r.Revision, Apps: r.Apps, Changes: changes}, err
}

func (b *backend) Events(since uint64) ([]client.Event, <-chan struct{}) {
	l, err := b.n.requireLeader()
	switch {
	case err != nil && b.n.peering != nil:
		return nil, nil // another node leads, and has the events
	case err != nil:
		return nil, b.n.store.Leadership() // this node will lead
	}
	next := l.control.Watch() // Watch comes before Events, so that no change in between is missed
	events := l.control.Events(since)
	out := make([]client.Event, 0, len(events))
	for i := range events {
		e := &events[i]
		kind := e.To
		switch {
		case e.Unit != "":
			kind = "unit"
		case e.Node != "":
			kind = "node"
		}
		out = append(out, client.Event{
			Number: e.Seq, Time: e.At, Kind: kind, App: e.App, Unit: e.Unit, Node: e.Node, Epoch: e.Epoch,
			From: e.From, Phase: e.To, Reason: e.Reason, Action: e.Action(), Former: e.Former,
		})
	}
	return out, next
}

func (b *backend) Nodes(ctx context.Context) ([]client.NodeStatus, error) {
	l, err := b.n.requireLeader()
	if err != nil {
		return b.nodesWithoutLeader(), nil //nolint:nilerr // show what this node knows
	}
	list := l.control.Nodes()
	views, _ := b.views()
	inflight := views.Statuses(ctx).InFlight()
	for i := range list {
		s := &list[i]
		s.Leader, s.InFlight = s.Node == b.n.cfg.NodeID, inflight[s.Node]
		if rec := b.n.store.State().Nodes[s.Node]; rec != nil {
			s.Voter = b.n.isVoter(rec.UID)
			b.addGossipView(s, rec)
		}
	}
	return list, nil
}

// seenItself is client.NodeStatus.SeenBy of the node that was asked while no node leads.
const seenItself = "itself"

// nodesWithoutLeader returns what this node knows by itself: the last state, and the nodes that gossip sees.
func (b *backend) nodesWithoutLeader() []client.NodeStatus {
	n := b.n
	st := n.store.State()
	who := n.describeVoters()
	var out []client.NodeStatus
	for _, id := range slices.Sorted(maps.Keys(st.Nodes)) {
		rec := st.Nodes[id]
		s := controller.StatusOfRecord(rec)
		s.State, s.Reason, s.Voter = "unknown", "no node leads; "+who, n.isVoter(rec.UID)
		b.addGossipView(&s, rec)
		switch {
		case rec.UID == n.ident.UID: // it answers, whatever gossip remembers of it
			s.State, s.LastSeen, s.SeenBy = "alive", time.Now(), seenItself
			if rec.Draining { // the command that watches the drain goes on
				s.State = "draining"
			}
			if t := n.warning(); t != "" {
				s.Notes = append(s.Notes, t)
			}
		case s.SeenBy == "":
			s.Reason = "not heard of, and " + s.Reason
		}
		out = append(out, s)
	}
	return out
}

func (b *backend) Drain(ctx context.Context, node string, deadline *time.Duration) error {
	l, err := b.n.requireLeader()
	if err != nil {
		return err
	}
	var by time.Time
	if deadline != nil {
		by = time.Now().Add(*deadline)
	}
	return l.control.Drain(ctx, node, by)
}

func (b *backend) Undrain(ctx context.Context, node string) error {
	l, err := b.n.requireLeader()
	if err != nil {
		return err
	}
	return l.control.Undrain(ctx, node)
}

func (b *backend) Remove(ctx context.Context, node string) error {
	l, err := b.n.requireLeader()
	if err != nil {
		return err
	}
	return b.n.upkeep.Remove(ctx, node, l.control.Remove)
}

func (b *backend) CheckLeave(ctx context.Context, node string) error {
	if _, err := b.n.requireLeader(); err != nil {
		return err
	}
	return b.n.upkeep.CheckLeave(ctx, node)
}

// RotateKey replaces the gossip key, waits until the nodes have it, at most for the time of a lease, and
// names those that have not taken it.
func (b *backend) RotateKey(ctx context.Context) (behind []string, err error) {
	if b.n.peering == nil {
		return nil, problem.New(problem.Conflict, "this node stands alone: it does not gossip").
			WithHint("start it with --advertise IP")
	}
	if _, err := b.n.requireLeader(); err != nil {
		return nil, err
	}
	_, err = b.n.consensus.ProposeHere(ctx, state.Command{
		RotateGossipKey: &state.RotateGossipKey{Next: cluster.NewGossipKey()},
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, b.n.timers().node.LeaseTTL)
	defer cancel()
	for {
		changed := b.n.store.Changed()
		behind = b.n.store.State().NodesBehind()
		if len(behind) == 0 {
			return nil, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return behind, nil
		}
	}
}

func (b *backend) Restart(ctx context.Context, force bool) (next string, err error) {
	return b.n.Restart(ctx, force)
}

// Process names this process of the node.
func (b *backend) Process() string { return b.n.node.Process() }

// addGossipView adds gossip's last sight of a node to its status.
func (b *backend) addGossipView(s *client.NodeStatus, rec *state.Node) {
	if b.n.peering == nil {
		return
	}
	g, ok := b.n.peering.Neighbours.Seen(rec.UID)
	if ok && g.LastSeen.After(s.LastSeen.Add(state.LeaseTTL/2)) {
		s.LastSeen, s.SeenBy = g.LastSeen, "gossip"
	}
}

// localView implements msg.NodeView for this node.
type localView struct{ n *Node }

var _ msg.NodeView = localView{}

func (v localView) Statuses(context.Context) (msg.NodeCounts, error) {
	counts := msg.NodeCounts{
		Ranks: v.n.node.RankStatuses(), Queued: map[string]int{}, Pairs: map[string]client.PDStatus{},
		Traffic: map[string]*client.Traffic{},
	}
	if in := v.n.ingress; in != nil {
		for a, p := range v.n.store.State().Pools() {
			counts.Queued[a.Name] += in.QueueLen(p.PoolName())
			if t := v.n.metrics.Traffic(p.PoolName()); t != nil && p.Pool != app.PoolPrefill {
				counts.Traffic[a.Name] = t
			}
			if pd, ok := in.PairStatus(a.Name); ok {
				counts.Pairs[a.Name] = pd
			}
		}
	}
	return counts, nil
}

func (v localView) Logs(ctx context.Context, q msg.LogQuery, give func(msg.LogLine) error) error {
	return v.n.node.Logs(ctx, q, give)
}

func (v localView) CallEngines(ctx context.Context, q *msg.EngineCall) ([]client.RankAnswer, error) {
	return v.n.node.CallEngines(ctx, q), nil
}

func (v localView) EngineMetrics(ctx context.Context, give func(*msg.EnginePage) error) error {
	return v.n.node.EngineMetrics(ctx, give)
}

func (v localView) ResetRouter(_ context.Context, app string) (ranks int, err error) {
	if v.n.ingress == nil {
		return 0, nil
	}
	res, err := v.n.ingress.ResetRouter(app)
	return res.Ranks, err
}

// eventRouterReset is the kind of the event that records a router reset.
const eventRouterReset = "router-reset"

// routers implements api.Routers. What is not below is the ingress's own.
type routers struct {
	*ingress.Ingress
	n *Node
}

var _ api.Routers = (*routers)(nil)

// newRouters returns the Routers of a node with role ingress, and nil on other nodes.
func newRouters(n *Node) api.Routers {
	if n.ingress == nil {
		return nil
	}
	return &routers{n.ingress, n}
}

func (r *routers) Explain(ctx context.Context, app string, q *client.Query) (*client.Explanation, error) {
	return r.ExplainRoute(ctx, app, q)
}

func (r *routers) Decisions(_ context.Context, app string, most int) ([]client.Replay, error) {
	return r.Ingress.Decisions(app, most)
}

// Reset implements api.Routers. It resets the router on every ingress of the cluster.
func (r *routers) Reset(ctx context.Context, app string) (client.ResetResult, error) {
	if _, err := r.RouterInfo(app); err != nil {
		return client.ResetResult{}, err
	}
	views, _ := (&backend{r.n}).views()
	ranks, err := views.ResetRouters(ctx, app)
	if l, leads := r.n.leading.Current(); err == nil && leads {
		l.control.Note(app, eventRouterReset, fmt.Sprintf("%d ranks listed again", ranks))
	}
	return client.ResetResult{App: app, Ranks: ranks}, err
}

func (r *routers) Router(_ context.Context, app string) (client.Info, error) {
	return r.RouterInfo(app)
}

func (r *routers) PotentialLoads(_ context.Context, app string, ids []uint32) ([]client.PotentialLoad,
	error,
) {
	return r.Ingress.PotentialLoads(app, ids)
}

func (r *routers) MarkPrefillComplete(_ context.Context, app, requestID string) error {
	return r.Ingress.MarkPrefillComplete(app, requestID)
}

func (r *routers) Free(_ context.Context, app, requestID string) error {
	return r.Ingress.Free(app, requestID)
}
