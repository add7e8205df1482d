package main

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
)

// tokenDocument is the JSON of token.
type tokenDocument struct {
	client.Token
	Command string `json:"command"`
}

func newToken(e *env) *cobra.Command {
	req := client.TokenRequest{}
	var output *format
	cmd := &cobra.Command{
		Use:   "token [flags]",
		Short: "make a token that lets a node join",
		Long: `token prints the command that a new machine joins with. A token is good for one node unless
--uses says otherwise; the same machine may use it again. With --roles it lets no node join that asks for
another role; without it a node may have any role, also control, which gets the key of the cluster's
authority. The cluster keeps only the token's hash.`,
		Example: `  dpserve token
  dpserve token --roles worker,ingress --uses 8 --ttl 24h`,
		Args: requireArgs(0),
		RunE: e.asking(func(ctx context.Context, cluster admin, _ []string) error {
			return runToken(ctx, e, cluster, req, *output)
		}),
	}
	cmd.Flags().DurationVar(&req.TTL, "ttl", client.DefaultTokenTTL, "how long it is good")
	cmd.Flags().IntVar(&req.Uses, "uses", 1, "how many nodes may join with it")
	cmd.Flags().StringSliceVar(&req.Roles, "roles", nil,
		"`roles` that these nodes may have: control, worker, ingress; default: all")
	output = addOutput(cmd)
	cmd.AddCommand(newTokenList(e), newTokenRevoke(e))
	return cmd
}

func runToken(ctx context.Context, e *env, cluster admin, req client.TokenRequest, output format) error {
	t, err := cluster.NewToken(ctx, req)
	if err != nil {
		return err
	}
	command := formatJoinCommand(t.Address, t.Token)
	if len(t.Roles) > 0 {
		command += " --roles " + strings.Join(t.Roles, ",")
	}
	if !output.isTable() {
		return writeDocument(e.io.Out, output, versioned{tokenDocument{t, command}}, []string{t.Token})
	}
	_, err = fmt.Fprintf(e.io.Out, "%s\n", command)
	printMessage(e.io.Err, "good for %s until %s; `dpserve token revoke %s` ends it",
		formatCount(t.Uses, "node"), t.Expires.Local().Format("2006-01-02 15:04:05 MST"), t.ID)
	return err
}

// formatJoinCommand returns the command that a user types on another machine.
func formatJoinCommand(address, token string) string {
	return fmt.Sprintf("dpserve join %s --token %s", address, token)
}

func newTokenList(e *env) *cobra.Command {
	var output *format
	cmd := &cobra.Command{
		Use:   "list [flags]",
		Short: "the tokens with which nodes join",
		Long: `list shows each token of the cluster by its id, never its secret: if it is valid, used up,
expired or revoked, the roles that its nodes may have, how many nodes have used it and may still use it, and
which node made it when. A token is shown for a day after it has expired.`,
		Example: "  dpserve token list",
		Args:    requireArgs(0),
		RunE: e.asking(func(ctx context.Context, cluster admin, _ []string) error {
			list, err := cluster.Tokens(ctx)
			if err != nil {
				return err
			}
			return newTokenListing(e, list).write(e.io, *output)
		}),
	}
	output = addOutput(cmd)
	return cmd
}

func newTokenListing(e *env, list []client.JoinToken) *listing {
	names := make([]string, len(list))
	for i := range list {
		names[i] = list[i].ID
	}
	return &listing{
		document: map[string]any{"tokens": list}, names: names,
		table: func(wide bool) []*table { return []*table{newTokenTable(newStatusView(e, wide), list)} },
	}
}

func newTokenTable(v statusView, list []client.JoinToken) *table {
	t := &table{head: []string{"ID", "STATUS", "ROLES", "USED", "LEFT", "EXPIRES", "MADE", "BY"}}
	for i := range list {
		k := &list[i]
		expires := v.since(k.Expires)
		if left := k.Expires.Sub(v.now); v.relative && left > 0 {
			expires = "in " + formatAge(left)
		}
		t.add(cells(k.ID, k.Status, cmp.Or(strings.Join(k.Roles, ","), "all"), strconv.Itoa(k.Used),
			strconv.Itoa(k.UsesLeft), expires, v.since(k.Made), k.By)...)
	}
	return t
}

func newTokenRevoke(e *env) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "revoke ID|--all",
		Short: "end a token, or all of them",
		Long: `revoke ends the token with this id, or all of them: no node joins with it from then on, also
not a node that repeats its join. Nodes that have joined stay; "dpserve nodes remove" removes one.`,
		Example: `  dpserve token revoke 5f2c9d0e11aa
  dpserve token revoke --all`,
		Args: requireArgs(0, "ID"),
	}
	cmd.Flags().BoolVar(&all, "all", false, "every token")
	cmd.RunE = e.asking(func(ctx context.Context, cluster admin, args []string) error {
		switch {
		case all == (len(args) > 0):
			return usageError("token revoke", "name one token by its id, or all with --all")
		case all:
			if err := cluster.RevokeAllTokens(ctx); err != nil {
				return err
			}
			printMessage(e.io.Err, "all tokens are revoked")
			return nil
		}
		if err := cluster.RevokeToken(ctx, args[0]); err != nil {
			return err
		}
		printMessage(e.io.Err, "token %s is revoked", args[0])
		return nil
	})
	return cmd
}
