package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/process"
)

// Member is one node of Members: a process that may end and start again on its data dir.
type Member struct {
	*Real        // the newest process
	Name  string // node id
	IP    string // what it advertises
	// CrashedAt is when its process was last killed. On a busy machine Kill has looked for the node's engines
	// for seconds before that.
	CrashedAt time.Time

	rig     *Members
	program string // the binary from its next start on; "" = Binary
	flags   []string
	args    []string
	dir     string
	logs    string // of the processes before
	frozen  bool
}

// Move gives the node another address, for its next start.
func (m *Member) Move(ip string) { m.IP = ip }

// Use gives the node another build of dpserve, for its next start.
func (m *Member) Use(binary string) { m.program = binary }

// Start runs `dpserve start` on the node's data dir and waits until its admin API answers.
func (m *Member) Start() {
	m.rig.T.Helper()
	m.run("start")
	m.Ready()
}

// Join runs `dpserve join` at the first node that runs, and waits until its admin API answers.
func (m *Member) Join(token string) {
	m.rig.T.Helper()
	m.run("join", m.rig.seed(), "--token", token)
	m.Ready()
}

// Launch starts a command on the node's data dir and does not wait for it.
func (m *Member) Launch(args ...string) {
	m.rig.T.Helper()
	m.run(args...)
}

func (c *Members) seed() string {
	c.T.Helper()
	for _, m := range c.Up() {
		return m.NodePort()
	}
	c.T.Fatal("no node runs that could be joined")
	return ""
}

// NodePort is the address of the node's port for other nodes.
func (m *Member) NodePort() string { return m.on(m.rig.nodePort) }

// Gossip is the address of the node's gossip, of UDP and TCP.
func (m *Member) Gossip() string { return m.on(m.rig.gossip) }

func (m *Member) on(port int) string { return m.IP + ":" + strconv.Itoa(port) }

func (m *Member) run(args ...string) {
	m.rig.T.Helper()
	if m.Real != nil {
		m.logs = m.Log()
	}
	c := m.rig
	m.args = append(args, "--node-id", m.Name, "--advertise", m.IP, "--data-dir", m.dir, "--node-port",
		strconv.Itoa(c.nodePort),
		"--gossip-port", strconv.Itoa(c.gossip), "--http-bind", m.on(c.http), "--admin-bind", m.on(c.admin),
		"--slots", strconv.Itoa(c.slots),
		"--port-range", fmt.Sprintf("%d-%d", c.engines, c.engines+enginesOfANode-1), "--timers",
		c.timerFlag())
	m.args = append(m.args, m.flags...)
	m.Real = &Real{T: c.T, HTTP: m.on(c.http), Admin: m.on(c.admin), Dir: m.dir, program: m.program}
	m.launch(m.args)
	m.frozen = false
}

// Ready waits until the node's admin API answers.
func (m *Member) Ready() {
	m.rig.T.Helper()
	m.rig.Eventually("node "+m.Name+" answers", func() error {
		if !m.Runs() {
			m.rig.T.Fatalf("node %s has ended:\n%s", m.Name, m.Output())
		}
		return m.Get("/api/v1/healthz", nil)
	})
}

func (m *Member) firstToken() string {
	m.rig.T.Helper()
	token := ""
	m.rig.Eventually("the first join token", func() error {
		if found := tokenLine.FindStringSubmatch(m.Output()); found != nil {
			token = found[1]
			return nil
		}
		return errors.New(m.Output())
	})
	return token
}

// Runs says whether the node's process lives.
func (m *Member) Runs() bool {
	if m.Real == nil {
		return false
	}
	return m.runs()
}

// Log is what the node's processes wrote so far.
func (m *Member) Log() string {
	if m.Real == nil {
		return m.logs
	}
	return m.logs + m.Output()
}

func (m *Member) signal(sig os.Signal) {
	if m.Runs() {
		m.Signal(sig)
	}
}

// Crash ends the node's process alone with SIGKILL. Its engines live on in their shims.
func (m *Member) Crash() {
	m.CrashedAt = time.Now()
	m.signal(syscall.SIGKILL)
	<-m.done
	m.frozen = false
}

// Kill ends the node with SIGKILL, as the end of its machine does: with its engines, their shims and what
// these have noted. They are gone when Kill returns.
func (m *Member) Kill() {
	m.rig.T.Helper()
	engines := append(m.Children(), shimsOf(m.dir)...)
	m.Crash()
	for _, pid := range append(shimsOf(m.dir), engines...) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	require.NoError(m.rig.T, os.RemoveAll(filepath.Join(m.dir, "engines")))
	m.rig.Eventually("the engines of "+m.Name+" gone", func() error {
		for _, pid := range engines {
			if Alive(pid) {
				return fmt.Errorf("process %d lives", pid)
			}
		}
		return nil
	})
}

// Term asks the node to end and waits for it.
func (m *Member) Term() {
	m.rig.T.Helper()
	m.signal(syscall.SIGTERM)
	m.gone()
}

// Freeze stops the node's process (SIGSTOP) and waits until it stands still; its engines go on.
func (m *Member) Freeze() {
	m.rig.T.Helper()
	m.signal(syscall.SIGSTOP)
	m.frozen = true
	if !m.Runs() {
		return
	}
	m.Eventually(func() error {
		if s, there := process.ReadStat(m.PID); !there || !s.Stopped {
			return errors.New("it runs")
		}
		return nil
	}, "node "+m.Name+" stopped")
}

// Thaw lets the node's process go on.
func (m *Member) Thaw() {
	m.signal(syscall.SIGCONT)
	m.frozen = false
}

// endTime is how long a node may take to end, before it is killed and the test fails.
const endTime = Patience

// gone waits for the end of a node that was asked to end.
func (m *Member) gone() {
	if m.Real == nil {
		return
	}
	select {
	case <-m.done:
	case <-time.After(endTime):
		m.rig.T.Errorf("node %s did not end within %s", m.Name, endTime)
		m.signal(syscall.SIGKILL)
		<-m.done
	}
}

// askTime bounds one question to an admin API: a stopped process never answers.
const askTime = 5 * time.Second

// Get asks the node's admin API; into may be nil.
func (m *Member) Get(path string, into any) error {
	code, text, err := m.Ask(http.MethodGet, path, "")
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("GET %s at %s: %d %s", path, m.Name, code, text)
	}
	if err != nil || into == nil {
		return err
	}
	return json.Unmarshal([]byte(text), into)
}

// Ask is one request to the node's admin API.
func (m *Member) Ask(method, path, body string) (code int, text string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+m.Admin+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	ShowToken(req)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// Nodes is the list of nodes as this one tells it.
func (m *Member) Nodes() ([]client.NodeStatus, error) {
	var reply struct{ Nodes []client.NodeStatus }
	err := m.Get("/api/v1/nodes", &reply)
	return reply.Nodes, err
}

// AppOf is an application's status as this node tells it.
func (m *Member) AppOf(name string) (client.AppStatus, error) {
	var reply struct{ App client.AppStatus }
	err := m.Get("/api/v1/apps/"+name, &reply)
	return reply.App, err
}

// Route returns the state of each rank of an application in this node's Router, by GROUP/RANK: ok, silent,
// not-ready and so on.
func (m *Member) Route(app string) (map[string]string, error) {
	code, text, err := m.Ask(http.MethodPost, "/api/v1/routers/"+app+"/explain", `{"prompt":"hello"}`)
	if err != nil || code != http.StatusOK {
		return nil, fmt.Errorf("explain at %s: %d %s: %w", m.Name, code, text, err)
	}
	var e client.Explanation
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		return nil, err
	}
	out := map[string]string{}
	for i := range e.Ranks {
		out[e.Ranks[i].Worker] = e.Ranks[i].State
	}
	return out, nil
}

// Want deploys an app.yaml through this node, and tries again while there is no leader.
func (m *Member) Want(yaml string) {
	m.rig.T.Helper()
	m.rig.Eventually("a deploy is accepted", func() error {
		code, text, err := m.Ask(http.MethodPut, "/api/v1/apps?file=app.yaml", yaml)
		if err == nil && code >= http.StatusBadRequest && code < http.StatusInternalServerError {
			m.rig.T.Fatalf("the deploy is refused: %d %s", code, text)
		}
		if err == nil && code != http.StatusAccepted {
			err = fmt.Errorf("%d %s", code, text)
		}
		return err
	})
}

// WaitApp waits until an application's status, as the first node that answers tells it, is as wanted.
func (c *Members) WaitApp(app, what string, want func(st *client.AppStatus) error) client.AppStatus {
	c.T.Helper()
	c.apps[app] = true
	var st client.AppStatus
	c.Eventually("app "+app+" "+what, func() error {
		err := errors.New("no node runs")
		for _, m := range c.Up() {
			if st, err = m.AppOf(app); err == nil {
				break
			}
		}
		if err != nil {
			return err
		}
		return want(&st)
	})
	return st
}

// Running waits until an application runs with all its ranks.
func (c *Members) Running(app string) client.AppStatus {
	c.T.Helper()
	return c.WaitApp(app, "RUNNING", func(st *client.AppStatus) error {
		if st.Status != "RUNNING" || st.Ready != st.Desired {
			return fmt.Errorf("%s, %d of %d ready: %s", st.Status, st.Ready, st.Desired, st.Message)
		}
		return Accounted(st)
	})
}

// Accounted says whether every ready rank has its account. A rank is ready a moment before the other nodes
// know its process.
func Accounted(st *client.AppStatus) error {
	for _, u := range st.Units {
		for i := range u.Ranks {
			if k := &u.Ranks[i]; u.Phase == "ready" && (k.URL == "" || k.Incarnation == "") {
				return fmt.Errorf("%s rank %d: its account is not there yet", u.Unit, k.Rank)
			}
		}
	}
	return nil
}

// AllQuiet waits until nothing is in flight, queued or reserved at any node.
func (c *Members) AllQuiet() {
	c.T.Helper()
	require.NotEmpty(c.T, c.Up())
	for _, m := range c.Up() {
		m.Quiet()
	}
}
