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

// Secrets are known to members only. Init sets each once; afterwards only TurnKey changes the gossip key.
type Secrets struct {
	Authority    []byte `json:"authority,omitempty"`     // PEM, the cluster's certificate authority
	AuthorityKey []byte `json:"authority_key,omitempty"` // PEM
	GossipKey    []byte `json:"gossip_key,omitempty"`    // nodes encrypt with it
	// accepted; becomes the key when every node accepts it
	GossipNext []byte `json:"gossip_next,omitempty"`
	GossipLast []byte `json:"gossip_last,omitempty"` // accepted until every node encrypts with the key
}

// TurnKey rotates the gossip key in three steps: nodes accept the new key, then they encrypt with it, then
// they drop the old one. At every moment all nodes can decrypt each other. Apply refuses it with ErrKeyTurned
// if the keyring is not From any more, or if Next is set while a rotation is under way.
type TurnKey struct {
	From string `json:"from"`           // KeyringSum of the keyring that the proposer saw
	Next []byte `json:"next,omitempty"` // begins a rotation; nil = the next step of the one under way
}

// Keyring returns the one or two accepted gossip keys. Nodes encrypt with the first. nil = the cluster has
// none.
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

// Turning reports whether a rotation of the gossip key is under way.
func (s *Secrets) Turning() bool { return len(s.GossipNext)+len(s.GossipLast) > 0 }

// KeyringSum identifies a keyring without revealing it; "" for an empty one.
func KeyringSum(ring [][]byte) string {
	if len(ring) == 0 {
		return ""
	}
	sum := sha256.Sum256(bytes.Join(ring, nil))
	return hex.EncodeToString(sum[:8])
}

// Untaken returns the sorted names of the nodes that have not installed the present keyring. Lost nodes do
// not count: the leader gives them the keyring with their first lease.
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
		return Result{}, problem.New(problem.Conflict, "turn the gossip key: %w: this cluster has none",
			ErrBadCommand)
	case c.From != KeyringSum(k.Keyring()), c.Next != nil && k.Turning():
		return Result{}, problem.New(problem.Conflict, "turn the gossip key: %w", ErrKeyTurned).
			WithHint("wait until the change under way is complete")
	case c.Next != nil && (len(c.Next) != GossipKeySize || bytes.Equal(c.Next, k.GossipKey)):
		return Result{}, problem.New(problem.InvalidArgument,
			"turn the gossip key: %w: the next one must be another one of %d bytes", ErrBadCommand,
			GossipKeySize)
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
