package state

import (
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// maxRemoved bounds the memory of removed nodes; the one removed the longest ago is forgotten first, after RemovedFor.
const maxRemoved = 4096

// Has says whether the node has a role.
func (n *Node) Has(r Role) bool { return slices.Contains(n.Roles, r) }

// Takes says whether the node may be given ranks.
func (n *Node) Takes() bool { return n.Has(RoleWorker) && !n.Lost && !n.Draining }

// putNode makes a node known or updates it. What the cluster decided of it (Lost, Draining) stays.
func (s *State) putNode(c *PutNode) (Result, error) {
	n := c.Node.clean()
	if err := n.check(); err != nil {
		return Result{}, err
	}
	if err := s.checkHolder(n); err != nil {
		return Result{}, err
	}
	old := s.Nodes[n.ID]
	if old != nil {
		n.Lost, n.Reason, n.Draining, n.DrainBy = old.Lost, old.Reason, old.Draining, old.DrainBy
		if n.Key == "" {
			n.Key = old.Key
		}
		if !old.isKey(n.Key) {
			return Result{}, otherKey("put node", n.ID)
		}
		if !c.AnyRoles && !SameRoles(old.Roles, n.Roles) {
			return Result{}, rolesFixed(old, n.Roles)
		}
		if old.Has(RoleControl) && !n.Has(RoleControl) && s.lastControl(old) {
			return Result{}, lastControl("put node", n.ID)
		}
	}
	return s.setNode(n), nil
}

// isKey says whether a key may stand for the node: its own, or any while its own is not known.
func (n *Node) isKey(key string) bool { return n.Key == "" || n.Key == key }

func otherKey(verb, id string) error {
	return problem.New(problem.Conflict, "%s: %w: %q belongs to a node with another key", verb, ErrNodeTaken, id).
		WithHint("if its pki folder is lost, remove the node and join with an empty --data-dir and a new token")
}

// SameRoles says whether two lists name the same roles, in any order.
func SameRoles[R ~string](a, b []R) bool {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	return slices.Equal(slices.Compact(a), slices.Compact(b))
}

func rolesFixed(old *Node, now []Role) error {
	return problem.New(problem.Conflict, "put node: %w: %q has joined with roles %v, not %v", ErrRolesFixed, old.ID, old.Roles, now).
		WithHint("let it leave (`dpserve leave`) and join again with an empty --data-dir")
}

// byUID is the record of a node, nil if there is none.
func (s *State) byUID(uid string) *Node {
	for _, n := range s.Nodes {
		if n.UID == uid {
			return n
		}
	}
	return nil
}

// clean is a copy as the state keeps it: as it comes back from JSON, and without what others decide.
func (n Node) clean() *Node {
	n.Lost, n.Reason, n.Draining, n.DrainBy = false, "", false, 0
	n.Roles, n.Offer.Devices = slices.Clone(n.Roles), slices.Clone(n.Offer.Devices)
	if len(n.Offer.Devices) == 0 {
		n.Offer.Devices = nil
	}
	labels := n.Offer.Labels
	n.Offer.Labels = nil
	for k, v := range labels {
		if n.Offer.Labels == nil {
			n.Offer.Labels = make(map[string]string, len(labels))
		}
		n.Offer.Labels[k] = v
	}
	return &n
}

func (n *Node) check() error {
	o := &n.Offer
	switch {
	case n.ID == "" || n.UID == "":
		return badNode("put node", "its name or UID is empty")
	case len(n.Roles) == 0:
		return badNode("put node", "node "+n.ID+" has no role")
	case o.Slots < 0 || o.PortLo < 0 || o.PortHi < 0 || o.PortLo > maxPort || o.PortHi > maxPort,
		slices.ContainsFunc(o.Devices, func(d int) bool { return d < 0 }):
		return badNode("put node", "node "+n.ID+" offers a negative number or a port above 65535")
	}
	return nil
}

func badNode(verb, why string) error {
	return problem.New(problem.InvalidArgument, "%s: %w: %s", verb, ErrBadCommand, why)
}

// checkHolder holds names and UIDs one to one, and removed UIDs out.
func (s *State) checkHolder(n *Node) error {
	if slices.Contains(s.Removed, n.UID) {
		return removedNode("put node", n.ID)
	}
	if old := s.Nodes[n.ID]; old != nil && old.UID != n.UID {
		return problem.New(problem.Conflict, "put node: %w: %q is held by another node", ErrNodeTaken, n.ID).
			WithHint("join under another --node-id, or remove the old node first: dpserve nodes remove %s", n.ID)
	}
	for id, other := range s.Nodes {
		if other.UID == n.UID && id != n.ID {
			return problem.New(problem.Conflict, "put node: %w: this data dir belongs to node %q, not %q", ErrNodeTaken, id, n.ID).
				WithHint("start it with --node-id %s, or with another --data-dir", id)
		}
	}
	return nil
}

func removedNode(verb, id string) error {
	return problem.New(problem.PermissionDenied, "%s: %w: %q does not come back with this data dir", verb, ErrNodeRemoved, id).
		WithHint("join with a new --data-dir and a new token")
}

// setNode puts a record in its place, or nothing if it says the same.
func (s *State) setNode(n *Node) Result {
	if old := s.Nodes[n.ID]; old != nil && reflect.DeepEqual(old, n) {
		return Result{Unchanged: true}
	}
	s.Nodes[n.ID] = n
	return Result{}
}

// node is the record of a name, if it is that of the UID.
func (s *State) node(verb, id, uid string) (*Node, error) {
	if n := s.Nodes[id]; n != nil && n.UID == uid {
		return n, nil
	}
	return nil, unknownNode(verb, id)
}

func unknownNode(verb, id string) error {
	return problem.New(problem.NotFound, "%s: %w %q", verb, ErrUnknownNode, id).WithHint("list the nodes with dpserve nodes")
}

// nodeLost records that a node was silent for too long. The first reason stays.
func (s *State) nodeLost(c *NodeRef) (Result, error) {
	n, err := s.node("node lost", c.Node, c.UID)
	if err != nil {
		return Result{}, err
	}
	if n.Lost {
		return Result{Unchanged: true}, nil
	}
	lost := *n
	lost.Lost, lost.Reason = true, c.Reason
	return s.setNode(&lost), nil
}

// nodeBack records that a lost node renewed.
func (s *State) nodeBack(c *NodeRef) (Result, error) {
	n, err := s.node("node back", c.Node, c.UID)
	if err != nil {
		return Result{}, err
	}
	back := *n
	back.Lost, back.Reason = false, ""
	return s.setNode(&back), nil
}

func (s *State) drainNode(c *DrainNode) (Result, error) {
	n := s.Nodes[c.Node]
	if n == nil {
		return Result{}, unknownNode("drain node", c.Node)
	}
	drained := *n
	drained.Draining, drained.DrainBy = !c.Undo, 0
	if !c.Undo {
		drained.DrainBy = max(0, c.By)
	}
	return s.setNode(&drained), nil
}

// removeNode forgets a node, and what its ports were used for: another machine may come under its name.
func (s *State) removeNode(c *RemoveNode) (Result, error) {
	if err := s.checkRemoveNode(c.Node); err != nil {
		return Result{}, err
	}
	n := s.Nodes[c.Node]
	if err := s.noteRemoved(n.UID, c.Now); err != nil {
		return Result{}, err
	}
	s.Freed = slices.DeleteFunc(slices.Clone(s.Freed), func(b Block) bool { return b.Node == n.ID })
	delete(s.Nodes, n.ID)
	return Result{}, nil
}

// noteRemoved remembers a removed node, in place of the one removed the longest ago where there is no room.
func (s *State) noteRemoved(uid string, now int64) error {
	removed, at := append(slices.Clone(s.Removed), uid), maps.Clone(s.RemovedAt)
	if at == nil {
		at = map[string]int64{}
	}
	if len(removed) > maxRemoved {
		if until := time.UnixMilli(at[removed[0]]).Add(RemovedFor); now > 0 && time.UnixMilli(now).Before(until) {
			return problem.New(problem.Conflict, "remove node: %w: %d since %s", ErrTooManyRemoved, maxRemoved, until.Add(-RemovedFor).UTC().Format(time.RFC3339)).
				WithHint("try again after %s: until then the certificate of the first of them is good, so it must stay known", until.UTC().Format(time.RFC3339))
		}
		delete(at, removed[0])
		removed = removed[1:]
	}
	if now > 0 {
		at[uid] = now
	}
	if len(at) == 0 {
		at = nil // as it comes back from JSON
	}
	s.Removed, s.RemovedAt = removed, at
	return nil
}

// checkRemoveNode is what Apply demands of a removal: the node is known, is not the last control node, and has no units unless it
// is lost.
func (s *State) checkRemoveNode(id string) error {
	if err := s.CheckLeave(id); err != nil {
		return err
	}
	if left := s.unitsOn(id); len(left) > 0 && !s.Nodes[id].Lost {
		return problem.New(problem.Conflict, "remove node: %w: %s has a rank on %q", ErrUnitsLeft, left[0], id).
			WithHint("drain it first: dpserve drain %s", id).WithDetails(left...)
	}
	return nil
}

// CheckLeave says whether a node could be removed if it were drained.
func (s *State) CheckLeave(id string) error {
	n := s.Nodes[id]
	if n == nil {
		return unknownNode("remove node", id)
	}
	if n.Has(RoleControl) && s.lastControl(n) {
		return lastControl("remove node", id)
	}
	return nil
}

// CheckRemoval says whether a person may remove a node now: RemoveNode would be accepted, and the node is lost or drained. Apply
// itself does not demand the drain, because entries of the log that were accepted once have to be accepted again at every replay.
func (s *State) CheckRemoval(id string) error {
	if err := s.checkRemoveNode(id); err != nil {
		return err
	}
	if n := s.Nodes[id]; !n.Lost && !n.Draining {
		return problem.New(problem.Conflict, "remove node: %w: %q is neither lost nor drained", ErrNodeInUse, id).
			WithHint("a node that works leaves with `dpserve leave`, or is drained first: dpserve drain %s; "+
				"a node that is silent is lost after some seconds", id)
	}
	return nil
}

// lastControl says whether the cluster would be without a living control node but for n.
func (s *State) lastControl(n *Node) bool {
	for _, other := range s.Nodes {
		if other.ID != n.ID && other.Has(RoleControl) && !other.Lost {
			return false
		}
	}
	return true
}

func lastControl(verb, id string) error {
	return problem.New(problem.Conflict, "%s: %w: without %q nobody keeps the cluster's state", verb, ErrLastControl, id).
		WithHint("join another node with --roles control first")
}

// unitsOn are the units, in order, that hold something on a node.
func (s *State) unitsOn(node string) []string {
	var out []string
	for id, u := range s.Units {
		if u.Holds() && slices.ContainsFunc(u.Ranks, func(r RankGrant) bool { return r.Node == node }) {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// checkNodes refuses ranks on nodes that must get none. A cluster that knows no nodes yet takes any: its data dir is older than
// the records of nodes.
func (s *State) checkNodes(g *UnitGrant) error {
	if len(s.Nodes) == 0 {
		return nil
	}
	for i := range g.Ranks {
		if why := s.Nodes[g.Ranks[i].Node].takesNot(); why != "" {
			return problem.New(problem.Conflict, "grant group: %w: rank %d of %s on node %s, which %s", ErrNodeGone,
				g.Ranks[i].Rank, g.Unit, g.Ranks[i].Node, why).WithHint("place the units again on the present state")
		}
	}
	return nil
}

// takesNot is why a node may not be given ranks; "" = it may.
func (n *Node) takesNot() string {
	switch {
	case n == nil:
		return "is not known"
	case n.Lost:
		return "is lost"
	case n.Draining:
		return "is draining"
	case !n.Has(RoleWorker):
		return "has no role worker"
	default:
		return ""
	}
}
