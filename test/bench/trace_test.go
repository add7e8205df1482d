//go:build linux

package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/tracesim"
)

// traceArgs are the flags of the role trace as a command line sets them.
func traceArgs(t *testing.T, args ...string) *traceFlags {
	t.Helper()
	var f traceFlags
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	f.register(flags)
	require.NoError(t, flags.Parse(args))
	require.NoError(t, f.takeFile(flags.Args()))
	return &f
}

// smallTrace is a file of 60 requests, every second of which continues the one before.
func smallTrace(t *testing.T) string {
	t.Helper()
	var text strings.Builder
	for i := range 60 {
		blocks := []int{i / 2 * 10, i/2*10 + 1, i/2*10 + 2, i/2*10 + 3}
		fmt.Fprintf(&text, `{"timestamp": %d, "input_length": %d, "output_length": 20, "hash_ids": %s}`+"\n",
			1000*i, 1025+512*2*(i%2), strings.ReplaceAll(fmt.Sprint(blocks[:2+2*(i%2)]), " ", ","))
	}
	file := filepath.Join(t.TempDir(), "small.jsonl")
	require.NoError(t, os.WriteFile(file, []byte(text.String()), 0o600))
	return file
}

func TestTraceTables(t *testing.T) {
	var out bytes.Buffer
	f := traceArgs(t, "-load", "1,2", "-ingresses", "1,3", "-lag", "0s,50ms", "-paired", "lmetric-1",
		"-goals", "1s,30ms", smallTrace(t))
	require.NoError(t, f.run(t.Context(), &out, os.Stderr, "round-robin,kv-tuned", 3))
	tables := strings.Split(strings.TrimSpace(out.String()), "\n\n")
	require.Len(t, tables, 8, "each combination has a table")
	assert.Contains(t, tables[0], "small.jsonl, load 1: 60 requests on 8 ranks of 699392 tokens; "+
		"ingresses 1, records 0s old, seeds 3\n")
	assert.Contains(t, tables[1], "ingresses 1, records 50ms old")
	assert.Contains(t, tables[2], "ingresses 3, records 0s old")
	assert.Contains(t, tables[4], "load 2: ")
	for _, table := range tables {
		assert.Contains(t, table,
			"goals: first token within 1s, 30ms per token after it; 100.0 % of the requests")
		lines := strings.Split(table, "\n")[2:]
		require.Len(t, lines, 4, "the row that the others are paired with is there")
		for i, name := range []string{"round-robin", "kv-tuned", "lmetric-1"} {
			assert.Truef(t, strings.HasPrefix(lines[1+i], name+" "), "%s", lines[1+i])
			assert.Len(t, []rune(lines[1+i]), len([]rune(lines[0])), "columns are aligned")
			assert.Equal(t, 1+b2i(name != "lmetric-1"), strings.Count(lines[1+i], "±"))
		}
		assert.Contains(t, lines[0], "over lmetric-1")
		assert.Regexp(t, `lmetric-1 +100\.0 ± 0\.0 +100\.0 .* 33\.3 +33\.3 `, lines[3],
			"the second prompt of each pair finds the blocks of the first")
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// TestRunsBesideEachOther: the tables do not depend on how many runs there are at a time.
func TestRunsBesideEachOther(t *testing.T) {
	f := traceArgs(t, "-trace", "chats", "-requests", "150", "-load", "8,20", "-ingresses", "1,4", "-lag",
		"20ms")
	rows, err := f.rows("round-robin,lmetric-1,lpwl,cache-aware")
	require.NoError(t, err)
	var texts []string
	for _, workers := range []int{1, 2, 7} {
		cells, err := f.cells(len(rows), 2)
		require.NoError(t, err)
		work, err := openWorkload(f.trace, f.requests)
		require.NoError(t, err)
		var out bytes.Buffer
		require.NoError(t, playAll(t.Context(), cells, rows, work, workers, nil,
			func(c *cell) { f.write(&out, c, rows) }))
		texts = append(texts, out.String())
	}
	assert.Equal(t, texts[0], texts[1])
	assert.Equal(t, texts[0], texts[2])
	assert.Equal(t, 4, strings.Count(texts[0], "chats, load"))
}

func TestTraceEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out bytes.Buffer
	err := traceArgs(t, "uniform").run(ctx, &out, os.Stderr, "random,round-robin", 3)
	require.Error(t, err)
	assert.Empty(t, out.String())
}

func TestTraceFlagsAreChecked(t *testing.T) {
	for flagName, values := range map[string][]string{
		"-load": {"0", "-1", "NaN", "1,,2", "1e9"}, "-ingresses": {"0", "x", "5000"},
		"-lag": {"-1s", "5", "2h"}, "-goals": {"1", "x,y"},
	} {
		for _, value := range values {
			var f traceFlags
			flags := flag.NewFlagSet("bench", flag.ContinueOnError)
			flags.SetOutput(io.Discard)
			f.register(flags)
			require.Error(t, flags.Parse([]string{flagName, value}), "%s %s", flagName, value)
		}
	}
	for _, goals := range []string{"2s", "2s,0s", "1s,1s,1s"} {
		_, err := traceArgs(t, "-goals", goals).cells(1, 1)
		require.ErrorIs(t, err, errUsage, goals)
	}
	_, err := traceArgs(t, "-paired", "nothing").rows("")
	require.ErrorIs(t, err, errUsage)
	_, err = traceArgs(t, "-paired", "nothing").rows("kv")
	require.ErrorContains(t, err, `no row "nothing"`)
	_, err = traceArgs(t, "-paired", "kv,lpwl").rows("kv,lpwl")
	require.Error(t, err, "one row")
	require.ErrorIs(t, new(traceFlags).takeFile([]string{"file", "-load"}), errUsage)
	err = traceArgs(t, filepath.Join(t.TempDir(), "none")).run(t.Context(), nil, os.Stderr, "", 1)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestWorkloadsAreListed(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, traceArgs(t).run(t.Context(), &out, os.Stderr, "", 1))
	for _, g := range generatedWorkloads() {
		assert.Contains(t, out.String(), "\n  "+g.name+" ")
		work, err := openWorkload(g.name, 700)
		require.NoError(t, err)
		requests := work(1, 5)
		assert.NotEmpty(t, requests, g.name)
		assert.LessOrEqual(t, len(requests), 700, g.name)
		assert.True(t, slices.IsSortedFunc(requests,
			func(a, b tracesim.Request) int { return int(a.At - b.At) }), g.name)
	}
}

func TestBurstsHaveTheirOwnColumn(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, traceArgs(t, "-trace", "bursts", "-load", "0.125", "-slow", "5").run(t.Context(), &out,
		os.Stderr, "round-robin", 1))
	assert.Contains(t, out.String(), "of a burst")
	assert.Contains(t, out.String(), "slow rank's share")
	assert.NotContains(t, out.String(), "±", "one seed says nothing of the others")
}

func TestHalfWidth(t *testing.T) {
	half, ok := halfWidth([]float64{1, 2, 3})
	assert.True(t, ok)
	assert.InDelta(t, 4.303/1.7320508, half, 1e-3)
	_, ok = halfWidth([]float64{1})
	assert.False(t, ok)
	assert.InDelta(t, 2.0423, studentT(30), 1e-3)
	assert.InDelta(t, 2.0395, studentT(31), 5e-3)
	assert.InDelta(t, 1.9840, studentT(100), 1e-3)
	for freedom := 1; freedom < 200; freedom++ {
		assert.Greater(t, studentT(freedom), studentT(freedom+1))
	}
}

func TestProgressSaysWhatIsLeft(t *testing.T) {
	begin := time.Unix(0, 0)
	p := &progress{width: 200, total: 4, began: begin}
	a, b := p.begin("mex seed 11"), p.begin("lmetric-1 seed 12")
	p.advance(a, .5)
	assert.Equal(t, "0 of 4 runs, 35s left: mex seed 11 50 %, lmetric-1 seed 12 0 %",
		p.line(begin.Add(5*time.Second)))
	p.advance(b, .5)
	p.end(a)
	assert.Equal(t, "1 of 4 runs, 10s left: lmetric-1 seed 12 50 %", p.line(begin.Add(6*time.Second)))
	p.width = 12
	assert.Equal(t, "1 of 4 runs", p.line(begin.Add(6*time.Second)))
	var none *progress
	none.end(none.begin("x"))
	none.wipe()
	none.stop()
}
