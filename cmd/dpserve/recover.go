package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/peering"
	"github.com/dpserve/dpserve/internal/state"
)

func newRecover(e *env) *cobra.Command {
	var dataDir string
	var yes bool
	cmd := &cobra.Command{
		Use:   "recover --data-dir FOLDER [flags]",
		Short: "make a stopped control node the only voter, because the others are lost for good",
		Long: `recover is for a cluster that has lost most of its voters for good: disks or machines that will
never come back. It works on the folder of a control node whose dpserve is stopped, and makes that node the
only voter, with the state that its own log has. It first prints what it drops: the other control nodes, which
are removed with their ranks, and what they decided after the last entry of this log. Applications, the
authority of the certificates and all other nodes stay, and so do the engines there. Stop dpserve on the other
control nodes before, if any still runs: a removed node ends as soon as it reaches the cluster, and joins again
with an empty folder. Where a majority of the voters can be started, start them instead: nothing is lost then.`,
		Example: `  dpserve recover --data-dir /var/lib/dpserve`,
		Args:    requireArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("data-dir") {
				return usageError("recover", "recover wants --data-dir")
			}
			return runRecover(e, dataDir, yes)
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", "", "`FOLDER` of the stopped control node")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return cmd
}

func runRecover(e *env, dataDir string, yes bool) error {
	if err := peering.RefuseRemoved(dataDir); err != nil {
		return err
	}
	r, err := cluster.OpenRecovery(dataDir, nil)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // it has only a lock and files that are read
	printLosses(e, r)
	if err := e.confirm("this cannot be undone", r.Node, yes); err != nil {
		return err
	}
	if err := r.Apply(e.now()); err != nil {
		return err
	}
	printMessage(e.io.Err, "%s is the only voter now: start it as before; the other nodes find it", r.Node)
	return nil
}

// printLosses prints what a recovery drops, and what it keeps.
func printLosses(e *env, r *cluster.Recovery) {
	printMessage(e.io.Err, "%s becomes the only voter of its cluster, with the %d entries of its log; what the "+
		"others decided after them is lost", r.Node, r.Index)
	voters := r.Voters()
	for _, n := range r.State.OtherControl(r.UID) {
		vote := "did not vote"
		if voters[n.UID] {
			vote = "voted"
		}
		about := []string{vote, n.Address, formatCount(ranksOf(r.State, n.ID), "rank")}
		if n.Lost {
			about = append(about, "lost: "+n.Reason)
		}
		printMessage(e.io.Err, "removed: %s (%s)", n.ID, strings.Join(about, ", "))
	}
	var kept []string
	for id, n := range r.State.Nodes {
		if n.UID == r.UID || !n.Has(state.RoleControl) {
			kept = append(kept, fmt.Sprintf("%s (%s)", id, formatCount(ranksOf(r.State, id), "rank")))
		}
	}
	slices.Sort(kept)
	printMessage(e.io.Err, "kept: %s; %s", formatCount(len(r.State.Apps), "application"),
		cmp.Or(strings.Join(kept, ", "), "no node"))
}

// ranksOf counts the ranks that are granted to a node.
func ranksOf(s *state.State, node string) (ranks int) {
	for _, id := range s.UnitsOn(node) {
		for i := range s.Units[id].Ranks {
			if s.Units[id].Ranks[i].Node == node {
				ranks++
			}
		}
	}
	return ranks
}
