package ingress

import (
	"cmp"
	"flag"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// writeDocs writes the table of causes into docs/api.md:
// go test ./actors/ingress -run TestThePageHasEveryCause -docs
var writeDocs = flag.Bool("docs", false, "write the table of causes into docs/api.md")

// RP29: docs/api.md has the table by which requests are retried.
func TestThePageHasEveryCause(t *testing.T) {
	const page = "../../docs/api.md"
	const begin, end = "<!-- causes: written by a test -->\n", "<!-- end of causes -->"
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	head, rest, ok := strings.Cut(string(text), begin)
	require.True(t, ok)
	table, tail, ok := strings.Cut(rest, end)
	require.True(t, ok)
	if *writeDocs {
		table = causesTable()
		require.NoError(t, os.WriteFile(page, []byte(head+begin+table+end+tail), 0o644))
	}
	assert.Equal(t, causesTable(), table)
}

func causesTable() string {
	var b strings.Builder
	b.WriteString("| Cause | Asked next | Counts as | Against the rank | At the end the client gets | " +
		"In a stream |\n|---|---|---|---|---|---|\n")
	for c := range dispatch.Causes {
		if row := dispatch.Cause(c).Row(); dispatch.Cause(c) != dispatch.Unused {
			b.WriteString("| " + strings.Join(causeRow(row), " | ") + " |\n")
		}
	}
	return b.String()
}

// causeRow is a row of the table in words.
func causeRow(row *dispatch.Row) []string {
	next := map[dispatch.Again]string{
		dispatch.Nobody: "nobody", dispatch.Other: "another rank", dispatch.Any: "any rank with a free slot",
	}[row.Again]
	cost := map[dispatch.Cost]string{dispatch.Refusal: "refusal", dispatch.Run: "attempt"}[row.Cost]
	if row.Pays {
		cost += ", if it waits"
	}
	var against []string
	for word, is := range map[string]bool{
		"counts towards its ejection": row.Charge, "its health is checked": row.CheckHealth && !row.Charge,
		"full for a while": row.Busy,
	} {
		if is {
			against = append(against, word)
		}
	}
	words := cmp.Or(row.Own, "–")
	if row.Words {
		words = "the engine's words"
	} else if row.Own != "" {
		words = "`" + words + "`"
	}
	begun := "–"
	if row.Begun != "" {
		begun = "`" + row.Begun + "`"
	}
	return []string{
		"`" + row.Name + "`", next, cmp.Or(cost, "–"), cmp.Or(strings.Join(against, ", "), "–"), words, begun,
	}
}

// TestCausesAreThoseOfTheirNeighbours: the table's words for codes and outcomes are those of the packages
// that it may not import.
func TestCausesAreThoseOfTheirNeighbours(t *testing.T) {
	assert.Equal(t, msg.OK, msg.Outcome(dispatch.DoneOK))
	assert.Equal(t, msg.FailedOutcome, msg.Outcome(dispatch.DoneFailed))
	assert.Equal(t, msg.Cancelled, msg.Outcome(dispatch.DoneCancelled))
	assert.Equal(t, msg.Refused, msg.Outcome(dispatch.DoneRefused))
	assert.Equal(t, msg.CauseClientError, dispatch.Passed.String())
	for c := range dispatch.Causes {
		row := dispatch.Cause(c).Row()
		assert.NotEmpty(t, row.Name)
		for _, code := range []string{row.Own, row.Begun} {
			assert.True(t, code == "" || openai.Status(code) != 500, code)
		}
	}
}

// RP45: which ends of requests the Router counts on, and which it learns from.
func TestWhatCausesShowOfTheLoad(t *testing.T) {
	failed := []dispatch.Cause{
		dispatch.Unreachable, dispatch.ConnRefused, dispatch.Reset, dispatch.Malformed, dispatch.Redirected,
		dispatch.RankError, dispatch.Timeout, dispatch.Busy, dispatch.EngineDead, dispatch.EngineError,
		dispatch.Empty, dispatch.Aborted, dispatch.FirstToken, dispatch.KVFailure, dispatch.UpstreamLost,
		dispatch.Stalled, dispatch.Silent, dispatch.ErrorEvent,
	}
	for c := range dispatch.Causes {
		want := routing.EndUnknown
		switch {
		case dispatch.Cause(c) == dispatch.OK:
			want = routing.EndGood
		case slices.Contains(failed, dispatch.Cause(c)):
			want = routing.EndFailed
		}
		assert.Equal(t, want, endOf(dispatch.Cause(c).String()), dispatch.Cause(c))
	}
	assert.Equal(t, routing.EndUnknown, endOf("ticket_lapsed"))
}
