package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"slices"

	"github.com/dpserve/dpserve/internal/problem"
)

// GossipKeySize is the length of a gossip key in bytes.
const GossipKeySize = 32

// Secrets are what only members may know. Init sets them, each once; TurnKey alone changes the gossip key.
type Secrets struct {
	Authority    []byte `json:"authority,omitempty"`     // PEM, the cluster's certificate authority
	AuthorityKey []byte `json:"authority_key,omitempty"` // PEM
	GossipKey    []byte `json:"gossip_key,omitempty"`    // what gossip is sent with
	GossipNext   []byte `json:"gossip_next,omitempty"`   // let in until every node lets it in; then it is the key
	GossipLast   []byte `json:"gossip_last,omitempty"`   // let in until every node sends with the key
}

// TurnKey changes the gossip key, a step at a time, so that no two nodes ever speak past each other: Next is let in, then sent with, then
// the old one is let out. Refused: a keyring that is not From any more, a Next while another change is under way (both ErrKeyTurned).
type TurnKey struct {
	From string `json:"from"`           // KeyringSum of what the proposer saw
	Next []byte `json:"next,omitempty"` // begins a change; nil = the next step of the one under way
}

// Keyring is the gossip keys that are let in, one or two; the first is sent with. nil = this cluster has none.
func (s *Secrets) Keyring() [][]byte {
	if len(s.GossipKey) == 0 {
		return nil
	}
	ring := [][]byte{s.GossipKey}
	for _, k := range [][]byte{s.GossipNext, s.GossipLast} {
		if len(k) > 0 {
			ring = append(ring, k)
		}
	}
	return ring
}

// Turning says that the gossip key is being changed.
func (s *Secrets) Turning() bool { return len(s.GossipNext)+len(s.GossipLast) > 0 }

// KeyringSum names a keyring without giving it away; "" for none.
func KeyringSum(ring [][]byte) string {
	if len(ring) == 0 {
		return ""
	}
	sum := sha256.Sum256(bytes.Join(ring, nil))
	return hex.EncodeToString(sum[:8])
}

// Untaken are the nodes, by name, that have not taken the present keyring. Lost ones do not count: they get it with their first lease.
func (s *State) Untaken() []string {
	sum := KeyringSum(s.Secrets.Keyring())
	var names []string
	for _, n := range s.Nodes {
		if !n.Lost && n.Keyring != sum {
			names = append(names, n.ID)
		}
	}
	slices.Sort(names)
	return names
}

func (s *State) turnKey(c *TurnKey) (Result, error) {
	k := &s.Secrets
	switch {
	case len(k.GossipKey) == 0:
		return Result{}, problem.New(problem.Conflict, "turn the gossip key: %w: this cluster has none", ErrBadCommand)
	case c.From != KeyringSum(k.Keyring()), c.Next != nil && k.Turning():
		return Result{}, problem.New(problem.Conflict, "turn the gossip key: %w", ErrKeyTurned).WithHint("wait until the change under way is complete")
	case c.Next != nil && (len(c.Next) != GossipKeySize || bytes.Equal(c.Next, k.GossipKey)):
		return Result{}, problem.New(problem.InvalidArgument, "turn the gossip key: %w: the next one must be another one of %d bytes", ErrBadCommand, GossipKeySize)
	case c.Next != nil:
		k.GossipNext = c.Next
	case len(k.GossipNext) > 0:
		k.GossipKey, k.GossipLast, k.GossipNext = k.GossipNext, k.GossipKey, nil
	case len(k.GossipLast) > 0:
		k.GossipLast = nil
	default:
		return Result{Unchanged: true}, nil
	}
	return Result{}, nil
}
