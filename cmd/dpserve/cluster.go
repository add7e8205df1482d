package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/share"
	"github.com/dpserve/dpserve/internal/state"
)

func newNodes(e *env) *cobra.Command {
	var output *format
	cmd := &cobra.Command{
		Use:   "nodes [flags]",
		Short: "the machines of the cluster",
		Long: `nodes shows every node: alive, silent (its lease is not renewed), lost (its ranks were given
to others), draining, drained, stopping (its process was told to end) or restarting (its process is being
replaced, its engines run); its roles (* = leads, + = votes), slots and devices in use (1.5/4 if ranks share
devices: -o json lists them), the groups that have ranks there, and when it was last heard of and by whom.
ROLES are c (control), w (worker) and i (ingress). VERSION and SKEW (its clock minus the leader's) are shown
with -o wide, or where they differ. DEVICES are the GPUs that a node found, with their memory; a note below
the table names GPUs that failed or that other programs use. -o json tells driver and numbers.`,
		Example: "  dpserve nodes -o wide",
		Args:    requireArgs(0),
		RunE: e.asking(func(ctx context.Context, cluster admin, _ []string) error {
			var list []client.NodeStatus
			err := newPatience(e, maxLeaderWait).askUntilAnswered(ctx, func(ctx context.Context) (err error) {
				list, err = cluster.Nodes(ctx)
				return err
			})
			if err != nil {
				return err
			}
			return newNodesListing(e, list).write(e.io, *output)
		}),
	}
	output = addOutput(cmd)
	cmd.AddCommand(newNodesRemove(e), newRotateKey(e))
	return cmd
}

func newNodesListing(e *env, list []client.NodeStatus) *listing {
	names := make([]string, len(list))
	var notes []string
	for i := range list {
		names[i] = list[i].Node
		for _, n := range list[i].Notes {
			notes = append(notes, list[i].Node+": "+n)
		}
	}
	return &listing{
		document: map[string]any{"nodes": list}, names: names, notes: notes,
		table: func(wide bool) []*table { return []*table{newStatusView(e, wide).nodes(list)} },
	}
}

func (v statusView) nodes(list []client.NodeStatus) *table {
	wide := v.wide
	showsVersion, showsSkew, showsDevices := wide, wide, false
	for i := range list {
		showsDevices = showsDevices || len(list[i].Devices) > 0
		showsVersion = showsVersion || list[i].Version != list[0].Version
		showsSkew = showsSkew || formatSkew(list[i].SkewMs) != noSkew
	}
	t := &table{head: []string{"NODE", "STATE", "ROLES", "SLOTS", "GPUS", "RANKS", "IN-FLIGHT", "GROUPS"}}
	if showsVersion {
		t.head = append(t.head, "VERSION")
	}
	if showsSkew {
		t.head = append(t.head, "SKEW")
	}
	if showsDevices {
		t.head = append(t.head, "DEVICES")
	}
	t.head = append(t.head, "LAST-SEEN", "BY")
	if wide {
		t.head = append(t.head, "ADDRESS", "ZONE", "LEASE")
	} else {
		t.optional = []string{
			"DEVICES", "BY", "GPUS", "GROUPS", "IN-FLIGHT", "VERSION", "LAST-SEEN", "RANKS", "SLOTS",
		}
	}
	t.head = append(t.head, "REASON")
	for i := range list {
		n := &list[i]
		row := cells(n.Node, n.State, formatRoles(n, wide), formatUsed(n.SlotsUsed, n.Slots),
			fmt.Sprintf("%s/%d", share.FormatDevices(n.GPUsUsed), n.GPUs),
			strconv.Itoa(n.Ranks), strconv.Itoa(n.InFlight),
			formatGroups(n.Groups, wide))
		row[1].color = nodeColor(n.State)
		if showsVersion {
			row = append(row, cell{text: n.Version})
		}
		if showsSkew {
			row = append(row, cell{text: formatSkew(n.SkewMs)})
		}
		if showsDevices {
			row = append(row, cell{text: formatDevices(n.Devices)})
		}
		row = append(row, cells(v.since(n.LastSeen), n.SeenBy)...)
		if wide {
			row = append(row, cells(n.Address, n.Zone, fmt.Sprintf("%.1fs", n.LeaseLeftS))...)
		}
		t.add(append(row, cell{text: joinLines(n.Reason)})...)
	}
	return t
}

// formatRoles lists a node's roles, by their first letters unless wide, and marks the leader with * and
// voters with +.
func formatRoles(n *client.NodeStatus, wide bool) string {
	s := strings.Join(n.Roles, ",")
	if !wide {
		s = ""
		for _, role := range n.Roles {
			s += role[:min(len(role), 1)]
		}
	}
	switch {
	case n.Leader:
		return s + "*"
	case n.Voter:
		return s + "+"
	}
	return s
}

// maxGroups is how many groups of a node the table names.
const maxGroups = 3

func formatGroups(groups []string, wide bool) string {
	if wide || len(groups) <= maxGroups {
		return strings.Join(groups, ",")
	}
	return fmt.Sprintf("%s,+%d", strings.Join(groups[:maxGroups-1], ","), len(groups)-maxGroups+1)
}

func formatUsed(n, of int) string { return fmt.Sprintf("%d/%d", n, of) }

// formatDevices returns how many devices of which model a node found: "8 x NVIDIA H100 80GB HBM3 79.6 GiB".
func formatDevices(models []client.DeviceModel) string {
	parts := make([]string, 0, len(models))
	for _, m := range models {
		text := fmt.Sprintf("%d x %s", len(m.Devices), m.Name)
		if m.MemoryMiB > 0 {
			text += fmt.Sprintf(" %.1f GiB", float64(m.MemoryMiB)/1024)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}

// formatSkew returns a clock's difference to the leader's clock. Differences below 100 ms are not shown,
// because the exchange of messages takes that long.
func formatSkew(ms int64) string {
	if -100 < ms && ms < 100 {
		return noSkew
	}
	return (time.Duration(ms) * time.Millisecond).Round(100 * time.Millisecond).String()
}

// noSkew stands for a difference that is not shown.
const noSkew = "-"

func nodeColor(state string) color {
	switch state {
	case "alive":
		return good
	case "draining", "silent", "stopping":
		return busy
	case "lost":
		return bad
	}
	return plain
}

func newNodesRemove(e *env) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "remove NODE [flags]",
		Short: "forget a node that will not come back",
		Long: `remove forgets a node that is lost or drained: its certificate is refused from then on, its
name is free, and if it voted, another control node votes instead. A node that works leaves by "dpserve
leave". A removal is refused, and changes nothing, if the voters that remain would have no living majority:
remove or bring back the lost ones first.`,
		Example: "  dpserve nodes remove gpu-3",
		Args:    requireArgs(1, "NODE"),
		RunE: e.asking(func(ctx context.Context, cluster admin, args []string) error {
			if err := e.confirm(args[0]+" is forgotten for good", args[0], yes); err != nil {
				return err
			}
			if err := removeNode(ctx, cluster, args[0]); err != nil {
				return err
			}
			printMessage(e.io.Err, "%s is removed", args[0])
			return nil
		}),
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return cmd
}

// findNode returns the named node. The error lists the existing ones.
func findNode(list []client.NodeStatus, name string) (*client.NodeStatus, error) {
	var names []string
	for i := range list {
		if list[i].Node == name {
			return &list[i], nil
		}
		names = append(names, list[i].Node)
	}
	return nil, state.UnknownNode(name, names)
}

// drainTimeout is the default of --timeout: how long drain watches.
const drainTimeout = 35 * time.Minute

type drainFlags struct {
	set      *pflag.FlagSet
	deadline time.Duration
	timeout  time.Duration
	detach   bool
}

// add adds the flags of drain and leave. what says what --timeout bounds.
func (f *drainFlags) add(cmd *cobra.Command, what string) {
	f.set = cmd.Flags()
	f.set.DurationVar(&f.deadline, "deadline", 0,
		"when running streams are cut; default: each application's graceful_shutdown_timeout_s")
	f.set.DurationVar(&f.timeout, "timeout", drainTimeout, what+"; then exit code 8")
}

func newDrain(e *env) *cobra.Command {
	f := &drainFlags{}
	cmd := &cobra.Command{
		Use:   "drain NODE [flags]",
		Short: "move a node's ranks elsewhere",
		Long: `drain gives a node no new ranks and moves those it has, whole groups or one independent rank
at a time, as soon as another node has room. Running streams end by themselves, or at --deadline. It shows
what is left until the node is empty; Ctrl-C leaves the monitor (exit code 130) and the drain goes on.
"dpserve undrain NODE" ends it.`,
		Example: `  dpserve drain gpu-3
  dpserve drain gpu-3 --deadline 30m`,
		Args: requireArgs(1, "NODE"),
		RunE: e.asking(func(ctx context.Context, cluster admin, args []string) error {
			return runDrain(ctx, e, cluster, f, args[0])
		}),
	}
	f.add(cmd, "how long to watch")
	cmd.Flags().BoolVar(&f.detach, "detach", false, "do not watch")
	return cmd
}

func runDrain(ctx context.Context, e *env, cluster admin, f *drainFlags, node string) error {
	if f.deadline < 0 || f.timeout <= 0 {
		return usageError("drain", "--deadline and --timeout must be positive")
	}
	var deadline *time.Duration
	if f.set.Changed("deadline") {
		deadline = &f.deadline
	}
	err := newPatience(e, maxLeaderWait).askUntilAnswered(ctx,
		func(ctx context.Context) error { return cluster.Drain(ctx, node, deadline) })
	if err != nil {
		return err
	}
	if f.detach {
		printMessage(e.io.Err, "%s is draining; watch it with `dpserve nodes`", node)
		return nil
	}
	return awaitDrained(ctx, e, cluster, node, f.timeout)
}

// awaitDrained shows what a node still has until the node is drained.
func awaitDrained(ctx context.Context, e *env, cluster admin, node string, timeout time.Duration) error {
	err := followUntilDone(ctx, e, timeout,
		func(ctx context.Context) (string, bool, error) { return drainProgress(ctx, cluster, node) },
		"the drain goes on, `dpserve undrain "+node+"` ends it",
		func(string) error {
			return problem.New(problem.Timeout, "%s is not drained in time; the drain goes on", node).
				WithHint("watch it with `dpserve nodes`")
		})
	if err == nil {
		printMessage(e.io.Err, "%s is drained", node)
	}
	return err
}

// drainProgress describes in one line what a node still has. over is true when the node is drained.
func drainProgress(ctx context.Context, cluster admin, node string) (left string, over bool, err error) {
	list, err := cluster.Nodes(ctx)
	if err != nil {
		return "", false, err
	}
	n, err := findNode(list, node)
	if err != nil {
		return "", false, err
	}
	switch n.State {
	case "drained", "lost":
		return "", true, nil
	case "alive":
		return "", false, problem.New(problem.Conflict, "%s is %s: the drain was ended",
			node, n.State).WithHint("`dpserve drain %s` begins it again", node)
	}
	left = fmt.Sprintf("%s: %s, %s in flight", node, formatCount(n.Ranks, "rank"),
		formatCount(n.InFlight, "request"))
	between := "; "
	if n.State != "draining" { // it is silent, say: the drain goes on
		left, between = left+"; it is "+n.State, ": "
	}
	if n.Reason != "" {
		left += between + joinLines(n.Reason)
	}
	return left, false, nil
}

func newUndrain(e *env) *cobra.Command {
	return &cobra.Command{
		Use:     "undrain NODE",
		Short:   "give a node ranks again",
		Long:    "undrain ends a drain. Ranks that have moved stay where they are.",
		Example: "  dpserve undrain gpu-3",
		Args:    requireArgs(1, "NODE"),
		RunE: e.asking(func(ctx context.Context, cluster admin, args []string) error {
			if err := cluster.Undrain(ctx, args[0]); err != nil {
				return err
			}
			printMessage(e.io.Err, "%s takes ranks again", args[0])
			return nil
		}),
	}
}

func newLeave(e *env) *cobra.Command {
	f := &drainFlags{}
	var yes bool
	cmd := &cobra.Command{
		Use:   "leave [flags]",
		Short: "take the node that answers out of its cluster",
		Long: `leave drains the node that --addr or DPSERVE_ADDR names, waits until it is empty and removes it
from the cluster. Its process then ends with exit code 0. Delete its data folder: to come back, join with an
empty one. A node without which the voters that remain would have no living majority is refused
before anything changes: remove or bring back the lost ones first.`,
		Example: `  dpserve leave --addr 127.0.0.3`,
		Args:    requireArgs(0),
		RunE: e.asking(func(ctx context.Context, cluster admin, _ []string) error {
			return runLeave(ctx, e, cluster, f, yes)
		}),
	}
	f.add(cmd, "how long to wait for the drain")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return cmd
}

func runLeave(ctx context.Context, e *env, cluster admin, f *drainFlags, yes bool) error {
	v, err := cluster.Version(ctx)
	if err != nil {
		return err
	}
	if v.Node == "" {
		return problem.New(problem.Upstream, "the node that answers does not tell its name").
			WithHint("it runs another version: use its own dpserve command")
	}
	list, err := cluster.Nodes(ctx)
	if err != nil {
		return err
	}
	if _, err := findNode(list, v.Node); err != nil {
		return err
	}
	if len(list) == 1 {
		return problem.New(problem.Conflict, "%s is the only node of its cluster", v.Node).
			WithHint("stop it with Ctrl-C or SIGTERM")
	}
	if err := e.confirm(v.Node+" leaves its cluster", v.Node, yes); err != nil {
		return err
	}
	check := func(ctx context.Context) error { return cluster.CheckLeave(ctx, v.Node) }
	if err := retryRemoval(ctx, check); err != nil {
		return err
	}
	if err := runDrain(ctx, e, cluster, f, v.Node); err != nil {
		return err
	}
	if err := removeNode(ctx, cluster, v.Node); err != nil {
		return err
	}
	printMessage(e.io.Err, "%s has left", v.Node)
	return nil
}

// removeNode removes a node from the cluster.
func removeNode(ctx context.Context, cluster admin, node string) error {
	return retryRemoval(ctx, func(ctx context.Context) error { return cluster.RemoveNode(ctx, node) })
}

// retryRemoval repeats ask while the leader answers Unavailable: the node's vote or leadership moves to
// another node, or the leader does not know yet whether the remaining voters are alive.
func retryRemoval(ctx context.Context, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	for {
		err := ask(ctx)
		if client.CodeOf(err) != client.CodeUnavailable || pause.For(ctx, removeRetry) != nil {
			return err
		}
	}
}

// How long retryRemoval asks, and the pause in between.
const (
	removeTimeout = 30 * time.Second
	removeRetry   = 500 * time.Millisecond
)

func newRotateKey(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "rotate-key [flags]",
		Short: "give the gossip of the cluster a new key",
		Long: `rotate-key replaces the key that the nodes' gossip is encrypted with, as after a machine was
removed whose disk somebody else may read. Every node takes the new key when it renews its lease, in some
seconds, and speaks with it alone; a node that is off takes it when it is back. Gossip only finds nodes: no
request and no lease notices, but for some seconds nodes do not see each other in it.`,
		Example: "  dpserve nodes rotate-key",
		Args:    requireArgs(0),
		RunE: e.asking(func(ctx context.Context, cluster admin, _ []string) error {
			var r client.KeyRotation
			err := newPatience(e, maxAPISilence).askUntilAnswered(ctx, func(ctx context.Context) (err error) {
				r, err = cluster.RotateKey(ctx)
				return err
			})
			if err != nil {
				return err
			}
			printMessage(e.io.Err, "the gossip has a new key")
			if len(r.Behind) > 0 {
				printMessage(e.io.Err, "%s will take it when they renew their leases; "+
					"`dpserve nodes` shows what is wrong there", strings.Join(r.Behind, ", "))
			}
			return nil
		}),
	}
}
