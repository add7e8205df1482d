package node

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func texts(s *logStore, q LogQuery) []string {
	lines, _ := s.read(&q, map[*ring]uint64{})
	out := []string{}
	for _, l := range lines {
		out = append(out, l.Text)
	}
	return out
}

func all() LogQuery { return LogQuery{Rank: -1} }

func TestTailsKeepEpochsApart(t *testing.T) {
	s := newLogStore("", slog.New(slog.DiscardHandler))
	for epoch := range uint64(3) {
		w, _ := s.open("a", "u", 0, epoch)
		_, _ = w.Write([]byte("1\n2\n"))
	}
	assert.Equal(t, []string{"1", "2"}, s.last("u", 0, 2, tailLines))
	assert.Empty(t, s.last("u", 0, 1, tailLines), "lines of a later epoch stand in front")
	assert.Empty(t, s.last("u", 9, 1, tailLines))
	assert.Len(t, texts(s, all()), 6)
}

func TestQueriesSelect(t *testing.T) {
	s := newLogStore("", slog.New(slog.DiscardHandler))
	for i, unit := range []string{"a/0", "a/1", "b/0"} {
		w, _ := s.open(unit[:1], unit, i, 1)
		_, _ = w.Write([]byte(unit + "\n"))
	}
	assert.Equal(t, []string{"a/0", "a/1", "b/0"}, texts(s, all()))
	assert.Equal(t, []string{"a/0", "a/1"}, texts(s, LogQuery{App: "a", Rank: -1}))
	assert.Equal(t, []string{"b/0"}, texts(s, LogQuery{Unit: "b/0", Rank: -1}))
	assert.Equal(t, []string{"a/1"}, texts(s, LogQuery{Rank: 1}))
	assert.Empty(t, texts(s, LogQuery{Rank: -1, Since: time.Now().Add(time.Hour)}))
}

// fill writes lines of an engine.
func fill(s *logStore, unit string, lines, length int) *lineWriter {
	w, _ := s.open(unit[:1], unit, 0, 1)
	line := []byte(strings.Repeat("x", length) + "\n")
	for range lines {
		_, _ = w.Write(line)
	}
	return w
}

// sum is what the rings of a store need, counted anew.
func sum(s *logStore) (bytes int) {
	for _, r := range s.rings {
		bytes += r.size()
	}
	return bytes
}

// Of 40 deployed and deleted applications the last lines stay for an hour.
func TestHF69DeletedApplicationsKeepTheirLastLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newLogStore("", slog.New(slog.DiscardHandler))
		none := func(string) bool { return false }
		empty := s.bytes
		crashed := fill(s, "crashed/0", 2*ringLines, 200)
		s.retire("crashed/0", false)
		assert.Equal(t, ringLines, crashed.ring.lines.Len(), "the lines before a crash are needed")
		for i := range 40 {
			unit := fmt.Sprintf("app-%d/0", i)
			fill(s, unit, 9000/40, 200) // the rest is the same
			s.retire(unit, true)
		}
		assert.Len(t, texts(s, LogQuery{Unit: "app-7/0", Rank: -1}), goneLines)
		assert.Equal(t, sum(s), s.bytes)

		s.forget(none)
		assert.Equal(t, goneLines, crashed.ring.lines.Len(), "its application is deleted too")
		again := fill(s, "app-3/0", 1, 1)
		assert.Equal(t, goneLines+1, again.ring.lines.Len(), "a rank that starts again has its lines")
		time.Sleep(goneKept)
		s.forget(none)
		assert.Equal(t, []*ring{again.ring}, slices.Collect(maps.Values(s.rings)))
		s.retire("app-3/0", true)
		time.Sleep(goneKept)
		s.forget(none)
		assert.Equal(t, empty, s.bytes)
	})
}

// All rings together are bounded. Those of ended engines go first, the quietest first; living ones share.
func TestHF69LogsInMemoryAreBounded(t *testing.T) {
	s := newLogStore("", slog.New(slog.DiscardHandler))
	const lines = 1000
	full := func(unit string) { fill(s, unit, lines, ringBytes/lines) }
	full("a/0")
	for i := range 100 {
		full(fmt.Sprintf("b/%d", i))
		s.retire(fmt.Sprintf("b/%d", i), false)
	}
	assert.LessOrEqual(t, s.bytes, ringsBytes)
	assert.Equal(t, sum(s), s.bytes)
	assert.Len(t, texts(s, LogQuery{Unit: "a/0", Rank: -1}), lines, "it lives")
	assert.Empty(t, texts(s, LogQuery{Unit: "b/0", Rank: -1}))
	assert.Len(t, texts(s, LogQuery{Unit: "b/99", Rank: -1}), lines)
	for i := range 100 {
		full(fmt.Sprintf("c/%d", i))
	}
	assert.LessOrEqual(t, s.bytes, ringsBytes)
	assert.Equal(t, sum(s), s.bytes)
	for i := range 100 {
		assert.GreaterOrEqual(t, len(texts(s, LogQuery{Unit: fmt.Sprintf("c/%d", i), Rank: -1})), lines/4)
	}
}

// HF43: They are deleted a week after their last line, and other logs are kept.
func TestLogsOfApplicationsThatAreGoneAreDeleted(t *testing.T) {
	dir := t.TempDir()
	s := newLogStore(dir, slog.New(slog.DiscardHandler))
	assert.Equal(t, filepath.Join(dir, "gone.0.1.1.log"), s.file("gone/0/1", 1))
	week := time.Now().Add(-logKept)
	for name, old := range map[string]bool{
		"gone.0.0.0.log": true, "gone.0.0.0.log.1": true, "gone.1.2.log": true, "gone.0.1.1.log": false,
		"kept.0.0.0.log": true, "mine.txt": true,
		"gone.prefill.0.0.0.log": true, "gone.decode.0.0.log.1": true,
		"kept.prefill.0.0.0.log": true, "kept.decode.0.0.log": true,
	} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		if old {
			require.NoError(t, os.Chtimes(path, week.Add(-time.Minute), week.Add(-time.Minute)))
		}
	}
	w, _ := s.open("gone", "gone/5", 0, 1)
	s.retire("gone/5", true)
	w.ring.gone = time.Now().Add(-goneKept)
	s.forget(func(name string) bool { return name == "kept" })
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	for i := range left {
		left[i] = filepath.Base(left[i])
	}
	assert.Equal(t, []string{
		"gone.0.1.1.log", "kept.0.0.0.log", "kept.decode.0.0.log", "kept.prefill.0.0.0.log", "mine.txt",
	}, left)
	assert.Empty(t, s.rings)
}

func TestDefaultsArePinned(t *testing.T) {
	assert.Equal(t, Timers{
		Probe: 10 * time.Second, Adopt: 30 * time.Second,
		PollFirst: 10 * time.Millisecond, PollLast: 200 * time.Millisecond,
		KillGrace:  5 * time.Second,
		VerifyPoll: 200 * time.Millisecond, VerifyNamed: 10 * time.Second, Rendezvous: 120 * time.Second,
		DeviceWait: 30 * time.Second, ReplicaStop: 5 * time.Second,
		LeaseTTL: 10 * time.Second, LeaseRenew: 2 * time.Second,
	}, Timers{}.withDefaults())
	assert.Equal(t, 600*time.Second, DefaultStartupTimeout)
	assert.Equal(t, [...]int{1024, 4096}, [...]int{mailboxBound, ringLines})
}
