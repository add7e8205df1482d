package process

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Pauses between two looks at processes that end.
const (
	endPoll  = 10 * time.Millisecond
	reapPoll = 5 * time.Millisecond
)

// clockTick is the unit of the times in /proc/PID/stat: USER_HZ is 100 on every Linux that Go supports.
const clockTick = 10 * time.Millisecond

// mostAncestors bounds Ancestors: parents change while they are read.
const mostAncestors = 64

// Stat is what /proc/PID/stat tells of a process.
type Stat struct {
	PID, Parent, Group int
	Zombie, Stopped    bool
	Exiting            bool          // its memory and its command line may be gone before its sockets are
	Start              string        // clock ticks since boot
	CPU                time.Duration // that it has used; -1 on systems that do not tell
}

// Descendants lists the living processes below a process: its children, theirs, and so on.
func Descendants(pid int) (out []int) {
	for _, child := range Children(pid) {
		if !child.Zombie {
			out = append(out, child.PID)
		}
		out = append(out, Descendants(child.PID)...)
	}
	return out
}

// Children lists the children of a process, zombies too. On a kernel that does not list them there are none.
func Children(pid int) (out []Stat) {
	folder := procFile(pid, "task")
	threads, err := os.ReadDir(folder)
	if err != nil {
		return nil
	}
	for _, thread := range threads {
		text, _ := os.ReadFile(filepath.Join(folder, thread.Name(), "children"))
		for word := range strings.FieldsSeq(string(text)) {
			number, err := strconv.Atoi(word)
			if s, there := ReadStat(number); err == nil && there && s.Parent == pid {
				out = append(out, s)
			}
		}
	}
	return out
}

// Ancestors lists the parent of a process, its parent, and so on.
func Ancestors(pid int) (out []int) {
	for range mostAncestors {
		s, there := ReadStat(pid)
		if !there || s.Parent == 0 {
			break
		}
		out, pid = append(out, s.Parent), s.Parent
	}
	return out
}

// sessionPIDs lists the living processes of a session that a process with a start time leads, or has led: its
// number is nobody else's while the session has a member.
func sessionPIDs(leader int, start string) (out []int) {
	if s, there := ReadStat(leader); leader <= 1 || there && s.Start != start {
		return nil
	}
	if runtime.GOOS != "linux" { // processes cannot be listed: the group stands for the session
		if syscall.Kill(-leader, 0) == nil {
			out = append(out, -leader)
		}
		return out
	}
	for _, pid := range IDs() {
		session, err := unix.Getsid(pid)
		if err != nil || session != leader {
			continue
		}
		if s, there := ReadStat(pid); there && !s.Zombie {
			out = append(out, pid)
		}
	}
	return out
}

// Reap takes the exit status of a child of this process that has ended or is about to, at most for wait. It
// has no effect on a process that is no child.
func Reap(pid int, wait time.Duration) {
	for over := time.Now().Add(wait); ; time.Sleep(reapPoll) {
		done, err := syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
		if done == pid || err != nil && !errors.Is(err, syscall.EINTR) || time.Now().After(over) {
			return
		}
	}
}

// parseStat splits a stat line after the command, which may contain spaces and parentheses.
func parseStat(pid int, line string) (Stat, bool) {
	at := strings.LastIndexByte(line, ')')
	f := strings.Fields(line[at+1:])
	if at < 0 || len(f) < 20 { // field 3 of proc(5) is f[0]
		return Stat{}, false
	}
	parent, errParent := strconv.Atoi(f[1])
	group, err := strconv.Atoi(f[2])
	flags, errFlags := strconv.ParseUint(f[6], 10, 64)
	user, errUser := strconv.ParseInt(f[11], 10, 64)
	system, errSystem := strconv.ParseInt(f[12], 10, 64)
	if err := errors.Join(err, errParent, errFlags, errUser, errSystem); err != nil {
		return Stat{}, false
	}
	const exiting = 0x4 // PF_EXITING of the kernel's sched.h
	return Stat{
		PID: pid, Parent: parent, Group: group, Zombie: f[0] == "Z" || f[0] == "X", Stopped: f[0] == "T",
		Exiting: flags&exiting != 0, Start: f[19], CPU: time.Duration(user+system) * clockTick,
	}, true
}

// All lists the processes of this machine, or of this container.
func All() []Stat {
	var out []Stat
	for _, pid := range IDs() {
		if s, ok := ReadStat(pid); ok {
			out = append(out, s)
		}
	}
	return out
}

// IDs lists the numbers of the processes of this machine, or of this container.
func IDs() []int {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer func() { _ = dir.Close() }()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil
	}
	var out []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			out = append(out, pid)
		}
	}
	return out
}

// Name is the name of a process; "" if there is no such process.
func Name(pid int) string { return strings.TrimSpace(string(read(pid, "comm"))) }

// read reads a file of a process; nil if there is none, or it is another user's.
func read(pid int, name string) []byte {
	b, _ := os.ReadFile(procFile(pid, name))
	return b
}

func procFile(pid int, name string) string { return "/proc/" + strconv.Itoa(pid) + "/" + name }

// Arguments are the command line of a process; nil if it has ended, or is another user's.
func Arguments(pid int) []string {
	return strings.Split(strings.TrimSuffix(string(read(pid, "cmdline")), "\x00"), "\x00")
}

// BootID identifies a boot of the machine, or of a container on it: the numbers of processes begin anew.
var BootID = sync.OnceValue(func() string {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	first, _ := ReadStat(1)
	return strings.TrimSpace(string(boot)) + "." + first.Start
})

// ListeningPorts lists the TCP ports on which a process and those below it listen, ascending.
func ListeningPorts(pid int) []int {
	var out []int
	for _, pid := range append(Descendants(pid), pid) {
		own := OpenSockets(pid)
		for _, socket := range Listening(strconv.Itoa(pid), "tcp") {
			if slices.Contains(own, socket.Inode) {
				out = append(out, socket.Port)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// OpenSockets lists the inodes of the sockets that a process has open. Those of other users are not seen.
func OpenSockets(pid int) []string {
	dir := "/proc/" + strconv.Itoa(pid) + "/fd/"
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var out []string
	for _, name := range names {
		to, err := os.Readlink(dir + name.Name())
		if inode, ok := strings.CutPrefix(to, "socket:["); err == nil && ok {
			out = append(out, strings.TrimSuffix(inode, "]"))
		}
	}
	return out
}

// Socket is a socket that takes connections or packets.
type Socket struct {
	Host  netip.Addr
	Port  int
	Inode string
}

// States in the tables of /proc/PID/net.
const (
	stateListen = "0A" // of TCP
	stateBound  = "07" // of UDP
)

// Listening returns the sockets that can be reached of a network, tcp or udp, as a process (its number, or
// self) sees them.
func Listening(pid, network string) []Socket {
	state := stateListen
	if network == "udp" {
		state = stateBound
	}
	var out []Socket
	for _, table := range []string{network, network + "6"} {
		text, _ := os.ReadFile("/proc/" + pid + "/net/" + table)
		out = append(out, parseSockets(string(text), state)...)
	}
	return out
}

// parseSockets reads a table of sockets: those that are in a state.
func parseSockets(table, state string) []Socket {
	var out []Socket
	for line := range strings.Lines(table) {
		f := strings.Fields(line) // number, local address, remote address, state, …, inode
		if len(f) < 10 || f[3] != state {
			continue
		}
		host, port, ok := strings.Cut(f[1], ":")
		number, err := strconv.ParseUint(port, 16, 16)
		address, isAddress := parseHost(host)
		if ok && err == nil && isAddress {
			out = append(out, Socket{address, int(number), f[9]})
		}
	}
	return out
}

// parseHost reads an address of these tables: words of four bytes in the order of the machine, which is
// little-endian wherever dpserve is built for.
func parseHost(text string) (netip.Addr, bool) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != 4 && len(b) != 16 {
		return netip.Addr{}, false
	}
	for word := range slices.Chunk(b, 4) {
		slices.Reverse(word)
	}
	return netip.AddrFromSlice(b)
}

// ErrNotInPath says that no folder of PATH has a program.
var ErrNotInPath = errors.New("is not in PATH")

// FindProgram returns the path of a program that is named by a path, or found along path, an engine's PATH.
// Relative folders in PATH do not count.
func FindProgram(name, path string) (string, error) {
	if strings.ContainsRune(name, filepath.Separator) {
		return name, checkProgram(name)
	}
	for _, folder := range filepath.SplitList(path) {
		if at := filepath.Join(folder, name); filepath.IsAbs(at) && checkProgram(at) == nil {
			return at, nil
		}
	}
	return "", fmt.Errorf("%s %w", name, ErrNotInPath)
}

// checkProgram says why a file cannot be executed.
func checkProgram(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return fmt.Errorf("%s is a folder", path)
	case info.Mode()&0o111 == 0:
		return fmt.Errorf("%s may not be executed", path)
	}
	return nil
}

// Blocks reports whether the socket keeps an address from being bound: same port, and same host or one of
// them is all hosts.
func (s *Socket) Blocks(address string) bool {
	host, port, err := net.SplitHostPort(address)
	if err != nil || port != strconv.Itoa(s.Port) {
		return false
	}
	wanted, err := netip.ParseAddr(host)
	return err != nil || wanted.IsUnspecified() || s.Host.IsUnspecified() || wanted.Unmap() == s.Host.Unmap()
}

// Holder names the process that keeps a TCP port of a host from being bound: "nginx (process 4711)". "": no
// process does, or this system does not tell.
func Holder(host string, port int) string {
	address := net.JoinHostPort(host, strconv.Itoa(port))
	for _, s := range Listening("self", "tcp") {
		if !s.Blocks(address) {
			continue
		}
		for _, pid := range IDs() {
			if slices.Contains(OpenSockets(pid), s.Inode) {
				return fmt.Sprintf("%s (process %d)", Name(pid), pid)
			}
		}
		return "a process of another user"
	}
	return ""
}
