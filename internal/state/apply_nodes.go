package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// maxRemoved bounds the list of removed nodes. The state forgets the oldest entry first, and only after
// RemovedFor.
const maxRemoved = 4096

// Has reports whether the node has a role.
func (n *Node) Has(r Role) bool { return slices.Contains(n.Roles, r) }

// Takes reports whether the node may be given ranks.
func (n *Node) Takes() bool { return n.Has(RoleWorker) && !n.Lost && !n.Draining }

// putNode records a node or updates its record. Lost and Draining stay, because the cluster decides them.
func (s *State) putNode(c *PutNode) (Result, error) {
	n := c.Node.normalize()
	if err := n.check(); err != nil {
		return Result{}, err
	}
	if err := s.checkIdentity(n); err != nil {
		return Result{}, err
	}
	old := s.Nodes[n.ID]
	if old != nil {
		n.Lost, n.Reason, n.Draining, n.DrainBy = old.Lost, old.Reason, old.Draining, old.DrainBy
		if n.Key == "" {
			n.Key = old.Key
		}
		if old.Key != "" && old.Key != n.Key {
			return Result{}, keyMismatchError("put node", n.ID)
		}
		if !c.AnyRoles && !SameRoles(old.Roles, n.Roles) {
			return Result{}, problem.New(problem.Conflict,
				"put node: %w: %q has joined with roles %v, not %v", ErrRolesFixed, old.ID, old.Roles,
				n.Roles).
				WithHint("let it leave (`dpserve leave`) and join again with an empty --data-dir")
		}
		if old.Has(RoleControl) && !n.Has(RoleControl) && s.isLastControl(old) {
			return Result{}, lastControlError("put node", n.ID)
		}
	}
	return s.setNode(n), nil
}

func keyMismatchError(verb, id string) error {
	return problem.New(problem.Conflict, "%s: %w: %q belongs to a node with another key", verb, ErrNodeTaken,
		id).
		WithHint("if its pki folder is lost, remove the node and join with an empty --data-dir and a " +
			"new token")
}

// SameRoles reports whether two lists name the same roles, in any order.
func SameRoles[R ~string](a, b []R) bool {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	return slices.Equal(slices.Compact(a), slices.Compact(b))
}

// ConvertRoles returns the same roles as another type of string.
func ConvertRoles[To, From ~string](roles []From) []To {
	var out []To
	for _, r := range roles {
		out = append(out, To(r))
	}
	return out
}

// nodeByUID returns the record of a node, nil if there is none.
func (s *State) nodeByUID(uid string) *Node {
	for _, n := range s.Nodes {
		if n.UID == uid {
			return n
		}
	}
	return nil
}

// normalize returns a copy in the form that the state keeps: equal to what JSON gives back, and without the
// fields that the cluster decides.
func (n Node) normalize() *Node {
	n.Lost, n.Reason, n.Draining, n.DrainBy = false, "", false, 0
	r := &n.Resources
	n.Roles, r.Devices = slices.Clone(n.Roles), append([]int(nil), r.Devices...)
	if len(r.Near) == 0 {
		r.Near = nil
	}
	if len(r.Models) == 0 {
		r.Models = nil
	}
	if len(r.Taken) == 0 {
		r.Taken = nil
	}
	if r.Labels = maps.Clone(r.Labels); len(r.Labels) == 0 {
		r.Labels = nil
	}
	return &n
}

func (n *Node) check() error {
	o := &n.Resources
	switch {
	case n.ID == "" || n.UID == "":
		return badNodeError("put node", "its name or UID is empty")
	case len(n.Roles) == 0:
		return badNodeError("put node", "node "+n.ID+" has no role")
	case o.Slots < 0 || o.PortLo < 0 || o.PortHi < 0 || o.PortLo > maxPort || o.PortHi > maxPort,
		slices.ContainsFunc(o.Devices, func(d int) bool { return d < 0 }):
		return badNodeError("put node", "node "+n.ID+" offers a negative number or a port above 65535")
	}
	return nil
}

func badNodeError(verb, why string) error {
	return problem.New(problem.InvalidArgument, "%s: %w: %s", verb, ErrBadCommand, why)
}

// checkIdentity refuses a removed UID, a name that another UID holds, and a UID that has another name.
func (s *State) checkIdentity(n *Node) error {
	if slices.Contains(s.Removed, n.UID) {
		return removedNodeError("put node", n.ID)
	}
	if old := s.Nodes[n.ID]; old != nil && old.UID != n.UID {
		return problem.New(problem.Conflict, "put node: %w: %q is held by another node", ErrNodeTaken, n.ID).
			WithHint("join under another --node-id, or remove the old node first: dpserve nodes remove %s",
				n.ID)
	}
	if old := s.nodeByUID(n.UID); old != nil && old.ID != n.ID {
		return problem.New(problem.Conflict, "put node: %w: this data dir belongs to node %q, not %q",
			ErrNodeTaken, old.ID, n.ID).
			WithHint("start it with --node-id %s, or with another --data-dir", old.ID)
	}
	return nil
}

func (s *State) setNode(n *Node) Result {
	if old := s.Nodes[n.ID]; old != nil && reflect.DeepEqual(old, n) {
		return Result{Unchanged: true}
	}
	s.Nodes[n.ID] = n
	return Result{}
}

// findNode returns the record of a name if it has the given UID.
func (s *State) findNode(id, uid string) (*Node, error) {
	if n := s.Nodes[id]; n != nil && n.UID == uid {
		return n, nil
	}
	return nil, s.unknownNodeError(id)
}

func (s *State) unknownNodeError(id string) error {
	return UnknownNode(id, slices.Sorted(maps.Keys(s.Nodes)))
}

// nodeLost records that a node was silent for too long. The first reason stays.
func (s *State) nodeLost(c *NodeRef) (Result, error) {
	n, err := s.findNode(c.Node, c.UID)
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

func (s *State) nodeBack(c *NodeRef) (Result, error) {
	n, err := s.findNode(c.Node, c.UID)
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
		return Result{}, s.unknownNodeError(c.Node)
	}
	drained := *n
	drained.Draining, drained.DrainBy = !c.Undo, 0
	if !c.Undo {
		drained.DrainBy = max(0, c.By)
	}
	return s.setNode(&drained), nil
}

// removeNode forgets a node and its freed port blocks, because another machine may join under its name.
func (s *State) removeNode(c *RemoveNode) (Result, error) {
	if err := s.checkRemoveNode(c.Node); err != nil {
		return Result{}, err
	}
	return Result{}, s.forgetNode(s.Nodes[c.Node], c.Now)
}

func (s *State) forgetNode(n *Node, now int64) error {
	if err := s.recordRemoved(n.UID, now); err != nil {
		return err
	}
	s.Freed = slices.DeleteFunc(slices.Clone(s.Freed), func(b Block) bool { return b.Node == n.ID })
	delete(s.Nodes, n.ID)
	return nil
}

// recordRemoved adds a removed node to the list. If the list is full, it replaces the oldest entry.
func (s *State) recordRemoved(uid string, now int64) error {
	removed, at := append(slices.Clone(s.Removed), uid), maps.Clone(s.RemovedAt)
	if at == nil {
		at = map[string]int64{}
	}
	if len(removed) > maxRemoved {
		until := time.UnixMilli(at[removed[0]]).Add(RemovedFor)
		if time.UnixMilli(now).Before(until) {
			return problem.New(problem.Conflict, "remove node: %w: %d since %s", ErrTooManyRemoved,
				maxRemoved, until.Add(-RemovedFor).UTC().Format(time.RFC3339)).
				WithHint("try again after %s: until then the certificate of the first of them is good, so "+
					"it must stay known", until.UTC().Format(time.RFC3339))
		}
		delete(at, removed[0])
		removed = removed[1:]
	}
	at[uid] = now
	s.Removed, s.RemovedAt = removed, at
	return nil
}

// checkRemoveNode checks what Apply demands of a removal: the node is known, it is not the last control node,
// and it has no units unless it is lost.
func (s *State) checkRemoveNode(id string) error {
	if err := s.CheckLeave(id); err != nil {
		return err
	}
	if left := s.UnitsOn(id); len(left) > 0 && !s.Nodes[id].Lost {
		return problem.New(problem.Conflict, "remove node: %w: %s has a rank on %q", ErrUnitsLeft, left[0],
			id).
			WithHint("drain it first: dpserve drain %s", id).WithDetails(left...)
	}
	return nil
}

// CheckLeave checks whether the cluster could remove a node if the node were drained.
func (s *State) CheckLeave(id string) error {
	n := s.Nodes[id]
	if n == nil {
		return s.unknownNodeError(id)
	}
	if n.Has(RoleControl) && s.isLastControl(n) {
		return lastControlError("remove node", id)
	}
	return nil
}

// CheckRemoval checks whether a person may remove a node now: Apply would accept RemoveNode, and the node is
// lost or drained. Apply itself does not demand the drain, because it must accept every entry that it
// accepted before at each replay of the log.
func (s *State) CheckRemoval(id string) error {
	if err := s.checkRemoveNode(id); err != nil {
		return err
	}
	if n := s.Nodes[id]; !n.Lost && !n.Draining {
		return problem.New(problem.Conflict, "remove node: %w: %q is neither lost nor drained", ErrNodeInUse,
			id).
			WithHint("a node that works leaves with `dpserve leave`, or is drained first: dpserve drain %s; "+
				"a node that is silent is lost after some seconds", id)
	}
	return nil
}

// isLastControl reports whether no other control node is alive.
func (s *State) isLastControl(n *Node) bool {
	for _, other := range s.Nodes {
		if other.ID != n.ID && other.Has(RoleControl) && !other.Lost {
			return false
		}
	}
	return true
}

// UnitsOn returns the sorted names of the units that hold something on a node.
func (s *State) UnitsOn(node string) []string {
	var out []string
	for id, u := range s.Units {
		if u.Holds() && u.IsOn(node) {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// checkGrantNodes refuses ranks on nodes that must get none. A state without nodes accepts any node, because
// its data dir is older than the records of nodes.
func (s *State) checkGrantNodes(g *UnitGrant) error {
	if len(s.Nodes) == 0 {
		return nil
	}
	for i := range g.Ranks {
		if why := s.Nodes[g.Ranks[i].Node].refusalReason(); why != "" {
			return problem.New(problem.Conflict, "grant group: %w: rank %d of %s on node %s, which %s",
				ErrNodeGone, g.Ranks[i].Rank, g.Unit, g.Ranks[i].Node, why).
				WithHint("place the units again on the present state")
		}
	}
	return nil
}

// refusalReason says why a node may not be given ranks; "" = it may.
func (n *Node) refusalReason() string {
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

// putToken stores a token. Storing the same token again changes nothing: its spent uses stay spent.
func (s *State) putToken(c *Token) (Result, error) {
	if err := c.check(); err != nil {
		return Result{}, err
	}
	if s.Tokens[c.Hash] != nil {
		return Result{Unchanged: true}, nil
	}
	dropTokens(s.Tokens, c.Made)
	s.Tokens[c.Hash] = &Token{
		Hash: c.Hash, Expires: c.Expires, Uses: c.Uses, Roles: slices.Clone(c.Roles), Made: c.Made, By: c.By,
	}
	return Result{}, nil
}

// useToken spends one use for a node, once per node and key.
func (s *State) useToken(c *UseToken) (Result, error) {
	t := s.Tokens[c.Hash]
	holder := s.nodeByUID(c.UID)
	switch {
	case c.UID == "":
		return Result{}, badNodeError("use token", "the node's UID is empty")
	case t == nil:
		return Result{}, tokenError(ErrTokenUnknown)
	case t.checkUse(c) != nil:
		return Result{}, t.checkUse(c)
	case slices.Contains(s.Removed, c.UID):
		return Result{}, removedNodeError("use token", c.UID)
	// A member without a recorded key cannot prove that the UID is its own.
	case holder != nil && holder.Key != c.Key, t.hasOtherKey(c):
		return Result{}, keyMismatchError("use token", c.UID)
	case slices.Contains(t.UsedBy, c.tokenUser()):
		return Result{Unchanged: true}, nil
	case t.Uses < 1:
		return Result{}, tokenError(ErrTokenUsed)
	}
	s.Tokens[c.Hash] = t.spend(c)
	return Result{}, nil
}

// revokeToken ends one token or all of them. The records stay until they are dropped, so that a node that
// tries one is told why it is refused.
func (s *State) revokeToken(c *RevokeToken) (Result, error) {
	out, found := Result{Unchanged: true}, c.All
	for hash, t := range s.Tokens {
		if !c.All && t.ID() != c.ID {
			continue
		}
		found = true
		if !t.Revoked {
			revoked := *t
			revoked.Revoked = true
			s.Tokens[hash], out.Unchanged = &revoked, false
		}
	}
	if !found {
		return Result{}, problem.New(problem.NotFound, "revoke token: %w %q", ErrTokenUnknown, c.ID).
			WithHint("`dpserve token list` shows the tokens with their ids")
	}
	return out, nil
}

// GossipKeySize is the length of a gossip key in bytes.
const GossipKeySize = 32

// Secrets are known to members only. Init sets each once; afterwards only RotateGossipKey changes the gossip
// key.
type Secrets struct {
	Authority    []byte `json:"authority,omitempty"`     // PEM, the cluster's certificate authority
	AuthorityKey []byte `json:"authority_key,omitempty"` // PEM
	GossipKey    []byte `json:"gossip_key,omitempty"`    // nodes encrypt with it
}

// RotateGossipKey replaces the gossip key. Each node takes the new one from its next lease renewal, a lost
// node from its first one.
type RotateGossipKey struct {
	Next []byte `json:"next"`
}

// GossipKeySum identifies a gossip key without revealing it; "" for none.
func GossipKeySum(key []byte) string {
	if len(key) == 0 {
		return ""
	}
	sum := sha256.Sum256(key)
	return hex.EncodeToString(sum[:8])
}

// NodesBehind returns the sorted names of the nodes that have not taken the present gossip key. Lost nodes do
// not count.
func (s *State) NodesBehind() []string {
	sum := GossipKeySum(s.Secrets.GossipKey)
	var names []string
	for _, n := range s.Nodes {
		if !n.Lost && n.GossipSum != sum {
			names = append(names, n.ID)
		}
	}
	slices.Sort(names)
	return names
}

func (s *State) rotateGossipKey(c *RotateGossipKey) (Result, error) {
	k := &s.Secrets
	switch {
	case len(k.GossipKey) == 0:
		return Result{}, problem.New(problem.Conflict, "rotate the gossip key: %w: this cluster has none",
			ErrBadCommand)
	case len(c.Next) != GossipKeySize || bytes.Equal(c.Next, k.GossipKey):
		return Result{}, problem.New(problem.InvalidArgument,
			"rotate the gossip key: %w: the next one must be another one of %d bytes", ErrBadCommand,
			GossipKeySize)
	}
	k.GossipKey = c.Next
	return Result{}, nil
}

// ControlLevel returns the lowest level of all control nodes. Lost nodes count, because they must be able to
// read the log when they come back. Without control nodes it is the level of this version.
func (s *State) ControlLevel() int {
	level := Level
	for _, n := range s.Nodes {
		if n.Has(RoleControl) {
			level = min(level, max(1, n.Level))
		}
	}
	return level
}

// Readable returns the command in a form that every control node can read. It drops unknown fields from the
// record of a PutNode, so that a node of a new version can be recorded at all. Any other command above their
// level is ErrControlTooOld, with the nodes' names. It may be proposed again after they are upgraded.
func (s *State) Readable(c Command) (Command, error) {
	level := s.ControlLevel()
	if c.PutNode != nil {
		cut := *c.PutNode
		cut.Node = cut.Node.ReadableAt(level)
		c.PutNode = &cut
	}
	needed := c.Level()
	if needed <= level {
		return c, nil
	}
	var old []string
	for id, n := range s.Nodes {
		if n.Has(RoleControl) && max(1, n.Level) < needed {
			old = append(old, id)
		}
	}
	slices.Sort(old)
	names := strings.Join(old, ", ")
	return c, problem.New(problem.Unavailable, "propose %s: %w: too old: %s", c.Kind(), ErrControlTooOld,
		names).
		WithHint("upgrade dpserve on %s, or remove a node that does not come back: dpserve nodes remove NAME",
			names).WithDetails(old...)
}
