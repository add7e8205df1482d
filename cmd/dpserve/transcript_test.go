package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// machines are the hosts of a page's transcripts: nodes on 127.0.0.1, 127.0.0.2 and so on.
type machines struct {
	dir   string // where the commands run
	fixed bool   // the ports of a node outlive its process
	hosts []*machine
	join  string // what the first node printed: ADDR --token TOKEN
}

type machine struct {
	name, admin string
}

// portsOfAMachine is enough for the engines of one node of a transcript.
const portsOfAMachine = 200

// enginePorts reserves ports for engines beside other tests, as a value of --port-range.
func enginePorts(t *testing.T, ips ...string) string {
	t.Helper()
	lo := ports.Take(t, portsOfAMachine, ips...)
	return fmt.Sprintf("%d-%d", lo, lo+portsOfAMachine-1)
}

// runTranscript types what is behind the prompts of a page's transcripts, and compares what is printed with
// what the page shows. 10.0.0.1 and the token of the page are replaced by real ones. With DPSERVE_UPDATE it
// writes the tables that it got into the page.
func runTranscript(t *testing.T, blocks []block, files map[string]string) {
	t.Helper()
	(&machines{dir: harness.DataDir(t)}).typeBlocks(t, blocks, files)
}

func (m *machines) typeBlocks(t *testing.T, blocks []block, files map[string]string) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("127.0.0.2 is not up elsewhere")
	}
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(m.dir, name), []byte(text), 0o600))
	}
	for i := range blocks {
		for _, c := range blocks[i].commands() {
			at := fmt.Sprintf("%s:%d: %s", blocks[i].page, blocks[i].line, c.text)
			var stdout, stderr string
			if isNode(c.text) {
				stdout, stderr = m.startNode(t, c)
			} else {
				stdout, stderr = m.run(t, c)
			}
			if isRead(c.text) { // the cluster may need a moment to become what the page shows
				poll(func() bool {
					want := comparable(dataOf(&c))
					if len(want) == 0 || slices.Equal(want, comparable(strings.Split(stdout, "\n"))) {
						return true
					}
					stdout, stderr = m.run(t, c)
					return false
				})
			}
			compareOutput(t, at, &blocks[i], &c, stdout, stderr)
		}
	}
}

// isNode reports whether a command is a node, which serves until Ctrl-C.
func isNode(line string) bool {
	return strings.HasPrefix(line, "dpserve start") || strings.HasPrefix(line, "dpserve join")
}

// isRead reports whether a command changes nothing, so that it may be typed again.
func isRead(line string) bool {
	return slices.Contains([]string{"nodes", "status", "plan"}, strings.Fields(line)[1]) ||
		strings.HasSuffix(line, " -X GET")
}

// startNode starts a node on the next loopback address and waits until it serves.
func (m *machines) startNode(t *testing.T, c command) (stdout, stderr string) {
	t.Helper()
	ip := fmt.Sprintf("127.0.0.%d", len(m.hosts)+1)
	args := strings.Fields(c.text)[1:]
	if args[0] == "join" {
		behind := slices.Index(args, "--token") + 2
		args = slices.Concat([]string{"join"}, strings.Fields(m.join), args[behind:])
	}
	args = slices.DeleteFunc(args, func(s string) bool { return s == "--advertise" || s == "10.0.0.1" })
	name := strings.ReplaceAll(c.host, " ", "-")
	http, admin := ip+":0", ip+":0"
	if m.fixed {
		http, admin = ports.TakeAddr(t), ports.TakeAddr(t)
	}
	args = append(args, "--advertise", ip, "--http-bind", http, "--admin-bind", admin,
		"--node-port", "0", "--gossip-port", "0", "--node-id", name, "--log-level", "error",
		"--data-dir", filepath.Join(m.dir, name), "--port-range", enginePorts(t, ip))
	if !slices.Contains(args, "--slots") {
		args = append(args, "--slots", "4")
	}
	p := startProcess(t, "admin http://", asDpserve(t), args...)
	p.Expect(harness.NodeFails) // the page ends nodes, and the test's end all of them
	host := &machine{name: c.host, admin: strings.TrimPrefix(p.printed(t, "admin "), "admin http://")}
	m.hosts = append(m.hosts, host)
	if m.join == "" {
		const before = "dpserve join "
		require.True(t, poll(func() bool { return strings.Contains(p.stderr.String(), before) }),
			"the first node prints no join command")
		_, m.join, _ = strings.Cut(p.stderr.String(), before)
		m.join, _, _ = strings.Cut(m.join, "\n")
	}
	return p.stdout.String(), p.stderr.String()
}

// run runs a command that ends, with the admin API of its host.
func (m *machines) run(t *testing.T, c command) (stdout, stderr string) {
	t.Helper()
	i := slices.IndexFunc(m.hosts, func(h *machine) bool { return h.name == c.host })
	require.GreaterOrEqual(t, i, 0, "%s: no node runs there", c.host)
	return runLine(t, m.dir, c.text, "DPSERVE_ADDR="+m.hosts[i].admin)
}

// runLine runs a line of shell in which dpserve is this binary. The exit code is not judged, because a page
// also shows refusals.
func runLine(t *testing.T, dir, line string, env ...string) (stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*scriptWait)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", line)
	cmd.Dir = dir
	cmd.Env = append(cleanEnviron(), "PATH="+filepath.Dir(asDpserve(t))+":"+os.Getenv("PATH"))
	cmd.Env = append(cmd.Env, env...)
	var out, talk strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &talk
	err := cmd.Run()
	require.NoError(t, ctx.Err(), "%s: %v\n%s%s", line, err, out.String(), talk.String())
	return out.String(), talk.String()
}

// What differs from run to run.
var (
	anAddress = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+(:\d+)?`)
	aTime     = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`)
	aToken    = regexp.MustCompile(`dpj1\.\S+`)
	aVote     = regexp.MustCompile(`\b(control|worker|ingress)[*+]`)
	aVersion  = regexp.MustCompile(`\(devel\)|\bv\d+\.\d+\.\d+\S*`)
	aDuration = regexp.MustCompile(`\b\d+ms\b`)
)

// comparable returns the lines of an output without what differs from run to run, and without blank lines.
// Columns are separated by one space.
func comparable(lines []string) []string {
	var out []string
	for _, line := range lines {
		line = anAddress.ReplaceAllString(line, "ADDRESS")
		line = aTime.ReplaceAllString(line, "TIME")
		line = aToken.ReplaceAllString(line, "TOKEN")
		line = aVote.ReplaceAllString(line, "$1")
		line = aVersion.ReplaceAllString(line, "VERSION")
		line = aDuration.ReplaceAllString(line, "DURATION")
		if line = strings.Join(strings.Fields(line), " "); line != "" {
			out = append(out, line)
		}
	}
	return out
}

// isTalk reports whether a line of a page belongs to stderr.
func isTalk(line string) bool {
	return strings.HasPrefix(line, "dpserve: ") || strings.HasPrefix(line, "hint: ") ||
		strings.HasPrefix(line, "  ")
}

// dataOf returns the lines of stdout that a page shows of a command.
func dataOf(c *command) []string {
	return slices.DeleteFunc(slices.Clone(c.output), isTalk)
}

// compareOutput compares what a page shows of a command with what the command printed. The lines of stdout
// are all there; of stderr, which tells progress, the page may leave lines out. A line that ends with … is
// the beginning of one.
func compareOutput(t *testing.T, at string, b *block, c *command, stdout, stderr string) {
	t.Helper()
	data := dataOf(c)
	got := comparable(strings.Split(stdout, "\n"))
	if want := comparable(data); len(want) > 0 && !slices.Equal(want, got) {
		if os.Getenv("DPSERVE_UPDATE") != "" && !anAddress.MatchString(stdout) {
			updateOutput(t, b, data, stdout)
			return
		}
		assert.Equal(t, want, got, "%s\nDPSERVE_UPDATE=1 writes the tables of the run into the page", at)
	}
	said := comparable(strings.Split(stderr, "\n"))
	talk := slices.DeleteFunc(slices.Clone(c.output), func(line string) bool { return !isTalk(line) })
	for _, want := range comparable(talk) {
		start, isCut := strings.CutSuffix(want, "…")
		assert.True(t, slices.ContainsFunc(said, func(line string) bool {
			return line == want || isCut && strings.HasPrefix(line, strings.TrimSpace(start))
		}), "%s\nstderr lacks %q, it has\n%s", at, want, stderr)
	}
}

// updateOutput replaces the lines of stdout that a page shows by those of the run.
func updateOutput(t *testing.T, b *block, old []string, stdout string) {
	t.Helper()
	was := strings.TrimSpace(strings.Join(old, "\n"))
	page := readPage(t, b.page)
	require.Equal(t, 1, strings.Count(page, was), "%s:%d: replace by hand\n%s", b.page, b.line, stdout)
	page = strings.Replace(page, was, strings.TrimSpace(stdout), 1)
	path := filepath.Join(repository, filepath.FromSlash(b.page))
	require.NoError(t, os.WriteFile(path, []byte(page), 0o600))
}

// runClusterPage runs the transcripts of docs/cluster.md on three nodes of this machine.
func runClusterPage(t *testing.T, blocks []block) {
	t.Helper()
	const experts = "engine: {kind: sim, args: {enable_expert_parallel: true}}, "
	const lockstep = "applications: [{name: moe, model: {id: moe}, " + experts +
		"data_parallel: {dp_size: 8, coupling: lockstep}, placement_group_strategy: PACK}]\n"
	const big = "applications: [{name: big, model: {id: big}, " + experts +
		"num_groups: 2, data_parallel: {dp_size: 4, coupling: lockstep}}]\n"
	runTranscript(t, blocks, map[string]string{"moe.yaml": lockstep, "big.yaml": big})
}

// runAgainstUp runs the lines of a page against a `dpserve up` of its own: the ports of the page are replaced
// by those of that node. No answer may be an error.
func runAgainstUp(t *testing.T, blocks []block, prepare func(t *testing.T, dir, url string)) {
	t.Helper()
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	p := startUp(t, "up")
	admin := strings.TrimPrefix(p.printed(t, "admin "), "admin http://")
	dir := t.TempDir()
	prepare(t, dir, "http://"+p.endpoint(t))
	link, err := adminLink(os.Getenv, admin)
	require.NoError(t, err)
	token, err := os.ReadFile(link)
	require.NoError(t, err)
	ports := strings.NewReplacer("127.0.0.1:8000", p.endpoint(t), "127.0.0.1:8265", admin)
	for _, b := range blocks {
		for _, c := range b.commands() {
			stdout, stderr := runLine(t, dir, ports.Replace(c.text), "DPSERVE_ADDR="+admin,
				"TOKEN="+strings.TrimSpace(string(token)))
			assert.NotEmpty(t, stdout, "%s:%d: %s\n%s", b.page, b.line, c.text, stderr)
			assert.NotContains(t, stdout, `"error"`, "%s:%d: %s", b.page, b.line, c.text)
			assert.Empty(t, stderr, "%s:%d: %s", b.page, b.line, c.text)
		}
	}
	p.interrupt(t)
}

// runRouterPage runs the lines of docs/router.md: the request that one of them replays has been served.
func runRouterPage(t *testing.T, blocks []block) {
	t.Helper()
	runAgainstUp(t, blocks, func(t *testing.T, dir, url string) {
		const body = `{"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}`
		require.NoError(t, os.WriteFile(filepath.Join(dir, "request.json"), []byte(body), 0o600))
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/chat/completions",
			strings.NewReader(body))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("X-Request-Id", "5f2c9d0e11aa43b7")
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		http.DefaultClient.CloseIdleConnections()
		require.Equal(t, http.StatusOK, answer.StatusCode)
	})
}

// runRoutingPage runs the lines of docs/routing.md, which need no node.
func runRoutingPage(t *testing.T, blocks []block) {
	t.Helper()
	for _, b := range blocks {
		for _, c := range b.commands() {
			args := strings.Fields(c.text)[1:]
			for i, arg := range args {
				if strings.HasPrefix(arg, "examples/") {
					args[i] = filepath.Join(repository, arg)
				}
			}
			cli := newCLI(t)
			require.Equal(t, 0, cli.run(args), cli.stderr())
			assert.Contains(t, cli.stdout(), "\nlmetric-1 ")
		}
	}
}

// runAPIPage runs the lines of docs/api.md.
func runAPIPage(t *testing.T, blocks []block) {
	t.Helper()
	runAgainstUp(t, blocks, func(t *testing.T, dir, _ string) {
		t.Helper()
		text := readPage(t, "examples/quickstart/app.yaml")
		require.NoError(t, os.WriteFile(filepath.Join(dir, "app.yaml"), []byte(text), 0o600))
	})
}
