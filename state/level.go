package state

import (
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// Level is the version of the log's and snapshots' format that this build can read. A version that adds a
// kind of command, a field of a command or a field of the state has the next level. Each node reports its
// level in its record.
const Level = 1 + nextLevels

// kind is one kind of command in a Command.
type kind struct {
	level int  // the least Level that can read it
	set   bool // whether the Command is of this kind
}

// kinds lists the kinds by the names of the command's fields. A kind that a later version adds has that
// version's level here.
func (c *Command) kinds() map[string]kind {
	all := map[string]kind{
		"init": {1, c.Init != nil}, "put_apps": {1, c.PutApps != nil}, "delete_app": {1, c.DeleteApp != nil},
		"forget_app": {1, c.ForgetApp != nil}, "grant_group": {1, c.GrantGroup != nil},
		"unit_ready":  {1, c.UnitReady != nil},
		"unit_fenced": {1, c.UnitFenced != nil}, "unit_failed": {1, c.UnitFailed != nil},
		"release":  {1, c.Release != nil},
		"put_node": {1, c.PutNode != nil}, "node_lost": {1, c.NodeLost != nil},
		"node_back":  {1, c.NodeBack != nil},
		"drain_node": {1, c.DrainNode != nil}, "remove_node": {1, c.RemoveNode != nil},
		"put_token": {1, c.PutToken != nil},
		"use_token": {1, c.UseToken != nil}, "turn_key": {1, c.TurnKey != nil},
	}
	c.addNext(all)
	return all
}

// Level returns the least level of a node that can read the command. A version that adds a field to a known
// kind checks it here: while the field is set, the command has the level of that version.
func (c *Command) Level() int { return c.kinds()[c.Kind()].level }

// ReadableAt returns the record without the fields that nodes of a lower level do not know.
func (n Node) ReadableAt(level int) Node {
	n.cutNext(level)
	return n
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
