package host

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/shim"
)

// Files of a data dir. Their owners are internal/cluster (the lock and the identity),
// internal/cluster/peering (the certificate) and the shims (their engines).
const (
	lockFile      = "lock"
	identityFile  = "cluster.json"
	certificateIn = "pki"
	enginesFolder = "engines"
)

// syncTrials are the synced writes whose median is told.
const syncTrials = 5

// inspectDataDir writes a temporary file where the data dir is, or would be made, and removes it again.
func inspectDataDir(path string) *doctor.DataDir {
	out := &doctor.DataDir{Path: path}
	if absolute, err := filepath.Abs(path); err == nil {
		out.Path = absolute
	}
	folder := out.Path
	for {
		info, err := os.Stat(folder)
		if err == nil && !info.IsDir() {
			out.Error = folder + " is not a folder"
			return out
		}
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) || folder == filepath.Dir(folder) {
			out.Error = plain(err)
			return out
		}
		folder, out.Missing = filepath.Dir(folder), true
	}
	out.InUse = !out.Missing && isLocked(filepath.Join(folder, lockFile))
	if !out.Missing {
		if p, ok := errors.AsType[*problem.Error](diskfile.CheckPrivate(folder)); ok {
			out.Error, out.Hint = strings.TrimPrefix(p.Message, "data dir: "), p.Hint
			return out
		}
	}
	if free, size, err := diskfile.Space(folder); err == nil {
		out.Free, out.Size = free, size
	}
	synced, err := trySync(folder)
	if err != nil {
		out.Error = plain(err)
	}
	out.Synced = synced
	return out
}

// isLocked reports whether a process holds the lock of the data dir. It takes the lock in shared mode for a
// moment, for which a dpserve that starts waits.
func isLocked(path string) bool {
	f, err := os.Open(path) //nolint:gosec // a file of the data dir
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }() // it unlocks
	return errors.Is(syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB), syscall.EWOULDBLOCK)
}

// trySync returns how long a synced write takes in a folder: the median of several.
func trySync(folder string) (took time.Duration, err error) {
	f, err := os.CreateTemp(folder, ".doctor-*")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	block := make([]byte, 4096)
	times := make([]time.Duration, 0, syncTrials)
	for range syncTrials {
		began := time.Now()
		if _, err := f.Write(block); err != nil {
			return 0, err
		}
		if err := f.Sync(); err != nil {
			return 0, err
		}
		times = append(times, time.Since(began))
	}
	slices.Sort(times)
	return times[syncTrials/2], nil
}

// certificate reads the node's certificate; nil = it has none, because it stands alone or has not joined.
func certificate(dataDir string) *doctor.Certificate {
	files, err := pki.Load(filepath.Join(dataDir, certificateIn))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &doctor.Certificate{Error: plain(err)}
	}
	own, err := files.Credentials()
	if err != nil {
		return &doctor.Certificate{Error: plain(err)}
	}
	return &doctor.Certificate{
		Node: own.Identity.Node, Begins: own.NotBefore, Ends: own.NotAfter, RenewAt: own.RenewAt(),
		OwnAuthority: len(files.AuthorityKey) > 0,
	}
}

// leftovers lists what runs of the engines whose folders are in the data dir, and the engines that run
// without a shim anywhere on this machine.
func leftovers(dataDir string) []doctor.Leftover {
	var own struct{ Cluster, UID string }
	readJSONFile(filepath.Join(dataDir, identityFile), &own)
	folders, _ := filepath.Glob(filepath.Join(dataDir, enginesFolder, "*")) // the pattern is well-formed
	known := map[string]bool{}                                              // cgroups
	var out []doctor.Leftover
	for _, folder := range folders {
		e := shim.Read(folder)
		known[e.State.Cgroup] = true
		pids := e.State.Left()
		if len(pids) == 0 {
			continue
		}
		l := doctor.Leftover{
			What: "a shim with its engine", PIDs: pids,
			Path: filepath.Join(enginesFolder, filepath.Base(folder)), Copy: errors.Is(e.Err, shim.ErrCopy),
			Foreign: own.UID != "" && (e.Spec.Cluster != own.Cluster || e.Spec.Node != own.UID),
		}
		if !e.State.HasShim() {
			l.What = "an engine without its shim"
		}
		out = append(out, l)
	}
	for folder, pids := range lostCgroups(known) {
		out = append(out, doctor.Leftover{
			What: "an engine without shim and dpserve", PIDs: pids, Cgroup: folder,
		})
	}
	return out
}

// endingWait is how long an engine without a shim is not told yet: its dpserve may be about to end it.
const endingWait = time.Second

// lostCgroups finds the cgroups of launches whose processes have no shim above them.
func lostCgroups(known map[string]bool) map[string][]int {
	look := func() map[string][]int {
		out := map[string][]int{}
		for _, l := range process.LaunchCgroups() {
			if pids := l.PIDs(); !known[l.Cgroup] && !slices.ContainsFunc(pids, hasShim) {
				out[l.Cgroup] = pids
			}
		}
		return out
	}
	before := look()
	if len(before) == 0 {
		return nil
	}
	time.Sleep(endingWait)
	after := look()
	maps.DeleteFunc(after, func(folder string, pids []int) bool {
		return len(pids) == 0 || before[folder] == nil
	})
	return after
}

// hasShim reports whether a shim is above a process.
func hasShim(pid int) bool {
	return slices.ContainsFunc(process.Ancestors(pid), func(pid int) bool {
		words := process.Arguments(pid)
		return len(words) == 3 && words[1] == shim.Command && filepath.IsAbs(words[2])
	})
}

// readJSONFile reads a file of the data dir. One that is missing or damaged leaves the value as it is: the
// next start says what is wrong with it.
func readJSONFile(path string, into any) {
	if text, err := os.ReadFile(path); err == nil { //nolint:gosec // a file of the data dir
		_ = json.Unmarshal(text, into)
	}
}

// plain returns the cause of an error of the system, without the operation.
func plain(err error) string {
	var path *fs.PathError
	var call *os.SyscallError
	switch {
	case errors.As(err, &path):
		return path.Path + ": " + path.Err.Error()
	case errors.As(err, &call):
		return call.Err.Error()
	}
	return err.Error()
}
