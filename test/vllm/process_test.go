package vllm

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// descendants are the live processes below pid, by parent links at this moment.
func descendants(pid int) []int {
	var out []int
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		for s := range strings.FieldsSeq(string(b)) {
			if n, err := strconv.Atoi(s); err == nil {
				out = append(append(out, n), descendants(n)...)
			}
		}
	}
	return out
}

// title is what a process calls itself.
func title(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	return string(b)
}

// sharedMemory is the shared memory that processes have mapped.
func sharedMemory(pids []int) []string {
	seen := map[string]bool{}
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			if _, name, ok := strings.Cut(strings.TrimSpace(line), "/dev/shm/"); ok &&
				!strings.HasSuffix(name, " (deleted)") {
				seen["/dev/shm/"+name] = true
			}
		}
	}
	return slices.Collect(maps.Keys(seen))
}

// allProcesses are the numbers of all processes of the machine.
func allProcesses() (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*")
	for _, f := range files {
		if pid, err := strconv.Atoi(filepath.Base(f)); err == nil && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}

// hasEnviron says whether a process was started with an entry in its environment.
func hasEnviron(pid int, entry string) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	return err == nil && slices.Contains(strings.Split(string(b), "\x00"), entry)
}

// describe names processes for a message.
func describe(pids []int) (out []string) {
	for _, pid := range pids {
		out = append(out, fmt.Sprintf("%d %s", pid, strings.ReplaceAll(title(pid), "\x00", " ")))
	}
	return out
}

var portOfTitle = regexp.MustCompile(`--port\x00(\d+)|tcp://[0-9.]+:(\d+)`)

// portsIn are the loopback addresses that a command line of an engine names.
func portsIn(title string) (addrs []string) {
	for _, m := range portOfTitle.FindAllStringSubmatch(title, -1) {
		addrs = append(addrs, "127.0.0.1:"+m[1]+m[2])
	}
	return addrs
}
