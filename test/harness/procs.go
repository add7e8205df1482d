package harness

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/dpserve/dpserve/internal/process"
)

func childrenOf(pid int) []int {
	var out []int
	files, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/children")
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		for s := range strings.FieldsSeq(string(b)) {
			if n, err := strconv.Atoi(s); err == nil {
				out = append(out, n)
			}
		}
	}
	return out
}

// shimsOf are the shims of the engines that a node with a data dir has started, by their own process ids.
func shimsOf(dir string) (pids []int) {
	for pid, args := range commands() {
		if len(args) > 2 && args[1] == "shim" && dir != "" && strings.HasPrefix(args[2], dir+"/") &&
			Alive(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Alive says whether pid runs (a zombie does not).
func Alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	_, after, ok := strings.Cut(string(b), ") ")
	return ok && !strings.HasPrefix(after, "Z") && !strings.HasPrefix(after, "X")
}

// Living returns the processes that still run.
func Living(pids []int) []int {
	return slices.DeleteFunc(slices.Clone(pids), func(pid int) bool { return !Alive(pid) })
}

// enginesOn are processes that were given a port between two, both included; none if these are not known.
func enginesOn(ports [2]int) (pids []int) {
	if ports[1] == 0 {
		return nil // they are not known; --port 0 of another program is not one of them
	}
	for pid, args := range commands() {
		for i, a := range args {
			if a != "--port" || i+1 == len(args) {
				continue
			}
			if port, err := strconv.Atoi(args[i+1]); err == nil && ports[0] <= port && port <= ports[1] &&
				Alive(pid) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// commands are the command lines of all other processes.
func commands() map[int][]string {
	out := map[int][]string{}
	for _, pid := range process.IDs() {
		if pid == os.Getpid() {
			continue
		}
		if b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline"); err == nil {
			out[pid] = strings.Split(string(b), "\x00")
		}
	}
	return out
}
