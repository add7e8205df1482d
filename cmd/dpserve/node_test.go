package main

import (
	"errors"
	"path/filepath"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/server"
)

// HF72: the default data dir is below XDG_STATE_HOME, else below the home folder; without either there is
// none.
func TestDefaultDataDir(t *testing.T) {
	for _, c := range []struct{ state, home, want string }{
		{"/var/state", "/home/me", "/var/state/dpserve"},
		{"/var/state", "", "/var/state/dpserve"},
		{"", "/home/me", "/home/me/.local/state/dpserve"},
		{"relative", "/home/me", "/home/me/.local/state/dpserve"},
		{"", "", ""},
		{"relative", "here", ""},
	} {
		got, err := defaultDataDir(func(name string) string {
			return map[string]string{"XDG_STATE_HOME": c.state, "HOME": c.home}[name]
		})
		assert.Equal(t, c.want, got, c)
		assert.Equal(t, c.want == "", err != nil, c)
	}
}

// HF72: without --data-dir the working folder gets nothing, and an old folder in it is named.
func TestDataDirOfStart(t *testing.T) {
	t.Chdir(t.TempDir())
	start := func(args ...string) *cli {
		c := newCLI(t)
		c.newNode = func(config server.Config) (node, error) {
			c.node.config = config
			return nil, errors.New("the test needs no more")
		}
		require.Equal(t, 1, c.run(append([]string{"start"}, args...)))
		return c
	}
	c := start()
	assert.Equal(t, filepath.Join(c.getenv("HOME"), ".local/state/dpserve"), c.node.config.DataDir)
	c = newCLI(t)
	c.getenv = func(string) string { return "" }
	for _, args := range [][]string{{"start"}, {"join", "127.0.0.1", "--token", "dpj1.x"}, {"doctor"}} {
		assert.Equal(t, 2, c.run(args), args)
	}
	assert.Contains(t, c.stderr(),
		"neither XDG_STATE_HOME nor HOME is set\nhint: name a folder with --data-dir")
}

// RP12: The smallest limit between the process's group and the root counts.
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
