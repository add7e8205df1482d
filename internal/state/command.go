package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// Command is one entry of the log: exactly one field is set.
type Command struct {
	Init            *Init            `json:"init,omitempty"`
	PutApps         *PutApps         `json:"put_apps,omitempty"`
	DeleteApp       *DeleteApp       `json:"delete_app,omitempty"`
	ForgetApp       *ForgetApp       `json:"forget_app,omitempty"`
	MarkGood        *MarkGood        `json:"mark_good,omitempty"`
	HaltRollout     *HaltRollout     `json:"halt_rollout,omitempty"`
	GrantGroup      *GrantGroup      `json:"grant_group,omitempty"`
	UnitReady       *UnitRef         `json:"unit_ready,omitempty"`
	UnitFenced      *UnitRef         `json:"unit_fenced,omitempty"`
	UnitFailed      *UnitRef         `json:"unit_failed,omitempty"`
	Release         *UnitRef         `json:"release,omitempty"`
	PutNode         *PutNode         `json:"put_node,omitempty"`
	NodeLost        *NodeRef         `json:"node_lost,omitempty"`
	NodeBack        *NodeRef         `json:"node_back,omitempty"`
	DrainNode       *DrainNode       `json:"drain_node,omitempty"`
	RemoveNode      *RemoveNode      `json:"remove_node,omitempty"`
	PutToken        *Token           `json:"put_token,omitempty"`
	UseToken        *UseToken        `json:"use_token,omitempty"`
	RevokeToken     *RevokeToken     `json:"revoke_token,omitempty"`
	RotateGossipKey *RotateGossipKey `json:"rotate_key,omitempty"`
}

// Init names the cluster and sets its secrets. It is refused if the cluster has another name. Secrets that
// are set stay.
type Init struct {
	Cluster string `json:"cluster"`
	Secret  []byte `json:"secret,omitempty"` // the key of hashes that ingresses and replicas must agree on
	// LeaseTTL (ms) is how long leases last, for the whole life of the cluster. A leader may give ranks away
	// only when all leases that earlier leaders granted are over, so all leaders must grant the same. The
	// first value stays; 0 = not set by this command.
	LeaseTTL int64 `json:"lease_ttl,omitempty"`
	Secrets
}

// AppSpec is one application of a PutApps.
type AppSpec struct {
	Name  string          `json:"name"`
	Spec  json.RawMessage `json:"spec"` // as in App
	Names []string        `json:"names"`
}

// PutApps creates or replaces the apps that it lists. Other apps stay unless Prune is set. An app whose Spec
// is byte-equal does not change.
type PutApps struct {
	Apps []AppSpec `json:"apps"`
	// app → revision the caller saw; 0 = must not exist; missing = any
	Expect map[string]uint64 `json:"expect,omitempty"`
	Prune  bool              `json:"prune,omitempty"`
	At     int64             `json:"at,omitempty"`   // unix ms, leader's clock
	From   uint64            `json:"from,omitempty"` // as in PastSpec
}

// DeleteApp marks an app as deleting.
type DeleteApp struct {
	Name string `json:"name"`
}

// ForgetApp removes a deleting app whose units are all released.
type ForgetApp struct {
	Name string `json:"name"`
}

// GrantGroup starts units in one command, all or none, each at its next epoch.
type GrantGroup struct {
	App         string      `json:"app"`
	Pool        string      `json:"pool,omitempty"` // as in Unit
	AppRevision uint64      `json:"app_revision"`
	Group       int         `json:"group"`
	Units       []UnitGrant `json:"units"`
	At          int64       `json:"at,omitempty"` // Unit.Since of all of them
}

// PoolName names the pool of the group, as app.Application.PoolName.
func (g *GrantGroup) PoolName() string { return app.PoolName(g.App, g.Pool) }

// UnitGrant is one unit of a GrantGroup. ExpectEpoch is the highest epoch that the proposer knows (0 = never
// granted).
type UnitGrant struct {
	Unit        string      `json:"unit"`
	ExpectEpoch uint64      `json:"expect_epoch"`
	Attempt     int         `json:"attempt"`
	Launch      string      `json:"launch,omitempty"`   // as in Unit
	Restarts    int         `json:"restarts,omitempty"` // first Unit.Restarts if the unit has no record
	LastEnd     *LastEnd    `json:"last_end,omitempty"` // as in Unit
	Ranks       []RankGrant `json:"ranks"`
	Blocks      []Block     `json:"blocks,omitempty"`
}

// UnitRef reports a fact about a unit at an epoch. Apply refuses a stale epoch.
type UnitRef struct {
	Unit    string   `json:"unit"`
	Epoch   uint64   `json:"epoch"`
	Reason  string   `json:"reason,omitempty"`
	LogTail []string `json:"log_tail,omitempty"`
	At      int64    `json:"at,omitempty"`       // Unit.Since
	LastEnd *LastEnd `json:"last_end,omitempty"` // failed: as in Unit
}

// Result is the outcome of a command.
type Result struct {
	Revision uint64            `json:"revision,omitempty"` // cluster revision after PutApps, DeleteApp
	Apps     map[string]uint64 `json:"apps,omitempty"`     // PutApps: revision per app
	Epochs   map[string]uint64 `json:"epochs,omitempty"`   // GrantGroup: new epoch per unit

	// Unchanged is set if a command about nodes or tokens changed nothing but Index. The node then wakes no
	// reader.
	Unchanged bool `json:"unchanged,omitempty"`

	// Index is the raft index of the command. Consensus sets it, Apply does not.
	Index uint64 `json:"index,omitempty"`
}

// Kind returns the name of the one field that is set, for logs; "" if not exactly one is set.
func (c *Command) Kind() string {
	fields := reflect.ValueOf(c).Elem()
	kind := ""
	for i := range fields.NumField() {
		if fields.Field(i).IsNil() {
			continue
		}
		if kind != "" {
			return ""
		}
		kind = kindOf(fields.Type().Field(i))
	}
	return kind
}

// kindOf is the name of a field of Command.
func kindOf(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

func isKind(name string) bool {
	return slices.ContainsFunc(reflect.VisibleFields(reflect.TypeFor[Command]()),
		func(f reflect.StructField) bool { return kindOf(f) == name })
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
		if known, ok := errors.AsType[*problem.Error](err); ok {
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
	for name := range raw {
		if !isKind(name) {
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

// checkNodesComplete checks nodes and tokens. A snapshot has no table of what there is none of.
func checkNodesComplete(s *State) error {
	if s.Nodes == nil {
		s.Nodes = map[string]*Node{}
	}
	if s.Tokens == nil {
		s.Tokens = map[string]*Token{}
	}
	if s.Served == nil {
		s.Served = map[string]string{}
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
const Level = 1

// Level returns the least level of a node that can read the command: that of the version which brought its
// kind, or a field that is set in it.
func (c *Command) Level() int { return 1 }

// ReadableAt returns the record without the fields that nodes of a lower level do not know.
func (n Node) ReadableAt(int) Node { return n }
