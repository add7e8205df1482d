package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
)

// pairTables returns the tables of a decision between two pools: the pairs that were compared, the ranks of
// the prefill pool, and those of the decode pool.
func pairTables(x *client.Explanation, wide bool) []*table {
	prefills, decodes := explanationTable(x.Pair.PrefillPool, wide), explanationTable(x, wide)
	prefills.head[0], decodes.head[0] = prefillHead, decodeHead
	return []*table{pairTable(x.Pair, wide), prefills, decodes}
}

// Headings of the columns with the ranks of either pool.
const (
	prefillHead = "PREFILL-RANK"
	decodeHead  = "DECODE-RANK"
)

// pairTable returns a table with a row per pair that was compared; the last row is the decode rank alone.
func pairTable(p *client.PairExplanation, wide bool) *table {
	var rows [][]client.Term
	for i := range p.Candidates {
		rows = append(rows, p.Candidates[i].Terms)
	}
	names := termNames(rows, wide)
	t := &table{head: append([]string{prefillHead, decodeHead}, termHeads(names)...)}
	t.head = append(t.head, "COST-MS", "PICK", "WHY-NOT")
	for i := range p.Candidates {
		c := &p.Candidates[i]
		row := append(cells(cmp.Or(c.Prefill, "-"), c.Decode), termCells(c.Terms, names)...)
		t.add(append(row, cell{text: formatDecimal(c.CostMs)}, pickCell(c.Picked), cell{text: c.Skip})...)
	}
	return t
}

// formatPair names a decode rank, and the prefill rank if there is one.
func formatPair(prefill, decode string) string {
	if prefill == "" {
		return "decode rank " + decode + " alone"
	}
	return "prefill rank " + prefill + " and decode rank " + decode
}

// describePair returns the lines under the tables of a decision between two pools.
func describePair(x *client.Explanation, v statusView) []string {
	var out []string
	if x.Replay != nil {
		out = append(out, describeReplay(x.Replay, v))
	}
	p, q := x.Pair, x.Pair.PrefillPool
	pick := "none: " + x.Decision
	if x.Pick != "" {
		pick = formatPair(p.Prefill, x.Pick) + ": " + p.Way
	}
	out = append(out, fmt.Sprintf("pick    %s, %s: %s", pick, p.Reason, p.Why), "decide  "+p.Decide,
		fmt.Sprintf("prompt  %s, %s of them not on the decode rank", describePrompt(x),
			formatTokens(p.UncachedTokens, x.Estimated)),
		fmt.Sprintf("policy  prefill %s: %s; decode %s: %s", q.Policy, q.Reason, x.Policy, x.Reason))
	for _, pool := range []struct {
		name string
		x    *client.Explanation
	}{{app.PoolPrefill, q}, {app.PoolDecode, x}} {
		if pool.x.Formula != "" {
			out = append(out, "score   "+pool.name+": "+pool.x.Formula)
		}
		for _, n := range pool.x.Notes {
			out = append(out, "note    "+pool.name+": "+n)
		}
	}
	return out
}

// pairNames names the picked ranks with their pools.
func pairNames(x *client.Explanation) []string {
	var out []string
	if x.Pair.Prefill != "" {
		out = append(out, app.PoolName(x.App, app.PoolPrefill)+"/"+x.Pair.Prefill)
	}
	if x.Pick != "" {
		out = append(out, app.PoolName(x.App, app.PoolDecode)+"/"+x.Pick)
	}
	return out
}

// addPairRows adds to the table of a Router how it decides between its two pools.
func addPairRows(t *table, p *client.PairInfo) {
	row := func(name, value string) { t.add(cells(name, value)...) }
	row("decide", p.Decide)
	row("transfer", p.Transfer)
	row("fallback", p.Fallback)
	row("pairs", fmt.Sprintf("%s, %d of %d connected", p.Pairs, p.Met, p.All))
	row("transfer time", describeTransfers(p))
	var counts []string
	for _, reason := range slices.Sorted(maps.Keys(p.Decisions)) {
		counts = append(counts, fmt.Sprintf("%s %d", reason, p.Decisions[reason]))
	}
	if len(counts) == 0 {
		counts = []string{"none yet"}
	}
	row("decisions", strings.Join(counts, ", "))
	row("pool", app.PoolDecode)
}

// maxLinks is how many links between machines the table names; JSON has every one.
const maxLinks = 8

// describeTransfers says how long transfers take, and which links take another time.
func describeTransfers(p *client.PairInfo) string {
	if len(p.Links) == 0 {
		return fmt.Sprintf("%.3f ms per token assumed, nothing measured yet", p.TransferMs)
	}
	parts := []string{
		fmt.Sprintf("%.3f ms per token, measured on %s", p.TransferMs, formatCount(len(p.Links), "link")),
	}
	for _, l := range p.Links {
		if l.TokenMs == p.TransferMs {
			continue
		}
		if len(parts) > maxLinks {
			parts = append(parts, "…")
			break
		}
		parts = append(parts, fmt.Sprintf("%s to %s %.3f ms (spread %.1f, %s)", l.Prefill, l.Decode,
			l.TokenMs, l.Spread, formatCount(l.Transfers, "transfer")))
	}
	return strings.Join(parts, "; ")
}

// pairNotes returns a line about each application with two pools.
func pairNotes(apps []client.AppStatus) []string {
	var out []string
	for i := range apps {
		if a := &apps[i]; a.PD != nil {
			out = append(out, a.Name+": "+describePD(a.PD))
		}
	}
	return out
}

// describePD returns where prompts were computed, the pairs and the transfers.
func describePD(pd *client.PDStatus) string {
	parts := []string{
		fmt.Sprintf("requests %d remote, %d local, %d fall-back", pd.Remote, pd.Local, pd.Fallbacks),
	}
	if pd.Pairs == client.PairsOn {
		parts = append(parts, fmt.Sprintf("pairs %d/%d connected", pd.Met, pd.All))
	} else {
		parts = append(parts, "pairs "+pd.Pairs)
	}
	if pd.TransferMs > 0 {
		parts = append(parts, fmt.Sprintf("transfers %s, %s", formatMillis(pd.TransferMs),
			formatMebibytes(int(pd.TransferBytes))))
	}
	return strings.Join(parts, "; ")
}
