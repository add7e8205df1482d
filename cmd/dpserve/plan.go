package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/share"
)

type planFlags struct {
	exitCode, prune bool
	revision        uint64
	engine          string
	output          *format
}

func newPlan(e *env) *cobra.Command {
	f := &planFlags{}
	cmd := &cobra.Command{
		Use:   "plan FILE|APP [flags]",
		Short: "show what deploy would do, and where every rank would go",
		Long: `plan asks the cluster what a deploy of FILE would do, on which node each rank would run, what
that takes of each node, and why something finds no place. It changes nothing. What cannot be placed ends it
with exit code 5. A line of advice names an application that gains little from data parallelism. With
--revision it says the same of a rollback of APP to that revision.

  + create        the application, or the unit, is new
  ~ update        it changes, and no rank that runs is touched
  ~ scale 2 -> 3  ranks are added or end, and the others are not touched
  -/+ restart     ranks that run are started again, for the reason behind #: one unit (a rank, or a whole
                  group if coupling is lockstep) at a time, as soon as the others are ready
  - delete        it drains and ends
  no change`,
		Example: `  dpserve plan app.yaml
  dpserve plan app.yaml --exit-code            # 3 if a deploy would change something
  dpserve plan demo --revision 3               # how the present revision differs from revision 3`,
		Args: requireArgs(1, "FILE"),
	}
	cmd.Flags().BoolVar(&f.exitCode, "exit-code", false, "exit code 3 when something would change")
	cmd.Flags().BoolVar(&f.prune, "prune", false,
		"as if deploy deleted the applications that FILE does not list")
	cmd.Flags().Uint64Var(&f.revision, "revision", 0, "former `REVISION` of APP, instead of FILE")
	cmd.Flags().StringVar(&f.engine, "engine", "", "sim: plan the file for the simulated engine")
	f.output = addOutput(cmd)
	addRevisionCompletion(e, cmd, "revision")
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return runPlan(cmd.Context(), e, f, args[0]) }
	return cmd
}

func runPlan(ctx context.Context, e *env, f *planFlags, path string) error {
	if f.revision != 0 && (f.prune || f.engine != "") {
		return usageError("plan", "--revision excludes --prune and --engine")
	}
	file, err := readFor(e, f.engine, func() (*appFile, error) {
		if f.revision != 0 {
			return f.readRevision(ctx, e, path)
		}
		return readApps(e, path)
	})
	if err != nil {
		return err
	}
	req := file.request()
	req.Prune = f.prune
	var p client.Plan
	err = e.withAdmin(func(cluster admin) error {
		p, err = cluster.Plan(ctx, req)
		return err
	})
	if err != nil {
		return err
	}
	if err := planListing(&p, file).write(e.io, *f.output); err != nil {
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

// readRevision reads the file of a former revision of an application.
func (f *planFlags) readRevision(ctx context.Context, e *env, name string) (file *appFile, err error) {
	err = e.withAdmin(func(cluster admin) error {
		past, err := cluster.AppFile(ctx, name, f.revision)
		if err != nil {
			return err
		}
		file, err = parseApps(e, app.Default(), fmt.Sprintf("%s@%d", name, past.Revision), []byte(past.Text))
		return err
	})
	if err != nil {
		return nil, err
	}
	file.again = fmt.Sprintf("dpserve rollback %s --to %d", name, f.revision)
	return file, nil
}

// unplacedError is the error of a plan in which some units find no place.
func unplacedError(p *client.Plan) error {
	var lines []string
	said := map[string]bool{} // all ranks of a group have the same reason
	hint := "add nodes or slots, or ask for fewer ranks"
	for i := range p.Apps {
		for _, u := range p.Apps[i].Units {
			if u.Why == "" || said[u.Why] {
				continue
			}
			said[u.Why] = true
			lines = append(lines, u.Why)
			hint = cmp.Or(u.Hint, hint)
		}
	}
	return problem.New(problem.Unplaceable, "not everything finds a place").WithDetails(lines...).
		WithHint("%s; deploy --partial starts what fits", hint)
}

func planListing(p *client.Plan, file *appFile) *listing {
	var names []string
	for i := range p.Apps {
		if p.Apps[i].Effect != client.EffectUnchanged {
			names = append(names, p.Apps[i].App)
		}
	}
	l := &listing{document: p, names: names, table: func(wide bool) []*table {
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
		l.notes = slices.Concat(planSummary(p), lossNotes(p, file.apps), sharedNotes(p),
			memoryNotes(file.apps), []string{
				"to do this: " + cmp.Or(file.again,
					fmt.Sprintf("dpserve deploy %s --revision %d", file.name, p.Revision)),
			})
	}
	var advice []string
	for i := range p.Apps {
		for _, text := range p.Apps[i].Advice {
			advice = append(advice, "advice: "+text)
		}
	}
	l.notes = append(advice, l.notes...)
	return l
}

// planSummary counts the ranks by what happens to them, and names the applications that do not serve
// meanwhile.
func planSummary(p *client.Plan) []string {
	ranks := map[client.Effect]int{}
	var outages []string
	for i := range p.Apps {
		a := &p.Apps[i]
		for _, u := range a.Units {
			ranks[u.Effect] += len(u.Seats)
		}
		if serving := servingUnits(a); len(serving) == 1 && serving[0].Effect == client.EffectRestart {
			outages = append(outages,
				a.App+" has one unit alone: its requests wait, or are refused, until it has restarted")
		}
		if isReplaced(a) {
			outages = append(outages, a.App+
				" ends all its ranks before new ones start: its requests wait, or are refused, meanwhile")
		}
	}
	return append([]string{fmt.Sprintf("ranks: %d to start, %d to restart, %d to end, %d not touched",
		ranks[client.EffectCreate], ranks[client.EffectRestart], ranks[client.EffectDelete],
		ranks[client.EffectUnchanged])}, outages...)
}

// lossNotes says for each pool of the plan how many of its ranks the death of one node takes at most. All
// ranks of a unit end together. A cluster of one node, and engines that dpserve only watches, need no note.
func lossNotes(p *client.Plan, apps []*app.Application) []string {
	var out []string
	for _, a := range apps {
		lost, all := map[string]int{}, 0 // by node
		for i := range p.Apps {
			for _, u := range p.Apps[i].Units {
				if p.Apps[i].App != a.Name || u.Pool != a.Pool || u.Effect == client.EffectDelete {
					continue
				}
				all += len(u.Seats)
				for _, node := range nodesOf(u.Seats) {
					lost[node] += len(u.Seats)
				}
			}
		}
		if len(p.Nodes) < 2 || len(lost) == 0 || a.Engine.Kind == app.KindAttach {
			continue
		}
		worst := slices.MaxFunc(slices.Sorted(maps.Keys(lost)),
			func(a, b string) int { return cmp.Compare(lost[a], lost[b]) })
		out = append(out, fmt.Sprintf("%s: the death of one node takes at most %d of %s (%s)",
			a.PoolName(), lost[worst], formatCount(all, "rank"), worst))
	}
	return out
}

// nodesOf returns the nodes of seats, each one once.
func nodesOf(seats []client.SeatPlan) []string {
	nodes := make([]string, 0, len(seats))
	for _, s := range seats {
		nodes = append(nodes, s.Node)
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// servingUnits returns the units that an application's answers come from: all but those of a prefill pool.
func servingUnits(a *client.AppPlan) []client.UnitPlan {
	return slices.DeleteFunc(slices.Clone(a.Units), func(u client.UnitPlan) bool {
		return u.Pool == client.PoolPrefill
	})
}

// isReplaced reports whether an application that gets other pools ends all ranks that it has.
func isReplaced(a *client.AppPlan) bool {
	ends := 0
	for _, u := range a.Units {
		switch u.Effect {
		case client.EffectDelete:
			ends++
		case client.EffectCreate:
		default:
			return false
		}
	}
	return ends > 0 && ends < len(a.Units)
}

// describeImpact says what a deploy does to an application, in the words of plan.
func describeImpact(i *client.Impact) string {
	switch i.Effect {
	case client.EffectScale:
		return fmt.Sprintf("scale %d -> %d", i.RanksBefore, i.RanksAfter)
	case client.EffectUnchanged:
		return "no change"
	case client.EffectRestart:
		if i.RanksBefore != i.RanksAfter {
			return fmt.Sprintf("restart, scale %d -> %d", i.RanksBefore, i.RanksAfter)
		}
	case client.EffectCreate, client.EffectUpdate, client.EffectDelete:
	}
	return string(i.Effect)
}

// formatEffect puts terraform's sign before a word, and the reasons behind it.
func formatEffect(effect client.Effect, word string, reasons []string) string {
	sign := map[client.Effect]string{
		client.EffectCreate: "+ ", client.EffectUpdate: "~ ", client.EffectScale: "~ ",
		client.EffectRestart: "-/+ ", client.EffectDelete: "- ",
	}[effect]
	if len(reasons) > 0 {
		word += "  # " + joinSome(reasons)
	}
	return sign + word
}

// maxJoined is how many reasons one line names.
const maxJoined = 3

// joinSome joins the first words of a list and says how many more there are.
func joinSome(list []string) string { return listSome(list, maxJoined) }

func planApps(p *client.Plan) *table {
	t := &table{head: []string{"APP", "CHANGE", "FIELDS"}}
	for i := range p.Apps {
		a := &p.Apps[i]
		row := cells(a.App, formatEffect(a.Effect, describeImpact(&a.Impact), a.Reasons),
			strings.Join(describeFields(a), ", "))
		row[1].color = effectColor(a.Effect)
		t.add(row...)
	}
	return t
}

// maxValue is how many characters of a value a table shows.
const maxValue = 24

// describeFields lists the fields that differ, with their values if they are short.
func describeFields(a *client.AppPlan) []string {
	out := make([]string, len(a.Diffs))
	for i, d := range a.Diffs {
		out[i] = d.Path
		if len(d.Old) <= maxValue && len(d.New) <= maxValue {
			out[i] += " " + cmp.Or(d.Old, "(unset)") + " -> " + cmp.Or(d.New, "(unset)")
		}
	}
	return out
}

// planUnits lists the units that change; with wide, all of them.
func planUnits(p *client.Plan, wide bool) *table {
	t := &table{head: []string{"UNIT", "CHANGE", "RANKS", "NODE", "GPUS"}}
	for i := range p.Apps {
		for _, u := range p.Apps[i].Units {
			if u.Effect == client.EffectUnchanged && u.Why == "" && !wide {
				continue
			}
			for _, row := range unitRows(&u) {
				row[1].color = effectColor(u.Effect)
				t.add(row...)
			}
		}
	}
	return t
}

// unitRows returns one row per node of a unit.
func unitRows(u *client.UnitPlan) [][]cell {
	what := formatEffect(u.Effect, describeImpact(&client.Impact{Effect: u.Effect}), nil)
	if len(u.Seats) == 0 {
		where := ""
		if u.Why != "" {
			where = "no place"
		}
		return [][]cell{cells(u.Unit, what, "", where, "")}
	}
	var out [][]cell
	for rest := u.Seats; len(rest) > 0; {
		n := 1
		for n < len(rest) && rest[n].Node == rest[0].Node {
			n++
		}
		out = append(out,
			cells(u.Unit, what, formatSpan(rest[0].Rank, rest[n-1].Rank), rest[0].Node,
				formatSeatDevices(rest[:n])))
		rest = rest[n:]
	}
	return out
}

// formatSeatDevices returns the devices of ranks on one node: "0-3", or "0.25 of 1" if a rank shares it.
func formatSeatDevices(seats []client.SeatPlan) string {
	var whole []int
	var shares []string
	for _, s := range seats {
		if s.Share == 0 {
			whole = append(whole, s.Devices...)
			continue
		}
		shares = append(shares, share.FormatDevices(s.Share)+" of "+formatIntList(s.Devices))
	}
	if len(shares) == 0 {
		return formatIntList(whole)
	}
	return strings.Join(shares, ", ")
}

// How many shared devices the notes below a plan list, and how many ranks of each.
const (
	maxShared  = 16
	maxSharers = 8
)

// memoryNotes tells the flag that dpserve adds for engines with a share of a device.
func memoryNotes(apps []*app.Application) []string {
	var out []string
	for _, a := range apps {
		if flag, value := app.MemoryOfShare(a); flag != "" {
			out = append(out, fmt.Sprintf("%s: its engines get --%s %s, nine tenths of their share; "+
				"engine.args may name another value", a.PoolName(), flag, value))
		}
	}
	return out
}

// sharedNotes says which ranks share which devices after the deploy.
func sharedNotes(p *client.Plan) []string {
	var out []string
	for i := range p.Nodes {
		for _, d := range p.Nodes[i].Shared {
			if len(out) == maxShared {
				return append(out, "-o json lists all shared devices")
			}
			out = append(out, fmt.Sprintf("device %d of %s: %s of it for %s", d.Device, p.Nodes[i].Node,
				share.FormatDevices(d.Used), listSome(d.Ranks, maxSharers)))
		}
	}
	return out
}

func planNodes(p *client.Plan) *table {
	t := &table{head: []string{"NODE", "SLOTS", "FREE", "NEED", "GPUS", "FREE", "NEED"}}
	showsDevices := slices.ContainsFunc(p.Nodes, func(n client.NodePlan) bool { return len(n.Devices) > 0 })
	if showsDevices {
		t.head, t.optional = append(t.head, "DEVICES"), []string{"DEVICES"}
	}
	t.head = append(t.head, "NOTE")
	for _, n := range p.Nodes {
		row := cells(n.Node, strconv.Itoa(n.Slots), strconv.Itoa(n.SlotsFree), strconv.Itoa(n.SlotsNeed),
			strconv.Itoa(n.GPUs), share.FormatDevices(n.GPUsFree), share.FormatDevices(n.GPUsNeed))
		if showsDevices {
			row = append(row, cell{text: formatDevices(n.Devices)})
		}
		t.add(append(row, cell{text: n.Note})...)
	}
	return t
}

func effectColor(effect client.Effect) color {
	switch effect {
	case client.EffectCreate:
		return good
	case client.EffectUpdate, client.EffectScale, client.EffectRestart:
		return busy
	case client.EffectDelete:
		return bad
	case client.EffectUnchanged:
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
