package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/api"
)

// tokenDocument is the JSON of token.
type tokenDocument struct {
	APIVersion string `json:"apiVersion"`
	api.Token
	Command string `json:"command"`
}

func newToken(e *env) *cobra.Command {
	req := api.TokenRequest{}
	var output *format
	cmd := &cobra.Command{
		Use:   "token [flags]",
		Short: "make a token that lets a node join",
		Long: `token prints the command that a new machine joins with. A token is good for one node unless --uses says otherwise; the same
machine may use it again. The cluster keeps only its hash.`,
		Example: `  dpserve token
  dpserve token --uses 8 --ttl 24h`,
		Args: takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return e.withAdmin(func(client admin) error { return e.token(cmd.Context(), client, req, *output) })
		},
	}
	cmd.Flags().DurationVar(&req.TTL, "ttl", api.DefaultTokenTTL, "how long it is good")
	cmd.Flags().IntVar(&req.Uses, "uses", 1, "how many nodes may join with it")
	output = addOutput(cmd)
	return cmd
}

func (e *env) token(ctx context.Context, client admin, req api.TokenRequest, output format) error {
	t, err := client.NewToken(ctx, req)
	if err != nil {
		return err
	}
	command := joinCommand(t.Address, t.Token)
	l := &listing{document: tokenDocument{apiVersion, t, command}, names: []string{t.Token}}
	if output != formatTable && output != formatWide {
		return l.write(e.io, output)
	}
	_, err = fmt.Fprintf(e.io.Out, "%s\n", command)
	talk(e.io.Err, "good for %s until %s", count(t.Uses, "node"), t.Expires.Local().Format(time.DateTime))
	return err
}

// joinCommand is what one types on another machine.
func joinCommand(address, token string) string {
	return fmt.Sprintf("dpserve join %s --token %s", address, token)
}
