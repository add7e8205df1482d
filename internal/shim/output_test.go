package shim

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/lines"
)

const outputFile = "out.log"

func texts(lines []Line) []string {
	var out []string
	for i := range lines {
		out = append(out, lines[i].Text)
	}
	return out
}

// A reader gets batches of a bounded size, and is told how many lines it has missed and when none follows.
func TestRing(t *testing.T) {
	r := newRing()
	for i := range ringLines + 10 {
		r.add(Stdout, fmt.Sprint(i), false)
	}
	b := r.from(3)
	assert.Equal(t, uint64(7), b.missed)
	assert.Equal(t, [...]any{"10", uint64(10)}, [...]any{b.lines[0].Text, b.lines[0].Number})
	assert.Equal(t, uint64(ringLines+10), b.next)
	assert.False(t, b.ended)
	r.writer(Stderr).Take("the last one")
	r.end()
	<-b.changed
	b = r.from(b.next)
	assert.Equal(t, []string{"the last one"}, texts(b.lines))
	assert.True(t, b.ended)
	b = r.from(1 << 20)
	assert.Empty(t, b.lines)
	assert.True(t, b.ended)

	for range ringBytes / lines.Limit {
		r.add(Stdout, strings.Repeat("x", lines.Limit), false)
	}
	assert.Len(t, r.from(0).lines, batchBytes/lines.Limit)
}

// EN3, HF43: Lines that leave the ring while the disk does not take them are counted in the file, and neither
// the engine nor a reader waits.
func TestAFullDiskStopsTheFileOnly(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("needs /dev/full")
	}
	path := filepath.Join(t.TempDir(), outputFile)
	require.NoError(t, os.Symlink("/dev/full", path))
	synctest.Test(t, func(t *testing.T) {
		r, done, written := newRing(), make(chan struct{}), make(chan struct{})
		go func() {
			defer close(written)
			keepOutput(r, &diskfile.Log{Path: path, Limit: outputSize}, time.Minute, done)
		}()
		for i := range ringLines + 5 {
			r.add(Stdout, fmt.Sprint("line ", i), false)
		}
		time.Sleep(time.Second)
		require.NoError(t, os.Remove(path))
		time.Sleep(time.Minute)
		r.add(Stdout, "the last one", false)
		r.end()
		<-written
		select {
		case <-done:
		default:
			close(done)
		}
	})
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	assert.Len(t, lines, ringLines+2)
	assert.Contains(t, lines[0], "dpserve 5 lines are missing here")
	assert.True(t, strings.HasSuffix(lines[1], " stdout line 5"), lines[1])
	last := LastLines(path, time.Time{}, 2)
	assert.Equal(t, []string{fmt.Sprint("line ", ringLines+4), "the last one"}, texts(last))
}

// EN3: Two files of at most 10 MiB and a line hold what an engine prints, however much it is.
func TestTheFilesAreBounded(t *testing.T) {
	dir := t.TempDir()
	file := &diskfile.Log{Path: filepath.Join(dir, outputFile), Limit: 1000}
	r, done := newRing(), make(chan struct{})
	for i := range ringLines {
		r.add(Stderr, fmt.Sprint("line ", i), false)
	}
	r.end()
	keepOutput(r, file, time.Minute, done)
	names, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Len(t, names, 2)
	for _, n := range names {
		info, err := n.Info()
		require.NoError(t, err)
		assert.Less(t, info.Size(), int64(1100))
	}
	assert.Equal(t, fmt.Sprint("line ", ringLines-1), LastLines(file.Path, time.Time{}, 1)[0].Text)
	assert.Empty(t, LastLines(file.Path, time.Now().Add(time.Hour), 5), "an earlier engine wrote them")
	assert.Empty(t, LastLines(filepath.Join(dir, "none"), time.Time{}, 5))
}

// A progress bar is passed on at most once a second, and its last state is a line.
func TestProgressBars(t *testing.T) {
	for written, want := range map[string][]string{
		"plain\n":                           {"plain"},
		"a\r\nb\r\n":                        {"a", "b"},
		"\rload 1\r|load 2":                 {"load 1~"},
		"load 1\r|":                         {"load 1~"},
		"load 1\r|\n":                       {"load 1~", "load 1"},
		"load 1\r|load 2\r|load 3\r|done\n": {"load 1~", "done"},
		"\r\r\r":                            nil,
	} {
		r := newRing()
		w := r.writer(Stderr)
		for part := range strings.SplitSeq(written, "|") {
			_, _ = w.Write([]byte(part))
		}
		var got []string
		for _, l := range r.from(0).lines {
			if l.Bar {
				l.Text += "~"
			}
			got = append(got, l.Text)
		}
		assert.Equal(t, want, got, "%q", written)
	}
}

func TestFileLines(t *testing.T) {
	when := time.UnixMilli(1_700_000_000_123)
	l, ok := parseFileLine(fileLine(when, Stderr, "a b  c") + "\n")
	assert.True(t, ok)
	assert.Equal(t, Line{At: when.UnixMilli(), Stream: Stderr, Text: "a b  c"}, l)
	for _, bad := range []string{
		"", "x", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z stdout", "half of it stdout text",
		"2026-01-01T00:00:00Z dpserve 5 lines are missing here",
	} {
		_, ok := parseFileLine(bad)
		assert.False(t, ok, bad)
	}
}
