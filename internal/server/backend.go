package server

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// backend implements the admin API's interfaces with the parts of a node.
type backend struct{ n *Node }

var _ api.Backend = (*backend)(nil)

// Validate implements api.Backend.
func (b *backend) Validate(file string, text []byte) ([]app.Warning, error) {
	_, warnings, err := ParseApps(file, text)
	return warnings, err
}

// Deploy implements api.Backend.
func (b *backend) Deploy(ctx context.Context, req api.DeployRequest) (api.DeployResult, error) {
	file, warnings, err := ParseApps(req.File, req.Text)
	if err != nil {
		return api.DeployResult{}, err
	}
	st := b.n.store.State()
	expect, err := expectedRevisions(st, file.Applications, req.Revision)
	if err != nil {
		return api.DeployResult{}, err
	}
	changes, err := deployChanges(st, file.Applications, req.Prune)
	if err != nil {
		return api.DeployResult{}, err
	}
	l, err := b.n.requireLeader()
	if err != nil {
		return api.DeployResult{}, err
	}
	r, err := l.control.Deploy(ctx, file.Applications, expect, req.Prune, req.Partial)
	if err != nil {
		return api.DeployResult{}, err
	}
	return api.DeployResult{Revision: r.Revision, Apps: r.Apps, Changes: changes, Warnings: warnings}, nil
}

// Plan implements api.Backend.
func (b *backend) Plan(_ context.Context, req api.DeployRequest) (msg.Plan, []app.Warning, error) {
	file, warnings, err := ParseApps(req.File, req.Text)
	if err != nil {
		return msg.Plan{}, nil, err
	}
	l, err := b.n.requireLeader()
	if err != nil {
		return msg.Plan{}, nil, err
	}
	p, err := l.control.Plan(file.Applications, req.Prune)
	return p, warnings, err
}

// expectedRevisions returns the revision of every named app that a caller at cluster revision want has seen.
// An app that changed after that revision is a conflict.
func expectedRevisions(st *state.State, apps []*app.Application, want *uint64) (map[string]uint64, error) {
	if want == nil {
		return nil, nil //nolint:nilnil // no expectation
	}
	if *want > st.Revision {
		return nil, problem.New(problem.Conflict, "revision %d does not exist yet, the cluster is at %d",
			*want, st.Revision).WithHint("plan against this cluster again")
	}
	out := map[string]uint64{}
	for _, a := range apps {
		out[a.Name] = 0
		if now := st.Apps[a.Name]; now != nil {
			if now.ChangedAt > *want {
				return nil, problem.New(problem.Conflict,
					"app %s has changed at revision %d, after the %d you saw", a.Name, now.ChangedAt, *want).
					WithHint("look at `dpserve status %s`, then deploy again", a.Name)
			}
			out[a.Name] = now.Revision
		}
	}
	return out, nil
}

// deployChanges returns the effect of a deploy on each app.
func deployChanges(st *state.State, apps []*app.Application, prune bool) ([]api.Change, error) {
	var out []api.Change
	listed := map[string]bool{}
	for _, a := range apps {
		listed[a.Name] = true
		c, err := deployChange(st.Apps[a.Name], a)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	if prune {
		for _, name := range slices.Sorted(maps.Keys(st.Apps)) {
			if !listed[name] {
				out = append(out, api.Change{App: name, Action: api.ActionDelete})
			}
		}
	}
	return out, nil
}

func deployChange(now *state.App, a *app.Application) (api.Change, error) {
	c := api.Change{App: a.Name, Action: api.ActionCreate}
	if now == nil {
		return c, nil
	}
	old, err := now.Application()
	if err != nil {
		return c, err
	}
	c.Action = api.ActionUnchanged
	for _, d := range app.Compare([]*app.Application{old}, []*app.Application{a}) {
		c.Action = api.ActionReplace
		for _, f := range d.Fields {
			c.Fields = append(c.Fields, f.Path)
		}
	}
	c.Gone = removedRanks(old, a)
	return c, nil
}

// Apps implements api.Backend.
func (b *backend) Apps(ctx context.Context) ([]msg.AppStatus, error) {
	l, err := b.n.requireLeader()
	if err != nil {
		return nil, err
	}
	ranks, queued, answered := b.n.collectStatus(ctx)
	list := l.control.StatusWithout(unreachable(l, answered))
	for i := range list {
		list[i].Queued = queued[list[i].Name]
		if b.n.ingress != nil {
			list[i].Index, list[i].Identity = b.n.ingress.Index(list[i].Name),
				b.n.ingress.Identity(list[i].Name)
		}
		for j := range list[i].Units {
			addRankStatuses(&list[i].Units[j], ranks[list[i].Units[j].Unit])
		}
	}
	return list, nil
}

// addRankStatuses replaces the ranks of a unit by the statuses that the replicas report. A status of another
// epoch belongs to a replica that is ending and is ignored.
func addRankStatuses(u *msg.UnitStatus, statuses []msg.RankStatus) {
	for i, r := range u.Ranks {
		for _, a := range statuses {
			if a.Rank == r.Rank && a.Epoch == r.Epoch {
				a.Group, a.Node, a.Devices, a.Phase = r.Group, r.Node, r.Devices, r.Phase
				u.Ranks[i] = a
			}
		}
	}
}

// App implements api.Backend.
func (b *backend) App(ctx context.Context, name string) (msg.AppStatus, error) {
	list, err := b.Apps(ctx)
	if err != nil {
		return msg.AppStatus{}, err
	}
	names := make([]string, 0, len(list))
	for i := range list {
		if list[i].Name == name {
			return list[i], nil
		}
		names = append(names, list[i].Name)
	}
	return msg.AppStatus{}, unknownApp(name, names)
}

func unknownApp(name string, names []string) error {
	e := problem.New(problem.NotFound, "there is no app %q", name)
	if len(names) == 0 {
		return e.WithHint("nothing is deployed; `dpserve deploy app.yaml` deploys a file")
	}
	return e.WithHint("apps are %s", strings.Join(names, ", "))
}

// Delete implements api.Backend.
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

// Events implements api.Backend.
func (b *backend) Events(since uint64) ([]api.Event, <-chan struct{}) {
	l, err := b.n.requireLeader()
	if err != nil {
		return nil, b.n.store.Leadership() // wait for a leader, which has the events
	}
	next := l.control.Watch() // Watch comes before Events, so that no change in between is missed
	var out []api.Event
	for _, e := range l.control.Events(since) {
		out = append(out, api.Event{
			Number: e.Seq, Time: e.At, Kind: eventKind(e.Unit, e.To), App: e.App,
			Unit: e.Unit, Epoch: e.Epoch, Phase: e.To, Reason: e.Reason,
		})
	}
	return out, next
}

func eventKind(unit, to string) string {
	if unit != "" {
		return "unit"
	}
	return to
}

var _ api.Nodes = (*backend)(nil)

// Nodes implements api.Nodes.
func (b *backend) Nodes(ctx context.Context) ([]msg.NodeStatus, error) {
	l, err := b.n.requireLeader()
	if err != nil {
		return b.n.nodesWithoutLeader(), nil //nolint:nilerr // show what this node knows
	}
	list := l.control.Nodes()
	inflight := map[string]int{}
	ranks, _, _ := b.n.collectStatus(ctx)
	for _, unit := range ranks {
		for i := range unit {
			inflight[unit[i].Node] += unit[i].InFlight
		}
	}
	for i := range list {
		s := &list[i]
		s.Leader, s.InFlight = s.Node == b.n.cfg.NodeID, inflight[s.Node]
		if rec := b.n.store.State().Nodes[s.Node]; rec != nil {
			s.Voter = b.n.isVoter(rec.UID)
			b.n.addGossipView(s, rec)
		}
	}
	return list, nil
}

// nodesWithoutLeader returns what this node knows by itself: the last state, and the nodes that gossip sees.
func (n *Node) nodesWithoutLeader() []msg.NodeStatus {
	st := n.store.State()
	who := n.describeVoters()
	var out []msg.NodeStatus
	for _, id := range slices.Sorted(maps.Keys(st.Nodes)) {
		rec := st.Nodes[id]
		s := msg.NodeStatus{
			Node: id, State: "unknown", Reason: "no node leads; " + who, Address: rec.Address, Zone: rec.Zone,
			Version: rec.Version, Voter: n.isVoter(rec.UID), Slots: rec.Offer.Slots,
			GPUs: len(rec.Offer.Devices),
		}
		for _, r := range rec.Roles {
			s.Roles = append(s.Roles, string(r))
		}
		n.addGossipView(&s, rec)
		if t := n.warning(); t != "" && rec.UID == n.ident.UID {
			s.Notes = append(s.Notes, t)
		}
		if s.SeenBy == "" && rec.UID != n.ident.UID {
			s.Reason = "not heard of, and " + s.Reason
		}
		out = append(out, s)
	}
	return out
}

// Drain implements api.Nodes.
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

// Undrain implements api.Nodes.
func (b *backend) Undrain(ctx context.Context, node string) error {
	l, err := b.n.requireLeader()
	if err != nil {
		return err
	}
	return l.control.Undrain(ctx, node)
}

// Remove implements api.Nodes.
func (b *backend) Remove(ctx context.Context, node string) error {
	l, err := b.n.requireLeader()
	if err != nil {
		return err
	}
	return b.n.upkeep.Remove(ctx, node, l.control.Remove)
}

// CheckLeave implements api.Nodes.
func (b *backend) CheckLeave(ctx context.Context, node string) error {
	if _, err := b.n.requireLeader(); err != nil {
		return err
	}
	return b.n.upkeep.CheckLeave(ctx, node)
}

// NewToken implements api.Nodes.
func (b *backend) NewToken(ctx context.Context, req api.TokenRequest) (api.Token, error) {
	if b.n.peering == nil {
		return api.Token{}, problem.New(problem.Conflict, "this node stands alone: no other can join it").
			WithHint("start it with --advertise IP")
	}
	return b.n.newToken(ctx, req)
}

// newToken makes a join token.
func (n *Node) newToken(ctx context.Context, req api.TokenRequest) (api.Token, error) {
	if len(n.store.State().Secrets.Authority) == 0 {
		return api.Token{}, n.errNotLeading()
	}
	token, expires, err := n.peering.NewToken(ctx, n.store, req.TTL, req.Uses)
	return api.Token{Token: token, Address: n.peering.Address(), Uses: req.Uses, Expires: expires}, err
}

// RotateKey implements api.Nodes.
func (b *backend) RotateKey(ctx context.Context) error {
	if b.n.peering == nil {
		return problem.New(problem.Conflict, "this node stands alone: it does not gossip").
			WithHint("start it with --advertise IP")
	}
	if _, err := b.n.requireLeader(); err != nil {
		return err
	}
	return b.n.upkeep.RotateKey(ctx)
}

// KeyRotation implements api.Nodes.
func (b *backend) KeyRotation(context.Context) (api.KeyRotation, error) {
	if _, err := b.n.requireLeader(); err != nil {
		return api.KeyRotation{}, err
	}
	st := b.n.store.State()
	r := api.KeyRotation{Done: !st.Secrets.Turning()}
	if !r.Done {
		r.Waiting = st.Untaken()
	}
	return r, nil
}

// addGossipView adds gossip's last sight of a node to its status.
func (n *Node) addGossipView(s *msg.NodeStatus, rec *state.Node) {
	if n.peering == nil {
		return
	}
	g, ok := n.peering.Neighbours.Seen(rec.UID)
	if ok && g.State == membership.Alive && g.LastSeen.After(s.LastSeen.Add(state.LeaseTTL/2)) {
		s.LastSeen, s.SeenBy = g.LastSeen, "gossip"
	}
}
