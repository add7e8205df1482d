package state

import (
	"maps"
	"slices"

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

// useToken spends a use for a node, once per node.
func (s *State) useToken(c *UseToken) (Result, error) {
	t := s.Tokens[c.Hash]
	switch {
	case c.UID == "":
		return Result{}, badNode("use token", "the node's UID is empty")
	case t == nil:
		return Result{}, refusedToken(ErrTokenUnknown)
	case c.Now >= t.Expires:
		return Result{}, refusedToken(ErrTokenExpired)
	case slices.Contains(s.Removed, c.UID):
		return Result{}, removedNode("use token", c.UID)
	case slices.Contains(t.UsedBy, c.UID):
		return Result{Unchanged: true}, nil
	case t.Uses < 1:
		return Result{}, refusedToken(ErrTokenUsed)
	}
	used := *t
	used.Uses, used.UsedBy = t.Uses-1, append(slices.Clone(t.UsedBy), c.UID)
	s.Tokens[c.Hash] = &used
	return Result{}, nil
}

func refusedToken(why error) error {
	return problem.New(problem.Unauthenticated, "use token: %w", why).WithHint("make a new one on a node of the cluster: dpserve token")
}
