package state

import (
	"maps"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of join tokens.
const (
	maxTokens    = 256  // stored at once; a new one replaces the one that expires first
	maxTokenUses = 1024 // nodes per token
)

// putToken stores a token. Storing the same token again changes nothing: its spent uses stay spent.
func (s *State) putToken(c *Token) (Result, error) {
	if c.Hash == "" || c.Expires <= 0 || c.Uses < 1 || c.Uses > maxTokenUses {
		return Result{}, problem.New(problem.InvalidArgument,
			"put token: %w: it needs a hash, an expiry and 1-%d uses", ErrBadCommand, maxTokenUses)
	}
	if s.Tokens[c.Hash] != nil {
		return Result{Unchanged: true}, nil
	}
	if len(s.Tokens) >= maxTokens {
		delete(s.Tokens, s.firstToExpire())
	}
	s.Tokens[c.Hash] = &Token{Hash: c.Hash, Expires: c.Expires, Uses: c.Uses}
	return Result{}, nil
}

// firstToExpire returns the hash of the token with the earliest expiry, the lowest hash among equals.
func (s *State) firstToExpire() string {
	first := ""
	for _, h := range slices.Sorted(maps.Keys(s.Tokens)) {
		if first == "" || s.Tokens[h].Expires < s.Tokens[first].Expires {
			first = h
		}
	}
	return first
}

// tokenUser names the node that spends a use of a token: its UID and the key that it showed. The UID alone is
// not secret, because every certificate contains it.
func (c *UseToken) tokenUser() string {
	if c.Key == "" {
		return c.UID
	}
	return c.UID + " " + c.Key
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
	case c.Now >= t.Expires:
		return Result{}, tokenError(ErrTokenExpired)
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
	used := *t
	used.Uses, used.UsedBy = t.Uses-1, append(slices.Clone(t.UsedBy), c.tokenUser())
	s.Tokens[c.Hash] = &used
	return Result{}, nil
}

// hasOtherKey reports whether the node's UID has spent a use with a key other than the one it shows now.
func (t *Token) hasOtherKey(c *UseToken) bool {
	return slices.ContainsFunc(t.UsedBy, func(by string) bool {
		uid, key, _ := strings.Cut(by, " ")
		return uid == c.UID && key != c.Key
	})
}

func tokenError(why error) error {
	return problem.New(problem.Unauthenticated, "use token: %w", why).
		WithHint("make a new one on a node of the cluster: dpserve token")
}
