package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	proc "github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/parallel"
)

// CC6: TestREADME types the README: its commands in the order in which they stand, with ports 8000 and 8265
// taken, as two terminals do it. What serves until Ctrl-C runs in the first one, all other commands in the
// second. After the build, each command for the first terminal begins a part that depends on no other one:
// the parts have two terminals each and run side by side. Only the conversations of the example are fewer.
func TestREADME(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts real nodes")
	}
	if runtime.GOOS != "linux" {
		t.Skip("127.0.0.2 is not up elsewhere")
	}
	for _, program := range []string{"curl", "awk"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(program + " is not installed")
		}
	}
	runREADME(t, commandBlocks(t, "README.md"))
}

func runREADME(t *testing.T, blocks []block) {
	t.Helper()
	upRuns, machines := followPage(t, filepath.Join(t.TempDir(), "dpserve"), blocks)
	require.NotZero(t, upRuns, "the README starts no `up`")
	require.NotEmpty(t, machines, "the README shows no machines that join")
	t.Run("machines", func(t *testing.T) {
		t.Parallel()
		runTranscript(t, machines, nil)
	})
}

// runTourPage types docs/tour.md, which goes on where the README ends.
func runTourPage(t *testing.T, blocks []block) {
	t.Helper()
	followPage(t, asDpserve(t), blocks)
}

// followPage types the commands of a page with the binary bin. It returns how often the page starts `up`, and
// the transcripts of several machines, which it leaves to the caller.
func followPage(t *testing.T, bin string, blocks []block) (upRuns int, machines []block) {
	t.Helper()
	build := &reader{bin: bin, page: readPage(t, blocks[0].page)}
	var parts [][]string
	for _, b := range blocks {
		if b.language == "text" {
			machines = append(machines, b)
			continue
		}
		for _, c := range b.commands() {
			switch {
			case serves(c.text):
				parts = append(parts, []string{c.text})
			case len(parts) == 0:
				build.typeLine(t, c.text)
			default:
				parts[len(parts)-1] = append(parts[len(parts)-1], c.text)
			}
		}
	}
	for _, lines := range parts {
		isUp := strings.HasPrefix(lines[0], "bin/dpserve up")
		if isUp {
			upRuns++
		}
		r := &reader{bin: build.bin, page: build.page, isFirstUp: lines[0] == "bin/dpserve up"}
		t.Run(lines[0], func(t *testing.T) {
			t.Parallel()
			for _, line := range lines {
				r.typeLine(t, line)
			}
			r.stop(t)
		})
	}
	return upRuns, machines
}

// serves reports whether a line serves until Ctrl-C.
func serves(line string) bool {
	for _, begin := range []string{"bin/dpserve up", "bin/dpserve serve", "examples/cluster/"} {
		if strings.HasPrefix(line, begin) {
			return true
		}
	}
	return false
}

// reader follows a part of a page in two terminals.
type reader struct {
	bin       string // path that bin/dpserve stands for
	page      string
	isFirstUp bool        // the part begins with the first `up` of the page
	first     *foreground // what the first terminal runs
	addr      string      // DPSERVE_ADDR of the second terminal
}

// typeLine does what a line of the page says.
func (r *reader) typeLine(t *testing.T, line string) {
	t.Helper()
	typed := strings.ReplaceAll(line, "bin/dpserve", r.bin)
	switch {
	case strings.HasPrefix(line, "bin/dpserve up"):
		r.start(t, "RANK ", r.bin, strings.Fields(typed)[1:]...)
		r.followUp(t)
	case strings.HasPrefix(line, "bin/dpserve serve"):
		r.start(t, "RANK ", r.bin, strings.Fields(typed)[1:]...)
		printed, _, _ := strings.Cut(r.first.stdout.String(), "endpoint ")
		assert.Contains(t, r.page, "```text\n"+printed+"endpoint ", "the page shows what `serve` prints")
	case strings.HasPrefix(line, "examples/cluster/"):
		r.start(t, "Ctrl-C stops", "sh", "-c", "DPSERVE="+r.bin+" PORTS="+
			enginePorts(t, "127.0.0.1", "127.0.0.2", "127.0.0.3")+" exec "+typed)
		r.killANode(t)
	default:
		out := r.shell(t, typed)
		r.checkAnswer(t, line, out)
	}
}

// start starts a program in the first terminal and waits until it serves. TestMain has the default ports.
func (r *reader) start(t *testing.T, ready, program string, args ...string) {
	t.Helper()
	r.first = startProcess(t, ready, program, args...)
	r.first.Expect(harness.NodeFails, harness.EngineFails) // the page kills a rank and a node
}

// stop presses Ctrl-C in the first terminal.
func (r *reader) stop(t *testing.T) {
	t.Helper()
	r.first.interrupt(t)
	r.first, r.addr = nil, ""
}

// followUp reads what `up` has printed: the export line for the second terminal, because the ports are taken,
// the heads of its table, and for the first one the curl line, which the README shows.
func (r *reader) followUp(t *testing.T) {
	t.Helper()
	const export = "in other terminals: export DPSERVE_ADDR="
	_, rest, ok := strings.Cut(r.first.stderr.String(), export)
	require.True(t, ok, "up does not print %q where port 8265 is taken:\n%s", export, r.first.stderr.String())
	r.addr, _, _ = strings.Cut(rest, "\n")
	if !r.isFirstUp {
		return
	}
	// the README shows a terminal of 110 columns: the curl line in pieces, and fewer columns
	words := func(text string) string { return strings.Join(strings.Fields(text), " ") }
	dense := func(text string) string { return strings.Join(strings.Fields(text), "") }
	columns := words(r.first.printed(t, "RANK "))
	columns = strings.Replace(strings.Replace(columns, "SINCE", "AGE", 1), " TTFT-P95", "", 1)
	assert.Contains(t, words(r.page), columns, "the README shows the columns of `up`")
	curl := r.first.printed(t, "curl ")
	assert.Contains(t, dense(r.page), dense(strings.Replace(curl, r.first.endpoint(t), "127.0.0.1:8000", 1)),
		"the README shows the curl line of `up`")
	answer := r.shell(t, curl)
	assert.Contains(t, answer, `"delta":{"content":"`)
	assert.True(t, strings.HasSuffix(strings.TrimSpace(answer), "data: [DONE]"), answer)
}

// checkAnswer checks what the page says of a command's output.
func (r *reader) checkAnswer(t *testing.T, line, out string) {
	t.Helper()
	switch {
	case strings.HasPrefix(line, "kill -9"):
		assert.True(t, poll(func() bool {
			return regexp.MustCompile(`(?m)^demo/0/2 +ready +2 `).MatchString(r.shell(t, r.bin+" status"))
		}), "the rank that was killed does not come back under epoch 2")
	case strings.HasPrefix(line, "examples/multi-turn/"):
		for _, want := range []string{
			"model round-robin: 4 sessions of 3 turns", "model lmetric-1: 4 sessions of 3 turns",
			"12 ok, 0 failed", "a perfect cache holds",
		} {
			assert.Contains(t, out, want)
		}
	case strings.Contains(line, " route explain "):
		assert.Contains(t, out, "PICK")
	}
}

// killANode types the lines that the cluster example prints: a node is killed, and within seconds everything
// runs on the two others.
func (r *reader) killANode(t *testing.T) {
	t.Helper()
	out := r.first.stdout.String()
	assert.Equal(t, 6, strings.Count(out, "HTTP/1.1 200 OK"), out)
	assert.Regexp(t, `node-1 +alive +\S+\*`, out)
	r.addr = strings.TrimPrefix(r.first.printed(t, "  export DPSERVE_ADDR="), "export DPSERVE_ADDR=")
	status := func() string { // a node that was killed may have led: an election is no failure
		out, _ := r.try(t, r.bin+" status")
		out, _, _ = strings.Cut(out, "\nnext: ") // it names the lost node
		return strings.Join(strings.Fields(out), " ")
	}
	assert.True(t, poll(func() bool { return strings.Contains(status(), " node-2 ") }),
		"the node that will be killed has ranks")
	r.shell(t, r.first.printed(t, "  kill -9 "))
	isMoved := func() bool {
		now := status()
		return now != "" && !strings.Contains(now, " node-2 ") && strings.Contains(now, " RUNNING 8/8 ") &&
			strings.Contains(now, " RUNNING 2/2 ")
	}
	moved := poll(isMoved)
	assert.True(t, moved || poll(isMoved), "the ranks of the lost node do not come back:\n%s",
		status())
	assert.True(t, poll(func() bool {
		nodes, _ := r.try(t, r.bin+" nodes")
		return regexp.MustCompile(`(?m)^node-2 +lost `).MatchString(nodes)
	}), "the node that was killed is not lost")
}

// shell runs a line in the second terminal and returns its stdout.
func (r *reader) shell(t *testing.T, line string) string {
	t.Helper()
	out, err := r.try(t, line)
	require.NoError(t, err, line)
	return out
}

// try runs a line in the second terminal, in the repository's root. The error has its stderr.
func (r *reader) try(t *testing.T, line string) (stdout string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*scriptWait)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", line)
	cmd.Dir = repository
	cmd.Env = append(cleanEnviron(), "DPSERVE="+r.bin, "SESSIONS=4", "TURNS=3", "RATE=4")
	if r.addr != "" {
		cmd.Env = append(cmd.Env, "DPSERVE_ADDR="+r.addr)
	}
	var out, talk strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &talk
	if err = cmd.Run(); err != nil {
		err = fmt.Errorf("%w\n%s%s", err, out.String(), talk.String())
	}
	return out.String(), err
}

// asDpserve returns a path under which this binary is dpserve: testscript runs the command that argv[0]
// names.
func asDpserve(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	bin := filepath.Join(t.TempDir(), "dpserve")
	require.NoError(t, os.Symlink(self, bin))
	return bin
}

// foreground is a program in the foreground of a terminal: `dpserve up`, or an example's script.
type foreground struct {
	harness.Expected
	cmd            *exec.Cmd
	stdout, stderr parallel.Buffer
}

// startUp starts this binary as dpserve and waits until it serves.
func startUp(t *testing.T, args ...string) *foreground {
	t.Helper()
	return startProcess(t, "RANK ", asDpserve(t), args...)
}

// startProcess starts a program in the repository's root and waits until its stdout has the text ready.
func startProcess(t *testing.T, ready, program string, args ...string) *foreground {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 6*scriptWait)
	t.Cleanup(cancel)
	p := &foreground{cmd: exec.CommandContext(ctx, program, args...)}
	p.cmd.Dir = repository
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	p.cmd.Env = append(cleanEnviron(), "TMPDIR="+harness.DataDir(t)) // kill -9 leaves the node's folder
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		p.Check(t, fmt.Sprint("dpserve ", args), p.stdout.String()+p.stderr.String())
	})
	require.True(t, poll(func() bool { return strings.Contains(p.stdout.String(), ready) }),
		"%s does not print %q:\n%s%s", program, ready, p.stdout.String(), p.stderr.String())
	return p
}

// cleanEnviron returns the environment without the variables of dpserve.
func cleanEnviron() []string {
	return slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "DPSERVE_") })
}

// printed returns the first line of stdout that begins with prefix.
func (p *foreground) printed(t *testing.T, prefix string) string {
	t.Helper()
	for l := range strings.Lines(p.stdout.String()) {
		if strings.HasPrefix(l, prefix) {
			return strings.TrimSpace(l)
		}
	}
	t.Fatalf("up printed no line that begins with %q", prefix)
	return ""
}

func (p *foreground) endpoint(t *testing.T) string {
	t.Helper()
	return strings.TrimSuffix(strings.TrimPrefix(p.printed(t, "endpoint "), "endpoint http://"), "/v1")
}

// interrupt sends Ctrl-C and checks that no engine process is left.
func (p *foreground) interrupt(t *testing.T) {
	t.Helper()
	engines := enginesOf(p.pid())
	assert.NotEmpty(t, engines)
	require.NoError(t, p.cmd.Process.Signal(os.Interrupt))
	require.NoError(t, p.cmd.Wait(), "up ends with 0 after Ctrl-C:\n%s", p.stderr.String())
	for _, pid := range engines {
		assert.Equal(t, syscall.ESRCH, syscall.Kill(pid, 0), "engine %d is left", pid)
	}
}

func (p *foreground) pid() string { return strconv.Itoa(p.cmd.Process.Pid) }

// shell runs a command with sh.
func shell(t *testing.T, command string) string {
	t.Helper()
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	ctx, cancel := context.WithTimeout(context.Background(), scriptWait)
	defer cancel()
	out, err := exec.CommandContext(ctx, "sh", "-c", strings.Replace(command, "curl ", "curl -sS ", 1)).
		CombinedOutput()
	require.NoError(t, err, "%s\n%s", command, out)
	return string(out)
}

// CC6, HF62: Engines and their shims end when their node is killed and cannot stop them.
func TestCC6KilledUpLeavesNoEngine(t *testing.T) {
	t.Parallel()
	p := startUp(t, "up")
	left := proc.Descendants(p.cmd.Process.Pid)
	require.Len(t, left, 8)
	require.NoError(t, p.cmd.Process.Kill())
	_ = p.cmd.Wait() // killed
	for _, pid := range left {
		assert.True(t, poll(func() bool { s, there := proc.ReadStat(pid); return !there || s.Zombie }),
			"process %d outlives dpserve", pid)
	}
}

// TestCC6Quick measures the time to RUNNING and to the first token in real time.
func TestCC6Quick(t *testing.T) {
	if os.Getenv("DPSERVE_ACCEPTANCE") == "" {
		t.Skip("wall-clock times: make acceptance")
	}
	began := time.Now()
	p := startUp(t, "up")
	assert.Less(t, time.Since(began), 1500*time.Millisecond)
	shell(t, p.printed(t, "curl "))
	assert.Less(t, time.Since(began), 10*time.Second)
	p.interrupt(t)
}
