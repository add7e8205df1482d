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

// Kind is the name of the one field that is set, for logs; "" if it is not exactly one.
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

// DecodeCommand reads a log entry, or a command of another node. A kind that this version does not know is ErrUnknownCommand and
// ErrNewer, a field that it does not know is ErrNewer: whoever applies the log must not go on behind such an entry.
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

// UnmarshalJSON implements json.Unmarshaler. It refuses kinds and fields that this version does not know.
func (c *Command) UnmarshalJSON(b []byte) error {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return fmt.Errorf("%w: %w", ErrBadCommand, err)
	}
	known := c.kinds()
	for name := range raw {
		if _, ok := known[name]; !ok {
			return problem.New(problem.InvalidArgument, "%w", fmt.Errorf("%w %q: %w", ErrUnknownCommand, name, ErrNewer)).WithHint("%s", upgradeHint)
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

// decodeStrict reads one JSON value. ErrNewer: the value has a field that this version does not know, and is well-formed otherwise.
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

// Encode is the whole state, as a snapshot holds it.
func (s *State) Encode() ([]byte, error) { return json.Marshal(s) } //nolint:gosec // the secret belongs into the snapshot, which lies in the data dir

// Decode reads a snapshot for a node that takes part in consensus. A field that it does not know is ErrNewer: it would be lost with
// the node's next snapshot.
func Decode(b []byte) (*State, error) {
	s := New()
	if err := decodeStrict(b, s); err != nil {
		return nil, problem.New(problem.Internal, "decode snapshot: %w", err).WithHint("start the version of dpserve that wrote the data dir")
	}
	return s, s.complete()
}

// DecodeCopy reads a state for a node that only follows, and so never hands on what it read. Fields that it does not know are passed
// over; newer names the first of them, "" = there is none.
func DecodeCopy(b []byte) (s *State, newer string, err error) {
	if s, err = Decode(b); !errors.Is(err, ErrNewer) {
		return s, "", err
	}
	newer = err.Error()
	s = New()
	if err := json.Unmarshal(b, s); err != nil {
		return nil, "", problem.New(problem.Internal, "decode a copy of the state: %w", err)
	}
	return s, newer, s.complete()
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
