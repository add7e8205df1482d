package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/test/ports"
)

// Patience is how long a test waits for something that should take a second: machines are shared and noisy.
const Patience = 60 * time.Second

// Real is one running dpserve process.
type Real struct {
	*Expected // lines of the processes; nil = the rig that this process belongs to has them
	T         testing.TB
	HTTP      string // host:port of the OpenAI endpoint
	Admin     string // host:port of the admin API
	Dir       string // data dir
	PID       int

	program string // the binary; "" = Binary

	cmd   *exec.Cmd
	done  chan struct{}
	out   *Buffer
	ports [2]int // first and last of its engines' ports; 0 = not known
}

// Start runs `dpserve start` on free loopback ports with a data dir of its own, and ends it with the test.
func Start(t testing.TB, args ...string) *Real {
	t.Helper()
	return StartIn(t, DataDir(t), args...)
}

// portsOfANode is enough for a node's own ports and the engines of any test on one node.
const portsOfANode = 500

// StartIn is Start on a given data dir, for tests of restarts.
func StartIn(t testing.TB, dir string, args ...string) *Real {
	t.Helper()
	lo := ports.Take(t, portsOfANode) // its own two ports are from there too
	hi := lo + portsOfANode - 1
	r := &Real{
		Expected: &Expected{}, T: t, HTTP: fmt.Sprintf("127.0.0.1:%d", hi),
		Admin: fmt.Sprintf("127.0.0.1:%d", hi-1), Dir: dir,
	}
	r.ports = [2]int{lo, hi - 2}
	r.run(append([]string{
		"start", "--http-bind", r.HTTP, "--admin-bind", r.Admin, "--data-dir", dir,
		"--port-range", fmt.Sprintf("%d-%d", lo, hi-2),
	}, args...))
	r.Eventually(func() error { return r.get("/api/v1/healthz", nil) }, "admin API answers")
	return r
}

// Run starts dpserve with any arguments, without waiting for anything.
func Run(t testing.TB, args ...string) *Real {
	t.Helper()
	r := &Real{Expected: &Expected{}, T: t}
	r.run(args)
	return r
}

func (r *Real) run(args []string) {
	r.T.Helper()
	r.launch(args)
	r.T.Cleanup(func() {
		r.end()
		if r.T.Failed() {
			r.T.Logf("dpserve %s\n%s", strings.Join(args, " "), r.out)
		}
	})
}

// launch starts the process; who calls it ends it.
func (r *Real) launch(args []string) {
	r.T.Helper()
	r.out, r.done = &Buffer{}, make(chan struct{})
	if r.program == "" {
		r.program = Binary(r.T)
	}
	r.cmd = exec.Command(r.program, args...)
	r.cmd.Stdout, r.cmd.Stderr = r.out, r.out
	r.cmd.WaitDelay = 5 * time.Second
	require.NoError(r.T, r.cmd.Start())
	r.PID = r.cmd.Process.Pid
	go func() { _ = r.cmd.Wait(); close(r.done) }()
}

// Again starts the same command in place of the process, which ends or was told to. The process keeps its
// place in the order in which the test ends what it has started: an engine outlives the dpserve in front of
// it.
func (r *Real) Again() {
	r.T.Helper()
	r.ExitCode()
	r.check(r.T, "dpserve", r.Output(), len(r.Output()))
	r.launch(r.cmd.Args[1:])
}

// end stops the process and checks what it leaves behind: work in hand, complaints in its log, processes.
func (r *Real) end() {
	if !r.runs() { // shims keep how their engines ended for a next process, which does not come
		for _, pid := range shimsOf(r.Dir) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	children, before := append(r.Children(), shimsOf(r.Dir)...), len(r.Output())
	if r.Admin != "" && r.runs() {
		//nolint:testifylint // all is checked
		assert.NoError(r.T, soon(func() error { return idle(r.ask) }), "work in hand at the end")
	}
	r.Stop()
	left := func() []int { return append(Living(children), enginesOn(r.ports)...) }
	assert.NoError(r.T, soon(func() error { //nolint:testifylint // as above
		if pids := left(); len(pids) > 0 {
			return fmt.Errorf("%v", pids)
		}
		return nil
	}), "processes left behind")
	r.check(r.T, "dpserve", r.Output(), before)
}

func (r *Real) runs() bool {
	select {
	case <-r.done:
		return false
	default:
		return true
	}
}

// EnginePorts are the first and the last port that engines of the node may get.
func (r *Real) EnginePorts() (lo, hi int) { return r.ports[0], r.ports[1] }

// Output is what the process wrote so far, stdout and stderr together.
func (r *Real) Output() string { return r.out.String() }

// Signal sends sig to dpserve itself, never to a group.
func (r *Real) Signal(sig os.Signal) { _ = r.cmd.Process.Signal(sig) }

// Exited is closed when dpserve has ended.
func (r *Real) Exited() <-chan struct{} { return r.done }

// ExitCode waits for the end and returns the code (-1: by signal).
func (r *Real) ExitCode() int {
	r.T.Helper()
	select {
	case <-r.done:
	case <-time.After(Patience):
		r.T.Fatalf("dpserve (pid %d) did not end; output:\n%s", r.PID, r.out)
	}
	return r.cmd.ProcessState.ExitCode()
}

// Stop ends the process: one signal to drain, a second to stop at once, then SIGKILL.
func (r *Real) Stop() {
	for _, sig := range []os.Signal{os.Interrupt, os.Interrupt, syscall.SIGKILL} {
		r.Signal(sig)
		select {
		case <-r.done:
			return
		case <-time.After(5 * time.Second):
		}
	}
	<-r.done
}

// Deploy puts an app.yaml through the admin API.
func (r *Real) Deploy(yaml string) {
	r.T.Helper()
	code, body := r.Do(http.MethodPut, "/api/v1/apps?file=app.yaml", yaml)
	require.Equal(r.T, http.StatusAccepted, code, body)
}

// Delete deletes an app and waits until it is gone.
func (r *Real) Delete(app string) {
	r.T.Helper()
	code, body := r.Do(http.MethodDelete, "/api/v1/apps/"+app, "")
	require.Equal(r.T, http.StatusAccepted, code, body)
	r.Eventually(func() error {
		if code, _ := r.Do(http.MethodGet, "/api/v1/apps/"+app, ""); code != http.StatusNotFound {
			return fmt.Errorf("status %d", code)
		}
		return nil
	}, "app "+app+" gone")
}

// ShowToken adds the admin token of the node that a request goes to, found as the command finds it: by the
// link that the node leaves in the user's folder for state.
func ShowToken(r *http.Request) {
	folder := os.Getenv("XDG_STATE_HOME")
	if folder == "" {
		folder = filepath.Join(os.Getenv("HOME"), ".local", "state")
	}
	token, err := os.ReadFile(filepath.Join(folder, "dpserve", "admin", r.URL.Host))
	if err == nil { // else the node does not answer yet, or says that it wants a token
		r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
}

// Do sends one admin request.
func (r *Real) Do(method, path, body string) (code int, text string) {
	r.T.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, "http://"+r.Admin+path,
		strings.NewReader(body))
	require.NoError(r.T, err)
	ShowToken(req)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(r.T, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(r.T, err)
	return resp.StatusCode, string(b)
}

func (r *Real) get(path string, into any) error {
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://"+r.Admin+path, nil)
	if err != nil {
		return err
	}
	ShowToken(req)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, resp.Status)
	}
	if into == nil {
		return nil
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// App is the app's status.
func (r *Real) App(name string) client.AppStatus {
	r.T.Helper()
	var reply struct{ App client.AppStatus }
	require.NoError(r.T, r.get("/api/v1/apps/"+name, &reply))
	return reply.App
}

// Rank is one rank's status; ok is false while it is not listed.
func (r *Real) Rank(app string, group, rank int) (client.RankStatus, bool) {
	r.T.Helper()
	for _, u := range r.App(app).Units {
		for _, k := range u.Ranks {
			if k.Group == group && k.Rank == rank {
				return k, true
			}
		}
	}
	return client.RankStatus{}, false
}

// WaitStatus waits until the app has the status.
func (r *Real) WaitStatus(app, want string) client.AppStatus {
	r.T.Helper()
	var st client.AppStatus
	r.Eventually(func() error {
		st = r.App(app)
		if st.Status != want {
			return fmt.Errorf("app %s is %s: %s", app, st.Status, st.Message)
		}
		return nil
	}, "app "+app+" "+want)
	return st
}

// Eventually polls until f returns nil, or fails the test with f's last error.
func (r *Real) Eventually(f func() error, what string) {
	r.T.Helper()
	err := WaitFor(Patience, pollEvery, func() error {
		err := f()
		if err != nil && !r.runs() {
			r.T.Fatalf("waiting for %s: dpserve ended; output:\n%s", what, r.out)
		}
		return err
	})
	if err != nil {
		r.T.Fatalf("waiting for %s: %v; output:\n%s", what, err, r.out)
	}
}

// Quiet waits until nothing is in flight, queued or reserved in any app: the state every test must leave
// behind.
func (r *Real) Quiet() {
	r.T.Helper()
	r.Eventually(func() error { return idle(r.ask) }, "in-flight, queue and reservations 0")
}

// ask is a GET at the admin API of this process, with a time limit: a stopped process never answers.
func (r *Real) ask(path string) (code int, text string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.Admin+path, nil)
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

// Children are the live engines started by dpserve, in shims or not, by parent links at this moment.
func (r *Real) Children() []int {
	shims := shimsOf(r.Dir)
	out := slices.DeleteFunc(childrenOf(r.PID), func(pid int) bool {
		s, there := process.ReadStat(pid)
		return !there || s.Exiting || slices.Contains(shims, pid) // an ending shim has no command line
	})
	for _, pid := range shims {
		out = append(out, childrenOf(pid)...)
	}
	return out
}

// Chat is a chat request body for model.
func Chat(model, prompt string, maxTokens int, stream bool) string {
	b, err := json.Marshal(map[string]any{
		"model": model, "messages": []map[string]string{{"role": "user", "content": prompt}},
		"max_tokens": maxTokens, "stream": stream, "ignore_eos": true,
	})
	if err != nil {
		panic(err)
	}
	return string(b)
}

// Post sends a request to the OpenAI endpoint.
func (r *Real) Post(ctx context.Context, path, body string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.HTTP+path,
		strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	return http.DefaultClient.Do(req)
}

// Buffer is a bytes.Buffer for two goroutines.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// ErrStream is a stream that did not end well.
var ErrStream = errors.New("stream")

const (
	memoryFiles    = "/dev/shm"
	memoryFilesMin = 1 << 30 // bytes free: what all the tests of a run may keep there together
)

// DataDir makes a data dir that goes with the test: in memory where the machine has such files, because a
// node says when a write takes more than a second, and the disk of a busy machine does that. Tests of disks
// make the fault themselves.
func DataDir(t testing.TB) string {
	t.Helper()
	var fs syscall.Statfs_t
	in := memoryFiles
	if syscall.Statfs(memoryFiles, &fs) != nil || fs.Bavail*uint64(fs.Bsize) < memoryFilesMin {
		in = t.TempDir()
	}
	dir, err := os.MkdirTemp(in, "dpserve-test-") // no other user may write there, whatever the umask
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}
