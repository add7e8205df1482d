//go:build unix

package main

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// TestUpAndTerminals runs `up` on terminals of all kinds.
func TestUpAndTerminals(t *testing.T) {
	t.Parallel()
	t.Run("killed rank", testUpShowsAKilledRank)
	t.Run("load", testUpShowsLoad)
	t.Run("stop and continue", testUpStopsAndContinues)
	t.Run("closed terminal", testUpOnAClosedTerminal)
	t.Run("other terminals", testUpOnOtherTerminals)
	t.Run("no terminal", testUpWithoutATerminal)
}

// liveTable returns the live table of `up` as it is in the window, from its heading on.
func liveTable(window string) string {
	at := strings.LastIndex(window, "RANK ")
	if at < 0 {
		return ""
	}
	return window[at:]
}

// A killed rank is shown going and coming back; the sentences stand above the table, once each.
func testUpShowsAKilledRank(t *testing.T) {
	t.Parallel()
	p := upOnPTY(t, 100, 30)
	p.awaitText(t, "demo  4/4 ready  0 requests  0 in flight  0 tokens/s  (Ctrl-C stops)")
	engines := enginesOf(p.pid())
	require.Len(t, engines, 4)
	require.NoError(t, syscall.Kill(engines[1], syscall.SIGKILL))
	window := p.awaitText(t, " died (signal killed after ")
	p.awaitText(t, "demo  3/4 ready")
	name := regexp.MustCompile(`(demo/0/\d) died`).FindStringSubmatch(window)[1]
	row := regexp.MustCompile(name + ` +ready +2 `)
	window = p.await(t, "the next epoch", func(window string) bool {
		return row.MatchString(liveTable(window)) && strings.Contains(window, "demo  4/4 ready")
	})
	assert.Regexp(t, `dpserve: `+name+` is ready again, epoch 2, after \d+\.\d s\n`, window)
	assert.Equal(t, 4, strings.Count(liveTable(window), "\ndemo/0/"))
	all := p.everything()
	assert.Equal(t, 1, strings.Count(all, "RANK "), "one table:\n%s", all)
	assert.Equal(t, 1, strings.Count(all, " died "), all)
	assert.Equal(t, 1, strings.Count(all, "ready again"), all)
	assert.NotContains(t, all, "fenced", "the same fact is not told twice")

	for _, size := range []struct {
		cols int
		want string
	}{
		{40, "RANK      STATE     REASON\n"},
		{250, "RANK      STATE     EPOCH  AGE  NODE  "},
		{80, "RANK      STATE     EPOCH  IN-FLIGHT  TOK/S  HIT%  REASON\n"},
	} {
		p.setSize(t, size.cols, 30)
		window := p.await(t, "the table of the new size",
			func(window string) bool { return strings.HasPrefix(liveTable(window), size.want) })
		for line := range strings.Lines(liveTable(window)) {
			assert.LessOrEqual(t, textWidth(strings.TrimSpace(line)), size.cols-1)
		}
	}
	p.typeKeys(t, "\x03")
	assert.Equal(t, 0, p.exitCode(t))
	<-p.drained
	assert.True(t, strings.HasSuffix(p.everything(),
		"dpserve: stopping: 0 requests in flight; Ctrl-C again stops at once"), p.everything())
	assertEngines(t, engines[2:])
	p.check(t)
}

// assertEngines asserts that engines have ended.
func assertEngines(t *testing.T, engines []int) {
	t.Helper()
	for _, pid := range engines {
		assert.True(t, poll(func() bool { return syscall.Kill(pid, 0) != nil }), "engine %d is left", pid)
	}
}

// The table shows what the ranks do: tokens per second, what their caches hold, and requests in all.
func testUpShowsLoad(t *testing.T) {
	t.Parallel()
	p := upOnPTY(t, 120, 30)
	url := regexp.MustCompile(`http://\S+/v1`).FindString(p.visible())
	prompt := strings.Repeat("the same long prompt, ", 100)
	body := `{"model": "demo", "max_tokens": 64, "messages": [{"role": "user", "content": "` + prompt + `"}]}`
	for range 8 {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/chat/completions",
			strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("content-type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, http.StatusOK, resp.StatusCode)
	}
	http.DefaultClient.CloseIdleConnections()
	p.awaitText(t, "4/4 ready  8 requests  0 in flight")
	row := regexp.MustCompile(`demo/0/\d +ready +1 +\S+ +\S+ +0 +[1-9]\d* .* [1-9]\d\.\d\n`)
	p.await(t, "tokens per second and a hit rate", row.MatchString)
	p.typeKeys(t, "\x03")
	assert.Equal(t, 0, p.exitCode(t))
}

// Ctrl-Z leaves the terminal to the shell, fg draws the table again, and the ranks have run on.
func testUpStopsAndContinues(t *testing.T) {
	t.Parallel()
	shell, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("no shell with job control")
	}
	vars := []string{"PS1=prompt> ", "DPSERVE=" + asDpserve(t)}
	p := startOnPTY(t, 100, 30, vars, shell, "--norc", "--noediting", "-i")
	p.awaitText(t, "prompt>")
	p.typeKeys(t, "$DPSERVE up\n")
	p.awaitText(t, "demo  4/4 ready")
	p.typeKeys(t, "\x1a")
	p.awaitText(t, "Stopped")
	p.typeKeys(t, "echo still $((40+2)) here\n")
	window := p.awaitText(t, "still 42 here")
	assert.Equal(t, 1, strings.Count(window, "RANK "), window)
	p.typeKeys(t, "fg; echo code $?\n")
	window = p.await(t, "the table again", func(window string) bool {
		_, after, _ := strings.Cut(window, "still 42 here")
		return strings.Contains(after, "demo  4/4 ready")
	})
	_, after, _ := strings.Cut(window, "still 42 here")
	assert.Equal(t, 1, strings.Count(after, "RANK "), window)
	p.typeKeys(t, "\x03")
	p.awaitText(t, "stopping: 0 requests in flight")
	p.awaitText(t, "code 0")
	assert.NotContains(t, p.everything(), "died", "no rank was restarted")
	p.typeKeys(t, "exit\n")
	assert.Equal(t, 0, p.exitCode(t))
}

// A closed terminal means Ctrl-C: the node drains, and neither engine nor folder is left.
func testUpOnAClosedTerminal(t *testing.T) {
	t.Parallel()
	p := upOnPTY(t, 80, 24)
	engines := enginesOf(p.pid())
	require.Len(t, engines, 4)
	require.NoError(t, p.pty.Close())
	assert.Equal(t, 0, p.exitCode(t))
	assertEngines(t, engines)
	left, err := os.ReadDir(p.folder)
	require.NoError(t, err)
	assert.Empty(t, left, "the temporary folder is removed")
}

// A terminal that cannot move its cursor gets lines, and one without colour a table without colour.
func testUpOnOtherTerminals(t *testing.T) {
	t.Parallel()
	t.Run("TERM=dumb", func(t *testing.T) {
		t.Parallel()
		p := startOnPTY(t, 200, 40, []string{"TERM=dumb"}, asDpserve(t), "up")
		p.awaitText(t, "demo/0/3  ready")
		engines := enginesOf(p.pid())
		require.NoError(t, syscall.Kill(engines[0], syscall.SIGKILL))
		p.awaitText(t, " is ready again, epoch 2, after ")
		p.typeKeys(t, "\x03")
		assert.Equal(t, 0, p.exitCode(t))
		<-p.drained
		assert.Equal(t, 1, strings.Count(p.everything(), "RANK "), p.everything())
		assert.Zero(t, p.colors)
		p.check(t)
	})
	t.Run("NO_COLOR", func(t *testing.T) {
		t.Parallel()
		p := upOnPTY(t, 100, 30, "NO_COLOR=1")
		p.typeKeys(t, "\x03")
		assert.Equal(t, 0, p.exitCode(t))
		<-p.drained
		assert.Zero(t, p.colors)
		p.check(t)
	})
}

// Without a terminal the same changes are plain lines.
func testUpWithoutATerminal(t *testing.T) {
	t.Parallel()
	p := startUp(t, "up")
	p.Expect(harness.EngineFails)
	engines := enginesOf(p.pid())
	require.Len(t, engines, 4)
	require.NoError(t, syscall.Kill(engines[0], syscall.SIGKILL))
	require.True(t, poll(func() bool {
		return strings.Contains(p.stderr.String(), " is ready again, epoch 2, after ")
	}), p.stderr.String())
	p.interrupt(t)
	assert.Regexp(t, `dpserve: demo/0/\d died \(signal killed after .*\), starts again\n`, p.stderr.String())
	assert.NotContains(t, p.stdout.String()+p.stderr.String(), "\x1b")
	assert.NotContains(t, p.stderr.String(), "fenced")
}
