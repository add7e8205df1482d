package main

import (
	"encoding/json"
	"fmt"
	"math"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// maxRequest is the largest request file in MiB, as at the inference endpoint.
const maxRequest = 16

type explainFlags struct {
	prompt, file, tokens, replay string
	route, model                 string
	headers                      []string
	output                       *format
}

func newRoute(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "route COMMAND",
		Short:   "how requests find their rank",
		Example: `  dpserve route explain demo --prompt hello`,
		Args:    cobra.ArbitraryArgs,
		RunE:    requireSubcommand,
	}
	cmd.AddCommand(newRouteExplain(e))
	return cmd
}

// requireSubcommand runs a command that only holds others: it prints the help, or refuses an unknown
// subcommand.
func requireSubcommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	return unknownCommand(cmd, args[0])
}

func newRouteExplain(e *env) *cobra.Command {
	f := &explainFlags{}
	cmd := &cobra.Command{
		Use:   "explain APP [flags]",
		Short: "which rank a request would get, and why",
		Long: `explain asks the Router of an application what it would decide for a request, by the same
code and on the same state as for live requests, and changes nothing. The table has a row per rank: whether
it could be picked and if not why, requests in flight of those it may hold, prompt tokens it has cached,
each term of its score, and the score. ~ marks estimated tokens. --replay shows what a recent request was
decided on (its prompt blocks, the hits found, the ranks tried, the pick), and what it would get now; the
ranks' load at that moment is not kept. Terms that are 0 at every rank have a column only with -o wide; -o
json has every number in full.

Of an application with prefill and decode ranks, it shows which pair of ranks the request would get, or why
its decode rank computes the prompt: a table of the pairs that were compared, with each term of their cost in
milliseconds, and a table for the ranks of either pool.`,
		Example: `  dpserve route explain demo --prompt hello
  dpserve route explain demo -f request.json --route /v1/chat/completions
  dpserve route explain demo --replay 5f2c9d0e11aa43b7 -o json`,
		Args: requireArgs(1, "APP"),
	}
	flags := cmd.Flags()
	flags.StringVar(&f.prompt, "prompt", "", "`text` of a prompt")
	flags.StringVarP(&f.file, "file", "f", "", "`file` with the JSON body of a request; - is stdin")
	flags.StringVar(&f.tokens, "tokens", "", "prompt as token `ids`: 1,2,3")
	flags.StringVar(&f.replay, "replay", "", "`id` (x-request-id) of a recent request")
	flags.StringVar(&f.route, "route", "",
		"`path` of --prompt and -f; default: /v1/completions, or chat if the body has messages")
	flags.StringVar(&f.model, "model", "",
		"`name` of the model or adapter of --prompt and --tokens; default: the application's model")
	flags.StringArrayVar(&f.headers, "header", nil,
		"`HEADER` of --prompt and -f, as NAME: VALUE; may be repeated")
	f.output = addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		q, err := parseRouteQuery(e, f, cmd.Flags().Changed)
		if err != nil {
			return err
		}
		return e.withAdmin(func(cluster admin) error {
			x, err := cluster.Explain(cmd.Context(), args[0], q)
			if err != nil {
				return err
			}
			return explanationListing(e, x).write(e.io, *f.output)
		})
	}
	return cmd
}

// parseRouteQuery converts the flags. given says whether a flag is on the command line, because an empty
// prompt is a prompt.
func parseRouteQuery(e *env, f *explainFlags, given func(string) bool) (*client.Query, error) {
	n := 0
	for _, name := range []string{"prompt", "file", "tokens", "replay"} {
		if given(name) {
			n++
		}
	}
	if n != 1 {
		return nil, usageError("route explain",
			"route explain wants one of --prompt, -f, --tokens and --replay")
	}
	q := &client.Query{Replay: f.replay, Route: f.route, Model: f.model}
	var err error
	if q.Headers, err = parseHeaders(f.headers); err != nil {
		return nil, err
	}
	switch {
	case given("prompt"):
		q.Prompt = &f.prompt
	case given("tokens"):
		q.TokenIDs, err = parseTokens(f.tokens)
	case given("file"):
		q.Request, err = readRequest(e, f.file)
	case f.replay == "":
		err = usageError("route explain", "--replay wants a request id")
	}
	if err == nil && !given("prompt") && !given("file") && (f.route != "" || len(f.headers) > 0) {
		err = usageError("route explain", "--route and --header go with --prompt and -f")
	}
	if err == nil && f.model != "" && !given("prompt") && !given("tokens") {
		err = usageError("route explain", "--model goes with --prompt and --tokens")
	}
	return q, err
}

func parseHeaders(lines []string) (map[string]string, error) {
	if len(lines) == 0 {
		return nil, nil //nolint:nilnil // no headers
	}
	out := map[string]string{}
	for _, l := range lines {
		name, value, ok := strings.Cut(l, ":")
		if name = textproto.TrimString(name); !ok || name == "" {
			return nil, usageError("route explain", "--header %q: wanted NAME: VALUE", l)
		}
		out[name] = textproto.TrimString(value)
	}
	return out, nil
}

func parseTokens(s string) ([]uint32, error) {
	var out []uint32
	for word := range strings.SplitSeq(s, ",") {
		id, err := strconv.ParseUint(strings.TrimSpace(word), 10, 32)
		if err != nil {
			return nil, problem.New(problem.InvalidArgument, "--tokens: %q is not a token id", word).
				WithHint("token ids are numbers with commas between them: 1,2,3")
		}
		out = append(out, uint32(id))
	}
	return out, nil
}

func readRequest(e *env, path string) ([]byte, error) {
	text, err := readInput(e, path, maxRequest, "the inference endpoint takes no larger body",
		"-f takes the JSON body of a request")
	if err == nil && !json.Valid(text) {
		err = problem.New(problem.InvalidArgument, "%s is not JSON", path).
			WithHint("give the body as it is sent to the inference endpoint")
	}
	return text, err
}

func explanationListing(e *env, x *client.Explanation) *listing {
	v := statusView{now: e.now(), relative: e.io.OutTTY}
	if x.Pair != nil {
		return &listing{
			document: x, names: pairNames(x), notes: describePair(x, v),
			table: func(wide bool) []*table { return pairTables(x, wide) },
		}
	}
	l := &listing{
		document: x, notes: describeExplanation(x, v),
		table: func(wide bool) []*table { return []*table{explanationTable(x, wide)} },
	}
	if x.Pick != "" {
		l.names = []string{x.Pick}
	}
	return l
}

// explanationTable returns a table with a row per rank. Score terms are columns, in the order of the formula.
func explanationTable(x *client.Explanation, wide bool) *table {
	var rows [][]client.Term
	for i := range x.Ranks {
		rows = append(rows, x.Ranks[i].Terms)
	}
	names := termNames(rows, wide)
	t := &table{head: []string{"RANK", "STATE", "IN-FLIGHT", "HIT"}}
	if wide {
		t.head = append(t.head, "BLOCKS", "HOST", "DISK", "KV-USAGE")
	}
	t.head = append(t.head, termHeads(names)...)
	t.head = append(t.head, "SCORE", "PICK", "WHY-NOT")
	for i := range x.Ranks {
		t.add(explanationRow(x, &x.Ranks[i], names, wide)...)
	}
	return t
}

func explanationRow(x *client.Explanation, r *client.RankExplanation, names []string, wide bool) []cell {
	row := cells(r.Worker, r.State, fmt.Sprintf("%d/%d", r.InFlight, r.MaxOngoing),
		formatTokens(r.HitTokens, x.Estimated))
	row[1].color = candidateColor(r)
	if wide {
		row = append(row,
			cells(strconv.Itoa(r.HitBlocks), formatTokens(r.HostTokens, x.Estimated),
				formatTokens(r.DiskTokens, x.Estimated), formatShare(r.KVUsage))...)
	}
	row = append(row, termCells(r.Terms, names)...)
	score := "-"
	if r.Score != nil {
		score = formatScore(*r.Score)
	}
	return append(row, cell{text: score}, pickCell(r.Picked), cell{text: r.Why})
}

// pickCell marks the row of the rank or pair that was picked.
func pickCell(picked bool) cell {
	if picked {
		return cell{text: "<", color: good}
	}
	return cell{}
}

func candidateColor(r *client.RankExplanation) color {
	switch {
	case r.Picked:
		return good
	case r.Eligible:
		return plain
	}
	return busy
}

// termNames returns the names of the terms of a table's rows, in the order of the formula. A term that is 0
// in every row, or nearly so, says nothing, and gets a column only with -o wide.
func termNames(rows [][]client.Term, wide bool) []string {
	var names []string
	counts := map[string]bool{}
	for _, terms := range rows {
		for _, t := range terms {
			if !slices.Contains(names, t.Name) {
				names = append(names, t.Name)
			}
			counts[t.Name] = counts[t.Name] || math.Abs(t.Value) >= leastDecimal || wide
		}
	}
	return slices.DeleteFunc(names, func(name string) bool { return !counts[name] })
}

// termHeads returns the headings of the columns of terms.
func termHeads(names []string) []string {
	out := make([]string, len(names))
	for i, name := range names {
		out[i] = strings.ToUpper(strings.ReplaceAll(name, "_", "-"))
	}
	return out
}

// termCells returns the values of the named terms.
func termCells(terms []client.Term, names []string) []cell {
	out := cells(slices.Repeat([]string{"-"}, len(names))...)
	for _, t := range slices.Backward(terms) { // the first of several counts
		if i := slices.Index(names, t.Name); i >= 0 {
			out[i].text = formatScore(t.Value)
		}
	}
	return out
}

// describeExplanation returns the lines under the table.
func describeExplanation(x *client.Explanation, v statusView) []string {
	var out []string
	if x.Replay != nil {
		out = append(out, describeReplay(x.Replay, v))
	}
	pick := "none: " + x.Decision + ", " + x.Reason
	if x.Pick != "" {
		pick = x.Pick + ": " + x.Reason
	}
	out = append(out, "pick    "+pick, "prompt  "+describePrompt(x), "policy  "+x.Policy)
	if x.Formula != "" {
		out = append(out, "score   "+x.Formula)
	}
	for _, n := range x.Notes {
		out = append(out, "note    "+n)
	}
	return out
}

func describePrompt(x *client.Explanation) string {
	s := formatTokens(x.Tokens, x.Estimated) + " tokens"
	if x.Blocks > 0 {
		s += fmt.Sprintf(", %s of %d %s", formatCount(x.Blocks, "full block"), x.BlockSize, x.BlockUnit)
	}
	if x.Identity != "" {
		s += ", known by its " + x.Identity
	}
	return s
}

func describeReplay(r *client.Replay, v statusView) string {
	s := fmt.Sprintf("then    %s at %s", r.RequestID, r.At.UTC().Format(time.RFC3339))
	if v.relative {
		s = fmt.Sprintf("then    %s, %s ago", r.RequestID, formatAge(v.now.Sub(r.At)))
	}
	if r.Attempt > 1 {
		s += fmt.Sprintf(", attempt %d (tried %s)", r.Attempt, strings.Join(r.Tried, ", "))
	}
	pick := r.Pick
	if p := r.Pair; p != nil {
		pick = formatPair(p.Prefill, r.Pick)
	}
	return s + fmt.Sprintf(": %s by %s: %s, hit %d tokens; the rest is what it would get now", pick, r.Policy,
		r.Reason, r.HitTokens)
}

// formatTokens returns a count of tokens; ~ marks an estimate.
func formatTokens(n int, estimated bool) string {
	if estimated && n > 0 {
		return "~" + strconv.Itoa(n)
	}
	return strconv.Itoa(n)
}

func formatShare(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100**v)
}

// lastResort is a score beyond every other cost: a policy gives it to ranks that it takes only if no other is
// left.
const lastResort = 1 << 40

// formatScore is formatDecimal, with the word "last" for a rank that is taken only if no other is left.
func formatScore(v float64) string {
	if v >= lastResort {
		return "last"
	}
	return formatDecimal(v)
}

// leastDecimal is the least value that has a digit within four decimals.
const leastDecimal = 1e-4

// formatDecimal returns a number of a score with at most four decimals; very large and very small numbers use
// powers of ten. JSON has all digits.
func formatDecimal(v float64) string {
	const most = 1e7
	if a := math.Abs(v); a >= most || a > 0 && a < leastDecimal {
		return strconv.FormatFloat(v, 'g', 4, 64)
	}
	s := strconv.FormatFloat(v, 'f', 4, 64)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}
