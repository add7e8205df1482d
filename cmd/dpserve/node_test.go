package main

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
)

// The smallest limit between the process's group and the root counts.
func TestContainerMemory(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"no control groups": {nil, 0},
		"no limit": {
			map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 0,
		},
		"a container": {
			map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000000\n"}, 1000000,
		},
		"a service": {map[string]string{
			"proc/self/cgroup":                                      "0::/system.slice/dpserve.service\n",
			"sys/fs/cgroup/system.slice/memory.max":                 "5000\n",
			"sys/fs/cgroup/system.slice/dpserve.service/memory.max": "max\n",
		}, 5000},
		"version 1": {map[string]string{
			"proc/self/cgroup":                           "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n",
		}, 7000},
		"version 1 without a limit": {map[string]string{
			"proc/self/cgroup":                           "4:memory:/\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
		}, 0},
		"nonsense": {
			map[string]string{"proc/self/cgroup": "x\n0::../../..\n", "sys/fs/cgroup/memory.max": "-5\n"}, 0,
		},
	} {
		files := fstest.MapFS{}
		for path, text := range c.files {
			files[path] = &fstest.MapFile{Data: []byte(text)}
		}
		assert.Equal(t, c.want, containerMemory(files), name)
	}
}
