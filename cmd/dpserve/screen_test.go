package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// emulatedScreen returns a screen that draws on an emulator.
func emulatedScreen(cols, rows int) (*screen, *terminalEmulator) {
	v := newTerminalEmulator(cols, rows)
	size := func() (int, int) {
		v.mu.Lock()
		defer v.mu.Unlock()
		return v.cols, v.rows
	}
	return newScreen(&ioStreams{Err: v, ErrTTY: true, Size: size}), v
}

// Log lines go above the live lines, which stay whole whatever the size of the window becomes.
func TestScreenKeepsLiveLinesWhole(t *testing.T) {
	scr, v := emulatedScreen(40, 10)
	live := func(width, _ int) []string {
		return []string{"RANK  STATE", strings.Repeat("x", width+20), fmt.Sprintf("%d columns", width)}
	}
	block := func(width int) string {
		return fmt.Sprintf("RANK  STATE\n%s…\n%d columns", strings.Repeat("x", width-2), width)
	}
	scr.show(live)
	assert.Equal(t, block(40), v.visible())
	scr.printMessage("a line that is longer than the window is wide")
	_, _ = scr.Write([]byte("a line in two "))
	_, _ = scr.Write([]byte("parts\nand"))
	log := "dpserve: a line that is longer than the window is wide\na line in two parts\n"
	assert.Equal(t, log+block(40), v.everything())
	for _, width := range []int{17, 250, 80, 40, 13, 100} {
		v.resize(width, 10)
		scr.redraw(false)
		assert.Equal(t, log+block(width), v.everything(), "%d columns", width)
	}
	v.resize(100, 4)
	scr.redraw(false)
	assert.Equal(t, "RANK  STATE\n… and 2 more", lastLines(v.visible(), 2), "only what fits is drawn")
	scr.clear()
	assert.Equal(t, strings.TrimSpace(log), lastLines(v.everything(), 2))
	v.check(t)
}

func lastLines(s string, n int) string {
	all := strings.Split(s, "\n")
	return strings.Join(all[max(0, len(all)-n):], "\n")
}

// In the background the terminal belongs to the shell: only log lines are written. Afterwards the live lines
// are drawn below what the shell has written.
func TestScreenInTheBackground(t *testing.T) {
	scr, v := emulatedScreen(40, 10)
	foreground := true
	scr.isForeground = func() bool { return foreground }
	scr.showLine("live")
	foreground = false
	_, _ = v.Write([]byte("$ ls\n"))
	scr.showLine("live 2")
	scr.printMessage("a message")
	assert.Equal(t, "live\n$ ls\ndpserve: a message", v.visible())
	foreground = true
	_, _ = v.Write([]byte("$ fg\n"))
	scr.redraw(true)
	assert.Equal(t, "live\n$ ls\ndpserve: a message\n$ fg\nlive 2", v.visible())
	v.check(t)
}

// Text of engines can hold sequences and characters of two columns; neither moves the live lines.
func TestTextOfOtherPrograms(t *testing.T) {
	assert.Equal(t, "red text; bell",
		joinLines("\x1b[1;31mred\x1b[0m\r text\n\x07bell\x1b]0;title\x07\x1b(B"))
	assert.Equal(t, 8, textWidth(string(bad)+"日本e\u0301 ok"+string(resetColor)))
	assert.Equal(t, "日…", truncate("日本語", 4))
	assert.Equal(t, "日本語", truncate("日本語", 6))
	red := func(s string) string { return string(bad) + s + string(resetColor) }
	assert.Equal(t, red("ba…"), truncate(red("bad bad"), 3))
	assert.Equal(t, red("bad")+" a…", truncate(red("bad")+" and", 6))
	assert.Equal(t, []string{"one two", "  three", "  veryverylong"},
		wrap("one two\nthree veryverylong", 7))
}

func FuzzTruncate(f *testing.F) {
	f.Add("plain", 3)
	f.Add("\x1b[31m日本\x1b[0m語 \xff\x1b", 4)
	f.Fuzz(func(t *testing.T, text string, columns int) {
		columns = max(1, columns%300)
		line := truncate(cleanText(text), columns)
		assert.LessOrEqual(t, textWidth(line), columns)
		assert.NotContains(t, cleanText(text), "\x1b")
	})
}

// fleet returns an application of many ranks, of which some are broken.
func fleet(ranks int, broken map[int]state.Phase) client.AppStatus {
	phases := make([]state.Phase, ranks)
	for i := range phases {
		phases[i] = state.Ready
		if p := broken[i]; p != "" {
			phases[i] = p
		}
	}
	a := demo(client.StatusRunning, 1, phases...)
	if len(broken) > 0 {
		a.Status = client.StatusUnhealthy
	}
	for i := range a.Units {
		if broken[i] != "" {
			a.Units[i].Reason = "exit status 1"
		}
	}
	return a
}

// watched returns the first window of `status -w`.
func watched(t *testing.T, cols, rows int, apps []client.AppStatus, args ...string) *terminalEmulator {
	t.Helper()
	scr, v := emulatedScreen(cols, rows)
	c := newCLI(t)
	c.io.Err, c.io.Size = v, scr.size
	c.io.OutTTY, c.io.ErrTTY = true, true
	c.cluster.script = [][]client.AppStatus{apps}
	code := c.start(append([]string{"status", "-w"}, args...)...)
	v.await(t, "a table", func(window string) bool { return window != "" })
	c.interrupt()
	require.Equal(t, 0, exit(t, code), c.stderr())
	v.check(t)
	return v
}

// What an engine says of its load is readable in a narrow terminal, with how far it is.
func TestStatusWatchShowsHowFarALoadIs(t *testing.T) {
	apps := fleet(2, map[int]state.Phase{0: state.Starting, 1: state.Starting})
	apps.Units[0].Ranks[0].Progress = "loading weights 12 of 61"
	apps.Units[1].Ranks[0].Progress = "capturing graphs 7 of 35 (decode, FULL)"
	for _, width := range []int{60, 80, 160} {
		v := watched(t, width, 30, []client.AppStatus{apps})
		assert.Contains(t, v.visible(), "loading weights 12 of 61", "%d columns", width)
		assert.Contains(t, v.visible(), "capturing graphs 7 of", "%d columns", width)
	}
}

// A hundred ranks in a window of 30 rows: the broken ones are there, and what is left out is counted.
func TestStatusWatchShowsBrokenRanks(t *testing.T) {
	broken := map[int]state.Phase{
		3: state.Backoff, 17: state.Backoff, 44: state.Starting, 50: state.Backoff, 98: state.Backoff,
	}
	v := watched(t, 100, 30, []client.AppStatus{fleet(100, broken)})
	const want = `APP   STATUS     RANKS   GROUPS  MODEL  KIND  POLICY        QUEUED
demo  UNHEALTHY  95/100  1       demo   sim   power-of-two  0

demo: 95 of 100 ready; backoff 0/3, 0/17, 0/50, 0/98; starting 0/44

RANK       STATE     EPOCH  AGE  NODE  IN-FLIGHT  TOK/S  RESTARTS  HIT%  REASON
demo/0/3   backoff   1      -    n1    0          0      0         -     exit status 1
demo/0/17  backoff   1      -    n1    0          0      0         -     exit status 1
demo/0/44  starting  1      -    n1    0          0      0         -     exit status 1
demo/0/50  backoff   1      -    n1    0          0      0         -     exit status 1
demo/0/98  backoff   1      -    n1    0          0      0         -     exit status 1
demo/0/0   ready     1      -    n1    0          0      0         -
`
	assert.True(t, strings.HasPrefix(v.visible(), want), v.visible())
	assert.Equal(t, "… and 79 more, all ready", lastLines(v.visible(), 1))
	assert.Equal(t, 28, strings.Count(v.visible(), "\n")+1, "the window is full")
	assert.Positive(t, v.colors)

	v = watched(t, 100, 30, []client.AppStatus{fleet(100, broken)}, "--unhealthy")
	assert.NotContains(t, v.visible(), "  ready")
	assert.Contains(t, v.visible(), "demo/0/98  backoff")
	v = watched(t, 100, 30, []client.AppStatus{fleet(100, nil)}, "--unhealthy", "--no-color")
	assert.Equal(t, "everything runs: 100 of 100 ranks ready", v.visible())
	assert.Zero(t, v.colors)

	half := map[int]state.Phase{}
	for i := range 50 {
		half[2*i] = state.Backoff
	}
	v = watched(t, 80, 12, []client.AppStatus{fleet(100, half)})
	assert.Contains(t, v.visible(),
		"demo: 50 of 100 ready; backoff 0/0, 0/2, 0/4, 0/6, 0/8, 0/10, 0/12 and 43 more\n")
	assert.Equal(t, "… and 97 more, 47 of them not ready", lastLines(v.visible(), 1))
}

// Windows of every width show the state of each rank; what does not fit is left out by columns.
func TestStatusWatchWidths(t *testing.T) {
	for cols, want := range map[int]string{
		20:  "RANK      STATE   …\ndemo/0/1  backoff …\n",
		40:  "RANK      STATE     REASON\ndemo/0/1  backoff   exit status 1",
		80:  "RANK      STATE     EPOCH  IN-FLIGHT  TOK/S  HIT%  REASON\n",
		100: "RANK      STATE     EPOCH  AGE  NODE  IN-FLIGHT  TOK/S  RESTARTS  HIT%  REASON\n",
		250: "RANK      STATE     EPOCH  AGE  NODE  IN-FLIGHT  TOK/S  TTFT-P50  TTFT-P95  RESTARTS  HIT%  " +
			"REASON\n",
	} {
		v := watched(t, cols, 24, []client.AppStatus{fleet(4, map[int]state.Phase{1: state.Backoff})})
		assert.Contains(t, v.visible(), want, "%d columns", cols)
		for line := range strings.Lines(v.visible()) {
			assert.LessOrEqual(t, textWidth(strings.TrimSpace(line)), cols-1)
		}
		assert.Contains(t, v.visible(), "demo/0/1  backoff")
	}
}

// A reason of placement stands once, in full in the message with what to do about it.
func TestPlacementReasonStandsOnce(t *testing.T) {
	a := demo(client.StatusDeploying, 1, state.Pending, state.Pending, state.Pending)
	for i, name := range []string{"demo/0", "demo/0", "demo/0/2"} {
		a.Units[i].Reason = "place " + name + ": 0 of 1 rank can be placed (PACK); need: 1 rank of " +
			"1 slot each, PACK; node n1: 0 of 4 slots free; hint: add nodes or slots, ask for fewer ranks"
	}
	a.Message = "demo/0/0 and 2 more are pending: " + a.Units[0].Reason
	v := watched(t, 80, 24, []client.AppStatus{a})
	assert.Equal(t, `APP   STATUS     RANKS  GROUPS  MODEL  KIND  POLICY        QUEUED
demo  DEPLOYING  0/3    1       demo   sim   power-of-two  0

demo: demo/0/0 and 2 more are pending: place demo/0: 0 of 1 rank can be placed
  (PACK); need: 1 rank of 1 slot each, PACK; node n1: 0 of 4 slots free
hint: add nodes or slots, ask for fewer ranks
demo: 0 of 3 ready; pending 0/0, 0/1, 0/2

RANK      STATE     EPOCH  IN-FLIGHT  TOK/S  HIT%  REASON
demo/0/0  pending   1      0          0      -     0 of 1 rank can be placed (…
demo/0/1  pending   1      0          0      -     as above
demo/0/2  pending   1      0          0      -     as above

next: add nodes or slots, ask for fewer ranks: demo/0 finds no room: 0 of 1
  rank can be placed (PACK)`, v.visible())
}

// RP51: `status --unhealthy` shows the ranks that do not serve, with their reasons, and leaves whole
// applications out.
func TestStatusUnhealthy(t *testing.T) {
	c := newCLI(t)
	ejected := fleet(3, map[int]state.Phase{1: state.Failed})
	ejected.Units[2].Ranks[0].Ejected = true
	asleep := named("idle", client.StatusRunning, 1, state.Ready)
	asleep.Units[0].Ranks[0].Away = "asleep"
	other := named("other", client.StatusRunning, 1, state.Ready)
	c.cluster.script = [][]client.AppStatus{{other, ejected, asleep}}
	require.Equal(t, 0, c.run([]string{"status", "--unhealthy"}))
	assert.NotContains(t, c.stdout(), "other")
	assert.NotContains(t, c.stdout(), "demo/0/0")
	assert.Contains(t, c.stdout(), "demo: 2 of 3 ready; failed 0/1; ready 0/2\n")
	assert.Contains(t, c.stdout(), "demo/0/2  ready ")
	assert.Contains(t, c.stdout(), "ejected: its last answers failed")
	assert.Contains(t, c.stdout(), "asleep: its engine says so")

	c = newCLI(t)
	c.cluster.script = [][]client.AppStatus{{other}}
	require.Equal(t, 0, c.run([]string{"status", "--unhealthy"}))
	assert.Empty(t, c.stdout())
	assert.Equal(t, "dpserve: everything runs: 1 of 1 rank ready\n", c.stderr())
	require.Equal(t, 0, c.run([]string{"status", "--unhealthy", "-o", "json"}))
	assert.Contains(t, c.stdout(), `"apps": []`)
}

// Ages are never negative, whatever the clocks of the nodes say.
func TestAgeOfAClockThatIsAhead(t *testing.T) {
	now := time.Unix(1000, 0)
	view := statusView{now: now, relative: true}
	assert.Equal(t, "0s", view.since(now.Add(time.Hour)))
	assert.Equal(t, "1h", view.since(now.Add(-time.Hour)))
}
