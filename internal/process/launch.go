package process

import (
	"slices"
	"syscall"
	"time"
)

// Launch tells by what the processes of one start of an engine are known. A process can change its name, its
// environment, its parent, group and session. It cannot leave its cgroup, unless it may write another one,
// nor cease to descend from the process that has started the engine, if that one inherits the orphans below
// it (a subreaper).
type Launch struct {
	Boot   string `json:"boot"`             // see BootID: the numbers below mean nothing after another boot
	Cgroup string `json:"cgroup,omitempty"` // its folder; "" = none could be made

	Shim      int    `json:"shim,omitempty"` // the subreaper; 0 = none
	ShimStart string `json:"shim_start,omitempty"`

	PID   int    `json:"pid,omitempty"` // the front process; it leads a session and a group of its number
	Start string `json:"start,omitempty"`
}

// PIDs lists the living processes of the launch, without the shim. A zombie is not listed: it holds nothing,
// and its parent reaps it. When the shim has ended and there is no cgroup, only those are known that have
// stayed in the session of the front process.
func (l *Launch) PIDs() []int {
	if l.Boot != BootID() {
		return nil
	}
	out := cgroupPIDs(l.Cgroup)
	if l.HasShim() {
		out = append(out, Descendants(l.Shim)...)
	}
	if len(out) == 0 && l.Cgroup == "" {
		out = sessionPIDs(l.PID, l.Start)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// HasShim reports whether the shim lives.
func (l *Launch) HasShim() bool { return l.Boot == BootID() && isAlive(l.Shim, l.ShimStart) }

// HasFront reports whether the front process lives.
func (l *Launch) HasFront() bool { return l.Boot == BootID() && isAlive(l.PID, l.Start) }

// Kill sends SIGKILL to the processes of the launch, without the shim.
func (l *Launch) Kill() {
	if l.Boot != BootID() {
		return
	}
	killCgroup(l.Cgroup) // with those that are forked meanwhile
	killAll(l.PIDs())
}

// KillShim sends SIGKILL to the shim.
func (l *Launch) KillShim() {
	if l.HasShim() {
		killAll([]int{l.Shim})
	}
}

// End kills the processes of the launch until there are none, at most for wait, and removes the cgroup. It
// returns those that no signal has ended. The shim, if it lives and is another process than this one, ends
// last: until then it inherits orphans.
func (l *Launch) End(wait time.Duration) []int {
	for over := time.Now().Add(wait); ; time.Sleep(endPoll) {
		l.Kill()
		left := l.PIDs()
		if len(left) == 0 && l.Shim != syscall.Getpid() && l.HasShim() {
			left = []int{l.Shim}
			l.KillShim()
		}
		isRemoved := len(left) == 0 && removeCgroup(l.Cgroup)
		if isRemoved || time.Now().After(over) {
			return left
		}
	}
}

// isAlive reports whether the process that had a number and a start time lives.
func isAlive(pid int, start string) bool {
	s, there := ReadStat(pid)
	return pid > 0 && there && !s.Zombie && s.Start == start
}

func killAll(pids []int) {
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}
