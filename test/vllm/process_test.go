package vllm

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
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
