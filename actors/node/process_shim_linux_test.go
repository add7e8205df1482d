package node

import (
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/shim"
	"github.com/dpserve/dpserve/test/parallel"
)

// shimPatience bounds every wait of these tests.
const shimPatience = 60 * time.Second

// sink is the output of an engine.
type sink struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (s *sink) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *sink) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// openTest opens the launcher of a process of node "node"; the test binary is the shim.
func openTest(t *testing.T, dir string, change func(c *Config)) *shims {
	t.Helper()
	cfg := Config{
		DataDir: dir, Executable: os.Args[0], Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Shims: &ShimConfig{Cluster: "cluster", Node: "node", OrphanTimeout: time.Minute}, Rand: rand.Uint64,
	}
	if change != nil {
		change(&cfg)
	}
	timers := Timers{}.withDefaults()
	l, err := openShims(&cfg, &timers)
	require.NoError(t, err)
	t.Cleanup(func() {
		l.close()
		entries, err := shim.Discover(t.Context(), l.dir)
		require.NoError(t, err)
		for i := range entries {
			if e := &entries[i]; e.Client != nil {
				e.Client.Close()
				<-e.Client.Done()
			}
			assert.NoError(t, shim.Remove(entries[i].Dir))
			process.Reap(entries[i].State.Shim, shimPatience)
		}
	})
	return l
}

// script is the order of an engine that is a shell script.
func script(text string) LaunchOrder {
	return LaunchOrder{
		Launch: engine.Launch{
			Argv: []string{"sh", "-c", text}, Env: []string{"PATH=" + os.Getenv("PATH"), "TOKEN=secret"},
			URL: "http://127.0.0.1:20000", Events: &engine.EventSource{Bind: "tcp://127.0.0.1:1"},
		},
		App: "demo", Revision: 3, Unit: "demo/0/1", Epoch: 7, Ranks: []int{1},
		Incarnations: []uint64{1<<64 - 1}, Devices: []int{4}, Ports: []int{20000},
	}
}

func soon(t *testing.T, what string, done func() bool) {
	t.Helper()
	require.Eventually(t, done, shimPatience, 5*time.Millisecond, what)
}

func exitOf(t *testing.T, p Process) Exit {
	t.Helper()
	select {
	case <-p.Exited():
	case <-time.After(shimPatience):
		require.Fail(t, "the engine lives on")
	}
	return p.Exit()
}

// isEmpty says that no folder of a shim is left.
func isEmpty(l *shims) bool {
	names, err := os.ReadDir(l.dir)
	return err == nil && len(names) == 0
}

// A process of the node lets go of an engine, the next one finds it with its order, gets its output from the
// last lines on, and ends it; then nothing is left.
func TestAnEngineIsHandedOver(t *testing.T) {
	dir := t.TempDir()
	first := openTest(t, dir, nil)
	assert.Empty(t, first.Found())
	out, errs := &sink{}, &sink{}
	file := filepath.Join(dir, "go")
	o := script("echo one; echo two >&2; until [ -e " + file + " ]; do sleep 0.01; done; echo three; " +
		"exec sleep 60")
	p, err := first.Start(t.Context(), o, out, errs)
	require.NoError(t, err)
	soon(t, "output", func() bool { return out.text() == "one\n" && errs.text() == "two\n" })
	assert.Equal(t, "process "+strconv.Itoa(p.PID()), p.Held())
	p.Adopt(io.Discard, io.Discard) // no effect
	p.Release()
	p.Detach()
	first.close()

	next := openTest(t, dir, nil)
	require.Len(t, next.Found(), 1)
	f := next.Found()[0]
	assert.Equal(t, o, f.LaunchOrder)
	assert.Equal(t, p.PID(), f.Process.PID())
	assert.WithinDuration(t, time.Now(), f.Began, time.Hour)
	f.Process.Adopt(out, errs)
	soon(t, "the last lines again", func() bool {
		return out.text() == "one\none\n" && errs.text() == "two\ntwo\n"
	})
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	soon(t, "and the next", func() bool { return out.text() == "one\none\nthree\n" })
	f.Process.Terminate()
	assert.Equal(t, "terminated", exitOf(t, f.Process).Signal)
	soon(t, "nothing is held", func() bool { return f.Process.Held() == "" })
	f.Process.Release()
	f.Process.Release()
	next.close()
	assert.True(t, isEmpty(next))
	select {
	case <-p.Exited():
		assert.Fail(t, "nothing is heard of an engine after Detach")
	default:
	}
}

// An engine that ended while no node ran is reported with its real status and its last lines.
func TestAnEngineThatEndedMeanwhile(t *testing.T) {
	dir := t.TempDir()
	first := openTest(t, dir, nil)
	file := filepath.Join(dir, "go")
	p, err := first.Start(t.Context(),
		script("until [ -e "+file+" ]; do sleep 0.01; done; echo no room >&2; exit 7"),
		io.Discard, io.Discard)
	require.NoError(t, err)
	first.close()
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	soon(t, "end", func() bool { s, there := process.ReadStat(p.PID()); return !there || s.Zombie })
	next := openTest(t, dir, nil)
	require.Len(t, next.Found(), 1)
	f := next.Found()[0].Process
	assert.Equal(t, 7, exitOf(t, f).Code)
	errs := &sink{}
	f.Adopt(io.Discard, errs)
	soon(t, "its last words", func() bool { return errs.text() == "no room\n" })
	soon(t, "nothing is held", func() bool { return f.Held() == "" })
	f.Release()
	next.close()
	assert.True(t, isEmpty(next))
}

// worker is a script whose engine starts one worker in its session that ignores SIGTERM and has another
// environment, and one that has left the session.
const worker = `env -i sh -c 'trap "" TERM; while :; do sleep 1; done' & env -i setsid sleep 60 &
echo up; wait`

// allEnded checks that none of some processes is left. Without a cgroup those that have left the session
// outlive a shim that was killed.
func allEnded(t *testing.T, s *shim.State, pids []int) {
	t.Helper()
	assert.Empty(t, s.Left())
	for _, pid := range pids {
		if at, there := process.ReadStat(pid); s.Cgroup != "" {
			assert.True(t, !there || at.Zombie, "process %d lives", pid)
		}
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// EN3, HF62: The shim is killed under its node: the engine's end is seen at once, and its worker is held
// until it is killed.
func TestTheShimIsKilled(t *testing.T) {
	l := openTest(t, t.TempDir(), nil)
	out := &sink{}
	p, err := l.Start(t.Context(), script(worker), out, io.Discard)
	require.NoError(t, err)
	soon(t, "up", func() bool { return out.text() == "up\n" })
	sp := p.(*shimProcess)
	entries, err := os.ReadDir(l.dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	all := sp.state.PIDs()
	assert.GreaterOrEqual(t, len(all), 3)
	require.NoError(t, syscall.Kill(sp.state.Shim, syscall.SIGKILL))
	exit := exitOf(t, p)
	assert.Equal(t, -1, exit.Code)
	assert.Contains(t, exit.String(), "its shim was killed")
	soon(t, "nothing is held", func() bool { p.Kill(); return p.Held() == "" })
	p.Release()
	l.close()
	assert.True(t, isEmpty(l))
	allEnded(t, &sp.state, all)
}

// EN3, HF62: Node and shim are killed, in either order: the next process of the node ends what is left and
// reports it.
func TestNodeAndShimAreKilled(t *testing.T) {
	dir := t.TempDir()
	first := openTest(t, dir, nil)
	out := &sink{}
	order := script(worker)
	order.Output = filepath.Join(dir, "worker.log")
	p, err := first.Start(t.Context(), order, out, io.Discard)
	require.NoError(t, err)
	sp := p.(*shimProcess)
	soon(t, "up", func() bool { return out.text() == "up\n" && len(sp.lastLines()) == 1 })
	first.close()
	all := sp.state.PIDs()
	assert.GreaterOrEqual(t, len(all), 3)
	require.NoError(t, syscall.Kill(sp.state.Shim, syscall.SIGKILL))
	process.Reap(sp.state.Shim, shimPatience)
	next := openTest(t, dir, nil)
	allEnded(t, &sp.state, all)
	require.Len(t, next.Found(), 1)
	f := next.Found()[0].Process
	assert.Contains(t, exitOf(t, f).String(), "its shim was killed")
	f.Adopt(out, io.Discard)
	assert.Equal(t, "up\nup\n", out.text())
	assert.Empty(t, f.Held())
	f.Terminate()
	f.Kill()
	f.Release()
	next.close()
	assert.True(t, isEmpty(next))
}

// suspend stops a process and waits until it stands still.
func suspend(t *testing.T, pid int) {
	t.Helper()
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	soon(t, "stopped", func() bool {
		s, there := process.ReadStat(pid)
		return there && s.Stopped
	})
}

// EN3: A shim that hangs keeps Kill from nothing.
func TestAShimThatHangs(t *testing.T) {
	t.Parallel()
	l := openTest(t, t.TempDir(), nil)
	p, err := l.Start(t.Context(), script("exec sleep 60"), io.Discard, io.Discard)
	require.NoError(t, err)
	suspend(t, p.(*shimProcess).state.Shim)
	soon(t, "killed", func() bool { p.Kill(); return closed(p.Exited()) })
	soon(t, "nothing is held", func() bool { return p.Held() == "" })
	p.Release()
	l.close()
	assert.True(t, isEmpty(l))
}

// HF67: A shim that does not answer the next process of the node is asked again: its engine is found at once,
// lives, and is that process's when the shim answers. One that does not answer for the orphan timeout is
// ended with its engine. The engines of other shims do not wait for it.
func TestASilentShim(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first := openTest(t, dir, nil)
	var engines []*shimProcess
	for i := range 3 {
		out, order := &sink{}, script("echo up; exec sleep 60")
		order.Output = filepath.Join(dir, strconv.Itoa(i)+".log")
		p, err := first.Start(t.Context(), order, out, io.Discard)
		require.NoError(t, err)
		engine := p.(*shimProcess)
		soon(t, "its shim has its output", func() bool {
			return out.text() == "up\n" && len(engine.lastLines()) == 1
		})
		engines = append(engines, engine)
	}
	first.close()
	late, never := engines[1].state, engines[2].state
	suspend(t, late.Shim)
	suspend(t, never.Shim)
	next := openTest(t, dir, func(c *Config) { c.Shims.OrphanTimeout = 5 * time.Second })
	require.Len(t, next.Found(), 3)
	assert.Empty(t, next.foreign)
	found := map[int]Process{}
	outs := map[int]*sink{}
	for _, f := range next.Found() {
		out := &sink{}
		f.Process.Adopt(out, io.Discard)
		found[f.Process.PID()], outs[f.Process.PID()] = f.Process, out
		assert.False(t, closed(f.Process.Exited()))
	}
	assert.NotNil(t, found[engines[0].PID()].(*shimProcess).connected())
	assert.Nil(t, found[late.PID].(*shimProcess).connected())
	require.NoError(t, syscall.Kill(late.Shim, syscall.SIGCONT))
	soon(t, "its output", func() bool { return outs[late.PID].text() == "up\n" })
	found[late.PID].Terminate()
	assert.Equal(t, "terminated", exitOf(t, found[late.PID]).Signal)

	assert.Contains(t, exitOf(t, found[never.PID]).String(), "its shim was killed")
	assert.Empty(t, never.Left())
	assert.Equal(t, "up\n", outs[never.PID].text())
	process.Reap(never.Shim, shimPatience)
	assert.False(t, closed(found[engines[0].PID()].Exited()))
}

// HF59: A copied data dir ends nothing of the original: its engines are named, and told in one line. When
// they have ended, the copies are forgotten.
func TestACopiedDataDir(t *testing.T) {
	dir, from := t.TempDir(), t.TempDir()
	first := openTest(t, from, nil)
	var engines []*shimProcess
	for range 2 {
		p, err := first.Start(t.Context(), script("exec sleep 60"), io.Discard, io.Discard)
		require.NoError(t, err)
		engines = append(engines, p.(*shimProcess))
	}
	require.NoError(t, exec.CommandContext(t.Context(), "cp", "-a", from, dir).Run())
	said := &sink{}
	open := func() *shims {
		return openTest(t, filepath.Join(dir, filepath.Base(from)), func(c *Config) {
			c.Log = slog.New(slog.NewTextHandler(said, &slog.HandlerOptions{Level: slog.LevelWarn}))
		})
	}
	copied := open()
	assert.Empty(t, copied.Found())
	require.Len(t, copied.foreign, 2)
	for i, p := range engines {
		assert.Contains(t, strings.Join(copied.foreign, "\n"),
			"its shim is process "+strconv.Itoa(p.state.Shim))
		assert.Len(t, engines[i].state.Left(), 2)
		assert.False(t, closed(p.Exited()))
	}
	assert.Equal(t, 1, strings.Count(said.text(), "level=WARN"), said.text())
	copied.close()
	for _, p := range engines {
		p.Kill()
		exitOf(t, p)
		p.Release()
	}
	first.close()
	copied = open()
	assert.Empty(t, copied.Found())
	assert.Empty(t, copied.foreign)
	assert.True(t, isEmpty(copied))
	assert.Equal(t, 1, strings.Count(said.text(), "level=WARN"), said.text())
}

// HF63: Where cgroups cannot be written, engines start without them, and that is told once.
func TestEnginesWithoutCgroups(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	at, err := process.CgroupOf("x")
	require.NoError(t, err)
	self, err := filepath.Abs(os.Args[0])
	require.NoError(t, err)
	program := filepath.Join(t.TempDir(), "shim")
	text := "#!/bin/sh\nexec unshare -m sh -c 'mount -o remount,bind,ro \"$0\" && exec \"$@\"' '" +
		filepath.Dir(at) + "' '" + self + "' \"$@\"\n"
	require.NoError(t, parallel.WriteProgram(program, []byte(text)))
	said := &sink{}
	l := openTest(t, t.TempDir(), func(c *Config) {
		c.Executable, c.Log = program, slog.New(slog.NewTextHandler(said, nil))
	})
	for range 2 {
		p, err := l.Start(t.Context(), script("exec sleep 60"), io.Discard, io.Discard)
		require.NoError(t, err)
		assert.Empty(t, p.(*shimProcess).state.Cgroup)
		p.Kill()
		exitOf(t, p)
		p.Release()
	}
	l.close()
	assert.Equal(t, 1, strings.Count(said.text(), "\n"), said.text())
	assert.Contains(t, said.text(), "level=INFO msg=\"engines have no cgroup of their own")
	assert.Contains(t, said.text(), "read-only file system")
}

// EN3: Engines of another cluster, node or boot, and folders that cannot be read, are ended and forgotten.
func TestLeftoversOfOthers(t *testing.T) {
	dir := t.TempDir()
	first := openTest(t, dir, func(c *Config) { c.Rand = func() uint64 { return 0x0123456789abcdef } })
	var left []shim.State
	for range 2 {
		p, err := first.Start(t.Context(), script("exec sleep 60"), io.Discard, io.Discard)
		require.NoError(t, err)
		left = append(left, p.(*shimProcess).state)
	}
	first.close()
	damaged := filepath.Join(first.dir, "0123456789abcdef.2", "spec.json")
	require.NoError(t, os.WriteFile(damaged, []byte("{"), 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(first.dir, "0123456789abcdef.9"), 0o700))
	next := openTest(t, dir, func(c *Config) { c.Shims.Cluster = "another" })
	assert.Empty(t, next.Found())
	assert.Empty(t, next.foreign)
	assert.True(t, isEmpty(next))
	for i := range left {
		assert.Empty(t, left[i].Left())
	}
	for name, change := range map[string]func(c *Config, boot *string){
		"node": func(c *Config, _ *string) { c.Shims.Node = "another" },
		"boot": func(_ *Config, boot *string) { *boot = "another" },
	} {
		t.Run(name, func(t *testing.T) {
			l := openTest(t, dir, nil)
			p, err := l.Start(t.Context(), script("exec sleep 60"), io.Discard, io.Discard)
			require.NoError(t, err)
			e := shim.Entry{Dir: p.(*shimProcess).dir}
			e.Spec.Cluster, e.Spec.Node, e.Spec.Boot = "cluster", "node", l.boot
			other := &shims{cfg: l.cfg, boot: l.boot}
			c := Config{Shims: &other.cfg}
			change(&c, &other.boot)
			require.Error(t, other.mine(&e))
			require.NoError(t, l.mine(&e))
		})
	}
}

// EN3: A socket that does not belong to a shim of the launch is left alone and named, and so is who listens.
func TestAForgedSocketIsLeftAlone(t *testing.T) {
	dir, err := os.MkdirTemp("", "s") // the path of a socket is short
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	folder := filepath.Join(dir, EnginesDir, "0123456789abcdef.1")
	require.NoError(t, os.MkdirAll(folder, 0o700))
	spec := shim.Spec{
		Version: shim.Version, Cluster: "cluster", Node: "node", Boot: process.BootID(),
		ID: filepath.Base(folder), Path: "/bin/sh", Argv: []string{"sh"},
	}
	text, err := json.Marshal(&spec)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "spec.json"), text, 0o600))
	socket, err := net.Listen("unix", filepath.Join(folder, "shim.sock"))
	require.NoError(t, err)
	l := openTest(t, dir, nil)
	assert.Empty(t, l.Found())
	require.Len(t, l.foreign, 1)
	assert.Contains(t, l.foreign[0], "belongs to another user or process")
	assert.DirExists(t, folder)
	require.NoError(t, socket.Close())
}

// With on_lease_loss fence an engine lives as long as it is told.
func TestEnginesEndWithTheLease(t *testing.T) {
	l := openTest(t, t.TempDir(), func(c *Config) { c.OnLeaseLoss = Fence })
	assert.Equal(t, DefaultLeaseTTL, l.leaseLeft())
	p, err := l.Start(t.Context(), script("exec sleep 60"), io.Discard, io.Discard)
	require.NoError(t, err)
	l.Extend(time.Hour)
	assert.InDelta(t, time.Hour, l.leaseLeft(), float64(time.Minute))
	l.Extend(0)
	assert.Equal(t, leastLease, l.leaseLeft())
	assert.Equal(t, "terminated", exitOf(t, p).Signal)

	l = openTest(t, t.TempDir(), nil)
	assert.Zero(t, l.leaseLeft(), "serve: no lease counts")
	l.Extend(0)
}

// A start that fails leaves nothing, and says why as a direct child does.
func TestAShimThatCannotStart(t *testing.T) {
	l := openTest(t, t.TempDir(), nil)
	o := script("exit 1")
	o.Argv = []string{"no-such-engine", "--port", "1"}
	_, err := l.Start(t.Context(), o, io.Discard, io.Discard)
	require.EqualError(t, err,
		`start engine no-such-engine: exec: "no-such-engine": executable file not found in $PATH`)
	l = openTest(t, t.TempDir(), func(c *Config) { c.Executable = "/none/dpserve" })
	_, err = l.Start(t.Context(), script("exit 1"), io.Discard, io.Discard)
	require.ErrorContains(t, err, "start engine sh: start a shim: ")
	assert.True(t, isEmpty(l))
}

// A launch order is read by a later version of dpserve: its names stay, and unknown ones do no harm.
func TestALaunchOrderOnDisk(t *testing.T) {
	o := script("x")
	text, err := json.Marshal(&o)
	require.NoError(t, err)
	var again LaunchOrder
	require.NoError(t, json.Unmarshal(text, &again))
	assert.Equal(t, o, again)
	old := `{"launch":{"URL":"http://127.0.0.1:20000","Events":{"Bind":"tcp://127.0.0.1:1"},"Later":1},` +
		`"app":"demo","revision":3,"unit":"demo/0/1","group":0,"epoch":7,"ranks":[1],` +
		`"incarnations":[18446744073709551615],"devices":[4],"ports":[20000],"later":{}}`
	again = LaunchOrder{}
	require.NoError(t, json.Unmarshal([]byte(old), &again))
	o.Argv, o.Env = nil, nil
	assert.Equal(t, o, again)
}
