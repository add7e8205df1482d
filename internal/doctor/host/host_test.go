package host

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/shim"
	"github.com/dpserve/dpserve/test/parallel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// needsProc skips a test where there is no /proc.
func needsProc(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/proc/net/tcp"); err != nil {
		t.Skip("this system does not list its sockets in /proc")
	}
}

// TestCollect looks at this machine: everything is found, and nothing is left behind.
func TestCollect(t *testing.T) {
	needsProc(t)
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	port := l.Addr().(*net.TCPAddr).Port
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o700)) // the umask may let a group write
	f := Collect(t.Context(), &Config{
		DataDir: dir, Slots: 4, Streams: 100, Environ: os.Environ(),
		Ports: []doctor.Port{
			{Use: "http", Network: "tcp", Address: l.Addr().String()},
			{Use: "admin", Network: "tcp", Address: "127.0.0.1:" + strconv.Itoa(freePort(t))},
			{Use: "node", Network: "tcp", Address: "192.0.2.1:7947"},
			{Use: "gossip", Network: "udp", Address: "192.0.2.1:7946"},
		},
		Range: doctor.Span{Lo: port, Hi: port},
	})
	require.NotNil(t, f.Clock)
	assert.Positive(t, f.Clock.Slept)
	assert.False(t, f.Now.IsZero())

	require.Len(t, f.Ports, 4)
	assert.True(t, f.Ports[0].Taken)
	assert.Equal(t, os.Getpid(), f.Ports[0].Owner.PID)
	assert.True(t, f.Ports[0].Owner.Ours, "this program")
	assert.Empty(t, f.Ports[1].Error)
	for _, p := range f.Ports[2:] {
		assert.NotEmpty(t, p.Error, "an address of another machine")
		assert.False(t, p.Taken)
	}
	require.NotNil(t, f.EnginePorts)
	assert.Empty(t, f.EnginePorts.Listeners, "this program is a dpserve")
	require.NotNil(t, f.Files)
	assert.Positive(t, f.Files.Limit)
	assert.Contains(t, f.Files.Of, strconv.Itoa(os.Getpid()), "of the process that has the port")
	require.NotNil(t, f.DataDir)
	assert.Empty(t, f.DataDir.Error)
	assert.False(t, f.DataDir.Missing)
	assert.Positive(t, f.DataDir.Synced)
	assert.Positive(t, f.DataDir.Size)
	assert.Nil(t, f.Certificate)
	assert.Empty(t, slices.DeleteFunc(f.Leftovers, func(l doctor.Leftover) bool { return l.Cgroup != "" }),
		"but what other tests leave for a moment")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Empty(t, left, "nothing stays in the data dir")
}

// freePort returns a port that was free a moment ago.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port
}

// TestForeignListener: a listener of a program that is no dpserve.
func TestForeignListener(t *testing.T) {
	needsProc(t)
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	file, err := l.(*net.TCPListener).File()
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	cmd := exec.CommandContext(t.Context(), "sleep", "60")
	cmd.ExtraFiles = []*os.File{file}
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	require.NoError(t, file.Close())
	require.NoError(t, l.Close())

	out := enginePorts(doctor.Span{Lo: port, Hi: port}, newHolders())
	require.Len(t, out.Listeners, 1)
	assert.Equal(t, doctor.Owner{PID: cmd.Process.Pid, Program: "sleep"}, out.Listeners[0].Owner)
	assert.Equal(t, port, out.Listeners[0].Port)
}

func TestParseSpan(t *testing.T) {
	for text, want := range map[string]doctor.Span{"80": {Lo: 80, Hi: 80}, "200-299": {Lo: 200, Hi: 299}} {
		got, ok := parseSpan(text)
		assert.True(t, ok, text)
		assert.Equal(t, want, got)
	}
	for _, text := range []string{"", "-", "5-4", "x", "1-70000", "0-3"} {
		_, ok := parseSpan(text)
		assert.False(t, ok, text)
	}
}

// HF72: the doctor says of a data dir that it is missing, no folder, in use or not writable, and makes none.
func TestDataDirs(t *testing.T) {
	dir := t.TempDir()
	missing := filepath.Join(dir, "a", "b")
	d := inspectDataDir(missing)
	assert.True(t, d.Missing)
	assert.Empty(t, d.Error)
	assert.NoDirExists(t, filepath.Join(dir, "a"), "it is not made")

	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	assert.Equal(t, file+" is not a folder", inspectDataDir(file).Error)
	assert.Contains(t, inspectDataDir(filepath.Join(file, "below")).Error, "not a directory")

	assert.False(t, inspectDataDir(dir).InUse, "there is no lock")
	lock, err := os.Create(filepath.Join(dir, lockFile))
	require.NoError(t, err)
	defer func() { _ = lock.Close() }()
	assert.False(t, inspectDataDir(dir).InUse, "nobody holds the lock")
	require.NoError(t, syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))
	assert.True(t, inspectDataDir(dir).InUse)

	require.NoError(t, os.Chmod(dir, 0o777))
	d = inspectDataDir(dir)
	assert.True(t, d.InUse)
	assert.Contains(t, d.Error, dir+" has mode 0777")
	assert.Equal(t, "`chmod go-w "+dir+"`", d.Hint[:len("`chmod go-w "+dir+"`")])
}

// TestCertificates reads the files that a founder of a cluster has, and damaged ones.
func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	assert.Nil(t, certificate(dir), "a node that stands alone has none")
	folder := filepath.Join(dir, certificateIn)
	plantCertificate(t, folder, time.Now().Add(-29*24*time.Hour))
	c := certificate(dir)
	require.NotNil(t, c)
	assert.Empty(t, c.Error)
	assert.Equal(t, "gpu-1", c.Node)
	assert.InDelta(t, 24, time.Until(c.Ends).Hours(), 1)
	assert.InDelta(t, 29*24+1, time.Since(c.Begins).Hours(), 0.1, "an hour before it was signed")
	assert.True(t, c.RenewAt.Before(time.Now()))
	assert.True(t, c.OwnAuthority)

	require.NoError(t, os.WriteFile(filepath.Join(folder, "key.pem"), []byte("nonsense"), 0o600))
	assert.Contains(t, certificate(dir).Error, "of a cluster")
}

// plantCertificate writes the files of a node whose certificate was signed at a time.
func plantCertificate(t *testing.T, folder string, signed time.Time) {
	t.Helper()
	authority, err := pki.NewAuthority("c1", signed)
	require.NoError(t, err)
	key, err := pki.NewKey()
	require.NoError(t, err)
	csr, err := pki.NewCSR(key)
	require.NoError(t, err)
	own := pki.Identity{Cluster: "c1", Node: "gpu-1", UID: "u1", Roles: []string{"control"}}
	cert, err := authority.Sign(csr, own, signed, pki.DefaultLife)
	require.NoError(t, err)
	files := pki.Files{Key: key, Cert: cert, GossipKey: make([]byte, 32)}
	files.Authority, files.AuthorityKey = authority.PEM()
	require.NoError(t, pki.Save(folder, files))
}

// HF59, HF63: shims and engines of the data dir are found as long as they run, and told from those of a data
// dir of which this one is a copy.
func TestLeftovers(t *testing.T) {
	needsProc(t)
	dir := t.TempDir()
	assert.Empty(t, leftovers(dir))
	sleeper := func() (*exec.Cmd, process.Stat) {
		cmd := exec.CommandContext(t.Context(), "sleep", "60")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		s, _ := process.ReadStat(cmd.Process.Pid)
		return cmd, s
	}
	front, engine := sleeper()
	_, keeper := sleeper()
	write(t, `{"cluster":"c1","uid":"u1"}`, dir, identityFile)
	launch := func(name, node string, inode uint64, l process.Launch) {
		folder := filepath.Join(dir, enginesFolder, name)
		require.NoError(t, os.MkdirAll(folder, 0o700))
		var s syscall.Stat_t
		require.NoError(t, syscall.Stat(folder, &s))
		state := shim.State{Launch: l}
		state.Folder.Device = uint64(s.Dev) //nolint:unconvert // the type of Dev differs between systems
		state.Folder.Inode = s.Ino + inode
		text, err := json.Marshal(&state)
		require.NoError(t, err)
		write(t, string(text), dir, enginesFolder, name, "state.json")
		spec := fmt.Sprintf(`{"version":1,"id":%q,"path":"e","argv":["e"],"cluster":"c1","node":%q}`, name,
			node)
		write(t, spec, dir, enginesFolder, name, "spec.json")
	}
	lost := process.Launch{Boot: process.BootID(), PID: engine.PID, Start: engine.Start}
	kept := lost
	kept.PID, kept.Shim, kept.ShimStart = 0, keeper.PID, keeper.Start
	reused := lost
	reused.Start += "0"
	launch("a.1", "u1", 0, lost)
	launch("a.2", "u2", 0, kept)
	launch("a.3", "u1", 1, kept)
	launch("a.4", "u1", 0, reused)
	launch("a.5", "u1", 0, process.Launch{Boot: "another", PID: engine.PID, Start: engine.Start})
	assert.Equal(t, []doctor.Leftover{
		{What: "an engine without its shim", PIDs: []int{engine.PID}, Path: "engines/a.1"},
		{What: "a shim with its engine", PIDs: []int{keeper.PID}, Path: "engines/a.2", Foreign: true},
		{What: "a shim with its engine", PIDs: []int{keeper.PID}, Path: "engines/a.3", Copy: true},
	}, leftovers(dir))
	require.NoError(t, front.Process.Kill())
	waitFor(t, func() bool {
		s, ok := process.ReadStat(engine.PID)
		return !ok || s.Zombie
	})
	assert.Len(t, leftovers(dir), 2, "a process that its parent has not waited for holds nothing")
}

// HF63: an engine that has a cgroup and neither a shim nor a folder is found wherever it is.
func TestALostCgroup(t *testing.T) {
	needsProc(t)
	at, err := process.CgroupOf("doctor." + strconv.Itoa(os.Getpid()))
	if err == nil {
		err = process.MakeCgroup(at)
	}
	if err != nil {
		t.Skip("cgroups cannot be made here: ", err)
	}
	c, err := process.Start(process.Command{
		Argv: []string{"sleep", "60"}, In: process.Launch{Cgroup: at},
	}, io.Discard, io.Discard)
	require.NoError(t, err)
	l := c.Launch()
	t.Cleanup(func() { assert.Empty(t, l.End(10*time.Second)) })
	require.Equal(t, at, l.Cgroup)
	assert.True(t, process.InLaunchCgroup(c.PID()))
	assert.True(t, newHolders().describe(c.PID()).Ours)
	assert.Contains(t, leftovers(t.TempDir()), doctor.Leftover{
		What: "an engine without shim and dpserve", PIDs: []int{c.PID()}, Cgroup: at,
	})
}

// waitFor waits for what another process does.
func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, 30*time.Second, 2*time.Millisecond)
}

// TestAskVersion: programs that answer, fail, say nothing, and never answer.
func TestAskVersion(t *testing.T) {
	dir := t.TempDir()
	program := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, parallel.WriteProgram(path, []byte("#!/bin/sh\n"+text+"\n")))
		return path
	}
	env := environment(os.Environ())
	version, why := askVersion(t.Context(), program("good", "echo WARNING; echo \"vllm $V\""), env,
		map[string]string{"V": "0.32.0+cpu"})
	assert.Equal(t, "0.32.0+cpu", version)
	assert.Empty(t, why)
	_, why = askVersion(t.Context(), program("bad", "echo 'no torch' >&2; exit 3"), env, nil)
	assert.Equal(t, "--version ended with exit status 3: no torch", why)
	_, why = askVersion(t.Context(), program("mute", "true"), env, nil)
	assert.Equal(t, `--version said ""`, why)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, why = askVersion(ctx, program("slow", "exec sleep 60"), env, nil)
	assert.Contains(t, why, "did not answer")
}

func TestEnvironment(t *testing.T) {
	e := environment{"A=1", "AB=2", "A=3", "C"}
	assert.Equal(t, "3", e.get("A"))
	assert.Empty(t, e.get("B"))
	assert.Empty(t, e.get("C"))
	taken := &net.OpError{Op: "listen", Err: os.NewSyscallError("bind", syscall.EADDRINUSE)}
	assert.Equal(t, "address already in use", plain(taken))
}
