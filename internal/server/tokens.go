package server

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

func (b *backend) NewToken(ctx context.Context, req client.TokenRequest) (client.Token, error) {
	if err := b.refuseAlone(); err != nil {
		return client.Token{}, err
	}
	return b.newToken(ctx, req, b.n.cfg.NodeID)
}

// refuseAlone refuses commands about join tokens on a node that no other can join.
func (b *backend) refuseAlone() error {
	if b.n.peering != nil {
		return nil
	}
	return problem.New(problem.Conflict, "this node stands alone: no other can join it").
		WithHint("start it with --advertise IP")
}

func (b *backend) newToken(ctx context.Context, req client.TokenRequest, by string) (client.Token, error) {
	n := b.n
	if len(n.store.State().Secrets.Authority) == 0 {
		return client.Token{}, n.errNotLeading()
	}
	rec := state.Token{Uses: req.Uses, Roles: state.ConvertRoles[state.Role](req.Roles), By: by}
	token, err := n.peering.NewToken(ctx, n.store, req.TTL, &rec)
	return client.Token{
		Token: token, ID: rec.ID(), Address: n.peering.Address(), Uses: req.Uses, Roles: req.Roles,
		Expires: time.UnixMilli(rec.Expires),
	}, err
}

// Tokens lists the join tokens, the newest first.
func (b *backend) Tokens(context.Context) ([]client.JoinToken, error) {
	if err := b.refuseAlone(); err != nil {
		return nil, err
	}
	if _, err := b.n.requireLeader(); err != nil {
		return nil, err
	}
	now, st := time.Now(), b.n.store.State()
	out := make([]client.JoinToken, 0, len(st.Tokens))
	for _, t := range st.Tokens {
		out = append(out, client.JoinToken{
			ID: t.ID(), Status: t.Status(now), Roles: state.ConvertRoles[string](t.Roles), UsesLeft: t.Uses,
			Used: len(t.UsedBy), Expires: time.UnixMilli(t.Expires), Made: time.UnixMilli(t.Made), By: t.By,
		})
	}
	slices.SortFunc(out, func(a, b client.JoinToken) int {
		return cmp.Or(b.Made.Compare(a.Made), cmp.Compare(a.ID, b.ID))
	})
	return out, nil
}

// RevokeToken ends one join token; "" = all of them.
func (b *backend) RevokeToken(ctx context.Context, id string) error {
	if err := b.refuseAlone(); err != nil {
		return err
	}
	if _, err := b.n.requireLeader(); err != nil {
		return err
	}
	_, err := b.n.store.Propose(ctx, state.Command{RevokeToken: &state.RevokeToken{ID: id, All: id == ""}})
	return err
}
