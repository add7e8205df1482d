package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// pickMark stands in the row of the rank that was picked.
const pickMark = "<"

// explanationTable has a row per rank. Terms are columns, in the order in which they add up.
func explanationTable(x *msg.Explanation, wide bool) *table {
	names := termNames(x)
	t := &table{head: []string{"RANK", "STATE", "IN-FLIGHT", "HIT"}}
	if wide {
		t.head = append(t.head, "BLOCKS", "HOST", "DISK", "KV-USAGE")
	}
	for _, n := range names {
		t.head = append(t.head, strings.ToUpper(strings.ReplaceAll(n, "_", "-")))
	}
	t.head = append(t.head, "SCORE", "PICK", "WHY-NOT")
	for i := range x.Ranks {
		t.add(explanationRow(x, &x.Ranks[i], names, wide)...)
	}
	return t
}

func explanationRow(x *msg.Explanation, r *msg.RankExplanation, names []string, wide bool) []cell {
	row := cells(r.Worker, r.State, fmt.Sprintf("%d/%d", r.InFlight, r.MaxOngoing), tokens(r.HitTokens, x.Estimated))
	row[1].color = candidateColor(r)
	if wide {
		row = append(row, cells(strconv.Itoa(r.HitBlocks), tokens(r.HostTokens, x.Estimated), tokens(r.DiskTokens, x.Estimated), share(r.KVUsage))...)
	}
	for _, n := range names {
		row = append(row, cell{text: termValue(r, n)})
	}
	score, mark := "-", ""
	if r.Score != nil {
		score = decimal(*r.Score)
	}
	if r.Picked {
		mark = pickMark
	}
	return append(row, cell{text: score}, cell{text: mark, color: good}, cell{text: r.Why})
}

func candidateColor(r *msg.RankExplanation) color {
	switch {
	case r.Picked:
		return good
	case r.Eligible:
		return plain
	}
	return busy
}

// termNames are the terms of all ranks, in the order of the first rank that has them.
func termNames(x *msg.Explanation) []string {
	var out []string
	seen := map[string]bool{}
	for i := range x.Ranks {
		for _, t := range x.Ranks[i].Terms {
			if !seen[t.Name] {
				seen[t.Name] = true
				out = append(out, t.Name)
			}
		}
	}
	return out
}

func termValue(r *msg.RankExplanation, name string) string {
	for _, t := range r.Terms {
		if t.Name == name {
			return decimal(t.Value)
		}
	}
	return "-"
}

// explanationLines are the sentences under the table.
func explanationLines(x *msg.Explanation, v statusView) []string {
	var out []string
	if x.Replay != nil {
		out = append(out, replayLine(x.Replay, v))
	}
	switch {
	case x.Pick != "":
		out = append(out, fmt.Sprintf("pick    %s: %s", x.Pick, x.Reason))
	default:
		out = append(out, fmt.Sprintf("pick    none: %s, %s", x.Decision, x.Reason))
	}
	out = append(out, "prompt  "+promptLine(x), "policy  "+x.Policy)
	if x.Formula != "" {
		out = append(out, "score   "+x.Formula)
	}
	for _, n := range x.Notes {
		out = append(out, "note    "+n)
	}
	return out
}

func promptLine(x *msg.Explanation) string {
	s := tokens(x.Tokens, x.Estimated) + " tokens"
	if x.Blocks > 0 {
		s += fmt.Sprintf(", %s of %d %s", count(x.Blocks, "full block"), x.BlockSize, x.BlockUnit)
	}
	if x.Identity != "" {
		s += ", known by its " + x.Identity
	}
	return s
}

func replayLine(r *msg.Replay, v statusView) string {
	s := fmt.Sprintf("then    %s at %s", r.RequestID, r.At.UTC().Format(time.RFC3339))
	if v.relative {
		s = fmt.Sprintf("then    %s, %s ago", r.RequestID, age(v.now.Sub(r.At)))
	}
	if r.Attempt > 1 {
		s += fmt.Sprintf(", attempt %d (tried %s)", r.Attempt, strings.Join(r.Tried, ", "))
	}
	return s + fmt.Sprintf(": %s by %s: %s, hit %d tokens; the rest is what it would get now", r.Pick, r.Policy, r.Reason, r.HitTokens)
}

// tokens is a count of tokens, marked where it is estimated.
func tokens(n int, estimated bool) string {
	if estimated && n > 0 {
		return "~" + strconv.Itoa(n)
	}
	return strconv.Itoa(n)
}

func share(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100**v)
}

// decimal shows a number of a score: at most four decimals, and powers of ten where that says more. JSON has all digits.
func decimal(v float64) string {
	const most, least = 1e7, 1e-4
	if a := math.Abs(v); a >= most || a > 0 && a < least {
		return strconv.FormatFloat(v, 'g', 4, 64)
	}
	s := strconv.FormatFloat(v, 'f', 4, 64)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}
