package lines_test

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/lines"
)

// split writes parts to a Writer with bars, and returns what it passes on: "~" ends a bar's text.
func split(parts ...string) (out []string) {
	w := lines.Writer{
		Take: func(line string) { out = append(out, line) },
		Bar:  func(text string) { out = append(out, text+"~") },
	}
	for _, part := range parts {
		_, _ = w.Write([]byte(part))
	}
	w.End()
	return out
}

func TestWriter(t *testing.T) {
	long := strings.Repeat("x", lines.Limit)
	for _, c := range []struct{ parts, want []string }{
		{[]string{"one\r\ntw", "o\n", "half"}, []string{"one", "two", "half"}},
		{[]string{"\xff\n", "\n"}, []string{"\ufffd", ""}},
		{[]string{long + "and", " its tail\nnext\n"}, []string{long, "next"}},
		{[]string{long, "\nnext"}, []string{long, "next"}},
		{[]string{"\rload 1\r", "load 2\r", "done\n"}, []string{"load 1~", "load 2~", "done"}},
	} {
		assert.Equal(t, c.want, split(c.parts...), "%.40q", c.parts)
	}
}

// The lines are the same however they are cut into writes; strings.Split is the oracle.
func TestWriterDoesNotDependOnTheCuts(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		text := rapid.StringMatching(`[a-zé\r\n]{0,60}`).Draw(r, "text")
		got := []string{}
		w := lines.Writer{Take: func(line string) { got = append(got, line) }}
		for rest := []byte(text); len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(r, "n")
			written, err := w.Write(rest[:n])
			require.NoError(r, err)
			require.Equal(r, n, written)
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
		assert.Equal(r, append([]string{}, want...), got)
	})
}

// FuzzWriter: an engine may write anything. Lines are bounded, valid UTF-8 and without line ends.
func FuzzWriter(f *testing.F) {
	f.Add([]byte("a\nb"), 1)
	f.Add([]byte("\r\n\xff\n"), 2)
	f.Fuzz(func(t *testing.T, text []byte, at int) {
		at = min(max(at, 0), len(text))
		for _, line := range split(string(text[:at]), string(text[at:])) {
			if !utf8.ValidString(line) || strings.Contains(line, "\n") || len(line) > 3*lines.Limit+1 {
				t.Fatalf("%q", line)
			}
		}
	})
}

// A ring keeps the newest entries within both bounds; a reader sees by the number which ones it has missed.
func TestRing(t *testing.T) {
	r := lines.Ring[string]{Most: 4, MostBytes: 10, Size: func(s *string) int { return len(*s) }}
	for _, step := range []struct {
		add   string
		want  string // all that is kept
		first uint64
		bytes int
	}{
		{"a", "a", 0, 1},
		{"b", "a b", 0, 2},
		{"c", "a b c", 0, 3},
		{"d", "a b c d", 0, 4},
		{"e", "b c d e", 1, 4},
		{"1234567", "c d e 1234567", 2, 10},
		{"12", "e 1234567 12", 4, 10},
		{"longer than all", "longer than all", 7, 15},
		{"f", "f", 8, 1},
	} {
		r.Add(step.add)
		held, first := r.From(0)
		assert.Equal(t, step.want, strings.Join(held, " "))
		assert.Equal(t, step.first, first, step.want)
		assert.Equal(t, step.bytes, r.Bytes(), step.want)
		assert.Equal(t, first+uint64(r.Len()), r.Next(), step.want)
	}
	r.Add("g")
	r.Add("h")
	for number, want := range map[uint64]string{
		0: "8 [f g h]", 8: "8 [f g h]", 10: "10 [h]", 11: "11 []", 99: "11 []",
	} {
		held, first := r.From(number)
		assert.Equal(t, want, fmt.Sprint(first, " ", held))
	}
	r.Keep(5)
	assert.Equal(t, 3, r.Len())
	r.Keep(1)
	held, first := r.From(0)
	assert.Equal(t, "10 [h]", fmt.Sprint(first, " ", held))
	assert.Equal(t, 1, r.Bytes())
}
