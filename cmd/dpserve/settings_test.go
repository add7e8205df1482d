package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/problem"
)

// TestForeignLines: the launch lines of other programs work with the program's name replaced, and a flag that
// dpserve lacks is refused with what to write instead. DPSERVE_UPDATE=1 writes testdata/foreign.txt anew.
func TestForeignLines(t *testing.T) {
	engine := func() string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"data": [{"id": "M", "owned_by": "sglang"}]}`)
		}))
		t.Cleanup(s.Close)
		return strings.TrimPrefix(s.URL, "http://")
	}
	first, second := engine(), engine()
	toAddress := strings.NewReplacer("U1", first, "U2", second)
	toName := strings.NewReplacer(first, "U1", second, "U2", "127.0.0.1:8998", "HOST:8998")
	checkBlocks(t, "testdata/foreign.txt", func(words []string) string {
		words = strings.Fields(toAddress.Replace(strings.Join(words, " ")))
		if words[0] != "up" {
			return toName.Replace(transcribeServe(t, words))
		}
		return toName.Replace(transcribeUp(t, words))
	})
}

// TestLinesOfThePageAreRun: each line of serve and up on docs/coming-from.md is one of testdata/foreign.txt.
func TestLinesOfThePageAreRun(t *testing.T) {
	text, err := os.ReadFile("testdata/foreign.txt")
	require.NoError(t, err)
	run := map[string]bool{}
	for block := range strings.SplitSeq(string(text), "\n\n") {
		typed, _, _ := strings.Cut(block, "----\n")
		words := strings.Fields(typed)
		if words[0] == "print" {
			words[0] = "serve"
		}
		run["dpserve "+strings.Join(words, " ")] = true
	}
	checked := 0
	for _, line := range spans(t, "docs/coming-from.md") {
		if strings.HasPrefix(line, "dpserve serve ") || strings.HasPrefix(line, "dpserve up ") {
			assert.True(t, run[line], line)
			checked++
		}
	}
	assert.Greater(t, checked, 10, "this test no longer finds the lines of the page")
}

// transcribeUp returns the application that up deploys, what it says and, of a command line that it refuses,
// the exit code.
func transcribeUp(t *testing.T, words []string) string {
	t.Helper()
	c := newCLI(t)
	c.cluster.down = problem.New(problem.Unavailable, "the test ends here")
	code := c.run(words)
	_, said, isDeployed := strings.Cut(c.stdout(), "# the app.yaml this stands for\n")
	if isDeployed && code == 1 {
		said += strings.ReplaceAll(c.stderr(), "dpserve: the test ends here\n", "")
		if bind := c.node.config.MetricsBind; bind != "" {
			said += "--metrics-bind " + bind + "\n"
		}
		return said
	}
	return c.stderr() + fmt.Sprintf("exit %d\n", code)
}

// TestRouterFlags: each flag of another router has one answer, and its key or flag exists.
func TestRouterFlags(t *testing.T) {
	up, seen := newUp(newCLI(t).env).Flags(), map[string]bool{}
	for _, row := range engineflags.RouterFlags() {
		require.False(t, seen[row.Name], "--%s is there twice", row.Name)
		seen[row.Name] = true
		answers := 0
		for _, answer := range []string{row.Key, row.Flag, row.LeftOut, row.Instead} {
			if answer != "" {
				answers++
			}
		}
		assert.Equal(t, 1, answers, row.Name)
		assert.NotNil(t, up.Lookup(row.Name), row.Name)
		if row.Flag != "" {
			assert.NotNil(t, up.Lookup(row.Flag), row.Name)
		}
		if row.Key == "" || strings.HasSuffix(row.Key, keyPolicy) {
			continue
		}
		doc := object{}
		s := &settings{}
		value := any(int64(1))
		if row.Switch && row.Value == "" {
			value = true
		}
		if strings.HasSuffix(row.Key, "profile") {
			value = "load"
		}
		s.put(setting{flag: "--" + row.Name, key: row.Key, value: value, row: &row})
		s.apply(newCLI(t).env, doc)
		head := "applications:\n  - name: a\n    model: {id: m}\n    engine: {kind: sim}\n"
		text := appendYAML([]byte(head), 4, doc)
		_, _, err := app.Parse(app.Default(), "a.yaml", text)
		assert.NoError(t, err, "--%s: %s", row.Name, text)
	}
}
