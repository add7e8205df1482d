package node

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
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

// TestLinesAreTheSameHoweverTheyAreCutIntoWrites compares with strings.Split.
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
		w.end()
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
	long := strings.Repeat("x", lineLimit+10)
	_, _ = w.Write([]byte(long + "tail of the same line\nnext\n"))
	got := texts(s, all())
	require.Len(t, got, 2)
	assert.Equal(t, [...]any{lineLimit, "next"}, [...]any{len(got[0]), got[1]})

	for range ringLines {
		_, _ = other.Write([]byte("y\n"))
	}
	assert.Len(t, texts(s, all()), ringLines)
	for range 40 {
		_, _ = w.Write([]byte(long + "\n"))
	}
	assert.LessOrEqual(t, s.rings[logKey{"u", 0}].bytes, ringBytes)
	assert.LessOrEqual(t, len(texts(s, all())), ringBytes/lineLimit)
	_, _ = w.Write([]byte{'a', 0xff, '\n'})
	last := s.tail("u", 0, 1)
	assert.Equal(t, "a�", last[len(last)-1])
}

func TestTailsKeepEpochsApart(t *testing.T) {
	s := newLogStore("", slog.New(slog.DiscardHandler))
	for epoch := range uint64(3) {
		w, _ := s.open("a", "u", 0, epoch)
		_, _ = w.Write([]byte("1\n2\n"))
	}
	assert.Equal(t, []string{"1", "2"}, s.tail("u", 0, 2))
	assert.Empty(t, s.tail("u", 0, 1), "lines of a later epoch stand in front")
	assert.Empty(t, s.tail("u", 9, 1))
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

func TestOldLogsMakeRoom(t *testing.T) {
	s := newLogStore("", slog.New(slog.DiscardHandler))
	for i := range logsKept + 5 {
		w, _ := s.open("a", "u", i, 1)
		_, _ = w.Write([]byte("x\n"))
	}
	assert.Len(t, s.rings, logsKept)
	assert.Empty(t, s.tail("u", 0, 1))
	assert.NotEmpty(t, s.tail("u", logsKept+4, 1))
}

func TestLogFilesAreTurnedOver(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "logs")
	s := newLogStore(dir, slog.New(slog.DiscardHandler))
	w, _ := s.open("a", "a/0/1", 1, 1)
	_, _ = w.Write([]byte("first\n"))
	w.ring.file.size = logFileSize
	_, _ = w.Write([]byte("second\n"))
	s.close()
	for name, want := range map[string]string{"a.0.1.1.log": " stdout second\n", "a.0.1.1.log.1": " stdout first\n"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		assert.True(t, strings.HasSuffix(string(b), want), "%s: %q", name, b)
	}

	broken := newLogStore(filepath.Join(dir, "a.0.1.1.log"), slog.New(slog.DiscardHandler)) // a file, not a folder
	w, _ = broken.open("a", "u", 0, 1)
	_, err := w.Write([]byte("kept in memory\n"))
	require.NoError(t, err)
	assert.Equal(t, []string{"kept in memory"}, texts(broken, all()))
}

// FuzzLineWriter: an engine may write anything; what is kept is bounded, valid UTF-8 and without line ends.
func FuzzLineWriter(f *testing.F) {
	f.Add([]byte("a\nb"), 1)
	f.Add([]byte("\r\n\xff\n"), 2)
	f.Fuzz(func(t *testing.T, text []byte, at int) {
		s := newLogStore("", slog.New(slog.DiscardHandler))
		w, _ := s.open("a", "u", 0, 1)
		at = min(max(at, 0), len(text))
		_, _ = w.Write(text[:at])
		_, _ = w.Write(text[at:])
		w.end()
		for _, line := range texts(s, all()) {
			if !utf8.ValidString(line) || strings.Contains(line, "\n") || len(line) > 3*lineLimit {
				t.Fatalf("%q", line)
			}
		}
	})
}

func TestDefaultsArePinned(t *testing.T) {
	assert.Equal(t, Timers{
		Canary: 10 * time.Second, PollFirst: 10 * time.Millisecond, PollLast: 200 * time.Millisecond, KillGrace: 5 * time.Second,
		VerifyPoll: 200 * time.Millisecond, VerifyNamed: 10 * time.Second, Rendezvous: 120 * time.Second, ReplicaStop: 5 * time.Second,
		LeaseTTL: 10 * time.Second, LeaseRenew: 2 * time.Second,
	}, Timers{}.withDefaults())
	assert.Equal(t, 600*time.Second, DefaultStartupTimeout)
	assert.Equal(t, [...]int{1024, 4096, 65536, 10 << 20}, [...]int{mailboxBound, ringLines, lineLimit, logFileSize})
}
