package main

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// statusView renders applications for one terminal, or for a pipe.
type statusView struct {
	now      time.Time
	relative bool // times are ages for a person, and messages are lines under the table; else for a program
	wide     bool
	width    int // columns of the terminal
}

func newStatusView(e *env, wide bool) statusView {
	width, _ := e.io.Size()
	return statusView{now: e.now(), relative: e.io.OutTTY, wide: wide, width: width}
}

func (v statusView) tables(apps []client.AppStatus) []*table {
	return []*table{v.apps(apps), v.ranks(unhealthyFirst(rankRows(apps)))}
}

func (v statusView) apps(apps []client.AppStatus) *table {
	t := &table{head: []string{"APP", "STATUS", "RANKS", "GROUPS", "MODEL", "KIND", "POLICY", "QUEUED"}}
	if v.wide {
		t.head = append(t.head, "REVISION", "COUPLING")
	} else {
		t.optional = []string{"GROUPS", "KIND", "QUEUED", "POLICY", "MODEL"}
	}
	asColumn := v.wide || !v.relative
	if asColumn {
		t.head = append(t.head, "MESSAGE")
	}
	for i := range apps {
		a := &apps[i]
		row := cells(a.Name, a.Status, fmt.Sprintf("%d/%d", a.Ready, a.Desired), strconv.Itoa(a.Groups),
			a.Model, a.Kind, a.Policy, strconv.Itoa(a.Queued))
		row[1].color = statusColor(a.Status)
		if v.wide {
			row = append(row, cells(strconv.FormatUint(a.Revision, 10), a.Coupling)...)
		}
		if asColumn {
			row = append(row, cell{text: joinLines(a.Message)})
		} else {
			t.notes = append(t.notes, v.messageLines(a)...)
		}
		t.add(row...)
		for j := range a.Pools {
			t.add(v.pool(&a.Pools[j])...)
		}
		if line := summarizeRanks(a, min(v.width-1, summaryWidth)); line != "" {
			t.notes = append(t.notes, line)
		}
	}
	if len(t.notes) > 0 {
		t.notes = append([]string{""}, t.notes...)
	}
	return t
}

// pool returns the row of a pool, under that of its application.
func (v statusView) pool(p *client.PoolStatus) []cell {
	row := cells("  "+p.Pool, p.Status, fmt.Sprintf("%d/%d", p.Ready, p.Desired), strconv.Itoa(p.Groups), "",
		"", p.Policy, "")
	row[1].color = statusColor(p.Status)
	if v.wide {
		row = append(row, cells("", p.Coupling)...)
	}
	if v.wide || !v.relative {
		row = append(row, cell{})
	}
	return row
}

// messageLines returns what an application's message says and the reasons of its ranks do not, one fact and
// one hint per line, wrapped.
func (v statusView) messageLines(a *client.AppStatus) []string {
	said := map[string]bool{}
	for i := range a.Units {
		u := &a.Units[i]
		if why := joinLines(u.Reason); !isPlacementReason(rankRow{app: a, unit: u}.pool(), why) {
			said[u.Unit+" is "+u.Phase+": "+why] = true
		}
	}
	var out []string
	for line := range strings.Lines(a.Message) {
		line = joinLines(line)
		if line == "" || said[line] {
			continue
		}
		text, hint, hasHint := strings.Cut(line, "; hint: ")
		out = append(out, wrap(a.Name+": "+text, v.width-1)...)
		if hasHint {
			out = append(out, wrap("hint: "+hint, v.width-1)...)
		}
	}
	return out
}

// summaryWidth is the longest summary of an application's ranks.
const summaryWidth = 80

// summarizeRanks returns one line that names the ranks that are not ready, by state, as far as they fit. It
// returns "" if there are fewer than two: their rows say the same.
func summarizeRanks(a *client.AppStatus, width int) string {
	names := map[string][]string{} // by phase
	total := 0
	for r := range allRanks([]client.AppStatus{*a}) {
		if r.isReady() {
			continue
		}
		total++
		name := strings.TrimPrefix(r.name(), a.Name)
		names[r.rank.Phase] = append(names[r.rank.Phase], strings.TrimLeft(name, "./"))
	}
	if total < 2 {
		return ""
	}
	line := ""
	for most := total; most >= 0; most-- {
		line = fmt.Sprintf("%s: %d of %d ready", a.Name, a.Ready, a.Desired)
		for _, phase := range slices.Sorted(maps.Keys(names)) {
			line += "; " + phase + " " + listSome(names[phase], most)
		}
		if textWidth(line) <= width {
			break
		}
	}
	return line
}

// listSome lists at most so many names and says how many are left out.
func listSome(names []string, most int) string {
	switch {
	case len(names) <= most:
		return strings.Join(names, ", ")
	case most == 0:
		return strconv.Itoa(len(names))
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

func (v statusView) ranks(rows []rankRow) *table {
	t := &table{
		head: []string{
			"RANK", "STATE", "EPOCH", "AGE", "NODE", "IN-FLIGHT", "TOK/S", "TTFT-P50", "TTFT-P95",
			"RESTARTS", "HIT%",
		},
	}
	if !v.relative {
		t.head[3] = "SINCE"
	}
	if v.wide {
		t.head = append(t.head, "REQUESTS", "PID", "MEMORY", "INCARNATION", "URL", "LAST-END")
	} else {
		t.optional = []string{
			"TTFT-P95", "TTFT-P50", "RESTARTS", "NODE", t.head[3], "HIT%", "TOK/S", "IN-FLIGHT", "EPOCH",
		}
	}
	t.head = append(t.head, "REASON")
	reasons, ends := reasonsOf(rows), v.lastEnds(rows)
	for i, r := range rows {
		row := cells(r.name(), r.rank.Phase, strconv.FormatUint(r.rank.Epoch, 10), v.since(r.unit.Since),
			r.rank.Node, strconv.Itoa(r.rank.InFlight), fmt.Sprintf("%.0f", r.rank.TokensPerS),
			formatMillis(r.rank.TTFTp50Ms), formatMillis(r.rank.TTFTp95Ms), strconv.Itoa(r.unit.Restarts),
			formatHitRate(r.rank))
		row[1].color = phaseColor(r.rank.Phase)
		if v.wide {
			row = append(row,
				cells(strconv.FormatUint(r.rank.Requests, 10), formatNumber(r.rank.PID),
					formatMemory(r.rank.Memory), r.rank.Incarnation, r.rank.URL, ends[i])...)
		}
		t.add(append(row, cell{text: reasons[i]})...)
	}
	return t
}

// lastEnds returns how the unit of each rank ended last, once for the ranks of a unit.
func (v statusView) lastEnds(rows []rankRow) []string {
	out := make([]string, len(rows))
	for i, r := range rows {
		switch e := r.unit.LastEnd; {
		case e == nil:
			out[i] = "-"
		case i > 0 && rows[i-1].unit == r.unit:
			out[i] = "as above"
		case v.relative:
			out[i] = v.since(e.At) + " ago: " + describeEnd(e)
		default:
			out[i] = v.since(e.At) + ": " + describeEnd(e)
		}
	}
	return out
}

// liveRanks returns the table of ranks for live lines: at most so many lines. If not all ranks fit, those
// that are not ready come first, and the last line says what is missing.
func (v statusView) liveRanks(rows []rankRow, lines int, paint func(color, string) string) []string {
	room := lines - 1 // under the heading
	cut := 0
	if len(rows) > room {
		rows = unhealthyFirst(rows)
		cut = len(rows) - max(room-1, 0)
	}
	hidden := rows[len(rows)-cut:]
	t := v.ranks(rows[:len(rows)-cut])
	for _, row := range t.rows { // the columns stay in place while states change
		row[1].text = fmt.Sprintf("%-*s", len(state.Starting), row[1].text)
	}
	t.fit(v.width-1, reasonWidth)
	out := t.renderLines(paint)
	if cut == 0 {
		return out
	}
	more := fmt.Sprintf("… and %d more, all ready", cut)
	if broken := len(slices.DeleteFunc(hidden, rankRow.isReady)); broken > 0 {
		more = fmt.Sprintf("… and %d more, %d of them not ready", cut, broken)
	}
	return append(out, more)
}

func (v statusView) since(t time.Time) string {
	switch {
	case t.IsZero():
		return "-"
	case v.relative:
		return formatAge(v.now.Sub(t))
	}
	return t.UTC().Format(time.RFC3339)
}

// formatAge returns a duration in its largest unit.
func formatAge(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", max(int(d.Seconds()), 0))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// formatMillis returns a latency; 0 means that nothing was measured.
func formatMillis(ms float64) string {
	if ms == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1fms", ms)
}

func formatNumber(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

// formatMemory returns a number of bytes in GiB; "-" = not known.
func formatMemory(bytes uint64) string {
	if bytes == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}

// joinLines joins the lines of a message, so that it fits one cell of a table.
func joinLines(s string) string {
	s = strings.ReplaceAll(strings.TrimSpace(cleanText(s)), "\n", "; ")
	return strings.Join(strings.Fields(s), " ")
}

func statusColor(status string) color {
	switch status {
	case client.StatusRunning:
		return good
	case client.StatusDeploying, client.StatusDeleting:
		return busy
	case client.StatusUnhealthy, client.StatusDeployFailed:
		return bad
	}
	return plain
}

func phaseColor(phase string) color {
	if phase == client.Unreachable {
		return bad
	}
	switch state.Phase(phase) {
	case state.Ready:
		return good
	case state.Pending, state.Starting, state.Draining, state.Backoff:
		return busy
	case state.Fenced, state.Killing, state.Failed:
		return bad
	case state.Gone:
		return faint
	}
	return plain
}

// rankRow is one rank with its unit and its application.
type rankRow struct {
	app  *client.AppStatus
	unit *client.UnitStatus
	rank *client.RankStatus
}

// allRanks yields all ranks in the order of the listing.
func allRanks(apps []client.AppStatus) iter.Seq[rankRow] {
	return func(yield func(rankRow) bool) {
		for a := range apps {
			for u := range apps[a].Units {
				unit := &apps[a].Units[u]
				for r := range unit.Ranks {
					if !yield(rankRow{&apps[a], unit, &unit.Ranks[r]}) {
						return
					}
				}
			}
		}
	}
}

func rankRows(apps []client.AppStatus) []rankRow { return slices.Collect(allRanks(apps)) }

// unhealthyFirst orders ranks: those that are not ready come first, each part in the order of the listing.
func unhealthyFirst(rows []rankRow) []rankRow {
	isBroken := func(r rankRow) bool { return !r.isReady() }
	return slices.Concat(slices.DeleteFunc(slices.Clone(rows), rankRow.isReady),
		slices.DeleteFunc(slices.Clone(rows), isBroken))
}

// onlyUnhealthy returns the applications that do not run or have a rank that is not ready, with those ranks
// alone.
func onlyUnhealthy(apps []client.AppStatus) []client.AppStatus {
	var out []client.AppStatus
	for _, a := range apps {
		var units []client.UnitStatus
		for i, u := range a.Units {
			u.Ranks = slices.DeleteFunc(slices.Clone(u.Ranks), func(k client.RankStatus) bool {
				return rankRow{&a, &a.Units[i], &k}.isReady()
			})
			if len(u.Ranks) > 0 {
				units = append(units, u)
			}
		}
		if a.Units = units; len(units) > 0 || a.Status != client.StatusRunning {
			out = append(out, a)
		}
	}
	return out
}

// isReady reports whether a rank serves and its answers do not fail.
func (r rankRow) isReady() bool {
	return r.rank.Phase == string(state.Ready) && !r.rank.Ejected && r.rank.Away == ""
}

// name returns APP/GROUP/RANK, the form that logs takes. Of a rank of a pool, APP is the pool's name.
func (r rankRow) name() string {
	return fmt.Sprintf("%s/%d/%d", r.pool(), r.rank.Group, r.rank.Rank)
}

// pool returns the name of the rank's pool, that of the application if it has one pool.
func (r rankRow) pool() string {
	name, _, _ := strings.Cut(r.unit.Unit, "/")
	return name
}

// reason says why a rank is not ready, or what it waits for.
func (r rankRow) reason() string {
	switch {
	case r.rank.Phase == string(state.Ready) && r.rank.Ejected:
		return "ejected: its last answers failed"
	case r.rank.Phase == string(state.Ready) && r.rank.Away != "":
		return r.rank.Away + ": its engine says so; it gets requests again when the engine is back"
	case r.rank.Phase == string(state.Ready):
		return ""
	}
	return strings.TrimPrefix(joinLines(cmp.Or(r.rank.Progress, r.unit.Reason))+r.nextTry(), "; ")
}

// nextTry says, as one more clause, when a unit that waits for its next start starts; "" if it does not wait.
func (r rankRow) nextTry() string {
	if r.unit.NextTry.IsZero() {
		return ""
	}
	return "; it is tried again at " + r.unit.NextTry.UTC().Format(time.RFC3339)
}

// isPlacementReason reports whether a reason says that a group or unit of an application or of a pool finds
// no room. Such a reason lists every node, and the units of the pool share it.
func isPlacementReason(pool, reason string) bool { return strings.HasPrefix(reason, "place "+pool+"/") }

// reasonsOf returns the reason of each rank. The ranks of a unit share one, and the units of an application a
// reason of placement: it stands at the first of them. A reason of placement is shortened, because the
// application's message has it in full.
func reasonsOf(rows []rankRow) []string {
	said := map[string]bool{}
	out := make([]string, len(rows))
	for i, r := range rows {
		why := r.reason()
		key := r.unit.Unit + " " + why
		out[i] = why
		if isPlacementReason(r.pool(), why) {
			_, reason, _ := strings.Cut(why, ": ") // without the name of the group or unit
			key = r.pool() + " " + reason
			out[i], _, _ = strings.Cut(reason, "; ")
		}
		if why != "" && said[key] {
			out[i] = "as above"
		}
		said[key] = true
	}
	return out
}

// reasonOf returns the reason of a rank for a line of its own, above which nothing may be.
func reasonOf(r rankRow) string { return reasonsOf([]rankRow{r})[0] }

// indexNotes returns a line about the index of each application that has one.
func indexNotes(apps []client.AppStatus) []string {
	var out []string
	for i := range apps {
		if a := &apps[i]; a.Index != nil {
			out = append(out,
				fmt.Sprintf("%s: index %s; identity %s", a.Name, describeIndex(a.Index), a.Identity))
		}
	}
	return out
}

// statusNotes returns the lines under the tables of status: which ranks have too much of the load, how the
// two pools of an application work together, which ranks have its adapters, and the problems of each rank's
// KV cache and KV events.
func statusNotes(apps []client.AppStatus) []string {
	var out []string
	for i := range apps {
		for _, im := range apps[i].Imbalances {
			out = append(out, im.Pool+": "+im.String())
		}
	}
	out = slices.Concat(out, pairNotes(apps), adapterNotes(apps))
	for r := range allRanks(apps) {
		if kv := r.rank.KV; kv != nil {
			if text := describeKVProblems(kv); text != "" {
				out = append(out, r.name()+": "+text)
			}
		}
	}
	return out
}

// Bounds of what status says of adapters.
const (
	maxAdapterNotes = 16 // adapters of an application
	maxAdapterRanks = 8  // names of the ranks that have one
)

// adapterNotes returns a line for each LoRA adapter of an application, with the ranks that have it.
func adapterNotes(apps []client.AppStatus) (out []string) {
	for i := range apps {
		a, ranks, total := &apps[i], map[string][]string{}, 0 // ranks: by adapter
		for r := range allRanks(apps[i : i+1]) {
			total++
			name := strings.TrimLeft(strings.TrimPrefix(r.name(), a.Name), "./")
			for _, adapter := range r.rank.Adapters {
				ranks[adapter] = append(ranks[adapter], name)
			}
		}
		adapters := slices.Sorted(maps.Keys(ranks))
		for _, adapter := range adapters[:min(len(adapters), maxAdapterNotes)] {
			where := "all ranks"
			if len(ranks[adapter]) < total {
				where = listSome(ranks[adapter], maxAdapterRanks)
			}
			out = append(out, fmt.Sprintf("%s: adapter %s on %s", a.Name, cleanText(adapter), where))
		}
		if more := len(adapters) - maxAdapterNotes; more > 0 {
			out = append(out, fmt.Sprintf("%s: %d more adapters; `dpserve status %[1]s -o json` has all",
				a.Name, more))
		}
	}
	return out
}

// describeIndex returns the size of an index and its error counts.
func describeIndex(ix *client.Index) string {
	s := fmt.Sprintf("%d blocks, %s of %s", ix.Blocks, formatMebibytes(ix.Bytes), formatMebibytes(ix.Cap))
	for _, part := range []struct {
		n    uint64
		what string
	}{{uint64(max(ix.Orphans, 0)), "orphans"}, {ix.Evicted, "evicted"}} {
		if part.n > 0 {
			s += fmt.Sprintf(", %d %s", part.n, part.what)
		}
	}
	return s
}

func formatMebibytes(n int) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// describeKVProblems returns the problems of a rank's KV cache and KV events, "" if there are none.
func describeKVProblems(kv *client.KVStatus) string {
	e := kv.Events
	if e == nil {
		return kv.Note
	}
	var out []string
	if kv.Note != "" {
		out = append(out, kv.Note)
	}
	switch {
	case e.State == client.EventsSilent && kv.Note == "":
		out = append(out, fmt.Sprintf("KV events silent for %.0f s under traffic", e.SilentFor))
	case e.State == client.EventsPartial:
		out = append(out, "KV events partial: what it held before is not known")
	case e.State == client.EventsConnecting:
		out = append(out, "its KV events are not connected")
	}
	if e.Gaps > 0 {
		out = append(out, fmt.Sprintf("%d gaps in its KV events", e.Gaps))
	}
	if e.Dropped > 0 {
		out = append(out, fmt.Sprintf("%d KV events dropped", e.Dropped))
	}
	return strings.Join(out, "; ")
}

// formatHitRate returns a rank's share of cached prompt tokens; "-" while its engine has reported none.
func formatHitRate(r *client.RankStatus) string {
	if r.PromptTokens == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", 100*r.HitRate)
}
