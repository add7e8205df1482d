package main

import (
	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/wiring"
)

func newJoin(e *env) *cobra.Command {
	f := &nodeFlags{config: wiring.DefaultConfig()}
	to := &wiring.Join{}
	cmd := &cobra.Command{
		Use:   "join ADDR --token TOKEN [flags]",
		Short: "run a node that joins a cluster, in the foreground",
		Long: `join brings this machine into the cluster that a node at ADDR (its node port) belongs to: the token proves that it may, then it
gets its certificate, then it is a member. It names the step that failed, and may be repeated as it is. Then it runs as start does;
later starts need no token: "dpserve start" with the same folder and address. "dpserve token" makes tokens.`,
		Example: `  dpserve join 10.0.0.1:7947 --token dpj1.... --advertise 10.0.0.2`,
		Args:    takes(1, "ADDR"),
	}
	cmd.Flags().StringVar(&to.Token, "token", "", "`TOKEN` that dpserve start or dpserve token printed")
	f.addNode(cmd)
	output := addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if to.Token == "" {
			return usageError("join", "join wants --token")
		}
		f.settle(cmd)
		to.Address = args[0]
		f.config.Join = to
		return e.start(cmd.Context(), f, *output)
	}
	return cmd
}
