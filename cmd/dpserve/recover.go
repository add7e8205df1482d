package main

import (
	"cmp"
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
only voter, with the state that its own log has. It first prints what it drops: the other control nodes,
which are removed with their ranks, and what they decided after the last entry of this log. Applications, the
authority of the certificates and all other nodes stay, and so do the engines there. Stop dpserve on the
other control nodes before, if any still runs: a removed node ends as soon as it reaches the cluster, and
joins again with an empty folder. Where a majority of the voters can be started, start them instead: nothing
is lost then.`,
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
	tell := func(format string, args ...any) { printMessage(e.io.Err, format, args...) }
	tell("%s becomes the only voter of its cluster, with the %d entries of its log; what "+
		"the others decided after them is lost", r.Node, r.Index)
	voters := r.Voters()
	for _, n := range state.OtherControl(r.State, r.UID) {
		vote := "did not vote"
		if voters[n.UID] {
			vote = "voted"
		}
		about := []string{vote, n.Address, formatCount(state.CountRanks(r.State, n.ID), "rank")}
		if n.Lost {
			about = append(about, "lost: "+n.Reason)
		}
		tell("removed: %s (%s)", n.ID, strings.Join(about, ", "))
	}
	var kept []string
	for id, n := range r.State.Nodes {
		if n.UID == r.UID || !n.Has(state.RoleControl) {
			ranks := formatCount(state.CountRanks(r.State, id), "rank")
			kept = append(kept, id+" ("+ranks+")")
		}
	}
	slices.Sort(kept)
	tell("kept: %s; %s", formatCount(len(r.State.Apps), "application"),
		cmp.Or(strings.Join(kept, ", "), "no node"))
}
