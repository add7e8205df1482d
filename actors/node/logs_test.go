package node

import (
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/process"
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

// strings.Split is the oracle.
func TestLinesAreTheSameHoweverTheyAreCutIntoWrites(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		text := rapid.StringMatching(`[a-zé\r\n]{0,60}`).Draw(r, "text")
		s := newLogStore("", slog.New(slog.DiscardHandler))
		w, _ := s.open("a", "u", 0, 1)
		for rest := []byte(text); len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(r, "n")
			got, err := w.Write(rest[:n])
			require.NoError(r, err)
			require.Equal(r, n, got)
			rest = rest[n:]
		}
		w.End()
		want := strings.Split(text, "\n")
		if want[len(want)-1] == "" {
			want = want[:len(want)-1]
		}
		for i := range want {
			want[i] = strings.TrimSuffix(want[i], "\r")
		}
		assert.Equal(r, append([]string{}, want...), texts(s, all()))
	})
}

func TestTheRingIsBounded(t *testing.T) {
	s := newLogStore("", slog.New(slog.DiscardHandler))
	w, other := s.open("a", "u", 0, 1)
	long := strings.Repeat("x", process.LineLimit+10)
	_, _ = w.Write([]byte(long + "tail of the same line\nnext\n"))
	got := texts(s, all())
	require.Len(t, got, 2)
	assert.Equal(t, [...]any{process.LineLimit, "next"}, [...]any{len(got[0]), got[1]})

	for range ringLines {
		_, _ = other.Write([]byte("y\n"))
	}
	assert.Len(t, texts(s, all()), ringLines)
	for range 40 {
		_, _ = w.Write([]byte(long + "\n"))
	}
	assert.LessOrEqual(t, s.rings[logKey{"u", 0}].bytes, ringBytes)
	assert.LessOrEqual(t, len(texts(s, all())), ringBytes/process.LineLimit)
	_, _ = w.Write([]byte{'a', 0xff, '\n'})
	last := s.last("u", 0, 1, tailLines)
	assert.Equal(t, "a�", last[len(last)-1])
}

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

// descriptors counts the files below a folder that this process has open; -1: this system does not tell.
func descriptors(dir string) (n int) {
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return -1
	}
	for _, name := range names {
		if to, err := os.Readlink("/proc/self/fd/" + name.Name()); err == nil && strings.HasPrefix(to, dir) {
			n++
		}
	}
	return n
}

// sum is what the rings of a store need, counted anew.
func sum(s *logStore) (bytes int) {
	for _, r := range s.rings {
		bytes += r.size()
	}
	return bytes
}

// Of 40 deployed and deleted applications the last lines stay for an hour, and no descriptor.
func TestHF69DeletedApplicationsKeepTheirLastLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := newLogStore(dir, slog.New(slog.DiscardHandler))
		defer s.close()
		none := func(string) bool { return false }
		empty := s.bytes
		crashed := fill(s, "crashed/0", 2*ringLines, 200)
		synctest.Wait()
		s.retire("crashed/0", false)
		synctest.Wait()
		assert.Len(t, crashed.ring.lines, ringLines, "the lines before a crash are needed")
		for i := range 40 {
			unit := fmt.Sprintf("app-%d/0", i)
			fill(s, unit, 9000/40, 200) // the rest is the same
			s.retire(unit, true)
			synctest.Wait()
		}
		assert.LessOrEqual(t, descriptors(dir), 0)
		assert.Len(t, texts(s, LogQuery{Unit: "app-7/0", Rank: -1}), goneLines)
		assert.Equal(t, sum(s), s.bytes)
		text, err := os.ReadFile(filepath.Join(dir, "app-7.0.0.log"))
		require.NoError(t, err)
		assert.Equal(t, 9000/40, strings.Count(string(text), "\n"), "the file has all lines")

		s.forget(none)
		synctest.Wait()
		assert.Len(t, crashed.ring.lines, goneLines, "its application is deleted too")
		again := fill(s, "app-3/0", 1, 1)
		assert.Len(t, again.ring.lines, goneLines+1, "a rank that starts again has its lines")
		time.Sleep(goneKept)
		s.forget(none)
		assert.Equal(t, []*ring{again.ring}, slices.Collect(maps.Values(s.rings)))
		s.retire("app-3/0", true)
		time.Sleep(goneKept)
		s.forget(none)
		assert.Equal(t, empty, s.bytes)
		assert.LessOrEqual(t, descriptors(dir), 0)
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

func TestLogFilesAreTurnedOver(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "logs")
	s := newLogStore(dir, slog.New(slog.DiscardHandler))
	w, _ := s.open("a", "a/0/1", 1, 1)
	_, _ = w.Write([]byte("first\n"))
	s.settle(t, w.ring)
	w.ring.file.Limit = 1
	_, _ = w.Write([]byte("second\n"))
	s.close()
	for name, want := range map[string]string{
		"a.0.1.1.log":   " stdout second\n",
		"a.0.1.1.log.1": " stdout first\n",
	} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		assert.True(t, strings.HasSuffix(string(b), want), "%s: %q", name, b)
	}

	// a file, not a folder
	broken := newLogStore(filepath.Join(dir, "a.0.1.1.log"), slog.New(slog.DiscardHandler))
	w, _ = broken.open("a", "u", 0, 1)
	_, err := w.Write([]byte("kept in memory\n"))
	require.NoError(t, err)
	assert.Equal(t, []string{"kept in memory"}, texts(broken, all()))
	broken.close()
}

// settle waits until a ring's writer has ended.
func (s *logStore) settle(t *testing.T, r *ring) {
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return !r.writing
	}, time.Minute, time.Millisecond)
}

// HF43: Only the file is delayed, not lines, tails, other ranks and their files, starts, or the end of the
// node. The file is a pipe without a reader: opening it hangs.
func TestALogDiskThatHangsHoldsUpNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "a.0.0.0.log")
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	s := newLogStore(dir, slog.New(slog.DiscardHandler))
	w, _ := s.open("a", "a/0/0", 0, 1)
	for range 3 * ringLines {
		_, _ = w.Write([]byte("x\n"))
	}
	_, _ = w.Write([]byte("the last without its end"))
	w.End()
	assert.Equal(t, "the last without its end", s.last("a/0/0", 0, 1, tailLines)[tailLines-1])
	other, _ := s.open("a", "a/0/1", 1, 1)
	_, _ = other.Write([]byte("y\n"))
	s.settle(t, other.ring)
	b, err := os.ReadFile(filepath.Join(dir, "a.0.1.1.log"))
	require.NoError(t, err)
	assert.Contains(t, string(b), " stdout y\n")
	s.close()

	pipe, err := os.OpenFile(path, os.O_RDWR, 0) // the disk answers again
	require.NoError(t, err)
	go func() { _, _ = io.Copy(io.Discard, pipe) }()
	s.writers.Wait()
	require.NoError(t, pipe.Close())
}

// The number of missing lines is in the file.
func TestLinesThatADiskDoesNotTakeInTimeAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, s, w := withFullDisk(t)
		for range 3 * ringLines {
			_, _ = w.Write([]byte("x\n"))
		}
		time.Sleep(time.Second)
		require.NoError(t, os.Remove(filepath.Join(dir, "a.0.0.0.log")))
		time.Sleep(logRetry)
		s.close()
		b, err := os.ReadFile(filepath.Join(dir, "a.0.0.0.log"))
		require.NoError(t, err)
		lines := strings.Split(strings.TrimSpace(string(b)), "\n")
		// the note counts the first line too
		assert.Contains(t, lines[0], " dpserve 8193 lines are missing here")
		assert.Len(t, lines, 1+ringLines)
	})
}

// withFullDisk is a store with a rank whose file accepts nothing, and one unwritten line.
func withFullDisk(t *testing.T) (dir string, s *logStore, w *lineWriter) {
	dir = t.TempDir()
	require.NoError(t, os.Symlink("/dev/full", filepath.Join(dir, "a.0.0.0.log")))
	s = newLogStore(dir, slog.New(slog.DiscardHandler))
	w, _ = s.open("a", "a/0/0", 0, 1)
	_, _ = w.Write([]byte("first\n"))
	synctest.Wait()
	return dir, s, w
}

// HF43: The file then also has the lines written meanwhile.
func TestALogFileIsTriedAgainAfterAFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, s, w := withFullDisk(t)
		path := filepath.Join(dir, "a.0.0.0.log")
		require.NoError(t, os.Remove(path))
		_, _ = w.Write([]byte("second\n"))
		time.Sleep(logRetry / 2)
		assert.NoFileExists(t, path)
		time.Sleep(logRetry)
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Regexp(t, "(?s)^[^ ]+ stdout first\n[^ ]+ stdout second\n$", string(b))
		s.close()
	})
}

// HF43: They are deleted a week after their last line, and other logs are kept.
func TestLogsOfApplicationsThatAreGoneAreDeleted(t *testing.T) {
	dir := t.TempDir()
	s := newLogStore(dir, slog.New(slog.DiscardHandler))
	defer s.close()
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

// An engine that fills its log costs a bounded amount of memory and disk and is not slowed down by the disk:
// 64 MiB here, which turn the files over six times.
func TestALogThatGrowsForEverKeepsItsBounds(t *testing.T) {
	dir := t.TempDir()
	s := newLogStore(dir, slog.New(slog.DiscardHandler))
	w, _ := s.open("a", "a/0/0", 0, 1)
	line := []byte(strings.Repeat("x", 1<<10-1) + "\n")
	for i := range 64 << 10 {
		_, _ = w.Write(line)
		if i%(1<<12) == 0 {
			s.settle(t, w.ring) // the disk takes all lines
		}
	}
	s.mu.Lock()
	kept, size := len(w.ring.lines), w.ring.bytes
	s.mu.Unlock()
	assert.LessOrEqual(t, kept, ringLines)
	assert.LessOrEqual(t, size, ringBytes)
	s.close()
	for _, name := range []string{"a.0.0.0.log", "a.0.0.0.log.1"} {
		f, err := os.Stat(filepath.Join(dir, name))
		require.NoError(t, err)
		assert.LessOrEqual(t, f.Size(), int64(logFileSize+process.LineLimit))
	}
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Len(t, files, 2)
}

// FuzzLineWriter: an engine may write anything. The kept lines are bounded, valid UTF-8 and without line
// ends.
func FuzzLineWriter(f *testing.F) {
	f.Add([]byte("a\nb"), 1)
	f.Add([]byte("\r\n\xff\n"), 2)
	f.Fuzz(func(t *testing.T, text []byte, at int) {
		s := newLogStore("", slog.New(slog.DiscardHandler))
		w, _ := s.open("a", "u", 0, 1)
		at = min(max(at, 0), len(text))
		_, _ = w.Write(text[:at])
		_, _ = w.Write(text[at:])
		w.End()
		for _, line := range texts(s, all()) {
			if !utf8.ValidString(line) || strings.Contains(line, "\n") || len(line) > 3*process.LineLimit {
				t.Fatalf("%q", line)
			}
		}
	})
}

func TestDefaultsArePinned(t *testing.T) {
	assert.Equal(t, Timers{
		Canary: 10 * time.Second, Adopt: 30 * time.Second,
		PollFirst: 10 * time.Millisecond, PollLast: 200 * time.Millisecond,
		KillGrace:  5 * time.Second,
		VerifyPoll: 200 * time.Millisecond, VerifyNamed: 10 * time.Second, Rendezvous: 120 * time.Second,
		DeviceWait: 30 * time.Second, ReplicaStop: 5 * time.Second,
		LeaseTTL: 10 * time.Second, LeaseRenew: 2 * time.Second,
	}, Timers{}.withDefaults())
	assert.Equal(t, 600*time.Second, DefaultStartupTimeout)
	assert.Equal(t, [...]int{1024, 4096, 65536, 10 << 20},
		[...]int{mailboxBound, ringLines, process.LineLimit, logFileSize})
}
