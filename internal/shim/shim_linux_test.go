package shim

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/test/parallel"
)

// patience bounds every wait of these tests.
const patience = 60 * time.Second

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	require.Eventually(t, done, patience, 2*time.Millisecond, what)
}

func dead(pid int) bool {
	s, there := process.ReadStat(pid)
	return !there || s.Zombie
}

// running is an engine of a test.
type running struct {
	*Client
	t     *testing.T
	dir   string // of all launches
	info  Info
	exits <-chan process.Exit
}

// begin starts an engine whose spec change may alter, and owns it. Its end leaves nothing.
func begin(t *testing.T, dir string, change func(*Spec), words ...string) *running {
	t.Helper()
	return beginWith(t, os.Args[0], dir, change, words...)
}

// beginWith starts an engine by a program that is the shim.
func beginWith(t *testing.T, program, dir string, change func(*Spec), words ...string) *running {
	t.Helper()
	spec := testSpec(newID(t), words...)
	spec.Output = filepath.Join(dir, outputFile)
	if change != nil {
		change(&spec)
	}
	c, info, err := Start(t.Context(), program, dir, spec)
	require.NoError(t, err)
	t.Cleanup(func() {
		said, _ := os.ReadFile(filepath.Join(dir, spec.ID, ownLogFile))
		assert.NotContains(t, string(said), "DATA RACE")
		assert.NotContains(t, string(said), "panic")
		c.Close()
		<-c.Done()
		assert.NoError(t, info.State.End())
		process.Reap(info.State.Shim, patience)
	})
	r := &running{Client: c, t: t, dir: dir, info: info}
	r.exits, err = c.Watch(t.Context())
	require.NoError(t, err)
	return r
}

var launches sync.Map // ids by test

// newID draws the id of a launch, which no other process of this machine has.
func newID(t *testing.T) string {
	n, _ := launches.LoadOrStore(t.Name(), new(int))
	*n.(*int)++
	return fmt.Sprintf("%d-%d.%d", os.Getpid(), time.Now().UnixNano(), *n.(*int))
}

func (r *running) exit() process.Exit {
	r.t.Helper()
	select {
	case e, ok := <-r.exits:
		require.True(r.t, ok, "the connection ended")
		return e
	case <-time.After(patience):
		require.Fail(r.t, "the engine lives on")
	}
	return process.Exit{}
}

// lines reads the output until there are n lines.
func (r *running) lines(since uint64, n int) []string {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	var out []string
	err := r.Logs(ctx, since, func(lines []Line, _ uint64) {
		for i := range lines {
			out = append(out, lines[i].Stream+" "+lines[i].Text)
		}
		if len(out) >= n {
			cancel()
		}
	})
	if err != nil {
		require.ErrorIs(r.t, err, context.Canceled)
	}
	return out
}

// find is the one launch below a folder.
func find(t *testing.T, dir string) *Entry {
	t.Helper()
	entries, err := Discover(t.Context(), dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	e := &entries[0]
	if e.Client != nil {
		t.Cleanup(func() { e.Client.Close(); <-e.Client.Done() })
	}
	return e
}

// own watches an engine that was found. The shim may not have noticed the end of its owner yet.
func own(t *testing.T, e *Entry) *running {
	t.Helper()
	require.NoError(t, e.Err)
	r := &running{Client: e.Client, t: t}
	eventually(t, "own", func() bool {
		var err error
		r.exits, err = e.Client.Watch(t.Context())
		if err != nil {
			require.ErrorIs(t, err, ErrOwned)
		}
		return err == nil
	})
	return r
}

// An engine lives in its shim, and after its end and Release nothing is left.
func TestOneEngine(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long/", 30)) // longer than the path of a socket
	r := begin(t, dir, nil, "say=up", "err=warning", "orphan", "polite")
	folder := filepath.Join(dir, r.info.Spec.ID)
	for name, mode := range map[string]os.FileMode{
		"": os.ModeDir | 0o700, specFile: 0o600, stateFile: 0o600, ownLogFile: 0o600,
	} {
		info, err := os.Stat(filepath.Join(folder, name))
		require.NoError(t, err)
		assert.Equal(t, mode, info.Mode(), name)
	}
	assert.Equal(t, r.info.State, readState(folder))
	assert.Equal(t, Running, r.info.State.Phase)
	assert.ElementsMatch(t, []string{"stdout up", "stderr warning"}, r.lines(0, 2))

	shim, engine := r.info.State.Shim, r.info.State.PID
	s, there := process.ReadStat(engine)
	require.True(t, there)
	assert.Equal(t, shim, s.Parent)
	assert.Equal(t, engine, s.Group, "a group of its own")
	assert.Equal(t, s.Start, r.info.State.Start)
	session, err := syscall.Getpgid(shim)
	require.NoError(t, err)
	assert.Equal(t, shim, session)
	require.ErrorIs(t, r.Release(t.Context()), ErrRunning)

	require.NoError(t, r.Signal(syscall.SIGTERM))
	exit := r.exit()
	assert.Equal(t, 3, exit.Code)
	assert.Equal(t, []string{"stdout bye"}, r.lines(2, 1))
	eventually(t, "release", func() bool { return r.Release(t.Context()) == nil })
	assert.NoDirExists(t, folder)
	assert.True(t, dead(shim))
	_, there = process.ReadStat(shim)
	assert.False(t, there, "it is reaped")
	assert.Empty(t, r.info.State.Left())
}

// A second owner is refused while the first one is connected; others may ask.
func TestOneOwner(t *testing.T) {
	dir := t.TempDir()
	r := begin(t, dir, nil)
	e := find(t, dir)
	require.NoError(t, e.Err)
	_, err := e.Client.Watch(t.Context())
	require.ErrorIs(t, err, ErrOwned)
	info, err := e.Client.Info(t.Context())
	require.NoError(t, err)
	assert.Equal(t, r.info.Spec, info.Spec)
	r.Close()
	next := own(t, e)
	require.NoError(t, next.Signal(syscall.SIGKILL))
	assert.Equal(t, "killed", next.exit().Signal)
}

// The process that owns an engine is killed; the next one finds the engine, its output, and its later exit.
func TestAnEngineOutlivesItsOwner(t *testing.T) {
	dir, id := t.TempDir(), newID(t)
	owner := exec.CommandContext(t.Context(), os.Args[0], ownerWord, dir, id)
	out, err := owner.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, owner.Start())
	t.Cleanup(func() {
		state := readState(filepath.Join(dir, id))
		assert.NoError(t, state.End())
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimPrefix(strings.TrimSpace(line), "pid "))
	require.NoError(t, err, line)
	require.NoError(t, owner.Process.Kill())
	_ = owner.Wait()

	e := find(t, dir)
	r := own(t, e)
	assert.Equal(t, pid, e.State.PID)
	assert.Equal(t, Running, e.State.Phase)
	assert.False(t, dead(pid))
	assert.Equal(t, []string{"stdout up"}, r.lines(e.Unread, 1))
	require.NoError(t, r.Signal(syscall.SIGTERM))
	assert.Equal(t, 3, r.exit().Code)
	eventually(t, "release", func() bool { return r.Release(t.Context()) == nil })
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Empty(t, entries)
}

// An engine that ends while nobody is there is found with its exit status and its last lines.
func TestAnExitThatNobodySaw(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(t.TempDir(), "go")
	r := begin(t, dir, nil, "say=read", "await="+file, "say=no room for the model", "exit=7")
	assert.Equal(t, []string{"stdout read"}, r.lines(0, 1))
	r.Close()
	<-r.Done()
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	eventually(t, "exit", func() bool { return dead(r.info.State.PID) })
	e := find(t, dir)
	next := own(t, e)
	assert.Equal(t, 7, next.exit().Code)
	info, err := next.Info(t.Context())
	require.NoError(t, err)
	assert.Equal(t, Exited, info.State.Phase)
	assert.Equal(t, uint64(1), info.Read)
	assert.Equal(t, []string{"stdout no room for the model"}, next.lines(info.Read, 1))
	eventually(t, "on disk", func() bool {
		s := readState(e.Dir)
		return s.Exit != nil && s.Exit.Code == 7 && len(LastLines(e.Spec.Output, e.State.Began, 9)) == 2
	})
}

// Without an owner an engine that ignores SIGTERM is killed after the grace, with what left its group, and
// its status is kept.
func TestAnOrphanEnds(t *testing.T) {
	dir := t.TempDir()
	r := begin(t, dir, func(s *Spec) { s.Orphan, s.Grace = 50*time.Millisecond, 50*time.Millisecond },
		"worker", "say=started", "stubborn")
	assert.Equal(t, []string{"stdout started"}, r.lines(0, 1))
	assert.Len(t, r.info.State.Left(), 3)
	r.Close()
	eventually(t, "end", func() bool { return len(r.info.State.Left()) == 1 })
	e := find(t, dir)
	next := own(t, e)
	assert.Equal(t, "killed", next.exit().Signal)
	info, err := next.Info(t.Context())
	require.NoError(t, err)
	assert.Contains(t, info.State.Reason, "no node came back within")
	eventually(t, "release", func() bool { return next.Release(t.Context()) == nil })
}

// In mode fence an engine ends when the last Extend has run out, although its owner is there.
func TestFence(t *testing.T) {
	r := begin(t, t.TempDir(), func(s *Spec) { s.Lease, s.Grace = time.Hour, time.Minute }, "say=up")
	assert.Equal(t, []string{"stdout up"}, r.lines(0, 1))
	require.NoError(t, r.Extend(time.Minute))
	info, err := r.Info(t.Context())
	require.NoError(t, err)
	assert.Equal(t, Running, info.State.Phase)
	require.NoError(t, r.Extend(0))
	assert.Equal(t, 0, r.exit().Code)
	info, err = r.Info(t.Context())
	require.NoError(t, err)
	assert.Equal(t, "the node's lease was not renewed", info.State.Reason)
}

// withoutCgroups is a program that runs this one where cgroups cannot be written.
func withoutCgroups(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	at, err := process.CgroupOf("x")
	require.NoError(t, err)
	self, err := filepath.Abs(os.Args[0])
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "shim")
	text := "#!/bin/sh\nexec unshare -m sh -c 'mount -o remount,bind,ro \"$0\" && exec \"$@\"' '" +
		filepath.Dir(at) + "' '" + self + "' \"$@\"\n"
	require.NoError(t, parallel.WriteProgram(path, []byte(text)))
	return path
}

// inheritOrphans makes this process inherit what loses its parent, and reaps it at once, as process 1 does.
func inheritOrphans(t *testing.T) (reap func()) {
	t.Helper()
	require.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	t.Cleanup(func() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) })
	return func() {
		for _, child := range process.Children(os.Getpid()) {
			if child.Zombie {
				_, _ = unix.Wait4(child.PID, nil, unix.WNOHANG, nil)
			}
		}
	}
}

// EN3, HF60, HF61: An engine has a core that has overwritten its environment and a helper that has left
// environment, session and parent. Nothing of them outlives the end of the front process, nor, where there
// are cgroups, the SIGKILL of the shim, although nobody waits for the front.
func TestWhatBelongsToAnEngine(t *testing.T) {
	for name, program := range map[string]func(*testing.T) string{
		"cgroup":  func(*testing.T) string { return os.Args[0] },
		"session": withoutCgroups,
	} {
		t.Run(name, func(t *testing.T) {
			reap := inheritOrphans(t)
			dir := t.TempDir()
			start := func() *running {
				r := beginWith(t, program(t), dir, nil, "helper", "core", "stubborn")
				assert.Equal(t, []string{"stdout renamed"}, r.lines(0, 1))
				assert.Equal(t, name == "cgroup" && canMakeCgroups(t), r.info.State.Cgroup != "")
				assert.Equal(t, r.info.State.Cgroup == "", r.info.State.NoCgroup != "")
				eventually(t, "core and helper have no environment", func() bool {
					pids := r.info.State.PIDs()
					return len(pids) == 3 && !slices.ContainsFunc(pids, func(pid int) bool {
						text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
						isEmpty := err == nil && strings.Trim(string(text), "\x00") == ""
						return pid != r.info.State.PID && !isEmpty
					})
				})
				return r
			}
			r := start()
			require.NoError(t, syscall.Kill(r.info.State.PID, syscall.SIGKILL))
			assert.Equal(t, "killed", r.exit().Signal)
			eventually(t, "nothing is left", func() bool { return len(r.info.State.PIDs()) == 0 })
			eventually(t, "release", func() bool { return r.Release(t.Context()) == nil })
			assert.NoDirExists(t, r.info.State.Cgroup)

			r = start()
			all := r.info.State.PIDs()
			require.NoError(t, syscall.Kill(r.info.State.Shim, syscall.SIGKILL))
			<-r.Done()
			_, ok := <-r.exits
			assert.False(t, ok, "nobody knows the exit status")
			eventually(t, "the kernel ends the front process", func() bool {
				reap()
				_, there := process.ReadStat(r.info.State.PID)
				return !there
			})
			left := r.info.State.PIDs()
			e := find(t, dir)
			require.ErrorIs(t, e.Err, ErrGone)
			assert.Nil(t, e.State.Exit)
			assert.FileExists(t, filepath.Join(e.Dir, socketFile), "stale")
			require.NoError(t, Remove(e.Dir))
			assert.NoDirExists(t, e.Dir)
			require.ErrorIs(t, r.Signal(syscall.SIGTERM), ErrGone)
			_, err := r.Info(t.Context())
			require.ErrorIs(t, err, ErrGone)
			if r.info.State.Cgroup != "" {
				assert.Len(t, left, 2)
				assert.NoDirExists(t, r.info.State.Cgroup)
			} else {
				assert.Len(t, left, 1, "without a cgroup the helper is not known any more")
			}
			for _, pid := range left {
				assert.True(t, dead(pid))
			}
			for _, pid := range all {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			eventually(t, "reaped", func() bool {
				reap()
				return !slices.ContainsFunc(all, func(pid int) bool { return !dead(pid) })
			})
		})
	}
}

// canMakeCgroups reports whether this process may make cgroups.
func canMakeCgroups(t *testing.T) bool {
	t.Helper()
	at, err := process.CgroupOf("test-" + newID(t))
	if err == nil {
		err = process.MakeCgroup(at)
	}
	if err == nil {
		err = os.Remove(at)
	}
	return err == nil
}

// HF59: A copy of a launch's folder, by bytes or by links, is told from the original: nothing of it is
// touched.
func TestACopiedFolder(t *testing.T) {
	r := begin(t, t.TempDir(), nil, "core", "stubborn")
	assert.Equal(t, []string{"stdout renamed"}, r.lines(0, 1))
	r.Close()
	from := filepath.Join(r.dir, r.info.Spec.ID)
	for _, how := range []string{"-a", "-al"} {
		dir := t.TempDir()
		out, err := exec.CommandContext(t.Context(), "cp", how, from, dir).CombinedOutput()
		require.NoError(t, err, string(out))
		e := find(t, dir)
		require.ErrorIs(t, e.Err, ErrCopy)
		assert.Len(t, e.State.Left(), 3)
		require.NoError(t, Remove(e.Dir))
		assert.NoDirExists(t, e.Dir)
		assert.Len(t, r.info.State.Left(), 3)
	}
	own(t, find(t, r.dir))
}

// SIGTERM to a shim ends its engine with the grace; the shim stays for the status.
func TestAShimThatIsToldToEnd(t *testing.T) {
	r := begin(t, t.TempDir(), nil, "say=up", "polite")
	assert.Equal(t, []string{"stdout up"}, r.lines(0, 1))
	require.NoError(t, syscall.Kill(r.info.State.Shim, syscall.SIGHUP))
	require.NoError(t, syscall.Kill(r.info.State.Shim, syscall.SIGTERM))
	assert.Equal(t, 3, r.exit().Code)
	info, err := r.Info(t.Context())
	require.NoError(t, err)
	assert.Equal(t, "its shim was asked to end: signal terminated", info.State.Reason)
}

// A shim whose data dir was removed ends with its engine as soon as it has no owner.
func TestAShimWithoutItsFolder(t *testing.T) {
	r := begin(t, t.TempDir(), nil)
	eventually(t, "removed, while the shim may still write", func() bool {
		return os.RemoveAll(filepath.Join(r.dir, r.info.Spec.ID)) == nil
	})
	info, err := r.Info(t.Context())
	require.NoError(t, err)
	assert.Equal(t, Running, info.State.Phase, "its owner is there")
	r.Close()
	eventually(t, "end", func() bool { return len(r.info.State.Left()) == 0 })
}

// After a failed start nothing is left, and the error says why.
func TestStartsThatFail(t *testing.T) {
	plain := filepath.Join(t.TempDir(), "plain")
	require.NoError(t, os.WriteFile(plain, []byte("no program"), 0o600))
	for name, c := range map[string]struct {
		executable string
		change     func(*Spec)
		err        string
	}{
		"no engine":     {os.Args[0], func(s *Spec) { s.Path = "/none/e" }, "/none/e: no such file"},
		"not a program": {os.Args[0], func(s *Spec) { s.Path = plain }, "permission denied"},
		"no folder":     {os.Args[0], func(s *Spec) { s.Dir = "/none" }, "no such file or directory"},
		"bad id":        {os.Args[0], func(s *Spec) { s.ID = "../x" }, "is no launch"},
		"no shim":       {"/none/dpserve", nil, "start a shim"},
		"another shim":  {"/bin/true", nil, "the shim has not started"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			spec := testSpec(newID(t))
			if c.change != nil {
				c.change(&spec)
			}
			_, _, err := Start(t.Context(), c.executable, dir, spec)
			require.ErrorContains(t, err, c.err)
			entries, err := os.ReadDir(dir)
			require.NoError(t, err)
			assert.Empty(t, entries)
			if at, err := process.CgroupOf(filepath.Base(spec.ID)); err == nil {
				assert.NoDirExists(t, at)
			}
		})
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("stopped while starting")
	cancel(why)
	_, _, err := Start(ctx, os.Args[0], t.TempDir(), testSpec(newID(t)))
	require.ErrorIs(t, err, why)
}

// forge makes the folder of a launch on whose socket a process listens, which is recorded there as the shim,
// or another one is.
func forge(t *testing.T, word string, attr *syscall.SysProcAttr, isRecorded bool) *Entry {
	t.Helper()
	dir, err := os.MkdirTemp("", "shim")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	spec := testSpec(newID(t))
	spec.Version = Version
	folder := filepath.Join(dir, spec.ID)
	require.NoError(t, os.Mkdir(folder, 0o700))
	require.NoError(t, writeFile(folder, specFile, &spec))
	program := os.Args[0]
	if attr != nil { // another user needs access
		require.NoError(t, os.Chmod(dir, 0o777))
		require.NoError(t, os.Chmod(folder, 0o777))
		binary, err := os.ReadFile(program)
		require.NoError(t, err)
		program = filepath.Join(folder, "forger")
		require.NoError(t, parallel.WriteProgram(program, binary))
	}
	cmd := exec.CommandContext(t.Context(), program, forgerWord, folder, word)
	cmd.SysProcAttr = attr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, _ := bufio.NewReader(out).ReadString('\n')
	if line != "listening\n" {
		t.Skip("cannot forge a socket here: " + line)
	}
	recorded := os.Getpid()
	if isRecorded {
		recorded = cmd.Process.Pid
	}
	at, _ := process.ReadStat(recorded)
	state := State{Folder: folderOf(folder)}
	state.Boot, state.Shim, state.ShimStart = process.BootID(), at.PID, at.Start
	require.NoError(t, writeFile(folder, stateFile, &state))
	return find(t, dir)
}

// EN3: a socket of another process, user or version is not taken for the shim of a launch.
func TestForgedSockets(t *testing.T) {
	t.Run("another process", func(t *testing.T) {
		e := forge(t, `{"dpserve_shim":1}`, nil, false)
		require.ErrorIs(t, e.Err, ErrForeign)
		assert.ErrorContains(t, e.Err, "is not the shim of this launch")
	})
	t.Run("another user", func(t *testing.T) {
		if os.Geteuid() != 0 {
			t.Skip("needs root")
		}
		e := forge(t, `{"dpserve_shim":1}`,
			&syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}, true)
		require.ErrorIs(t, e.Err, ErrForeign)
		assert.ErrorContains(t, e.Err, "user 65534")
	})
	t.Run("another version", func(t *testing.T) {
		var version *VersionError
		require.ErrorAs(t, forge(t, `{"dpserve_shim":7}`, nil, true).Err, &version)
		assert.Equal(t, 7, version.Shim)
	})
	t.Run("another protocol", func(t *testing.T) {
		require.ErrorIs(t, forge(t, "SSH-2.0-OpenSSH", nil, true).Err, ErrProtocol)
	})
	t.Run("silence", func(t *testing.T) {
		require.ErrorIs(t, forge(t, "", nil, true).Err, ErrSilent)
	})
}

// EN3: folders without a spec, with a damaged one, or with that of another launch are named as such.
func TestFoldersThatAreNoLaunch(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "a.1"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "a.2"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.2", specFile), []byte("{"), 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "a.3"), 0o700))
	spec := testSpec("a.1")
	spec.Version = Version
	require.NoError(t, writeFile(filepath.Join(dir, "a.3"), specFile, &spec))
	entries, err := Discover(t.Context(), dir)
	require.NoError(t, err)
	require.Len(t, entries, 3)
	require.ErrorIs(t, entries[0].Err, os.ErrNotExist)
	require.ErrorIs(t, entries[1].Err, errDamaged)
	require.ErrorIs(t, entries[2].Err, errDamaged, "of another launch")
	entries, err = Discover(t.Context(), filepath.Join(dir, "none"))
	require.NoError(t, err)
	assert.Empty(t, entries)
}

// What is no request ends its connection and nothing else, and connections are bounded.
func TestAShimThatIsSentGarbage(t *testing.T) {
	dir := t.TempDir()
	r := begin(t, dir, nil)
	folder, err := os.Open(filepath.Join(dir, r.info.Spec.ID))
	require.NoError(t, err)
	defer folder.Close()
	for _, text := range []string{
		"GET / HTTP/1.1\r\n\r\n", "{\"dpserve_shim\":9}\n", "{\"dpserve_shim\":1}\nnonsense\n",
		"{\"dpserve_shim\":1}\n{\"op\":\"restart\"}\n",
		"{\"dpserve_shim\":1}\n" + strings.Repeat("x", 2*requestLimit),
	} {
		path, done, err := socketPath(folder)
		require.NoError(t, err)
		c, err := net.Dial("unix", path)
		done()
		require.NoError(t, err)
		_, err = c.Write([]byte(text))
		require.NoError(t, err)
		in := bufio.NewReader(c)
		line, err := in.ReadString('\n')
		require.NoError(t, err)
		assert.Equal(t, "{\"dpserve_shim\":1}\n", line)
		line, err = in.ReadString('\n')
		require.NoError(t, err, text[:10])
		assert.Contains(t, line, `"error"`)
		_, err = in.ReadString('\n')
		require.Error(t, err, "closed")
		_ = c.Close()
	}
	var many []net.Conn
	for range 3 * maxConns {
		path, done, err := socketPath(folder)
		require.NoError(t, err)
		c, err := net.Dial("unix", path)
		done()
		require.NoError(t, err)
		many = append(many, c)
	}
	info, err := r.Info(t.Context())
	require.NoError(t, err)
	assert.Equal(t, Running, info.State.Phase)
	for _, c := range many {
		_ = c.Close()
	}
	eventually(t, "room again", func() bool {
		entries, err := Discover(t.Context(), dir)
		require.NoError(t, err)
		if entries[0].Err != nil {
			return false
		}
		entries[0].Client.Close()
		<-entries[0].Client.Done()
		return true
	})
	assert.False(t, dead(r.info.State.PID))
}

// Sixteen engines are found and owned again.
func TestManyEngines(t *testing.T) {
	dir := t.TempDir()
	const many = 16
	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	for range many {
		begin(t, dir, func(s *Spec) { s.Path, s.Argv = sleep, []string{"sleep", "600"} }).Close()
	}
	began := time.Now()
	entries, err := Discover(t.Context(), dir)
	require.NoError(t, err)
	require.Len(t, entries, many)
	for i := range entries {
		own(t, &entries[i])
	}
	t.Logf("%d engines found and owned in %s", many, time.Since(began).Round(time.Millisecond))
	for i := range entries {
		entries[i].Client.Close()
		<-entries[i].Client.Done()
	}
}
