package tracefile

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/simulate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func create(t *testing.T, path string) (*Recorder, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	r, err := Create(path, slog.New(slog.NewTextHandler(&log, nil)))
	require.NoError(t, err)
	return r, &log
}

// TestSimulateReadsARecording: every request is in the file, with its time, its lengths, and the hashes that
// tell which prompts have an equal beginning; no text is.
func TestSimulateReadsARecording(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	r, log := create(t, path)
	text := strings.Repeat("You are a helpful assistant. ", 400)
	other := text[:5000] + strings.Repeat("something else, ", 400)
	ids := make([]uint32, 1300)
	add := func(after time.Duration, blocks []uint64) {
		r.Add(Request{At: r.begin.Add(after), Input: 3000, Output: 7, Blocks: blocks})
	}
	add(2*time.Second, r.Hashes("a", nil, []byte(text)))
	add(3*time.Second, r.Hashes("a", nil, []byte(other)))
	add(4*time.Second, r.Hashes("b", nil, []byte(text)))
	add(time.Second, r.Hashes("a", ids, nil))
	add(0, nil)
	r.Add(Request{At: r.begin}) // its prompt is not known
	r.Close()
	r.Close()
	r.Add(Request{At: r.begin, Input: 1})
	assert.Contains(t, log.String(), "requests=5 dropped=0")

	written, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.NotContains(t, string(written), "helpful")
	assert.True(t, strings.HasPrefix(string(written),
		`{"timestamp":2000,"input_length":3000,"output_length":7,"hash_ids":[`))
	requests, cut, err := simulate.ReadTrace(bytes.NewReader(written), 0)
	require.NoError(t, err)
	require.Len(t, requests, 5)
	assert.Zero(t, cut)
	var at []time.Duration
	for i := range requests {
		at = append(at, requests[i].At)
	}
	assert.Equal(t, []time.Duration{0, time.Second, 2 * time.Second, 3 * time.Second, 4 * time.Second}, at)
	first, second, third := requests[2].Blocks, requests[3].Blocks, requests[4].Blocks
	assert.Len(t, first, 5, "of 11,600 bytes")
	assert.Equal(t, first[:2], second[:2], "5,000 bytes are equal")
	assert.NotEqual(t, first[2], second[2])
	assert.NotEqual(t, first[0], third[0], "another salt")
	assert.Len(t, requests[1].Blocks, 2, "of 1,300 token ids")
	assert.Empty(t, requests[0].Blocks)

	again, _ := create(t, path)
	assert.Equal(t, path+".1", again.Path(), "the old file stays")
	assert.NotEqual(t, first, again.Hashes("a", nil, []byte(text)), "each file has hashes of its own")
	again.Close()
}

// TestARecordingEndsAtItsLimit with a whole line, and says so once; later requests are no fault. A file that
// cannot be made is an error.
func TestARecordingEndsAtItsLimit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	r, log := create(t, path)
	r.limit = 1000
	for i := range 100 {
		r.Add(Request{At: r.begin, Input: 100 + i})
	}
	r.Close()
	written, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.LessOrEqual(t, len(written), 1000)
	requests, _, err := simulate.ReadTrace(bytes.NewReader(written), 0)
	require.NoError(t, err)
	assert.Len(t, requests, r.written)
	assert.Equal(t, 1, strings.Count(log.String(), "the trace ends early"), log)

	_, err = Create(filepath.Join(path, "below a file"), slog.Default())
	require.Error(t, err)
	assert.Contains(t, fmt.Sprint(err), "record a trace")
}
