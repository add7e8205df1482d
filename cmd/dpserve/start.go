package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/server"
)

// address is printed by start and up with -o json: one line that tells a program where the node listens.
type address struct {
	Node string `json:"node"`
	// OpenAI endpoint, without a path; empty without role ingress
	URL     string `json:"url"`
	Admin   string `json:"admin"`             // HOST:PORT for --addr and DPSERVE_ADDR
	Metrics string `json:"metrics,omitempty"` // HOST:PORT of --metrics-bind
	PID     int    `json:"pid"`
}

func newStart(e *env) *cobra.Command {
	f := &nodeFlags{config: server.DefaultConfig()}
	cmd := &cobra.Command{
		Use:   "start [flags]",
		Short: "run a node in the foreground",
		Long: `start runs a node until Ctrl-C or SIGTERM. Apps that were deployed before come back from the
data folder. The first Ctrl-C drains (each app's graceful_shutdown_timeout_s), a second one stops at once.
With --advertise it is the first node of a cluster, or one that has joined before: at its very first start
it prints the command by which others join. Ports 8000 and 8265 bind loopback only; a public bind of them
needs --insecure-public in this version.

dpserve's own memory has the limit of GOMEMLIMIT (for example 4GiB), else 90 % of what its container or
service may use: above 85 % of it requests are refused with 503, above 95 % connections too.`,
		Example: "  dpserve start                                # then, in another terminal: " +
			`dpserve deploy app.yaml
  dpserve start --advertise 10.0.0.1           # the first node of several
  dpserve start --http-bind 127.0.0.1:0 -o json   # any free port, told as JSON on stdout`,
		Args: requireArgs(0),
	}
	f.addNode(cmd)
	output := addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		f.adaptBinds(cmd)
		if err := f.chooseDataDir(cmd, e); err != nil {
			return err
		}
		return runStart(cmd.Context(), e, f, *output)
	}
	return cmd
}

func runStart(ctx context.Context, e *env, f *nodeFlags, output format) error {
	c, err := f.buildConfig(e)
	if err != nil {
		return err
	}
	scr := e.screen()
	c.LogWriter, c.Shims, c.Program = scr, true, e.program
	restarts := make(chan os.Signal, 1)
	signal.Notify(restarts, syscall.SIGUSR2)
	defer signal.Stop(restarts)
	s, err := startNode(ctx, e, c)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }() // stop has returned the error
	if err := printAddress(e, s, &c, output); err != nil {
		return err
	}
	if at, token := s.FirstToken(); token != "" {
		printMessage(e.io.Err, "other machines join with (good for %s, for up to %d nodes):",
			formatAge(server.FirstTokenTTL), server.FirstTokenUses)
		printMessage(e.io.Err, "  %s", formatJoinCommand(at, token))
	}
	for {
		select {
		case <-s.done:
			return endStart(e, s, c.NodeID)
		case <-e.sig.first:
			return s.stop(e.sig, scr)
		case <-restarts:
			if _, err := s.Restart(ctx, false); err != nil {
				report(e.io.Err, err)
			}
		}
	}
}

// endStart returns the error of a node that has ended without a signal: it has left its cluster, or its
// process is to be replaced.
func endStart(e *env, s *serving, id string) error {
	switch {
	case s.err == nil && s.Left():
		if s.Refusal() == nil {
			printMessage(e.io.Err, "%s has left its cluster", id)
		}
		report(e.io.Err, s.Refusal())
		return nil
	case errors.Is(s.err, server.ErrRestart):
		if err := s.Close(); err != nil {
			report(e.io.Err, err) // the next process has the engines all the same
		}
		e.closeScreen()
		return e.execute()
	}
	return s.unexpectedEnd()
}

// printAddress prints the addresses that the node listens on, in the requested format.
func printAddress(e *env, s *serving, c *server.Config, output format) error {
	a := address{
		Node: c.NodeID, Admin: s.AdminAddr(), Metrics: s.MetricsAddr(), PID: os.Getpid(),
	}
	if at := s.HTTPAddr(); at != "" {
		a.URL = schemeOf(c) + "://" + at
	}
	if output == formatJSON {
		return writeJSONLine(e.io.Out, versioned{a})
	}
	if !output.isTable() {
		return writeDocument(e.io.Out, output, versioned{a}, []string{a.Node})
	}
	endpoint := ""
	if a.URL != "" {
		endpoint = "endpoint " + a.URL + "/v1\n"
	}
	_, err := fmt.Fprintf(e.io.Out,
		"node %[1]s\n%[2]sadmin %[3]s://%[4]s\npage %[3]s://%[4]s/\n%[5]s",
		a.Node, endpoint, schemeOf(c), a.Admin, formatMetricsLine(a.Metrics))
	return err
}

// formatMetricsLine returns the line for --metrics-bind, or "" without that flag.
func formatMetricsLine(addr string) string {
	if addr == "" {
		return ""
	}
	return "metrics http://" + addr + "/metrics\n"
}

func newJoin(e *env) *cobra.Command {
	f := &nodeFlags{config: server.DefaultConfig()}
	to := &server.Join{}
	cmd := &cobra.Command{
		Use:   "join ADDR --token TOKEN [flags]",
		Short: "run a node that joins a cluster, in the foreground",
		Long: `join brings this machine into the cluster that a node at ADDR belongs to: HOST or HOST:PORT of
its node port, which is 7947 if it is not given. The token proves that it may, then it gets its certificate,
then it is a member. It names the step that failed, and may be repeated as it is. Then it runs as start does;
later starts need no token: "dpserve start --advertise HOST" with the same folder. Without --advertise it
shows itself to the others at the address from which it reaches ADDR. "dpserve token" makes tokens.`,
		Example: `  dpserve join 10.0.0.1:7947 --token dpj1....`,
		Args:    requireArgs(1, "ADDR"),
	}
	cmd.Flags().StringVar(&to.Token, "token", "", "`TOKEN` that dpserve start or dpserve token printed")
	f.addNode(cmd)
	output := addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if to.Token == "" {
			return usageError("join", "join wants --token")
		}
		to.Address = withNodePort(args[0])
		if f.config.Advertise == "" {
			ip, err := localAddressTowards(cmd.Context(), to.Address)
			if err != nil {
				return err
			}
			f.config.Advertise = ip
		}
		f.adaptBinds(cmd)
		if err := f.chooseDataDir(cmd, e); err != nil {
			return err
		}
		f.config.Join = to
		return runStart(cmd.Context(), e, f, *output)
	}
	return cmd
}

// withNodePort adds the default node port to an address that has none.
func withNodePort(address string) string {
	if _, _, err := net.SplitHostPort(address); err == nil {
		return address
	}
	host := strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")
	if strings.Contains(host, ":") && net.ParseIP(host) == nil {
		return address // it is refused where it is dialled
	}
	return net.JoinHostPort(host, strconv.Itoa(server.DefaultNodePort))
}

// localAddressTowards returns the address of this machine on the route to addr. It sends nothing: the kernel
// looks up its routes.
func localAddressTowards(ctx context.Context, addr string) (string, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "udp", addr)
	if err != nil {
		return "", problem.New(problem.InvalidArgument, "there is no way to %s: %w", addr, err).
			WithHint("write HOST:PORT of a node's node port, or add --advertise with this machine's IP")
	}
	host, _, err := net.SplitHostPort(c.LocalAddr().String())
	if cerr := c.Close(); err == nil {
		err = cerr
	}
	return host, err
}
