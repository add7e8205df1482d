package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
)

func newRouter(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "router COMMAND",
		Short: "what an application's Router is, and make it forget",
		Example: `  dpserve router show demo
  dpserve router reset demo`,
		Args: cobra.ArbitraryArgs,
		RunE: requireSubcommand,
	}
	cmd.AddCommand(newRouterShow(e), newRouterReset(e))
	return cmd
}

func newRouterShow(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show APP [flags]",
		Short: "policy, parameters, prompt identity, index",
		Long: "show describes the Router of an application: what it decides by, what it reads, and how " +
			"much it knows.\nOf lockstep groups it shows the queue: what is held and why, the cohorts of " +
			"the last minute and the\nranks that got prompts, and the gap between tokens (docs/lockstep.md).",
		Example: "  dpserve router show demo",
		Args:    requireArgs(1, "APP"),
	}
	output := addOutput(cmd)
	cmd.RunE = e.asking(func(ctx context.Context, cluster admin, args []string) error {
		r, err := cluster.Router(ctx, args[0])
		if err != nil {
			return err
		}
		l := &listing{
			document: r, names: []string{r.App}, table: func(bool) []*table { return routerTables(&r) },
		}
		return l.write(e.io, *output)
	})
	return cmd
}

func routerTables(r *client.Info) []*table {
	if r.Pair != nil {
		return []*table{routerTable(r), routerTable(r.Pair.Prefill)}
	}
	return []*table{routerTable(r)}
}

func routerTable(r *client.Info) *table {
	t := &table{head: []string{"ROUTER", r.App}}
	if r.Pair != nil {
		addPairRows(t, r.Pair)
	}
	row := func(name, value string) { t.add(cells(name, value)...) }
	row("policy", r.Policy)
	row("preset", r.Preset)
	for _, name := range slices.Sorted(maps.Keys(r.Params)) {
		row("params."+name, fmt.Sprint(r.Params[name]))
	}
	row("reads", strings.Join(append([]string{"load"}, r.Reads...), ", "))
	row("identity", r.Identity)
	if r.BusyThreshold != nil {
		row("busy threshold", formatDecimal(*r.BusyThreshold))
	}
	if r.CachingOff {
		row("prefix caching", "off in the engines")
	}
	row("ranks ready", fmt.Sprintf("%d/%d", r.Ready, r.Ranks))
	if r.Ejected > 0 {
		row("ranks ejected", fmt.Sprintf("%d, %d of them left out", r.Ejected, r.LeftOut))
	}
	for _, why := range slices.Sorted(maps.Keys(r.Away)) {
		row("ranks "+why, strconv.Itoa(r.Away[why]))
	}
	row("queued", strconv.Itoa(r.Queued))
	row("imbalance", formatDecimal(r.Imbalance))
	row("reservations", strconv.Itoa(r.Reservations))
	if r.Streams != (client.Streams{}) {
		row("streams go on", describeStreams(&r.Streams))
	}
	if r.Index == nil {
		row("index", "none: the policy reads no caches")
	} else {
		row("index", describeIndex(r.Index))
	}
	for i := range r.Groups {
		addGroupRows(row, &r.Groups[i])
	}
	if r.CostModel != nil {
		row("cost model", describeCostModel(r.CostModel))
		if slow := listSlowRanks(r.CostModel); slow != "" {
			row("slow ranks", slow)
		}
	}
	return t
}

// describeStreams says which streams go on when their rank is lost, and why others do not.
func describeStreams(s *client.Streams) string {
	var which []string
	if s.Completions {
		which = append(which, "completions")
	}
	if s.Chat {
		which = append(which, "chat")
	}
	text := cmp.Or(strings.Join(which, ", "), "none")
	if s.Why != "" {
		text += " (" + s.Why + ")"
	}
	return text
}

// addGroupRows describes the queue of a lockstep group.
func addGroupRows(row func(name, value string), q *client.GroupQueue) {
	name := fmt.Sprintf("group %d ", q.Group)
	if !q.IsHere {
		row(name+"queue", fmt.Sprintf("at node %s; %d wait from here", cmp.Or(q.Owner, "?"), q.Waiting))
		return
	}
	held := fmt.Sprintf("%d held", q.Held)
	if q.Why != "" {
		held += ", the oldest " + q.Why
	}
	row(name+"queue", fmt.Sprintf("%s; %d in the group", held, q.Open))
	cohorts := "none in the last minute"
	if m := q.LastMinute; m.Count > 0 {
		n := float64(m.Count)
		cohorts = fmt.Sprintf("%d in the last minute, of %.1f requests, on %.1f of %d ranks", m.Count,
			float64(m.Requests)/n, float64(m.Ranks)/n, q.Ranks)
	}
	row(name+"cohorts", cohorts)
	pace := "no tokens"
	if q.PaceMs > 0 {
		pace = fmt.Sprintf("%.1f ms between tokens", q.PaceMs)
	}
	row(name+"pace", fmt.Sprintf("%s, decode balance %.2f, %.1f requests/s", pace, q.DecodeBalance, q.Rate))
}

// describeCostModel says which step times the Router expects, and how well they match the measured ones.
func describeCostModel(m *client.CostModel) string {
	var factors []string
	if m.PrefillSamples > 0 {
		factors = append(factors, fmt.Sprintf("prefill %.2f x", m.Prefill))
	}
	if m.DecodeSamples > 0 {
		factors = append(factors, fmt.Sprintf("decode %.2f x", m.Decode))
	} else if m.Decode < 1 {
		factors = append(factors, fmt.Sprintf("decode at most %.2f x", m.Decode))
	}
	if len(factors) == 0 {
		return m.Preset + " preset, nothing measured yet"
	}
	s := m.Preset + " preset; measured " + strings.Join(factors, ", ")
	if m.PrefillSamples+m.DecodeSamples == 0 {
		return s
	}
	last := formatAge(time.Duration(m.AgeS * float64(time.Second)))
	if m.PrefillSamples == 0 {
		return s + ", last sample " + last + " ago"
	}
	prompts := formatCount(int(m.PrefillSamples), "prompt")
	return s + fmt.Sprintf(" on %s, error %.0f %%, last sample %s ago", prompts, 100*m.Error, last)
}

const (
	slowFactor   = 1.5 // ranks slower than this multiple of the median are named
	maxSlowRanks = 8   // most names in the table; JSON has every rank
)

// listSlowRanks names the ranks that are much slower than the median, "" if there are none.
func listSlowRanks(l *client.CostModel) string {
	var slow []string
	for _, r := range l.Ranks {
		if r.Slow < slowFactor {
			continue
		}
		if len(slow) == maxSlowRanks {
			slow = append(slow, "…")
			break
		}
		slow = append(slow, fmt.Sprintf("%s %.1f x (spread %.1f)", r.Worker, r.Slow, r.Spread))
	}
	return strings.Join(slow, ", ")
}

func newRouterReset(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "reset APP",
		Short: "make the Router forget and learn anew",
		Long: `reset drops what the Router of an application remembers (policy state, index, loads that no
rank has confirmed) and asks every rank for its state. Requests in flight are not touched; for a moment
caches look cold.`,
		Example: "  dpserve router reset demo",
		Args:    requireArgs(1, "APP"),
		RunE: e.asking(func(ctx context.Context, cluster admin, args []string) error {
			r, err := cluster.ResetRouter(ctx, args[0])
			if err != nil {
				return err
			}
			printMessage(e.io.Err, "the router of %s was reset; %s listed again", r.App,
				formatCount(r.Ranks, "rank"))
			return nil
		}),
	}
}
