package main

import (
	"context"
	"fmt"
	"net"
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
)

// commandBlocks returns the commands of the ```sh blocks of a document, one per line.
func commandBlocks(t *testing.T, path string) []string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var out []string
	for _, block := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		for l := range strings.Lines(block[1]) {
			out = append(out, strings.TrimSpace(l))
		}
	}
	return out
}

// TestREADME runs the README's commands: its up, from the built binary instead of `go run` (which turns every
// exit code into 1), its curl against that node, then Ctrl-C. `go test ./...` is the present run; the test
// checks that .ci/run has the same command.
func TestREADME(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("streams two whole answers")
	}
	commands := commandBlocks(t, "../../README.md")
	var ups []string
	var curl, script, cluster string
	for _, c := range commands {
		switch {
		case strings.HasPrefix(c, "go run ./cmd/dpserve up"):
			ups = append(ups, strings.TrimPrefix(c, "go run ./cmd/dpserve "))
		case strings.HasPrefix(c, "curl "):
			curl = c
		case strings.HasPrefix(c, "examples/multi-turn/"):
			script = c
		case strings.HasPrefix(c, "examples/cluster/"):
			cluster = c
		case c == "go test ./...":
			ci, err := os.ReadFile("../../.ci/run")
			require.NoError(t, err)
			assert.Contains(t, string(ci), "stage_test() { "+c+"; }", ".ci/run and the README differ")
		default:
			t.Errorf("nobody runs this command of the README: %s", c)
		}
	}
	require.Len(t, ups, 2)
	require.NotEmpty(t, curl)
	require.NotEmpty(t, script)
	assert.Contains(t, commands, "go test ./...")

	t.Run("up", func(t *testing.T) {
		t.Parallel()
		runUpExample(t, ups[0], curl)
	})
	t.Run("multi-turn", func(t *testing.T) {
		t.Parallel()
		runMultiTurnExample(t, script, ups[1])
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		runClusterExample(t, cluster)
	})
}

// runUpExample runs the README's first example: its up, its curl and the curl that up prints, then Ctrl-C.
func runUpExample(t *testing.T, up, curl string) {
	t.Helper()
	p := startUp(t, strings.Fields(up)...)
	assert.Contains(t, p.stdout.String(), curl[:strings.Index(curl, "http")],
		"the README and `up` print the same curl")
	for _, command := range []string{
		p.printed(t, "curl "), strings.ReplaceAll(curl, "127.0.0.1:8000", p.endpoint(t)),
	} {
		answer := shell(t, command)
		assert.Contains(t, answer, `"delta":{"content":"`, command)
		assert.True(t, strings.HasSuffix(strings.TrimSpace(answer), "data: [DONE]"), "%s\n%s",
			command, answer)
	}
	p.interrupt(t)
}

// runClusterExample runs the README's cluster example on free ports until its first answers.
func runClusterExample(t *testing.T, script string) {
	t.Helper()
	require.NotEmpty(t, script)
	if runtime.GOOS != "linux" {
		t.Skip("127.0.0.2 is not up elsewhere")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*scriptWait)
	defer cancel()
	cmd := exec.CommandContext(ctx, "./"+script)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "ONCE=1", "DPSERVE="+asDpserve(t))
	for _, name := range []string{"HTTP_PORT", "ADMIN_PORT", "NODE_PORT", "GOSSIP_PORT"} {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
		require.NoError(t, err)
		cmd.Env = append(cmd.Env, fmt.Sprintf("%s=%d", name, l.Addr().(*net.TCPAddr).Port))
		require.NoError(t, l.Close())
	}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	assert.Equal(t, 6, strings.Count(string(out), "HTTP/1.1 200 OK"), string(out))
	assert.Regexp(t, `node-1 +alive +cwi\*`, string(out))
}

// runMultiTurnExample runs the README's second example with fewer conversations.
func runMultiTurnExample(t *testing.T, script, up string) {
	t.Helper()
	p := startUp(t, strings.Fields(up)...)
	ctx, cancel := context.WithTimeout(context.Background(), 2*scriptWait)
	defer cancel()
	cmd := exec.CommandContext(ctx, "./"+script, "http://"+p.endpoint(t))
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "DPSERVE="+p.cmd.Path, "SESSIONS=4", "TURNS=3", "RATE=4")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, want := range []string{
		"model round-robin: 4 sessions of 3 turns", "model lmetric-1: 4 sessions of 3 turns",
		"12 ok, 0 failed", "a perfect cache holds",
	} {
		assert.Contains(t, string(out), want)
	}
	p.interrupt(t)
}

// The examples of the help texts name commands and flags that exist.
func TestHelpExamples(t *testing.T) {
	root := newRoot(newCLI(t).env)
	for _, cmd := range append(root.Commands(), root) {
		for l := range strings.Lines(cmd.Example) {
			text, _, _ := strings.Cut(l, "#")
			text, _, _ = strings.Cut(text, "&&")
			_, text, ok := strings.Cut(strings.NewReplacer("<(", "", ")", "").Replace(text), "dpserve ")
			require.True(t, ok, "%q of help %s does not call dpserve", l, cmd.Name())
			found, rest, err := newRoot(newCLI(t).env).Find(strings.Fields(text))
			require.NoError(t, err, text)
			require.NoError(t, found.ParseFlags(rest), text)
			if found.Args != nil {
				require.NoError(t, found.Args(found, found.Flags().Args()), text)
			}
		}
	}
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

// upProcess is a real `dpserve up` process.
type upProcess struct {
	cmd            *exec.Cmd
	stdout, stderr lockedBuffer
}

// startUp starts this binary as dpserve in the repository's root and waits until it serves.
func startUp(t *testing.T, args ...string) *upProcess {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*scriptWait)
	t.Cleanup(cancel)
	p := &upProcess{cmd: exec.CommandContext(ctx, asDpserve(t), args...)}
	p.cmd.Dir = "../.."
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	p.cmd.Env = slices.DeleteFunc(os.Environ(),
		func(s string) bool { return strings.HasPrefix(s, "DPSERVE_") })
	p.cmd.Env = append(p.cmd.Env, "TMPDIR="+t.TempDir()) // kill -9 leaves the node's folder behind
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() { _ = p.cmd.Process.Kill(); _ = p.cmd.Wait() })
	require.True(t, poll(func() bool { return strings.Contains(p.stdout.String(), "RANK ") }),
		"up does not serve:\n%s", p.stderr.String())
	return p
}

// printed returns the first line of stdout that begins with prefix.
func (p *upProcess) printed(t *testing.T, prefix string) string {
	t.Helper()
	for l := range strings.Lines(p.stdout.String()) {
		if strings.HasPrefix(l, prefix) {
			return strings.TrimSpace(l)
		}
	}
	t.Fatalf("up printed no line that begins with %q", prefix)
	return ""
}

func (p *upProcess) endpoint(t *testing.T) string {
	t.Helper()
	return strings.TrimSuffix(strings.TrimPrefix(p.printed(t, "endpoint "), "endpoint http://"), "/v1")
}

// interrupt sends Ctrl-C and checks that no engine process is left.
func (p *upProcess) interrupt(t *testing.T) {
	t.Helper()
	engines := children(p.pid())
	assert.NotEmpty(t, engines)
	require.NoError(t, p.cmd.Process.Signal(os.Interrupt))
	require.NoError(t, p.cmd.Wait(), "up ends with 0 after Ctrl-C:\n%s", p.stderr.String())
	for _, pid := range engines {
		assert.Equal(t, syscall.ESRCH, syscall.Kill(pid, 0), "engine %d is left", pid)
	}
}

func (p *upProcess) pid() string { return strconv.Itoa(p.cmd.Process.Pid) }

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

// Engines end when their node is killed and cannot stop them.
func TestCC6KilledUpLeavesNoEngine(t *testing.T) {
	p := startUp(t, "up")
	engines := children(p.pid())
	require.Len(t, engines, 4)
	require.NoError(t, p.cmd.Process.Kill())
	_ = p.cmd.Wait() // killed
	for _, pid := range engines {
		assert.True(t, poll(func() bool { return syscall.Kill(pid, 0) != nil }),
			"engine %d outlives dpserve", pid)
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
