package state

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

func token(hash string, expires int64, uses int) Command {
	return Command{PutToken: &Token{Hash: hash, Expires: expires, Uses: uses}}
}

func use(hash, uid string, now int64) Command {
	return Command{UseToken: &UseToken{Hash: hash, UID: uid, Key: "k", Now: now}}
}

func TestTokenIsSpentOncePerNode(t *testing.T) {
	m := withNodes(t, "a", "b")
	m.refused(use("h", "u1", 1), ErrTokenUnknown, problem.Unauthenticated)
	m.must(token("h", 100, 2))
	m.refused(use("h", "", 1), ErrBadCommand, problem.InvalidArgument)
	m.must(use("h", "u1", 1))
	assert.True(t, m.must(use("h", "u1", 2)).Unchanged, "a join is safe to repeat")
	assert.True(t, m.must(token("h", 100, 2)).Unchanged, "and so is making the token")
	m.must(use("h", "u2", 99))
	m.refused(use("h", "u3", 99), ErrTokenUsed, problem.Unauthenticated)
	m.must(use("h", "u2", 99))
	m.refused(use("h", "u2", 100), ErrTokenExpired, problem.Unauthenticated)
	assert.Equal(t, Token{Hash: "h", Expires: 100, UsedBy: []string{"u1 k", "u2 k"}}, *m.Tokens["h"])

	m.must(Command{RemoveNode: &RemoveNode{Node: "b"}})
	m.must(token("k", 100, 1))
	m.refused(use("k", "uid-b", 1), ErrNodeRemoved, problem.PermissionDenied)
}

func useWith(hash, uid, key string) Command {
	return Command{UseToken: &UseToken{Hash: hash, UID: uid, Key: key, Now: 1}}
}

// HF21: a UID is not secret, because every certificate shows it. So only the key that used a token may use it
// again, and no token lets another key take a known node's UID.
func TestATokenIsBoundToTheKeyThatUsedIt(t *testing.T) {
	m := withNodes(t, "a")
	m.must(token("h", 100, 2))
	m.must(useWith("h", "uid-b", "k1"))
	assert.True(t, m.must(useWith("h", "uid-b", "k1")).Unchanged)
	m.refused(useWith("h", "uid-b", "k2"), ErrNodeTaken, problem.Conflict)
	m.refused(use("h", "uid-b", 1), ErrNodeTaken, problem.Conflict)
	assert.Equal(t, Token{Hash: "h", Expires: 100, Uses: 1, UsedBy: []string{"uid-b k1"}}, *m.Tokens["h"])

	b := node("b")
	b.Key = "k1"
	m.must(putNode(b))
	m.must(token("i", 100, 1))
	m.refused(useWith("i", "uid-b", "k2"), ErrNodeTaken, problem.Conflict)
	m.must(useWith("i", "uid-b", "k1"))
}

func TestTokensAreBounded(t *testing.T) {
	m := newMachine(t)
	for _, c := range []Command{
		token("", 1, 1), token("h", 0, 1), token("h", 1, 0),
		token("h", 1, maxTokenUses+1),
	} {
		m.refused(c, ErrBadCommand, problem.InvalidArgument)
	}
	for i := range maxTokens {
		m.must(token(fmt.Sprintf("h%03d", i), int64(1000-i/2), 1))
	}
	m.must(token("late", 1, 1))
	assert.Len(t, m.Tokens, maxTokens)
	assert.Nil(t, m.Tokens["h254"], "of the two that expire first the lower one")
	assert.NotNil(t, m.Tokens["h255"])
	assert.NotNil(t, m.Tokens["late"])
}

// HF73: a token that names roles lets no node join that asks for another one, also not a node that has used
// it before.
func TestTokensOfRoles(t *testing.T) {
	ask := func(uid string, roles ...Role) Command {
		return Command{UseToken: &UseToken{
			Hash: "0123456789abcdef", UID: uid, Key: "k", Roles: roles, Now: 1,
		}}
	}
	m := newMachine(t)
	made := Token{
		Hash: "0123456789abcdef", Expires: 100, Uses: 3, Roles: []Role{RoleWorker, RoleIngress}, Made: 1,
		By: "a",
	}
	m.refused(Command{PutToken: &Token{Hash: "h", Expires: 1, Uses: 1, Roles: []Role{"x"}}}, ErrBadCommand,
		problem.InvalidArgument)
	m.must(Command{PutToken: &made})
	for name, roles := range map[string][]Role{
		"one more": {RoleWorker, RoleControl}, "all": {RoleControl, RoleWorker, RoleIngress},
		"another": {RoleControl}, "none told": nil,
	} {
		m.refused(ask("u-"+name, roles...), ErrTokenRoles, problem.PermissionDenied)
	}
	m.must(ask("u1", RoleWorker))
	m.must(ask("u2", RoleIngress, RoleWorker))
	m.refused(ask("u1", RoleWorker, RoleControl), ErrTokenRoles, problem.PermissionDenied)
	assert.True(t, m.must(ask("u1", RoleWorker)).Unchanged)

	err := m.refused(ask("u3", RoleControl, RoleWorker), ErrTokenRoles, problem.PermissionDenied)
	require.EqualError(t, err, "use token: join token is not for these roles: 0123456789ab is for worker, "+
		"ingress, and the node asks for control")
	why, _ := errors.AsType[*problem.Error](err)
	assert.Equal(t, "join with --roles worker,ingress, or make another token: dpserve token --roles "+
		"control,worker", why.Hint)

	made.Uses, made.UsedBy = 1, []string{"u1 k", "u2 k"}
	assert.Equal(t, made, *m.Tokens[made.Hash])
}

func revoke(id string) Command { return Command{RevokeToken: &RevokeToken{ID: id, All: id == ""}} }

// HF73: a revoked token is refused at once, and its record says so until it is dropped.
func TestRevokedTokens(t *testing.T) {
	m := newMachine(t)
	for _, hash := range []string{"aaaaaaaaaaaa1", "bbbbbbbbbbbb1", "cccccccccccc1"} {
		m.must(token(hash, 100, 2))
		m.must(use(hash, "u1", 1))
	}
	m.refused(revoke("aaaa"), ErrTokenUnknown, problem.NotFound)
	m.must(revoke("aaaaaaaaaaaa"))
	assert.True(t, m.must(revoke("aaaaaaaaaaaa")).Unchanged)
	m.refused(use("aaaaaaaaaaaa1", "u1", 2), ErrTokenRevoked, problem.Unauthenticated)
	err := m.refused(use("aaaaaaaaaaaa1", "u2", 2), ErrTokenRevoked, problem.Unauthenticated)
	require.EqualError(t, err, "use token: join token was revoked: aaaaaaaaaaaa")
	m.must(use("bbbbbbbbbbbb1", "u2", 2))
	m.must(revoke(""))
	m.refused(use("bbbbbbbbbbbb1", "u2", 2), ErrTokenRevoked, problem.Unauthenticated)
	assert.True(t, m.must(token("bbbbbbbbbbbb1", 100, 2)).Unchanged, "to make it again does not help")
	m.refused(use("cccccccccccc1", "u1", 2), ErrTokenRevoked, problem.Unauthenticated)
	assert.True(t, m.must(revoke("")).Unchanged)
	assert.True(t, newMachine(t).must(revoke("")).Unchanged, "there is none")
}

// HF73: a token is valid, expired, used up or revoked.
func TestWhatATokenIsGoodFor(t *testing.T) {
	now := time.UnixMilli(100)
	for want, of := range map[string]Token{
		"valid": {Expires: 101, Uses: 1}, "expired": {Expires: 100, Uses: 1}, "used up": {Expires: 101},
		"revoked": {Expires: 100, Revoked: true},
	} {
		assert.Equal(t, want, of.Status(now))
	}
}

// HF73: a token that expired a day ago goes when the next one is made, and of too many tokens a revoked one
// goes first.
func TestOldTokensAreDropped(t *testing.T) {
	const day = 24 * 60 * 60 * 1000
	put := func(hash string, made, expires int64) Command {
		return Command{PutToken: &Token{Hash: hash, Expires: expires, Uses: 1, Made: made}}
	}
	m := newMachine(t)
	m.must(put("first", 1, 10))
	m.must(put("second", 2, 11))
	m.must(put("third", day+10, 2*day))
	assert.Equal(t, []string{"second", "third"}, slices.Sorted(maps.Keys(m.Tokens)))
	for i := range maxTokens - 2 {
		m.must(put(fmt.Sprintf("many%03d", i), day+10, 2*day))
	}
	m.must(revoke("many200"))
	m.must(put("last", day+10, 2*day))
	assert.Len(t, m.Tokens, maxTokens)
	assert.NotContains(t, m.Tokens, "many200")
	assert.Contains(t, m.Tokens, "second")
}
