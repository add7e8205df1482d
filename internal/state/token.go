package state

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// Token lets nodes join. The state keeps only its hash.
type Token struct {
	Hash    string `json:"hash"`
	Expires int64  `json:"expires"` // unix ms
	Uses    int    `json:"uses"`    // nodes that may still use it
	// UID and hash of the public key of each, with a space between them
	UsedBy  []string `json:"used_by,omitempty"`
	Roles   []Role   `json:"roles,omitempty"`   // that its nodes may have; empty = all
	Made    int64    `json:"made,omitempty"`    // unix ms
	By      string   `json:"by,omitempty"`      // the node that made it
	Revoked bool     `json:"revoked,omitempty"` // no node may use it any more
}

// UseToken spends one use of a token for a node. The same UID with the same key may repeat it. Refusals:
// ErrTokenUnknown, ErrTokenUsed, ErrTokenExpired, ErrTokenRevoked, ErrTokenRoles, ErrNodeTaken (the UID
// belongs to another key).
type UseToken struct {
	Hash string `json:"hash"`
	UID  string `json:"uid"`
	// hash of the public key that the node asks a certificate for
	Key   string `json:"key,omitempty"`
	Roles []Role `json:"roles,omitempty"` // that the node asks for
	Now   int64  `json:"now"`             // unix ms, of the proposer
}

// RevokeToken ends a token, or All of them, before they expire. Nodes that have joined with it stay.
type RevokeToken struct {
	ID  string `json:"id,omitempty"`
	All bool   `json:"all,omitempty"`
}

// Bounds of join tokens.
const (
	maxTokens    = 256            // stored at once; a new one replaces the one that dropToken names
	maxTokenUses = 1024           // nodes per token
	tokenKept    = 24 * time.Hour // how long a token is shown after it has expired
	tokenIDSize  = 12             // characters of the hash
)

// ID names the token for people. It is the beginning of the hash and tells nothing about the secret.
func (t *Token) ID() string { return t.Hash[:min(len(t.Hash), tokenIDSize)] }

// Status says what a token is good for.
func (t *Token) Status(now time.Time) string {
	switch {
	case t.Revoked:
		return "revoked"
	case now.UnixMilli() >= t.Expires:
		return "expired"
	case t.Uses < 1:
		return "used up"
	}
	return "valid"
}

// check refuses a token that cannot be stored.
func (t *Token) check() error {
	badRole := slices.ContainsFunc(t.Roles, func(r Role) bool {
		return r != RoleControl && r != RoleWorker && r != RoleIngress
	})
	if t.Hash == "" || t.Expires <= 0 || t.Uses < 1 || t.Uses > maxTokenUses || badRole {
		return problem.New(problem.InvalidArgument,
			"put token: %w: it needs a hash, an expiry, 1-%d uses and known roles", ErrBadCommand,
			maxTokenUses)
	}
	return nil
}

// checkUse refuses a token that is not good for the node, whether the node has spent a use or not.
func (t *Token) checkUse(c *UseToken) error {
	switch {
	case t.Revoked:
		return problem.New(problem.Unauthenticated, "use token: %w: %s", ErrTokenRevoked, t.ID()).
			WithHint(hintNewOne)
	case c.Now >= t.Expires:
		return tokenError(ErrTokenExpired)
	}
	if len(t.Roles) == 0 {
		return nil
	}
	more := slices.DeleteFunc(slices.Clone(c.Roles), func(r Role) bool { return slices.Contains(t.Roles, r) })
	if len(more) == 0 && len(c.Roles) > 0 {
		return nil
	}
	return problem.New(problem.PermissionDenied, "use token: %w: %s is for %s, and the node asks for %s",
		ErrTokenRoles, t.ID(), joinRoles(t.Roles, ", "), joinRoles(more, ", ")).
		WithHint("join with --roles %s, or make another token: dpserve token --roles %s",
			joinRoles(t.Roles, ","), joinRoles(c.Roles, ","))
}

func joinRoles(roles []Role, by string) string {
	return strings.Join(ConvertRoles[string](roles), by)
}

// spend returns the token with one use less, for a node that has not used it before.
func (t *Token) spend(c *UseToken) *Token {
	used := *t
	used.Uses, used.UsedBy = t.Uses-1, append(slices.Clone(t.UsedBy), c.tokenUser())
	return &used
}

// hasOtherKey reports whether the node's UID has spent a use with a key other than the one it shows now.
func (t *Token) hasOtherKey(c *UseToken) bool {
	return slices.ContainsFunc(t.UsedBy, func(by string) bool {
		uid, key, _ := strings.Cut(by, " ")
		return uid == c.UID && key != c.Key
	})
}

// tokenUser names the node that spends a use of a token: its UID and the key that it showed. The UID alone is
// not secret, because every certificate contains it.
func (c *UseToken) tokenUser() string {
	return c.UID + " " + c.Key
}

// dropTokens makes room for a token that is made now: those that expired tokenKept ago go, and if there are
// too many, one that was revoked, else the one that expires first.
func dropTokens(tokens map[string]*Token, now int64) {
	maps.DeleteFunc(tokens, func(_ string, t *Token) bool {
		return t.Expires+tokenKept.Milliseconds() <= now
	})
	if len(tokens) < maxTokens {
		return
	}
	first := ""
	for _, h := range slices.Sorted(maps.Keys(tokens)) {
		if first == "" || tokens[h].goesBefore(tokens[first]) {
			first = h
		}
	}
	delete(tokens, first)
}

func (t *Token) goesBefore(o *Token) bool {
	if t.Revoked != o.Revoked {
		return t.Revoked
	}
	return t.Expires < o.Expires
}

const hintNewOne = "make a new one on a node of the cluster: dpserve token"

func tokenError(why error) error {
	return problem.New(problem.Unauthenticated, "use token: %w", why).WithHint(hintNewOne)
}
