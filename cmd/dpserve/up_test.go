package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/server"
	"github.com/dpserve/dpserve/internal/state"
)

// start runs a command in the background and returns a channel with its exit code.
func (c *cli) start(args ...string) <-chan int {
	code := make(chan int, 1)
	go func() { code <- c.run(args) }()
	return code
}

func exit(t *testing.T, code <-chan int) int {
	t.Helper()
	select {
	case c := <-code:
		return c
	case <-time.After(time.Minute):
		t.Fatal("the command does not end")
		return -1
	}
}

func upCLI(t *testing.T) *cli {
	t.Helper()
	c := newCLI(t)
	c.cluster.script = [][]client.AppStatus{
		{demo(client.StatusDeploying, 2, state.Starting)}, {demo(client.StatusRunning, 2, state.Ready)},
	}
	return c
}

// The embedded application equals the example, so that the README is right about both.
func TestQuickstart(t *testing.T) {
	example, err := os.ReadFile("../../examples/quickstart/app.yaml")
	require.NoError(t, err)
	assert.Equal(t, string(example), string(quickstart))
}

func TestUp(t *testing.T) {
	c := upCLI(t)
	code := c.start("up")
	eventually(t, "the ranks are printed", func() bool { return strings.Contains(c.stdout(), "RANK") })
	c.interrupt()
	assert.Equal(t, 0, exit(t, code), c.stderr())
	assert.True(t,
		strings.HasPrefix(c.stdout(), "endpoint http://127.0.0.1:8000/v1\nadmin http://127.0.0.1:8265\n"+
			"page http://127.0.0.1:8265/\n\n"+
			`curl -N http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d `+
			`'{"model": "demo", "stream": true, "max_tokens": 64, `+
			`"messages": [{"role": "user", "content": "Hello"}]}'`+"\n\nRANK "), c.stdout())
	assert.Contains(t, c.stderr(), "dpserve: demo/0/0 starting\ndpserve: demo/0/0 ready\n")
	assert.Contains(t, c.stderr(), "dpserve: stopping: 1 request in flight; Ctrl-C again stops at once\n")
	assert.NotContains(t, c.stderr(), "\x1b", "no redraw without a terminal")
	assert.True(t, c.node.closed)
	assert.True(t, c.node.config.Ephemeral)
	assert.NoDirExists(t, c.node.config.DataDir, "the temporary folder is removed")
	assert.Contains(t, string(c.cluster.deployed[0].Text), "graceful_shutdown_timeout_s: 10",
		"the short drain of up")
}

func TestUpKeepsWhatIsWritten(t *testing.T) {
	c := upCLI(t)
	dir := t.TempDir()
	code := c.start("up", "--data-dir", dir, "-o", "json",
		file(t, strings.Replace(tiny, "name: demo", "name: demo, graceful_shutdown_timeout_s: 1800", 1)))
	eventually(t, "the address is printed", func() bool { return strings.Contains(c.stdout(), "\n") })
	c.interrupt()
	assert.Equal(t, 0, exit(t, code), c.stderr())
	var a address
	require.NoError(t, json.Unmarshal([]byte(c.stdout()), &a))
	assert.Equal(t, "http://127.0.0.1:8000", a.URL)
	assert.Equal(t, os.Getpid(), a.PID)
	assert.Equal(t, dir, c.node.config.DataDir)
	assert.DirExists(t, dir)
	assert.NotContains(t, string(c.cluster.deployed[0].Text), "graceful_shutdown_timeout_s: 10\n")
}

func TestUpOnATerminal(t *testing.T) {
	c := upCLI(t)
	c.io.ErrTTY = true
	code := c.start("up")
	eventually(t, "the summary is drawn",
		func() bool {
			return strings.Contains(c.stderr(), "demo  1/1 ready  3 requests  1 in flight  0 tokens/s")
		})
	c.interrupt()
	assert.Equal(t, 0, exit(t, code), c.stderr())
	assert.Contains(t, c.stderr(), beginSync+clearBelow+"demo DEPLOYING, 0 of 1 ranks ready")
	v := newTerminalEmulator(defaultWidth, defaultHeight)
	_, _ = v.Write([]byte(c.stderr()))
	v.check(t)
	assert.Equal(t, "dpserve: stopping: 1 request in flight; Ctrl-C again stops at once", v.everything(),
		"the live lines are gone at the end")
}

func TestUpSecondCtrlC(t *testing.T) {
	c := upCLI(t)
	c.node.slow = true
	code := c.start("up")
	eventually(t, "it serves", func() bool { return strings.Contains(c.stdout(), "RANK") })
	c.interrupt()
	eventually(t, "it drains", func() bool { return strings.Contains(c.stderr(), "stopping:") })
	c.interrupt()
	assert.Equal(t, 130, exit(t, code))
	assert.Contains(t, c.stderr(), "dpserve: stopping at once\n")
	assert.True(t, c.node.closed)
}

func TestUpInterruptedBeforeItServes(t *testing.T) {
	c := newCLI(t)
	c.cluster.script = [][]client.AppStatus{{demo(client.StatusDeploying, 2, state.Starting)}}
	c.cluster.onApps = func(call int) {
		if call == 1 {
			c.interrupt()
		}
	}
	assert.Equal(t, 130, exit(t, c.start("up")))
	assert.True(t, c.node.closed)
	assert.Contains(t, c.stderr(), "dpserve: interrupted\n")
}

func TestUpFailed(t *testing.T) {
	c := newCLI(t)
	failed := demo(client.StatusDeployFailed, 2, state.Failed)
	failed.Units[0].Attempt, failed.Units[0].Reason, failed.Units[0].LogTail = 3, "exit status 1", []string{
		"last words",
	}
	c.cluster.script = [][]client.AppStatus{{failed}}
	assert.Equal(t, 5, exit(t, c.start("up")))
	assert.Contains(t, c.stderr(), "\n  last words\n")
	assert.True(t, c.node.closed)
	assert.NoDirExists(t, c.node.config.DataDir)
}

func TestUpTellsOtherPorts(t *testing.T) {
	c := upCLI(t)
	c.node.http = "127.0.0.1:4711"
	code := c.start("up")
	eventually(t, "it serves", func() bool { return strings.Contains(c.stdout(), "RANK") })
	c.interrupt()
	exit(t, code)
	assert.Contains(t, c.stderr(),
		"dpserve: 127.0.0.1:8000 is taken, the endpoint listens on 127.0.0.1:4711\n")
	assert.NotContains(t, c.stderr(), "8265 is taken")
	assert.Contains(t, c.stdout(), "curl -N http://127.0.0.1:4711/")
}

func TestUpNodeBreaks(t *testing.T) {
	c := newCLI(t)
	c.node.serveErr = errors.New("disk gone")
	c.cluster.script = [][]client.AppStatus{{demo(client.StatusDeploying, 2, state.Starting)}}
	assert.Equal(t, 1, exit(t, c.start("up")))
	assert.Contains(t, c.stderr(), "dpserve: disk gone\n")
}

func TestStart(t *testing.T) {
	c := newCLI(t)
	code := c.start("start", "--data-dir", t.TempDir(), "--labels", "zone=a", "--slots", "3", "-o", "json",
		"--node-id", "n1")
	eventually(t, "the address is printed", func() bool { return strings.HasSuffix(c.stdout(), "}\n") })
	c.interrupt()
	assert.Equal(t, 0, exit(t, code), c.stderr())
	assert.Equal(t, map[string]string{"zone": "a"}, c.node.config.Labels)
	assert.Equal(t, 3, c.node.config.Slots)
	assert.False(t, c.node.config.Ephemeral)
	assert.True(t, c.node.closed)
	var a address
	require.NoError(t, json.Unmarshal([]byte(c.stdout()), &a))
	assert.Equal(t, "n1", a.Node)
}

func TestStartNodeStops(t *testing.T) {
	c := newCLI(t)
	c.node.serveErr = errors.New("disk gone")
	assert.Equal(t, 1, exit(t, c.start("start", "--data-dir", t.TempDir())))
	assert.Contains(t, c.stderr(), "dpserve: disk gone\n")
}

// A node that left, or that the others refuse as removed, is no failure. In the second case it says what a
// start on its folder says.
func TestANodeThatIsNoMemberAnyMoreEnds(t *testing.T) {
	for said, refusal := range map[string]error{
		"dpserve: n1 has left its cluster\n": nil,
		"dpserve: 10.0.0.1:7947 says no\nhint: join anew\n": problem.New(problem.PermissionDenied,
			"10.0.0.1:7947 says no").WithHint("join anew"),
	} {
		c := newCLI(t)
		c.node.left, c.node.refusal = true, refusal
		assert.Equal(t, 0, exit(t, c.start("start", "--data-dir", t.TempDir(), "--node-id", "n1")))
		assert.Contains(t, c.stderr(), said)
		assert.True(t, c.node.closed)
	}
}

func TestCurlLineQuotes(t *testing.T) {
	assert.Contains(t, formatCurlLine(&server.Config{}, "h:1", `it's "x"`, 1000), `"model": "it'\''s \"x\""`)
	assert.Contains(t, formatCurlLine(&server.Config{APIKeysFile: "f"}, "h:1", "m", 1000),
		`curl -N http://h:1/v1/chat/completions -H "Authorization: Bearer $KEY" -H 'content-type`)
	s := httptest.NewUnstartedServer(nil)
	s.StartTLS()
	defer s.Close()
	key, err := x509.MarshalPKCS8PrivateKey(s.TLS.Certificates[0].PrivateKey)
	require.NoError(t, err)
	var pair strings.Builder
	require.NoError(t, pem.Encode(&pair, &pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}))
	require.NoError(t, pem.Encode(&pair, &pem.Block{Type: "PRIVATE KEY", Bytes: key}))
	path := file(t, pair.String())
	assert.Contains(t, formatCurlLine(&server.Config{TLSCert: path, TLSKey: path}, "h:1", "m", 1000),
		"curl -N --cacert '"+path+"' https://h:1/v1/chat/completions -H 'content-type", "it signed itself")
}

func TestRate(t *testing.T) {
	r := &rate{}
	at := time.Unix(0, 0)
	assert.Zero(t, r.add(at, 10))
	assert.InDelta(t, 40.0, r.add(at.Add(time.Second), 50), 1e-9)
	for i := range 20 {
		r.add(at.Add(time.Duration(i+2)*time.Second), 50)
	}
	assert.Zero(t, r.add(at.Add(30*time.Second), 50))
}

// Two `up` processes never share a slice, and a released slice can be reserved again.
func TestPortSlicesAreDisjoint(t *testing.T) {
	a, b, again := server.DefaultConfig(), server.DefaultConfig(), server.DefaultConfig()
	releaseA := reservePortSlice(context.Background(), &a)
	defer releaseA()
	releaseB := reservePortSlice(context.Background(), &b)
	require.NoError(t, a.Validate())
	require.NoError(t, b.Validate())
	if b.PortRange == server.DefaultPortRange {
		t.Skip("every slice is taken on this machine")
	}
	assert.NotEqual(t, a.PortRange, b.PortRange)
	releaseB()
	defer reservePortSlice(context.Background(), &again)()
	assert.NotEqual(t, a.PortRange, again.PortRange)
}
