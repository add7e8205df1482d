package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/internal/doctor/host"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/server"
)

// doctorDocument is the JSON of doctor.
type doctorDocument struct {
	OK       bool             `json:"ok"` // nothing fails
	Findings []doctor.Finding `json:"findings"`
}

func newDoctor(e *env) *cobra.Command {
	f := &nodeFlags{config: server.DefaultConfig()}
	cmd := &cobra.Command{
		Use:   "doctor [FILE] [flags]",
		Short: "check this machine, and a node that runs",
		Long: `doctor looks for what keeps a node or its engines from working, and says what to do about it:
clock, ports, the range of engine ports, limits of open files, /dev/shm, data dir and disk, certificate,
engines that outlived their dpserve, and devices. Give it the flags that "dpserve start" gets. With FILE it
also looks at the engines and models that an app.yaml names: program, version, config and weights. If a node
answers at --addr, it looks at the cluster: clocks and states of the nodes, KV block sizes, KV events that do
not come, and ranks with much more load than others.

Each line is ok, warn or FAIL, the check, and what was found; a hint under it says what to do. The exit code
is 1 if anything fails. It changes nothing; the one file that it writes into the data dir to time a synced
write is removed again.`,
		Example: `  dpserve doctor
  dpserve doctor app.yaml --data-dir /var/lib/dpserve --advertise 10.0.0.1
  dpserve doctor -o json                       # for scripts`,
		Args: requireArgs(0, "FILE"),
	}
	addFlagsOf(cmd.Flags(), f, "data-dir", "http-bind", "admin-bind", "advertise", "node-port",
		"gossip-port", "port-range", "slots", "gpus")
	output := addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		f.adaptBinds(cmd)
		if err := f.chooseDataDir(cmd, e); err != nil {
			return err
		}
		return runDoctor(cmd.Context(), e, f, args, *output)
	}
	return cmd
}

// addFlagsOf adds some flags of start.
func addFlagsOf(to *pflag.FlagSet, f *nodeFlags, names ...string) {
	start := &cobra.Command{}
	f.addNode(start)
	for _, name := range names {
		to.AddFlag(start.Flag(name))
	}
}

func runDoctor(ctx context.Context, e *env, f *nodeFlags, args []string, output format) error {
	c, err := f.buildConfig(e)
	if err != nil {
		return err
	}
	c.InsecurePublic = true // doctor listens for a moment only
	if err := c.Validate(); err != nil {
		return err
	}
	var apps []*app.Application
	if len(args) > 0 {
		file, err := readApps(e, args[0])
		if err != nil {
			return err
		}
		apps = file.apps
	}
	look, err := hostConfig(&c, apps)
	if err != nil {
		return err
	}
	facts := host.Collect(ctx, look)
	facts.Cluster = clusterFacts(ctx, e)
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	findings := doctor.Examine(facts)
	if err := writeFindings(e, findings, output); err != nil {
		return err
	}
	if doctor.Count(findings, doctor.Fail) > 0 {
		return &silentError{code: problem.ExitCode(problem.Internal)}
	}
	return nil
}

// hostConfig says what to look at for a node of this configuration.
func hostConfig(c *server.Config, apps []*app.Application) (*host.Config, error) {
	lo, hi, err := c.EnginePorts()
	if err != nil {
		return nil, err
	}
	out := &host.Config{
		DataDir: c.DataDir, Range: doctor.Span{Lo: lo, Hi: hi}, Slots: c.Slots, Streams: server.MaxConns,
		Apps: apps, Environ: os.Environ(),
	}
	out.GPUs, out.AllGPUs = c.OfferedGPUs()
	if at, err := time.Parse(time.RFC3339, readBuildInfo().Date); err == nil {
		out.Built = at
	}
	add := func(use, flag, network, address string) {
		if _, port, err := net.SplitHostPort(address); err == nil && port != "0" {
			out.Ports = append(out.Ports,
				doctor.Port{Use: use, Flag: flag, Network: network, Address: address})
		}
	}
	add("http", "--http-bind", "tcp", c.HTTPBind)
	add("admin", "--admin-bind", "tcp", c.AdminBind)
	if c.Advertise != "" {
		gossip := net.JoinHostPort(c.Advertise, strconv.Itoa(c.GossipPort))
		add("node", "--node-port", "tcp", net.JoinHostPort(c.Advertise, strconv.Itoa(c.NodePort)))
		add("gossip", "--gossip-port", "tcp", gossip)
		add("gossip", "--gossip-port", "udp", gossip)
	}
	return out, nil
}

// doctorWait bounds the questions to the admin API.
const doctorWait = 5 * time.Second

// clusterFacts asks the node at --addr, DPSERVE_ADDR or the default address.
func clusterFacts(ctx context.Context, e *env) *doctor.Cluster {
	named := cmp.Or(e.addr, e.getenv("DPSERVE_ADDR"))
	out := &doctor.Cluster{Address: cmp.Or(named, defaultAddr), Wanted: named != ""}
	if err := e.withAdmin(func(cluster admin) error { return askCluster(ctx, cluster, out) }); err != nil {
		known := describeError(err)
		out.Error, out.Hint = known.Message, known.Hint
	}
	return out
}

// askCluster fills in what the node tells.
func askCluster(ctx context.Context, cluster admin, out *doctor.Cluster) error {
	ctx, cancel := context.WithTimeout(ctx, doctorWait)
	defer cancel()
	build, err := cluster.Version(ctx)
	if err != nil {
		return err
	}
	out.Wanted, out.Node, out.Version = true, build.Node, build.Version
	if out.Nodes, err = cluster.Nodes(ctx); err != nil {
		return err
	}
	if out.Apps, err = cluster.Apps(ctx); err != nil {
		return err
	}
	out.RouterBlocks = routerBlocks(ctx, cluster, out.Apps)
	return nil
}

// routerBlocks asks the Router of each application that goes by tokens for its block size. A Router that
// does not answer is left out.
func routerBlocks(ctx context.Context, cluster admin, apps []client.AppStatus) map[string]int {
	out := map[string]int{}
	unseen := &client.Query{TokenIDs: []uint32{1, 2, 3, 4}}
	for i := range apps {
		a := &apps[i]
		if a.Identity != app.IdentityTokens || a.Ready == 0 {
			continue
		}
		if x, err := cluster.Explain(ctx, a.Name, unseen); err == nil && x.BlockUnit == "tokens" {
			out[a.Name] = x.BlockSize
		}
	}
	return out
}

// writeFindings prints the result. On stdout is what was found, on stderr the sum.
func writeFindings(e *env, list []doctor.Finding, output format) error {
	failed, warned := doctor.Count(list, doctor.Fail), doctor.Count(list, doctor.Warn)
	if !output.isTable() {
		var names []string
		for i := range list {
			if list[i].Level == doctor.Fail {
				names = append(names, list[i].Check)
			}
		}
		return writeDocument(e.io.Out, output, versioned{doctorDocument{failed == 0, list}}, names)
	}
	if _, err := fmt.Fprint(e.io.Out, renderFindings(e, list)); err != nil {
		return err
	}
	switch {
	case failed > 0:
		printMessage(e.io.Err, "%d of %s fail; %s", failed, formatCount(len(list), "finding"),
			formatCount(warned, "warning"))
	case warned > 0:
		printMessage(e.io.Err, "nothing fails; %s", formatCount(warned, "warning"))
	default:
		printMessage(e.io.Err, "nothing fails")
	}
	return nil
}

// renderFindings returns a line per finding, and under it what to do.
func renderFindings(e *env, list []doctor.Finding) string {
	width := 0
	for i := range list {
		width = max(width, len(list[i].Check))
	}
	colors := map[doctor.Level]color{doctor.OK: good, doctor.Warn: busy, doctor.Fail: bad}
	var b strings.Builder
	for i := range list {
		f := &list[i]
		level := e.io.paint(colors[f.Level], string(f.Level))
		pad := strings.Repeat(" ", len("FAIL")-len(f.Level)+columnGap)
		fmt.Fprintf(&b, "%s%s%-*s  %s\n", level, pad, width, f.Check, joinLines(f.Found))
		if f.Hint != "" {
			fmt.Fprintf(&b, "%s%s\n", strings.Repeat(" ", len("FAIL")+columnGap), "hint: "+joinLines(f.Hint))
		}
	}
	return b.String()
}
