package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/parallel"
)

// smi is a program nvidia-smi that a node finds first in PATH. It prints what the test puts into its files.
type smi struct {
	t   *testing.T
	dir string
}

// newSMI makes the program for all nodes of the test, which must not be parallel.
func newSMI(t *testing.T) *smi {
	t.Helper()
	s := &smi{t, t.TempDir()}
	text := fmt.Sprintf(`#!/bin/sh
cd %q || exit 1
case $1 in
--query-gpu=*) cat gpus ;;
--query-compute-apps=*) cat apps ;;
topo) cat topo ;;
esac
`, s.dir)
	require.NoError(t, parallel.WriteProgram(filepath.Join(s.dir, "nvidia-smi"), []byte(text)))
	t.Setenv("PATH", s.dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	if _, isSet := os.LookupEnv("CUDA_VISIBLE_DEVICES"); isSet {
		t.Setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
	}
	s.prints("apps", "")
	s.prints("topo", "")
	s.devices(4, 4, 4, 4)
	return s
}

// prints replaces a file as a whole, because the program may read it now.
func (s *smi) prints(file, text string) {
	s.t.Helper()
	next := filepath.Join(s.dir, file+".next")
	require.NoError(s.t, os.WriteFile(next, []byte(text), 0o600))
	require.NoError(s.t, os.Rename(next, filepath.Join(s.dir, file)))
}

// devices lists devices with so many MiB in use; a negative number leaves the device out.
func (s *smi) devices(used ...int) {
	s.t.Helper()
	var out strings.Builder
	for i, mib := range used {
		if mib >= 0 {
			_, _ = fmt.Fprintf(&out, "%d, GPU-%d, NVIDIA H100 80GB HBM3, 81559, %d, 550.54.15\n", i, i, mib)
		}
	}
	s.prints("gpus", out.String())
}

// quick are timers for devices that tests can wait for.
const quick = "device_reread=200ms,device_probe=30s,device_wait=60s"

// onlyNode returns the status of the one node.
func onlyNode(r *harness.Real) client.NodeStatus {
	r.T.Helper()
	var list struct{ Nodes []client.NodeStatus }
	code, text := r.Do(http.MethodGet, "/api/v1/nodes", "")
	require.Equal(r.T, http.StatusOK, code, text)
	require.NoError(r.T, json.Unmarshal([]byte(text), &list))
	require.Len(r.T, list.Nodes, 1)
	return list.Nodes[0]
}

// waitNode waits until the one node is as wanted.
func waitNode(r *harness.Real, what string, want func(n *client.NodeStatus) bool) client.NodeStatus {
	r.T.Helper()
	var n client.NodeStatus
	r.Eventually(func() error {
		if n = onlyNode(r); !want(&n) {
			return fmt.Errorf("%d GPUs, %g used, notes %q", n.GPUs, n.GPUsUsed, n.Notes)
		}
		return nil
	}, what)
	return n
}

// onDevices is an application of ranks with devices, on the simulated engine.
func onDevices(name string, ranks, devices int) string {
	return strings.Replace(simApp(name, ranks, "independent", ""), "    data_parallel:",
		fmt.Sprintf("    resources: {gpus: %d}\n    data_parallel:", devices), 1)
}

// bridges is a topology of four devices: 0 is linked with 2, and 1 with 3.
const bridges = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n" +
	"GPU0\t X \tSYS\tNV4\tSYS\t0-7\t0\nGPU1\tSYS\t X \tSYS\tNV4\t0-7\t0\n" +
	"GPU2\tNV4\tSYS\t X \tSYS\t8-15\t1\nGPU3\tSYS\tNV4\tSYS\t X \t8-15\t1\n"

// HF77: GPUs are found and shown, and ranks get close ones. Ranks that share a device see it and get their
// part of its memory; one that is started again does not wait for what the others hold. Nodes and status
// show the shares. An engine that uses a device without a grant is named.
func TestDevices(t *testing.T) {
	s := newSMI(t)
	s.prints("topo", bridges)
	r := harness.Start(t, "--timers", quick)
	r.Expect(harness.DevicesFail, harness.EngineFails)
	n := onlyNode(r)
	assert.Equal(t, 4, n.GPUs)
	assert.Equal(t, []client.DeviceModel{{
		Kind: "nvidia", Name: "NVIDIA H100 80GB HBM3", MemoryMiB: 81559, Driver: "550.54.15",
		Devices: []int{0, 1, 2, 3},
	}}, n.Devices)
	assert.Empty(t, n.Notes)

	file := written(t, onDevices("pairs", 2, 2))
	code, text := commandAt(t, r.Admin, "plan", file)
	require.Zero(t, code, text)
	assert.Contains(t, text, "4 x NVIDIA H100 80GB HBM3 79.6 GiB")
	code, text = commandAt(t, r.Admin, "deploy", file)
	require.Zero(t, code, text)
	st := r.WaitStatus("pairs", "RUNNING")
	var granted [][]int
	for _, u := range st.Units {
		granted = append(granted, u.Ranks[0].Devices)
	}
	assert.ElementsMatch(t, [][]int{{0, 2}, {1, 3}}, granted, "linked devices, not 0,1 and 2,3")
	waitNode(r, "all devices used", func(n *client.NodeStatus) bool { return n.GPUsUsed == 4 })
	_, text = commandAt(t, r.Admin, "nodes")
	assert.Contains(t, text, "4/4")
	assert.Contains(t, text, "4 x NVIDIA H100 80GB HBM3 79.6 GiB")
	r.Delete("pairs")
	waitNode(r, "no device used", func(n *client.NodeStatus) bool { return n.GPUsUsed == 0 })
	ranksShareADevice(t, r, s)
}

func ranksShareADevice(t *testing.T, r *harness.Real, s *smi) {
	t.Helper()
	dir := t.TempDir()
	r.Deploy(stubApp(t, "quarters", "vllm", dir, "", "A: b",
		"data_parallel: {dp_size: 4, coupling: independent}\n    resources: {gpus: 0.25}"))
	r.Deploy(strings.Replace(onDevices("half", 1, 5), "gpus: 5", "gpus: 0.5", 1))
	r.WaitStatus("half", "RUNNING")
	st := r.WaitStatus("quarters", "RUNNING")
	starts := stubStarts(t, dir)
	for _, u := range st.Units {
		k := u.Ranks[0]
		assert.Equal(t, []int{0}, k.Devices)
		assert.InDelta(t, 0.25, k.Share, 0)
		require.NotNil(t, starts[k.PID], "rank %d", k.Rank)
		assert.Equal(t, "0", starts[k.PID].variable("CUDA_VISIBLE_DEVICES"))
		assert.Equal(t, "0.225", starts[k.PID].flag("--gpu-memory-utilization"))
	}
	n := waitNode(r, "the shares", func(n *client.NodeStatus) bool { return n.GPUsUsed == 1.5 })
	assert.Equal(t, []client.SharedDevice{
		{Device: 0, Used: 1, Ranks: []string{"quarters/0/0", "quarters/0/1", "quarters/0/2", "quarters/0/3"}},
		{Device: 1, Used: 0.5, Ranks: []string{"half/0/0"}},
	}, n.Shared)
	_, text := commandAt(t, r.Admin, "nodes")
	assert.Contains(t, text, "  1.5/4  ")

	s.devices(61000, 20000, 4, 4) // three quarters of device 0, for the three ranks that go on
	require.NoError(t, syscall.Kill(st.Units[1].Ranks[0].PID, syscall.SIGKILL))
	r.Eventually(func() error {
		if k, ok := r.Rank("quarters", 0, 1); !ok || k.Epoch != 2 || k.Phase != "ready" {
			return fmt.Errorf("rank 1 is %s at epoch %d: %s", k.Phase, k.Epoch, k.Progress)
		}
		return nil
	}, "rank 1 starts again beside the others")

	r.Deploy(simApp("plain", 1, "independent", ""))
	pid := r.WaitStatus("plain", "RUNNING").Units[0].Ranks[0].PID
	s.prints("apps", fmt.Sprintf("GPU-2, %d, 40000\n", pid))
	s.devices(61000, 20000, 41000, 4)
	n = waitNode(r, "the device is used", func(n *client.NodeStatus) bool { return len(n.Notes) > 0 })
	assert.Regexp(t, fmt.Sprintf(`device 2: 40.0 of 79.6 GiB are in use by process %d \([^)]*\) of `+
		`plain/0/0 with 39.1 GiB, and was granted to no rank \(write resources.gpus `, pid), n.Notes[0])
}
