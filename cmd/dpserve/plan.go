package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// actionUnchanged is the action of an application or unit that stays as it is.
const actionUnchanged = string(client.ActionUnchanged)

type planFlags struct {
	exitCode, prune bool
	engine          string
	output          *format
}

// planDocument is the JSON of plan.
type planDocument struct {
	APIVersion string `json:"apiVersion"`
	client.Plan
}

func newPlan(e *env) *cobra.Command {
	f := &planFlags{}
	cmd := &cobra.Command{
		Use:   "plan FILE [flags]",
		Short: "show what deploy would do, and where every rank would go",
		Long: `plan asks the cluster what a deploy of FILE would create, replace and delete, on which node
each rank would run, what that takes of each node, and why something finds no place. It changes nothing.
What cannot be placed ends it with exit code 5.`,
		Example: `  dpserve plan app.yaml
  dpserve plan app.yaml --exit-code            # 3 if a deploy would change something`,
		Args: requireArgs(1, "FILE"),
	}
	cmd.Flags().BoolVar(&f.exitCode, "exit-code", false, "exit code 3 when something would change")
	cmd.Flags().BoolVar(&f.prune, "prune", false,
		"as if deploy deleted the applications that FILE does not list")
	cmd.Flags().StringVar(&f.engine, "engine", "", "sim: plan the file for the simulated engine")
	f.output = addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return runPlan(cmd.Context(), e, f, args[0]) }
	return cmd
}

func runPlan(ctx context.Context, e *env, f *planFlags, path string) error {
	file, err := readDeployFile(e, f.engine, path)
	if err != nil {
		return err
	}
	cluster, err := e.admin()
	if err != nil {
		return err
	}
	defer cluster.Close()
	req := file.request()
	req.Prune = f.prune
	p, err := cluster.Plan(ctx, req)
	if err != nil {
		return err
	}
	if err := planListing(&p, file.name).write(e.io, *f.output); err != nil {
		return err
	}
	switch {
	case !p.Fits:
		return unplacedError(&p)
	case f.exitCode && p.Changes:
		return &silentError{code: exitDiffers}
	}
	return nil
}

// unplacedError is the error of a plan in which some units find no place.
func unplacedError(p *client.Plan) error {
	var lines []string
	said := map[string]bool{} // all ranks of a group have the same reason
	hint := "add nodes or slots, ask for fewer ranks, or deploy with --partial what fits"
	for i := range p.Apps {
		for _, u := range p.Apps[i].Units {
			if u.Why == "" || said[u.Why] {
				continue
			}
			said[u.Why] = true
			lines = append(lines, u.Why)
			if u.Hint != "" {
				hint = u.Hint
			}
		}
	}
	return problem.New(problem.Unplaceable, "not everything finds a place").WithDetails(lines...).
		WithHint("%s", hint)
}

func planListing(p *client.Plan, file string) *listing {
	var names []string
	for i := range p.Apps {
		if p.Apps[i].Action != actionUnchanged {
			names = append(names, p.Apps[i].App)
		}
	}
	l := &listing{document: planDocument{apiVersion, *p}, names: names, table: func(wide bool) []*table {
		out := []*table{planApps(p)}
		if t := planUnits(p, wide); len(t.rows) > 0 {
			out = append(out, t)
		}
		return append(out, planNodes(p))
	}}
	switch {
	case !p.Changes:
		l.notes = []string{"no changes"}
	case p.Fits:
		l.notes = []string{fmt.Sprintf("to do this: dpserve deploy %s --revision %d", file, p.Revision)}
	}
	return l
}

func planApps(p *client.Plan) *table {
	t := &table{head: []string{"APP", "CHANGE", "FIELDS"}}
	for i := range p.Apps {
		a := &p.Apps[i]
		row := cells(a.App, a.Action, strings.Join(a.Fields, ", "))
		row[1].color = actionColor(a.Action)
		t.add(row...)
	}
	return t
}

// planUnits lists the units that change; with wide, all of them.
func planUnits(p *client.Plan, wide bool) *table {
	t := &table{head: []string{"UNIT", "CHANGE", "RANKS", "NODE", "GPUS"}}
	for i := range p.Apps {
		for _, u := range p.Apps[i].Units {
			if u.Action == actionUnchanged && u.Why == "" && !wide {
				continue
			}
			for _, row := range unitRows(&u) {
				row[1].color = actionColor(u.Action)
				t.add(row...)
			}
		}
	}
	return t
}

// unitRows returns one row per node of a unit.
func unitRows(u *client.UnitPlan) [][]cell {
	if len(u.Seats) == 0 {
		where := ""
		if u.Why != "" {
			where = "no place"
		}
		return [][]cell{cells(u.Unit, u.Action, "", where, "")}
	}
	var out [][]cell
	for rest := u.Seats; len(rest) > 0; {
		n := 1
		for n < len(rest) && rest[n].Node == rest[0].Node {
			n++
		}
		var devices []int
		for _, s := range rest[:n] {
			devices = append(devices, s.Devices...)
		}
		out = append(out,
			cells(u.Unit, u.Action, formatSpan(rest[0].Rank, rest[n-1].Rank), rest[0].Node,
				formatIntList(devices)))
		rest = rest[n:]
	}
	return out
}

func planNodes(p *client.Plan) *table {
	t := &table{head: []string{"NODE", "SLOTS", "FREE", "NEED", "GPUS", "FREE", "NEED", "NOTE"}}
	for _, n := range p.Nodes {
		t.add(cells(n.Node, strconv.Itoa(n.Slots), strconv.Itoa(n.SlotsFree), strconv.Itoa(n.SlotsNeed),
			strconv.Itoa(n.GPUs), strconv.Itoa(n.GPUsFree), strconv.Itoa(n.GPUsNeed), n.Note)...)
	}
	return t
}

func actionColor(action string) color {
	switch client.Action(action) {
	case client.ActionCreate:
		return good
	case client.ActionReplace:
		return busy
	case client.ActionDelete:
		return bad
	case client.ActionUnchanged:
		return faint
	}
	return plain
}

// formatSpan returns "3" or "0-7".
func formatSpan(lo, hi int) string {
	if lo == hi {
		return strconv.Itoa(lo)
	}
	return strconv.Itoa(lo) + "-" + strconv.Itoa(hi)
}

// formatIntList returns numbers as --gpus takes them: "0-3,6".
func formatIntList(list []int) string {
	list = slices.Clone(list)
	slices.Sort(list)
	var parts []string
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		parts = append(parts, formatSpan(list[i], list[j]))
		i = j + 1
	}
	return strings.Join(parts, ",")
}
