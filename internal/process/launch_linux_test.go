package process

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The files of machines with cgroup v2 alone, with both versions, and of a container that sees a part.
func TestTheFolderOfACgroup(t *testing.T) {
	const (
		v2     = "25 30 0:23 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		v1     = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
		both   = v1 + `38 31 0:41 / /sys/fs/cgroup/uni\040fied rw - cgroup2 cgroup2 rw` + "\n"
		bound  = "25 30 0:23 /docker/abc /sys/fs/cgroup ro shared:4 - cgroup2 cgroup2 rw\n"
		daemon = "0::/system.slice/dpserve.service\n"
	)
	for name, c := range map[string]struct{ mounts, own, folder string }{
		"v2":          {v2, daemon, "/sys/fs/cgroup/system.slice/dpserve.service"},
		"both":        {both, "9:name=systemd:/\n4:memory:/x\n0::/\n", "/sys/fs/cgroup/uni fied"},
		"v1":          {v1, "4:memory:/x\n", ""},
		"a part":      {bound, "0::/docker/abc/app\n", "/sys/fs/cgroup/app"},
		"its root":    {bound, "0::/docker/abc\n", "/sys/fs/cgroup"},
		"outside":     {bound, "0::/docker/abcd\n", ""},
		"beyond":      {v2, "0::/../../user.slice\n", ""},
		"no mount":    {"", daemon, ""},
		"cut":         {"25 30 - cgroup2", daemon, ""},
		"nothing own": {v2, "", ""},
	} {
		root, point, ok := findCgroup2(c.mounts)
		folder := ""
		if ok {
			folder, ok = joinCgroup(root, point, c.own)
		}
		assert.Equal(t, c.folder, folder, name)
		assert.Equal(t, c.folder != "", ok, name)
	}
	assert.Equal(t, "/a/d.service/dpserve-launch-x.1", cgroupBelow("/a/d.service", "x.1"))
	assert.Equal(t, "/a/d.service/dpserve-launch-x.1", cgroupBelow("/a/d.service/dpserve.main", "x.1"))
}

// The numbers of memory, from the files of a machine that has the controller.
func TestTheMemoryOfACgroup(t *testing.T) {
	parent := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(parent, name), []byte(text), 0o600))
	}
	write(controllersFile, "cpu memory pids\n")
	write(subtreeFile, "cpu\n")
	cgroup := filepath.Join(parent, CgroupPrefix+"x.1")
	require.NoError(t, MakeCgroup(cgroup))
	text, err := os.ReadFile(filepath.Join(parent, subtreeFile))
	require.NoError(t, err)
	assert.Equal(t, "+memory", string(text))
	assert.Zero(t, Memory(cgroup))
	assert.Zero(t, outOfMemory(cgroup))
	assert.Zero(t, Memory(""))
	assert.Zero(t, outOfMemory(""))
	parent = cgroup
	write(memoryFile, "123456\n")
	write(memoryEvents, "low 0\nhigh 0\nmax 5\noom 2\noom_kill 2\noom_group_kill 0\n")
	assert.Equal(t, uint64(123456), Memory(cgroup))
	assert.Equal(t, uint64(2), outOfMemory(cgroup))
	exit := Exit{Code: -1, Signal: "killed", After: time.Second}
	exit.note(cgroup, 7)
	assert.Equal(t, "engine was ended by signal killed after 1s: the kernel ended process 7 of the engine: "+
		"out of memory", exit.String())
	exit = Exit{Code: 1, After: time.Second}
	exit.note(cgroup, 7)
	assert.Equal(t, "engine exited with code 1 after 1s: the kernel ended a process of the engine: "+
		"out of memory", exit.String())
	exit = Exit{Code: 1, After: time.Second}
	exit.note("", 7)
	assert.Equal(t, "engine exited with code 1 after 1s", exit.String())
}

// HF63: What the kernel refuses is told and makes nothing.
func TestACgroupThatCannotBeMade(t *testing.T) {
	folder := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(folder, controllersFile), []byte("memory\n"), 0o600))
	require.ErrorIs(t, MakeCgroup(filepath.Join(folder, "none", "x")), os.ErrNotExist)
	at := filepath.Join(folder, "x")
	require.NoError(t, MakeCgroup(at), "subtree_control cannot be written")
	require.ErrorIs(t, MakeCgroup(at), os.ErrExist)
}

// An empty cgroup of a launch is removed when it is old enough that no shim is about to use it.
func TestEmptyCgroupsAreRemoved(t *testing.T) {
	name := "empty." + strconv.Itoa(os.Getpid())
	kept, err := CgroupOf(name + ".1")
	if err == nil {
		err = MakeCgroup(kept)
	}
	if err != nil {
		t.Skip("cgroups cannot be made here: ", err)
	}
	t.Cleanup(func() { removeCgroup(kept) })
	old, err := CgroupOf(name + ".2")
	require.NoError(t, err)
	require.NoError(t, MakeCgroup(old))
	then := time.Now().Add(-2 * emptyFor)
	require.NoError(t, os.Chtimes(old, then, then))
	RemoveEmptyCgroups()
	assert.NoDirExists(t, old)
	assert.DirExists(t, kept)
}

// HF63: The kernel starts nothing in a folder that is no cgroup: the process runs without one.
func TestAStartThatACgroupRefuses(t *testing.T) {
	for name, c := range map[string]struct{ program, cgroup, err string }{
		"no cgroup":  {"sleep", t.TempDir(), ""},
		"no folder":  {"sleep", "/none", ""},
		"no program": {"/none/e", t.TempDir(), "no such file"},
	} {
		child, err := Start(Command{
			Argv: []string{c.program, "600"}, In: Launch{Cgroup: c.cgroup},
		}, io.Discard, io.Discard)
		if c.err != "" {
			require.ErrorContains(t, err, c.err, name)
			continue
		}
		require.NoError(t, err, name)
		l := child.Launch()
		assert.Empty(t, l.Cgroup, name)
		assert.Equal(t, []int{child.PID()}, l.PIDs(), name)
		child.Kill()
		<-child.Exited()
		assert.Empty(t, l.PIDs(), name)
	}
}

// A front process that is dead and reaped leaves a child in its session, which is found and ended. Another
// leader of that number, another boot, or no process, is not touched.
func TestASession(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "sleep 600 >/dev/null & echo $!")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	at, _ := ReadStat(cmd.Process.Pid)
	require.NoError(t, cmd.Wait())
	sleeper, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)

	l := Launch{Boot: BootID(), PID: at.PID, Start: at.Start}
	assert.Equal(t, []int{sleeper}, l.PIDs())
	assert.False(t, l.HasFront())
	assert.False(t, l.HasShim())
	other := l
	other.Boot = "another"
	other.Kill()
	assert.Empty(t, other.PIDs())
	assert.Empty(t, other.End(0))
	self, _ := ReadStat(os.Getpid())
	session, err := syscall.Getpgid(0)
	require.NoError(t, err)
	again := Launch{Boot: BootID(), PID: session, Start: self.Start + "0"}
	assert.Empty(t, again.PIDs(), "the number belongs to somebody else now")
	assert.Empty(t, l.End(10*time.Second))
	assert.Empty(t, l.PIDs())
	assert.Empty(t, new(Launch).PIDs())
}

func TestParentsAndChildren(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "sleep 600 & wait")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); _ = cmd.Wait() })
	var below []int
	require.Eventually(t, func() bool {
		below = Descendants(cmd.Process.Pid)
		return len(below) == 1 && Arguments(below[0])[0] == "sleep"
	}, 30*time.Second, time.Millisecond)
	assert.Subset(t, Descendants(os.Getpid()), append(below, cmd.Process.Pid))
	assert.Equal(t, []int{cmd.Process.Pid, os.Getpid()}, Ancestors(below[0])[:2])
	assert.True(t, slices.ContainsFunc(Children(os.Getpid()), func(s Stat) bool {
		return s.PID == cmd.Process.Pid
	}))
	assert.Empty(t, Ancestors(1<<30))
	assert.Empty(t, Children(1<<30))
	assert.False(t, InLaunchCgroup(os.Getpid()))
}
