package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
)

// nodesDocument is the JSON of nodes.
type nodesDocument struct {
	APIVersion string           `json:"apiVersion"`
	Nodes      []msg.NodeStatus `json:"nodes"`
}

func newNodes(e *env) *cobra.Command {
	var output *format
	cmd := &cobra.Command{
		Use:   "nodes [flags]",
		Short: "the machines of the cluster",
		Long: `nodes shows every node: alive, silent (its lease is not renewed), lost (its ranks were given to others), draining,
drained or stopping (its process was told to end); its roles (* = leads, + = votes), slots and devices in use, the
groups that have ranks there, and when it was last heard of and by whom.`,
		Example: "  dpserve nodes -o wide",
		Args:    takes(0),
		RunE:    func(cmd *cobra.Command, _ []string) error { return e.nodes(cmd.Context(), *output) },
	}
	output = addOutput(cmd)
	cmd.AddCommand(newNodesRemove(e), newRotateKey(e))
	return cmd
}

func (e *env) nodes(ctx context.Context, output format) error {
	client, err := e.admin()
	if err != nil {
		return err
	}
	defer client.Close()
	list, err := client.Nodes(ctx)
	if err != nil {
		return err
	}
	return e.nodesListing(list).write(e.io, output)
}

func (e *env) nodesListing(list []msg.NodeStatus) *listing {
	names := make([]string, len(list))
	var notes []string
	for i := range list {
		names[i] = list[i].Node
		for _, n := range list[i].Notes {
			notes = append(notes, list[i].Node+": "+n)
		}
	}
	view := nodesView{statusView{now: e.now(), relative: e.io.OutTTY}}
	return &listing{document: nodesDocument{apiVersion, list}, names: names, notes: notes, table: func(wide bool) []*table {
		return []*table{view.table(list, wide)}
	}}
}

// nodesView renders nodes.
type nodesView struct{ statusView }

func (v nodesView) table(list []msg.NodeStatus, wide bool) *table {
	t := &table{head: []string{"NODE", "STATE", "ROLES", "SLOTS", "GPUS", "RANKS", "IN-FLIGHT", "GROUPS", "VERSION", "SKEW", "LAST-SEEN", "BY"}}
	if wide {
		t.head = append(t.head, "ADDRESS", "ZONE", "LEASE")
	}
	t.head = append(t.head, "REASON")
	for i := range list {
		n := &list[i]
		row := cells(n.Node, n.State, roles(n), used(n.SlotsUsed, n.Slots), used(n.GPUsUsed, n.GPUs), strconv.Itoa(n.Ranks), strconv.Itoa(n.InFlight),
			strings.Join(n.Groups, ","), n.Version, skew(n.SkewMs), v.since(n.LastSeen), n.SeenBy)
		row[1].color = nodeColor(n.State)
		if wide {
			row = append(row, cells(n.Address, n.Zone, fmt.Sprintf("%.1fs", n.LeaseLeftS))...)
		}
		t.add(append(row, cell{text: oneLine(n.Reason)})...)
	}
	return t
}

// roles marks who leads and who votes.
func roles(n *msg.NodeStatus) string {
	s := strings.Join(n.Roles, ",")
	switch {
	case n.Leader:
		return s + "*"
	case n.Voter:
		return s + "+"
	}
	return s
}

func used(n, of int) string { return fmt.Sprintf("%d/%d", n, of) }

// skew is a clock's difference to the leader's; what an exchange of messages takes is none.
func skew(ms int64) string {
	if -100 < ms && ms < 100 {
		return "-"
	}
	return (time.Duration(ms) * time.Millisecond).Round(100 * time.Millisecond).String()
}

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
		Long: `remove forgets a node that is lost or drained: its certificate is refused from then on, its name is free, and if it voted, another
control node votes instead. A node that works leaves by "dpserve leave". A removal is refused, and changes nothing, if the voters
that remain would have no living majority: remove or bring back the lost ones first.`,
		Example: "  dpserve nodes remove gpu-3",
		Args:    takes(1, "NODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return e.withAdmin(func(client admin) error {
				if err := e.confirm(args[0]+" is forgotten for good", args[0], yes); err != nil {
					return err
				}
				if err := removeNode(cmd.Context(), client, args[0]); err != nil {
					return err
				}
				talk(e.io.Err, "%s is removed", args[0])
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return cmd
}

// withAdmin calls f with a client that is closed behind it.
func (e *env) withAdmin(f func(client admin) error) error {
	client, err := e.admin()
	if err != nil {
		return err
	}
	defer client.Close()
	return f(client)
}

// nodeNamed finds a node, or says which ones there are.
func nodeNamed(list []msg.NodeStatus, name string) (*msg.NodeStatus, error) {
	var names []string
	for i := range list {
		if list[i].Node == name {
			return &list[i], nil
		}
		names = append(names, list[i].Node)
	}
	return nil, problem.New(problem.NotFound, "no node %q", name).WithHint("nodes are %s", strings.Join(names, ", "))
}
