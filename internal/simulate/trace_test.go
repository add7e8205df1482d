package simulate_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/simulate"
)

func readTestdata(t *testing.T, name string, most int) []simulate.Request {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name))
	require.NoError(t, err)
	defer f.Close()
	trace, _, err := simulate.ReadTrace(f, most)
	require.NoError(t, err, name)
	return trace
}

func TestMooncakeTrace(t *testing.T) {
	assert.Equal(t, []simulate.Request{
		{Prompt: 512, Output: 1, Blocks: []uint64{}},
		{At: 3 * time.Second, Prompt: 1100, Output: 5, Blocks: []uint64{7, 8}},
		{At: 4500500 * time.Microsecond, Prompt: 1600, Output: 90, Blocks: []uint64{7, 8, 10}},
	}, readTestdata(t, "mooncake.jsonl", 0))
}

// The first request in time comes at 0, and a trace may be read in part.
func TestAzureTraces(t *testing.T) {
	assert.Equal(t, []simulate.Request{
		{Prompt: 4100, Output: 230},
		{At: 250 * time.Millisecond, Prompt: 700, Output: 12},
		{At: 500 * time.Millisecond, Prompt: 64, Output: 1},
		{At: 2750 * time.Millisecond, Prompt: 64, Output: 1},
	}, readTestdata(t, "azure2023.csv", 0))
	assert.Equal(t, []simulate.Request{
		{Prompt: 1200, Output: 40},
		{At: 100 * time.Millisecond, Prompt: 35, Output: 7},
		{At: 1350 * time.Millisecond, Prompt: 2500, Output: 310},
	}, readTestdata(t, "azure2024.csv", 0))
	assert.Equal(t, []simulate.Request{
		{Prompt: 1200, Output: 40},
		{At: 100 * time.Millisecond, Prompt: 35, Output: 7},
	}, readTestdata(t, "azure2024.csv", 2))
}

func TestBadLinesAreNamed(t *testing.T) {
	const good, header = `{"timestamp": 1, "input_length": 9, "output_length": 9}` + "\n",
		"TIMESTAMP,ContextTokens,GeneratedTokens\n"
	const row = "2023-11-16 18:15:46.6805900,374,44\n"
	for text, line := range map[string]int{
		"x":           1,
		"\n\nA,B,C\n": 3,
		good + "x":    2,
		good + `{"timestamp": 1, "input_length": 0}`:                      2,
		good + `{"timestamp": 1, "input_length": 9, "output_length": -1}`: 2,
		good + good + `{"timestamp": -1, "input_length": 9}`:              3,
		`{"timestamp": 1e30, "input_length": 9}`:                          1,
		`{"timestamp": 1, "input_length": 9e18}`:                          1,
		`{"timestamp": 1, "input_length": 2000000000}`:                    1,
		`{"timestamp": 1, "input_length": 9, "hash_ids": [-1]}`:           1,
		good + row:                                              2,
		header + row + good:                                     3,
		header + row + "1,2":                                    3,
		header + row + "1,2,3":                                  3,
		header + row + row[:28] + ",x,":                         3,
		header + "2023-11-16 18:15:46,0,44\n":                   2,
		header + "2023-11-16 18:15:46,9,-4\n":                   2,
		header + row + "1823-11-16 18:15:46,9,4\n":              3,
		header + row + "2023-11-16 18:15:46,9,4,5\n":            3,
		header + row + "\"" + strings.Repeat("9", 5<<20) + "\"": 3,
	} {
		_, _, err := simulate.ReadTrace(strings.NewReader(text), 0)
		require.ErrorIs(t, err, simulate.ErrTrace, "%.200s", text)
		var bad *simulate.LineError
		require.ErrorAs(t, err, &bad, "%.200s", text)
		assert.Equal(t, line, bad.Line, "%.200s", text)
		assert.Less(t, len(err.Error()), 400)
	}
	for _, empty := range []string{"", "\n\n", header} {
		_, _, err := simulate.ReadTrace(strings.NewReader(empty), 0)
		require.ErrorIs(t, err, simulate.ErrTrace)
	}
}

// A recorder that was ended leaves a part of a line. What is before it is played.
func TestTheLastLineMayBeCut(t *testing.T) {
	const good = `{"timestamp": 1, "input_length": 9, "output_length": 9}` + "\n"
	trace, cut, err := simulate.ReadTrace(strings.NewReader(good+good+good[:30]), 0)
	require.NoError(t, err)
	assert.Len(t, trace, 2)
	assert.Equal(t, 3, cut)
	for _, text := range []string{good[:30], good + good[:30] + "\n", good + good[:30] + "\n" + good} {
		_, _, err := simulate.ReadTrace(strings.NewReader(text), 0)
		require.ErrorIs(t, err, simulate.ErrTrace, text)
	}
}

// FuzzReadTrace: whatever a file holds, a trace is in order and within its bounds, or the bad line is named.
func FuzzReadTrace(f *testing.F) {
	for _, name := range []string{"mooncake.jsonl", "azure2023.csv", "azure2024.csv"} {
		text, err := os.ReadFile(filepath.Join("testdata", name))
		require.NoError(f, err)
		f.Add(text)
	}
	f.Add([]byte("\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\n" +
		"1969-12-31 23:59:60,1,1\n9999-01-01 00:00:00Z,1,1"))
	f.Add([]byte(`{"timestamp": 3e12, "input_length": 1073741824, "output_length": 1073741824, ` +
		`"hash_ids": [18446744073709551615]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		trace, _, err := simulate.ReadTrace(bytes.NewReader(text), 0)
		if err != nil {
			require.ErrorIs(t, err, simulate.ErrTrace)
			if bad := (*simulate.LineError)(nil); errors.As(err, &bad) {
				require.Positive(t, bad.Line)
				require.LessOrEqual(t, bad.Line, 1+bytes.Count(text, []byte("\n")))
			}
			return
		}
		require.NotEmpty(t, trace)
		require.Zero(t, trace[0].At)
		last := time.Duration(0)
		for _, r := range simulate.Play(trace, 0.5, 1) {
			require.GreaterOrEqual(t, r.At, last)
			last = r.At
			require.Positive(t, r.Prompt)
			require.Positive(t, r.Output)
			require.LessOrEqual(t, len(r.Blocks), r.Prompt/simulate.BlockSize)
		}
		again, _, err := simulate.ReadTrace(bytes.NewReader(text), 1)
		require.NoError(t, err)
		require.Len(t, again, 1)
	})
}

// Rounded timestamps are spread over what they were rounded by; exact ones stay.
func TestRoundedTimesAreSpread(t *testing.T) {
	var rounded, exact []simulate.Request
	for i := range 100 {
		rounded = append(rounded, simulate.Request{At: time.Duration(i/10) * 3 * time.Second})
		exact = append(exact, simulate.Request{At: time.Duration(i) * time.Second})
	}
	distinct := map[time.Duration]bool{}
	for _, r := range simulate.Play(rounded, 2, 1) {
		distinct[r.At] = true
		assert.Less(t, r.At, 15*time.Second)
	}
	assert.Len(t, distinct, 100)
	for i, r := range simulate.Play(exact, 2, 1) {
		assert.Equal(t, time.Duration(i)*time.Second/2, r.At)
	}
}
