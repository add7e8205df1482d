package system

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/parallel"
	"github.com/dpserve/dpserve/test/ports"
)

// patient is a machine on which nothing fails, with a node that runs: the arguments and the environment of
// its doctor.
type patient struct {
	t       *testing.T
	r       *harness.Real // the node
	dir     string        // of what is planted
	dataDir string
	file    string // an app.yaml of a model that is whole
	model   string
	flags   map[string]string
	env     []string
	before  string // shell commands before the doctor: limits of its process
}

// examination is the JSON of doctor.
type examination struct {
	OK       bool
	Findings []doctor.Finding
	code     int
	text     string
}

func newPatient(t *testing.T, r *harness.Real) *patient {
	t.Helper()
	dir := t.TempDir()
	p := &patient{
		t: t, r: r, dir: dir, dataDir: filepath.Join(dir, "data"), model: filepath.Join(dir, "model"),
		flags: map[string]string{"--http-bind": r.HTTP, "--admin-bind": r.Admin},
		env:   []string{"DPSERVE_ADDR=" + r.Admin, "PATH=" + filepath.Join(dir, "bin") + ":/usr/bin:/bin"},
	}
	base := ports.Take(t, 50)
	p.flags["--port-range"] = fmt.Sprintf("%d-%d", base, base+49)
	require.NoError(t, os.Mkdir(p.dataDir, 0o700))
	p.plant("exit 0", "bin", "vllm")
	p.plant("[ \"$1\" = topo ] || echo No devices were found", "bin", "nvidia-smi")
	p.write("", "lib", "python3.12", "site-packages", "vllm-0.32.0.dist-info", "METADATA")
	p.write(`{"model_type":"qwen2"}`, "model", "config.json")
	p.write(`{}`, "model", "tokenizer.json")
	p.write(`{"weight_map":{"a":"m-1.bin","b":"m-2.bin"}}`, "model", "pytorch_model.bin.index.json")
	p.write("PK\x03\x04 weights", "model", "m-1.bin")
	p.write("PK\x03\x04 weights", "model", "m-2.bin")
	p.file = p.write("applications:\n  - name: chat\n    model: {id: chat, source: "+p.model+"}\n"+
		"    engine: {kind: vllm}\n    resources: {gpus: 0}\n", "app.yaml")
	return p
}

// write writes a file below the patient's folder.
func (p *patient) write(text string, path ...string) string {
	p.t.Helper()
	file := filepath.Join(append([]string{p.dir}, path...)...)
	require.NoError(p.t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(p.t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

// plant writes a program below the patient's folder.
func (p *patient) plant(script string, path ...string) {
	p.t.Helper()
	file := p.write("", path...)
	require.NoError(p.t, parallel.WriteProgram(file, []byte("#!/bin/sh\n"+script+"\n")))
	require.NoError(p.t, os.Chmod(file, 0o755))
}

// examine runs doctor in a process with the patient's environment and limits.
func (p *patient) examine() examination {
	p.t.Helper()
	args := []string{"doctor", p.file, "-o", "json", "--data-dir", p.dataDir}
	for flag, value := range p.flags {
		args = append(args, flag, value)
	}
	script := strings.TrimSpace(p.before + "\nexec \"$0\" \"$@\"")
	cmd := exec.CommandContext(p.t.Context(), "/bin/sh", append([]string{"-c", script, harness.Binary(p.t)},
		args...)...)
	cmd.Env = append(os.Environ(), p.env...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		var ended *exec.ExitError
		require.ErrorAs(p.t, err, &ended)
	}
	e := examination{code: cmd.ProcessState.ExitCode(), text: string(out) + errs.String()}
	require.NoError(p.t, json.Unmarshal(out, &e), e.text)
	return e
}

// failing returns the findings that fail.
func (e *examination) failing() []doctor.Finding {
	var out []doctor.Finding
	for _, f := range e.Findings {
		if f.Level == doctor.Fail {
			out = append(out, f)
		}
	}
	return out
}

// CC9: each planted fault is one line FAIL with a hint, and nothing else fails; without one the exit code
// is 0. The faults are of three patients, because some hide others.
func TestCC9Doctor(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	sleeper := exec.CommandContext(t.Context(), "/bin/sleep", "600")
	sleeper.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	require.NoError(t, sleeper.Start())
	t.Cleanup(func() { _ = sleeper.Process.Kill(); _ = sleeper.Wait() })
	slept, _ := process.ReadStat(sleeper.Process.Pid)

	clean := newPatient(t, r).examine()
	require.Equal(t, 0, clean.code, clean.text)
	assert.True(t, clean.OK)
	assert.Empty(t, clean.failing())
	var checks []string
	for _, f := range clean.Findings {
		checks = append(checks, f.Check)
	}
	for _, want := range []string{
		"clock", "ports", "engine-ports", "files", "shm", "data-dir", "disk", "leftovers", "devices",
		"engine", "model", "node",
	} {
		assert.Contains(t, checks, want)
	}

	type fault struct {
		plant              func(p *patient)
		check, found, hint string
	}
	for name, faults := range map[string]map[string]fault{
		"a busy host": {
			"a port that another program has": {
				func(p *patient) {
					l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", ports.TakeAddr(t))
					require.NoError(t, err)
					t.Cleanup(func() { _ = l.Close() })
					p.flags["--http-bind"] = l.Addr().String()
				},
				"ports", fmt.Sprintf("(process %d)", os.Getpid()), "--http-bind",
			},
			"engine ports that the kernel gives to connections": {
				func(p *patient) {
					text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
					require.NoError(t, err)
					var lo, hi int
					_, err = fmt.Sscan(string(text), &lo, &hi)
					require.NoError(t, err)
					p.flags["--port-range"] = fmt.Sprintf("%d-%d", hi-99, hi)
				},
				"engine-ports", "the kernel's ephemeral range", "ip_local_reserved_ports",
			},
			"a certificate that has ended": {
				func(p *patient) { p.certificate(time.Now().Add(-31 * 24 * time.Hour)) },
				"certificate", "the certificate of gpu-1 ended 24 hours ago",
				"start dpserve on this data dir",
			},
			"an engine of a dpserve that has died": {
				func(p *patient) {
					p.write(fmt.Sprintf(`{"boot":%q,"pid":%d,"start":%q}`, process.BootID(), slept.PID,
						slept.Start), "data", "engines", "dead.1", "state.json")
				},
				"leftovers", fmt.Sprintf("(process %d)", sleeper.Process.Pid),
				fmt.Sprintf("`kill %d`", sleeper.Process.Pid),
			},
			"a driver that does not answer": {
				func(p *patient) {
					p.plant("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
						"bin", "nvidia-smi")
				},
				"devices", "Driver/library version mismatch", "driver",
			},
			"a model with a missing file": {
				func(p *patient) { require.NoError(t, os.Remove(filepath.Join(p.model, "m-2.bin"))) },
				"model", "lacks 1 file of its index: m-2.bin", "copy the missing files",
			},
		},
		"limits of a process": {
			"a node that does not answer": {
				func(p *patient) { p.env = append(p.env, "DPSERVE_ADDR=127.0.0.1:1") },
				"node", "no answer from http://127.0.0.1:1", "dpserve",
			},
			"an address of another machine": {
				func(p *patient) { p.flags["--advertise"], p.flags["--gossip-port"] = "192.0.2.1", "0" },
				"ports", "node 192.0.2.1:7947 cannot be bound: cannot assign requested address",
				"--advertise",
			},
			"a process that may open few files": {
				func(p *patient) { // the limit of a dpserve that runs is its own
					p.before += "\nulimit -n 256"
					p.flags["--http-bind"], p.flags["--admin-bind"] = "127.0.0.1:0", "127.0.0.1:0"
				},
				"files", "this shell may open 256 files", "LimitNOFILE=",
			},
			"a disk that takes no byte": {
				func(p *patient) { p.before += "\nulimit -f 0" }, "data-dir", "file too large", "--data-dir",
			},
			"a device that another program fills": {
				func(p *patient) {
					p.plant(fmt.Sprintf(`case "$1" in
--query-gpu=*) echo "0, GPU-0, NVIDIA H100, 81559, 70000, 550.54.15" ;;
--query-compute-apps=*) echo "GPU-0, %d, 69000" ;;
esac`, os.Getpid()), "bin", "nvidia-smi")
				},
				"devices", "device 0 (NVIDIA H100) has 11.3 GiB free of 79.6 GiB", "gpu_memory_utilization",
			},
			"an engine that is too old": {
				func(p *patient) {
					packages := filepath.Join(p.dir, "lib", "python3.12", "site-packages")
					require.NoError(t, os.Rename(filepath.Join(packages, "vllm-0.32.0.dist-info"),
						filepath.Join(packages, "vllm-0.9.2.dist-info")))
				},
				"engine", "is vllm 0.9.2", "pip install vllm==",
			},
		},
		"what is installed": {
			"a model of Git LFS": {
				func(p *patient) {
					p.write("version https://git-lfs.github.com/spec/v1\n", "model", "m-1.bin")
				},
				"model", "m-1.bin is a pointer of Git LFS", "copy the missing files",
			},
			"a data dir below a file": {
				func(p *patient) { p.dataDir = filepath.Join(p.file, "data") },
				"data-dir", "not a directory", "--data-dir",
			},
			"an engine that is not installed": {
				func(p *patient) { require.NoError(t, os.Remove(filepath.Join(p.dir, "bin", "vllm"))) },
				"engine", "chat: vllm: vllm is not in PATH", "pip install vllm==",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPatient(t, r)
			for _, c := range faults {
				c.plant(p)
			}
			got := p.examine()
			assert.Equal(t, 1, got.code, got.text)
			failing := got.failing()
			assert.Len(t, failing, len(faults), "%+v", failing)
			for fault, c := range faults {
				assert.True(t, slices.ContainsFunc(failing, func(f doctor.Finding) bool {
					return f.Check == c.check && strings.Contains(f.Found, c.found) &&
						strings.Contains(f.Hint, c.hint)
				}), "%s: %+v", fault, failing)
			}
		})
	}
	left, err := os.ReadDir(r.Dir)
	require.NoError(t, err)
	for _, f := range left {
		assert.NotContains(t, f.Name(), "doctor", "no file stays in the data dir")
	}
}

// certificate writes the files of a node whose certificate was signed at a time.
func (p *patient) certificate(signed time.Time) {
	p.t.Helper()
	authority, err := pki.NewAuthority("c1", signed)
	require.NoError(p.t, err)
	key, err := pki.NewKey()
	require.NoError(p.t, err)
	csr, err := pki.NewCSR(key)
	require.NoError(p.t, err)
	own := pki.Identity{Cluster: "c1", Node: "gpu-1", UID: "u1", Roles: []string{"control"}}
	files := pki.Files{Key: key, GossipKey: make([]byte, 32)}
	files.Cert, err = authority.Sign(csr, own, signed, pki.DefaultLife)
	require.NoError(p.t, err)
	files.Authority, files.AuthorityKey = authority.PEM()
	require.NoError(p.t, pki.Save(filepath.Join(p.dataDir, "pki"), files))
}
