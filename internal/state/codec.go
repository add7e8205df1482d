package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/dpserve/dpserve/internal/problem"
)

// Kind returns the name of the one field that is set, for logs; "" if not exactly one is set.
func (c *Command) Kind() string {
	kind := ""
	for name, k := range c.kinds() {
		if !k.set {
			continue
		}
		if kind != "" {
			return ""
		}
		kind = name
	}
	return kind
}

// check refuses a command that does not have exactly one field set.
func (c *Command) check() error {
	if c == nil || c.Kind() == "" {
		return problem.New(problem.InvalidArgument, "%w: exactly one field must be set", ErrUnknownCommand)
	}
	return nil
}

// EncodeCommand returns a command in the form of a log entry.
func EncodeCommand(c *Command) ([]byte, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	return json.Marshal(c)
}

// DecodeCommand reads a log entry or a command of another node. The error wraps ErrUnknownCommand and
// ErrNewer for an unknown kind, and ErrNewer for an unknown field. A node must not apply any entry behind one
// that it cannot read.
func DecodeCommand(b []byte) (*Command, error) {
	c := new(Command)
	if err := json.Unmarshal(b, c); err != nil {
		var known *problem.Error
		if errors.As(err, &known) {
			return nil, known
		}
		return nil, problem.New(problem.InvalidArgument, "decode command: %w", err)
	}
	return c, c.check()
}

// commandFields is Command without the method UnmarshalJSON.
type commandFields Command

// UnmarshalJSON implements json.Unmarshaler. It refuses kinds and fields that this version does not know.
func (c *Command) UnmarshalJSON(b []byte) error {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return fmt.Errorf("%w: %w", ErrBadCommand, err)
	}
	known := c.kinds()
	for name := range raw {
		if _, ok := known[name]; !ok {
			return problem.New(problem.InvalidArgument, "%w",
				fmt.Errorf("%w %q: %w", ErrUnknownCommand, name, ErrNewer)).WithHint("%s", upgradeHint)
		}
	}
	var f commandFields
	err := decodeStrict(b, &f)
	switch {
	case errors.Is(err, ErrNewer):
		return problem.New(problem.InvalidArgument, "decode command: %w", err).WithHint("%s", upgradeHint)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrBadCommand, err)
	}
	*c = Command(f)
	return nil
}

const upgradeHint = "upgrade dpserve on the node that cannot read it"

// decodeStrict reads one JSON value. ErrNewer means: the value is well-formed, but has a field that this
// version does not know.
func decodeStrict[T any](b []byte, into *T) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if err != nil && json.Unmarshal(b, new(T)) == nil {
		return fmt.Errorf("%w: %w", ErrNewer, err)
	}
	if err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("data after its end")
	}
	return nil
}

// Decode reads a snapshot for a node that takes part in consensus. An unknown field is ErrNewer, because the
// node's next snapshot would lose it.
func Decode(b []byte) (*State, error) {
	s := New()
	if err := decodeStrict(b, s); err != nil {
		return nil, problem.New(problem.Internal, "decode snapshot: %w", err).
			WithHint("start the version of dpserve that wrote the data dir")
	}
	return s, checkComplete(s)
}

// DecodeCopy reads a state for a node that only follows. It ignores unknown fields, because such a node never
// passes its copy on. newer names the first unknown field; "" = there is none.
func DecodeCopy(b []byte) (s *State, newer string, err error) {
	if s, err = Decode(b); !errors.Is(err, ErrNewer) {
		return s, "", err
	}
	newer = err.Error()
	s = New()
	if err := json.Unmarshal(b, s); err != nil {
		return nil, "", problem.New(problem.Internal, "decode a copy of the state: %w", err)
	}
	return s, newer, checkComplete(s)
}

// checkComplete refuses a snapshot with missing parts, so that readers need no checks.
func checkComplete(s *State) error {
	if s.Apps == nil || s.Units == nil || s.Epochs == nil || s.Revisions == nil {
		return incompleteError("apps, units or epochs are missing")
	}
	for name, a := range s.Apps {
		if a == nil || a.Name != name {
			return incompleteError("application %q is not whole", name)
		}
		a.decode()
	}
	for id, u := range s.Units {
		if u == nil || u.ID != id || u.Epoch == 0 || s.Epochs[id] != u.Epoch {
			return incompleteError("unit %q is not whole", id)
		}
	}
	return checkNodesComplete(s)
}

// checkNodesComplete checks nodes and tokens. An older snapshot may have no table of them.
func checkNodesComplete(s *State) error {
	if s.Nodes == nil {
		s.Nodes = map[string]*Node{}
	}
	if s.Tokens == nil {
		s.Tokens = map[string]*Token{}
	}
	holders := make(map[string]string, len(s.Nodes))
	for id, n := range s.Nodes {
		if n == nil || n.ID != id || n.UID == "" || holders[n.UID] != "" ||
			slices.Contains(s.Removed, n.UID) {
			return incompleteError("node %q is not whole", id)
		}
		holders[n.UID] = id
	}
	for hash, t := range s.Tokens {
		if t == nil || t.Hash != hash {
			return incompleteError("a join token is not whole")
		}
	}
	return nil
}

func incompleteError(format string, args ...any) error {
	return problem.New(problem.Internal, "decode snapshot: "+format, args...)
}

// Level is the version of the log's and snapshots' format that this build can read. A version that adds a
// kind of command, a field of a command or a field of the state has the next level. Each node reports its
// level in its record.
const Level = poolLevel + nextLevels

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
		"use_token": {1, c.UseToken != nil}, "turn_key": {1, c.RotateGossipKey != nil},
	}
	c.addNext(all)
	return all
}

// Level returns the least level of a node that can read the command. A version that adds a field to a known
// kind checks it here: while the field is set, the command has the level of that version.
func (c *Command) Level() int {
	if c.PutApps != nil && c.PutApps.isPools() {
		return poolLevel
	}
	return c.kinds()[c.Kind()].level
}

// ReadableAt returns the record without the fields that nodes of a lower level do not know.
func (n Node) ReadableAt(level int) Node {
	n.cutNext(level)
	return n
}
