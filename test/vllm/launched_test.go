package vllm

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

const (
	exampleFile = "examples/vllm-cpu/app.yaml" // two dense ranks
	endTime     = 60 * time.Second             // for the engines of a deleted application
	portTime    = 40 * time.Second             // for the processes and ports of a killed engine
)

// launched is an application whose engines are started by dpserve.
type launched struct {
	t    *testing.T
	dp   *harness.Real
	app  string
	home string // HOME and TMPDIR of dpserve and of its engines

	groups []int // process groups of engines that were ready once
}

// startNode starts dpserve where engines find vLLM and the files of the repository. Engines inherit its PATH,
// HOME and TMPDIR.
func startNode(t *testing.T, program string) *launched {
	t.Helper()
	harness.Binary(t) // built with the HOME that has the build cache
	root, err := harness.Root()
	require.NoError(t, err)
	home, err := os.MkdirTemp("", "dpserve-vllm-") // a short path: sockets have little room for theirs
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(home) })
	t.Setenv("PATH", filepath.Dir(program)+":"+os.Getenv("PATH"))
	t.Setenv("HOME", home)
	t.Setenv("TMPDIR", home)
	t.Chdir(root)
	a := &launched{t: t, home: home, dp: harness.Start(t)}
	a.dp.Expect(harness.EngineFails, harness.RequestsFail, harness.RanksMove)
	t.Cleanup(a.end)
	return a
}

// deploy deploys a file and waits until n ranks are ready.
func (a *launched) deploy(app, file string, n int) {
	a.t.Helper()
	began := time.Now()
	a.app = app
	a.dp.Deploy(file)
	a.wait("every rank is ready", func() error { return a.allReady(n) })
	a.t.Logf("%s: %d ranks are ready %s after the deploy", app, n, since(began))
	ranks := a.ranks()
	for i := range ranks {
		a.note(&ranks[i])
	}
}

// status is the application's status. dpserve may not answer while it restarts.
func (a *launched) status() (client.AppStatus, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var reply struct{ App client.AppStatus }
	url := "http://" + a.dp.Admin + "/api/v1/apps/" + a.app
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return reply.App, err
	}
	harness.ShowToken(req)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return reply.App, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return reply.App, fmt.Errorf("%w: %s", errStatus, resp.Status)
	}
	err = json.NewDecoder(resp.Body).Decode(&reply)
	return reply.App, err
}

// allReady says why n ranks are not ready.
func (a *launched) allReady(n int) error {
	st, err := a.status()
	if err != nil {
		return err
	}
	if st.Status == "DEPLOY_FAILED" {
		var tail []string
		for i := range st.Units {
			tail = append(tail, st.Units[i].LogTail...)
		}
		a.t.Fatalf("%s: %s\n%s", st.Status, st.Message, strings.Join(tail, "\n"))
	}
	if st.Status != "RUNNING" || st.Ready != n {
		return fmt.Errorf("%s, %d of %d ranks are ready: %s", st.Status, st.Ready, n, st.Message)
	}
	return harness.Accounted(&st)
}

// ranks are all ranks of the application, those of its pools too.
func (a *launched) ranks() (out []client.RankStatus) {
	st, _ := a.status()
	for i := range st.Units {
		out = append(out, st.Units[i].Ranks...)
	}
	return out
}

// rankOf is one rank of a status, empty if it is not there.
func rankOf(st *client.AppStatus, group, rank int) client.RankStatus {
	for i := range st.Units {
		for _, k := range st.Units[i].Ranks {
			if k.Group == group && k.Rank == rank {
				return k
			}
		}
	}
	return client.RankStatus{}
}

// wait waits for something that takes as long as the start of an engine.
func (a *launched) wait(what string, f func() error) {
	a.t.Helper()
	err := harness.WaitFor(startTimeout, 200*time.Millisecond, f)
	if err != nil {
		a.t.Fatalf("waiting until %s: %v; output:\n%s", what, err, a.dp.Output())
	}
}

// note remembers the process group of a rank's engine.
func (a *launched) note(k *client.RankStatus) {
	group, err := syscall.Getpgid(k.PID)
	if err == nil && !slices.Contains(a.groups, group) {
		a.groups = append(a.groups, group)
	}
}

// left are the live processes of all engines of the test. A process that has renamed itself may have lost
// its environment, and one that has left its group has it.
func (a *launched) left() (pids []int) {
	for _, pid := range allProcesses() {
		group, err := syscall.Getpgid(pid)
		if err == nil && slices.Contains(a.groups, group) || hasEnviron(pid, "TMPDIR="+a.home) {
			if harness.Alive(pid) && pid != a.dp.PID {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// nothingLeft waits until no process of an engine lives.
func (a *launched) nothingLeft() {
	a.t.Helper()
	assert.Eventually(a.t, func() bool { return len(a.left()) == 0 }, endTime, 100*time.Millisecond,
		"processes of engines are left: %s", describe(a.left()))
}

// end deletes the application, checks that nothing of it is left, and ends what is left all the same.
func (a *launched) end() {
	if a.t.Failed() {
		st, _ := a.status()
		for _, u := range st.Units {
			a.t.Logf("%s %s: %s\n%s", u.Unit, u.Phase, u.Reason, strings.Join(u.LogTail, "\n"))
		}
	}
	select {
	case <-a.dp.Exited():
	default:
		if a.app != "" {
			code, body := a.dp.Do(http.MethodDelete, "/api/v1/apps/"+a.app, "")
			assert.Contains(a.t, []int{http.StatusAccepted, http.StatusNotFound}, code, body)
		}
	}
	a.nothingLeft()
	for _, pid := range a.left() {
		_ = syscall.Kill(pid, syscall.SIGKILL) // they are of this test: its groups, its folder
	}
}

// A life is one start of a rank.
type life struct {
	group, rank int
	epoch       uint64
	incarnation string
	front       int // process id
	processes   []int
	url         string
	ports       []string // that its command line names
}

// addr is host:port of the engine's API.
func (l *life) addr() string { return strings.TrimPrefix(l.url, "http://") }

// alive waits until a rank is ready, and says which engine it has.
func (a *launched) alive(group, rank int) life {
	a.t.Helper()
	var l life
	a.wait(fmt.Sprintf("rank %d/%d is ready", group, rank), func() error {
		st, err := a.status()
		if err != nil {
			return err
		}
		k := rankOf(&st, group, rank)
		if k.Phase != "ready" || k.PID == 0 || k.URL == "" || k.Incarnation == "" {
			return fmt.Errorf("rank %d/%d: %+v", group, rank, k)
		}
		a.note(&k)
		l = life{
			group: group, rank: rank, epoch: k.Epoch, incarnation: k.Incarnation, front: k.PID, url: k.URL,
			processes: append([]int{k.PID}, descendants(k.PID)...), ports: portsIn(title(k.PID)),
		}
		return nil
	})
	return l
}

// back waits until a rank runs again after a failure: its number, the next epoch, another process.
func (a *launched) back(old life) life {
	a.t.Helper()
	a.wait(fmt.Sprintf("rank %d/%d starts again", old.group, old.rank), func() error {
		st, err := a.status()
		if err != nil {
			return err
		}
		if k := rankOf(&st, old.group, old.rank); k.Epoch <= old.epoch {
			return fmt.Errorf("rank %d/%d: %s in epoch %d", old.group, old.rank, k.Phase, k.Epoch)
		}
		return nil
	})
	now := a.alive(old.group, old.rank)
	assert.Equal(a.t, old.epoch+1, now.epoch, "the epoch of the rank")
	assert.NotEqual(a.t, old.incarnation, now.incarnation)
	assert.NotEqual(a.t, old.front, now.front)
	return now
}

// gone waits until neither a process nor a port of an engine is left. A port that the rank has again is not
// looked at.
func (a *launched) gone(old life, now *life) {
	a.t.Helper()
	taken := func() (out []string) {
		for _, pid := range old.processes {
			if harness.Alive(pid) {
				out = append(out, fmt.Sprintf("process %d (%s)", pid, title(pid)))
			}
		}
		for _, addr := range old.ports {
			if now != nil && slices.Contains(now.ports, addr) {
				continue
			}
			l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", addr)
			if err != nil {
				out = append(out, err.Error())
				continue
			}
			_ = l.Close()
		}
		return out
	}
	assert.Eventually(a.t, func() bool { return len(taken()) == 0 }, portTime, 200*time.Millisecond,
		"of the old engine is left: %v", taken())
}

// FS13: TestLaunched deploys the example of two dense ranks, as it is in the repository but for a longer
// start.
func TestLaunched(t *testing.T) {
	program := installed(t)
	a := startNode(t, program)
	a.deploy("tiny", exampleApp(t), 2)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *launched)
	}{
		{"Streams", testStreams},
		{"Cached", testCached},
		{"FrontKilled", testFrontKilled},
		{"CoreKilled", testCoreKilled},
		{"Restart", testRestartOfDpserve},
		{"RollingUpdate", testRollingUpdate},
		{"Drain", testDrain}, // the last one: it ends dpserve
	} {
		if !t.Run(part.name, func(t *testing.T) { part.run(t, a.of(t)) }) {
			return
		}
	}
}

// of gives the parts of a test their own T.
func (a *launched) of(t *testing.T) *launched {
	b := *a
	b.t = t
	t.Cleanup(func() { a.groups = b.groups })
	return &b
}

// exampleApp is the example, with time for a busy machine.
func exampleApp(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(exampleFile)
	require.NoError(t, err)
	const was = "startup_timeout_s: 300"
	require.Equal(t, 1, strings.Count(string(text), was), "%s says how long a start may take", exampleFile)
	return strings.Replace(string(text), was, fmt.Sprintf("startup_timeout_s: %d",
		int(startTimeout.Seconds())), 1)
}

func since(began time.Time) time.Duration { return time.Since(began).Round(100 * time.Millisecond) }
