package server

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
)

// playVariable makes this test binary one of the programs of TestHF70: what it prints, or "hang".
const playVariable = "DPSERVE_TEST_PROGRAM"

func TestMain(m *testing.M) {
	switch text, play := os.LookupEnv(playVariable); {
	case !play:
		os.Exit(m.Run())
	case text == "hang":
		time.Sleep(time.Hour)
	default:
		_, _ = os.Stdout.WriteString(text)
		if len(os.Args) != 6 || os.Args[1] != "version" || os.Args[2] != "--check" {
			os.Exit(2)
		}
	}
}

// A file that a restart would execute is asked first. Whatever cannot replace the running program is refused
// with the reason.
func TestHF70FilesThatARestartRefuses(t *testing.T) {
	here := runtime.GOOS + "/" + runtime.GOARCH
	self, err := os.Executable()
	require.NoError(t, err)
	binary, err := os.ReadFile(self)
	require.NoError(t, err)
	answer := func(platform string, check *Reads) string {
		text, err := json.Marshal(&programAnswer{"v2", platform, check})
		require.NoError(t, err)
		return string(text)
	}
	reads := func(shimNewest, level int) *Reads {
		return &Reads{ShimOldest: 1, ShimNewest: shimNewest, StateLevel: level, OK: true}
	}
	foreign := append([]byte{}, binary[:4096]...)
	foreign[18], foreign[19] = 0xF3, 0x7F // the machine of the header of an ELF file: none that exists
	const hang = 200 * time.Millisecond
	for name, c := range map[string]struct {
		file  []byte // nil: this test binary
		mode  os.FileMode
		says  string // of the test binary
		wants string
	}{
		"missing":              {file: []byte{}, wants: "no such file or directory"},
		"not executable":       {file: binary, mode: 0o600, wants: "permission denied"},
		"empty":                {file: []byte{}, mode: 0o700, wants: "it is not for this machine"},
		"script":               {file: []byte("#!/bin/sh\nexit 3\n"), mode: 0o700, wants: "it is a script"},
		"text":                 {file: []byte("exit 3\n"), mode: 0o700, wants: "it is not for this machine"},
		"another architecture": {file: foreign, mode: 0o700, wants: "it is not for this machine"},
		"truncated":            {file: binary[:len(binary)/3], mode: 0o700, wants: "it does not answer"},
		"hangs":                {says: "hang", wants: "it does not answer within 200ms"},
		"another program":      {says: "hello\n", wants: "it does not answer as a dpserve"},
		"before the check":     {says: `{"version":"v0.1.0"}`, wants: "it does not answer as a dpserve that"},
		"built for another system": {
			says: answer("plan9/mips", reads(2, 7)), wants: "it is built for plan9/mips, and this machine is",
		},
		"older shims": {
			says:  answer(here, reads(1, 7)),
			wants: "dpserve v2 speaks version 1 of the protocol of shims, the engines here were started with",
		},
		"older state": {
			says: answer(here, reads(2, 6)), wants: "reads the state up to level 6, the log here has level 7",
		},
		"another data dir": {
			says:  answer(here, &Reads{ShimNewest: 2, StateLevel: 7, Reason: "it has format 9"}),
			wants: "dpserve v2 does not read the data dir: it has format 9",
		},
		"good":  {says: answer(here, reads(2, 7))},
		"newer": {says: answer(here, reads(3, 8))},
	} {
		t.Run(name, func(t *testing.T) {
			path := self
			switch {
			case c.says != "":
				t.Setenv(playVariable, c.says)
			case c.mode != 0:
				path = filepath.Join(t.TempDir(), "dpserve")
				require.NoError(t, os.WriteFile(path, c.file, c.mode))
			default:
				path = filepath.Join(t.TempDir(), "none")
			}
			limit := programTimeout
			if c.says == "hang" {
				limit = hang
			}
			a, err := askProgram(t.Context(), path, "/data", limit)
			if err == nil {
				err = a.judge(2, 7)
			}
			if c.wants == "" {
				require.NoError(t, err)
				assert.Equal(t, "v2", a.Version)
				return
			}
			require.ErrorContains(t, err, c.wants)
		})
	}
}

// What `dpserve version --check` says of a data dir. It leaves the folder as it is.
func TestHF70CheckOfADataDir(t *testing.T) {
	good := func(dir string) {
		_, err := cluster.Identify(dir, "n1")
		require.NoError(t, err)
		require.NoError(t, os.Remove(filepath.Join(dir, "lock")))
	}
	file := func(path, text string) func(dir string) {
		return func(dir string) {
			good(dir)
			path := filepath.Join(dir, path)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
			require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		}
	}
	const snapshot = "raft/snapshots/2-9-1/state.bin"
	for name, c := range map[string]struct {
		make  func(dir string)
		wants string
	}{
		"good":        {make: good},
		"no data dir": {make: func(string) {}, wants: "is no data dir"},
		"newer format": {
			make: file("cluster.json", `{"format":9,"node":"n1","uid":"u"}`), wants: "has format 9",
		},
		"damaged": {make: file("cluster.json", `{`), wants: "cannot be read"},
		"newer snapshot": {
			make: file(snapshot, `{"apps":{},"brand_new":1}`), wants: "snapshot 2-9-1: decode snapshot",
		},
		"being written": {make: file("raft/snapshots/2-9-1.tmp/state.bin", `{"apps`)},
		"newer engine": {
			make: file("engines/a.1/spec.json", spec(9)), wants: "speaks version 9 of the protocol",
		},
		"engine of today": {make: file("engines/a.1/spec.json", spec(1))},
		"a stray folder":  {make: file("engines/a.1/other", "x")},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c.make(dir)
			before := list(t, dir)
			r := CheckDataDir(dir)
			assert.Equal(t, before, list(t, dir))
			assert.Equal(t, c.wants == "", r.OK)
			assert.Contains(t, r.Reason, c.wants)
		})
	}
}

func spec(version int) string {
	text, _ := json.Marshal(map[string]any{ // has no value that cannot be encoded
		"version": version, "id": "a.1", "path": "/bin/true", "argv": []string{"true"},
	})
	return string(text)
}

func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		names = append(names, path)
		return err
	}))
	return names
}
