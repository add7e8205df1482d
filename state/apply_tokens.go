package state

import (
	"maps"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of join tokens.
const (
	maxTokens    = 256  // kept at once; the one that expires first makes room
	maxTokenUses = 1024 // nodes per token
)

// putToken makes a token known. The same one again changes nothing: uses that are spent stay spent.
func (s *State) putToken(c *Token) (Result, error) {
	if c.Hash == "" || c.Expires <= 0 || c.Uses < 1 || c.Uses > maxTokenUses {
		return Result{}, problem.New(problem.InvalidArgument, "put token: %w: it needs a hash, an expiry and 1-%d uses", ErrBadCommand, maxTokenUses)
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

// firstToExpire is the hash of the token with the earliest expiry; among equals the lowest.
func (s *State) firstToExpire() string {
	first := ""
	for _, h := range slices.Sorted(maps.Keys(s.Tokens)) {
		if first == "" || s.Tokens[h].Expires < s.Tokens[first].Expires {
			first = h
		}
	}
	return first
}

// spentBy is who has spent a use of a token: a UID with the key it showed. The UID alone is no secret, its certificate shows it to anybody.
func (c *UseToken) spentBy() string {
	if c.Key == "" {
		return c.UID
	}
	return c.UID + " " + c.Key
}

// useToken spends a use for a node, once per node and key.
func (s *State) useToken(c *UseToken) (Result, error) {
	t := s.Tokens[c.Hash]
	holder := s.byUID(c.UID)
	switch {
	case c.UID == "":
		return Result{}, badNode("use token", "the node's UID is empty")
	case t == nil:
		return Result{}, refusedToken(ErrTokenUnknown)
	case c.Now >= t.Expires:
		return Result{}, refusedToken(ErrTokenExpired)
	case slices.Contains(s.Removed, c.UID):
		return Result{}, removedNode("use token", c.UID)
	case holder != nil && holder.Key != c.Key, t.hasOtherKey(c): // of a member whose key is not known nobody can say that it is its own
		return Result{}, otherKey("use token", c.UID)
	case slices.Contains(t.UsedBy, c.spentBy()):
		return Result{Unchanged: true}, nil
	case t.Uses < 1:
		return Result{}, refusedToken(ErrTokenUsed)
	}
	used := *t
	used.Uses, used.UsedBy = t.Uses-1, append(slices.Clone(t.UsedBy), c.spentBy())
	s.Tokens[c.Hash] = &used
	return Result{}, nil
}

// hasOtherKey says that the node's UID has spent a use with another key than it shows now.
func (t *Token) hasOtherKey(c *UseToken) bool {
	return slices.ContainsFunc(t.UsedBy, func(by string) bool {
		uid, key, _ := strings.Cut(by, " ")
		return uid == c.UID && key != c.Key
	})
}

func refusedToken(why error) error {
	return problem.New(problem.Unauthenticated, "use token: %w", why).WithHint("make a new one on a node of the cluster: dpserve token")
}
