package main

import (
	"context"
	"net"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/problem"
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
later starts need no token: "dpserve start --advertise IP" with the same folder. Without --advertise it shows itself to the others at
the address from which it reaches ADDR. "dpserve token" makes tokens.`,
		Example: `  dpserve join 10.0.0.1:7947 --token dpj1....`,
		Args:    takes(1, "ADDR"),
	}
	cmd.Flags().StringVar(&to.Token, "token", "", "`TOKEN` that dpserve start or dpserve token printed")
	f.addNode(cmd)
	output := addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if to.Token == "" {
			return usageError("join", "join wants --token")
		}
		to.Address = args[0]
		if f.config.Advertise == "" {
			ip, err := routeTo(cmd.Context(), to.Address)
			if err != nil {
				return err
			}
			f.config.Advertise = ip
		}
		f.settle(cmd)
		f.config.Join = to
		return e.start(cmd.Context(), f, *output)
	}
	return cmd
}

// routeTo is this machine's address on the way to another one. Nothing is sent: the kernel looks at its routes.
func routeTo(ctx context.Context, addr string) (string, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "udp", addr)
	if err != nil {
		return "", problem.New(problem.InvalidArgument, "there is no way to %s: %w", addr, err).WithHint("write HOST:PORT of a node's node port, or add --advertise with this machine's IP")
	}
	host, _, err := net.SplitHostPort(c.LocalAddr().String())
	if cerr := c.Close(); err == nil {
		err = cerr
	}
	return host, err
}
