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

// kinds lists the command's fields by name, set or not.
func (c *Command) kinds() map[string]bool {
	return map[string]bool{
		"init": c.Init != nil, "put_apps": c.PutApps != nil, "delete_app": c.DeleteApp != nil, "forget_app": c.ForgetApp != nil,
		"grant_group": c.GrantGroup != nil, "unit_ready": c.UnitReady != nil, "unit_fenced": c.UnitFenced != nil,
		"unit_failed": c.UnitFailed != nil, "release": c.Release != nil,
		"put_node": c.PutNode != nil, "node_lost": c.NodeLost != nil, "node_back": c.NodeBack != nil, "drain_node": c.DrainNode != nil,
		"remove_node": c.RemoveNode != nil, "put_token": c.PutToken != nil, "use_token": c.UseToken != nil, "turn_key": c.TurnKey != nil,
	}
}

// Kind is the name of the one field that is set, for logs; "" if it is not exactly one.
func (c *Command) Kind() string {
	kind := ""
	for name, set := range c.kinds() {
		if !set {
			continue
		}
		if kind != "" {
			return ""
		}
		kind = name
	}
	return kind
}

// check refuses a command that does not say exactly one thing.
func (c *Command) check() error {
	if c == nil || c.Kind() == "" {
		return problem.New(problem.InvalidArgument, "%w: exactly one field must be set", ErrUnknownCommand)
	}
	return nil
}

// EncodeCommand is a command as the log holds it.
func EncodeCommand(c *Command) ([]byte, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	return json.Marshal(c)
}

// DecodeCommand reads a log entry. A command type that this version does not know is ErrUnknownCommand, never a crash: an
// older node must refuse what a newer leader wrote, loudly and alive.
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

// commandFields is Command without its UnmarshalJSON.
type commandFields Command

// UnmarshalJSON implements json.Unmarshaler: fields beside the known commands are ErrUnknownCommand; unknown fields inside a
// known command are passed over, as a newer version may have added them.
func (c *Command) UnmarshalJSON(b []byte) error {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return fmt.Errorf("%w: %w", ErrBadCommand, err)
	}
	known := c.kinds()
	for name := range raw {
		if _, ok := known[name]; !ok {
			return problem.New(problem.InvalidArgument, "%w %q", ErrUnknownCommand, name).WithHint("run the same version of dpserve on every node")
		}
	}
	var f commandFields
	if err := json.Unmarshal(b, &f); err != nil {
		return fmt.Errorf("%w: %w", ErrBadCommand, err)
	}
	*c = Command(f)
	return nil
}

// Encode is the whole state, as a snapshot holds it.
func (s *State) Encode() ([]byte, error) { return json.Marshal(s) } //nolint:gosec // the secret belongs into the snapshot, which lies in the data dir

// Decode reads a snapshot. Fields it does not know are refused: they would be lost with the next snapshot.
func Decode(b []byte) (*State, error) {
	s := New()
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(s); err != nil {
		return nil, problem.New(problem.Internal, "decode snapshot: %w", err).WithHint("start the version of dpserve that wrote the data dir")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, problem.New(problem.Internal, "decode snapshot: data after its end")
	}
	return s, s.complete()
}

// complete refuses a snapshot with holes, so that no reader needs to look for them.
func (s *State) complete() error {
	if s.Apps == nil || s.Units == nil || s.Epochs == nil || s.Revisions == nil {
		return notWhole("apps, units or epochs are missing")
	}
	for name, a := range s.Apps {
		if a == nil || a.Name != name {
			return notWhole("application %q is not whole", name)
		}
	}
	for id, u := range s.Units {
		if u == nil || u.ID != id || u.Epoch == 0 || s.Epochs[id] != u.Epoch {
			return notWhole("unit %q is not whole", id)
		}
	}
	return s.completeNodes()
}

// completeNodes looks at nodes and tokens, which an older snapshot does not have.
func (s *State) completeNodes() error {
	if s.Nodes == nil {
		s.Nodes = map[string]*Node{}
	}
	if s.Tokens == nil {
		s.Tokens = map[string]*Token{}
	}
	holders := make(map[string]string, len(s.Nodes))
	for id, n := range s.Nodes {
		if n == nil || n.ID != id || n.UID == "" || holders[n.UID] != "" || slices.Contains(s.Removed, n.UID) {
			return notWhole("node %q is not whole", id)
		}
		holders[n.UID] = id
	}
	for hash, t := range s.Tokens {
		if t == nil || t.Hash != hash {
			return notWhole("a join token is not whole")
		}
	}
	return nil
}

func notWhole(format string, args ...any) error {
	return problem.New(problem.Internal, "decode snapshot: "+format, args...)
}
