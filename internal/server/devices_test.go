package server

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/devices"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/parallel"
)

func TestGPUsFlag(t *testing.T) {
	for text, want := range map[string][]int{
		"": nil, "auto": nil, "none": nil, "0": {}, "3": {0, 1, 2}, "6,0-2": {0, 1, 2, 6}, "5-5": {5},
	} {
		got, err := parseGPUs(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
	for _, text := range []string{"x", "-1", "1,1", "3-1", "1025", "0-1024", "auto,1", "1,", "all"} {
		_, err := parseGPUs(text)
		require.ErrorContains(t, err, "want auto, none, a count or a list", text)
	}
}

func TestDevicesOfOneModelAreGrouped(t *testing.T) {
	inv := devices.Inventory{Kind: devices.Nvidia, Driver: "550", Devices: []devices.Device{
		{Index: 0, Name: "H100", TotalMiB: 81559},
		{Index: 1, Name: "GB10", TotalMiB: devices.Unknown},
		{Index: 2, Name: "H100", TotalMiB: 81559},
		{Index: 3, Name: "H100", TotalMiB: 81559},
	}}
	assert.Equal(t, []state.DeviceModel{
		{Kind: "nvidia", Name: "H100", MemoryMiB: 81559, Driver: "550", Devices: []int{0, 2}},
		{Kind: "nvidia", Name: "GB10", Driver: "550", Devices: []int{1}},
	}, modelsOf(&inv, []int{0, 1, 2, 9}))
	assert.Empty(t, modelsOf(&devices.Inventory{}, []int{0, 1}), "only declared")
}

// fakeSMI puts a program nvidia-smi that prints these texts into PATH, before any other.
func fakeSMI(t *testing.T, gpus, topology string) {
	t.Helper()
	dir := t.TempDir()
	text := "#!/bin/sh\ncase $1 in\n--query-gpu=*) printf '" + gpus + "' ;;\ntopo) printf '" + topology +
		"' ;;\nesac\n"
	require.NoError(t, parallel.WriteProgram(dir+"/nvidia-smi", []byte(text)))
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	if _, isSet := os.LookupEnv("CUDA_VISIBLE_DEVICES"); isSet {
		t.Setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
	}
}

// The devices that a node finds are in its record, which placement reads, with what is close and what they
// are.
func TestFoundDevicesAreInTheNodesRecord(t *testing.T) {
	gpus, topology := "", `\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n`
	for _, row := range []string{
		`GPU0\t X \tSYS\tNV4\tSYS\t0-7\t0\n`, `GPU1\tSYS\t X \tSYS\tNV4\t0-7\t0\n`,
		`GPU2\tNV4\tSYS\t X \tSYS\t8-15\t1\n`, `GPU3\tSYS\tNV4\tSYS\t X \t8-15\t1\n`,
	} {
		topology += row
	}
	for _, n := range []string{"0", "1", "2", "3"} {
		gpus += n + `, GPU-` + n + `, H, 1024, 3, 550\n`
	}
	fakeSMI(t, gpus, topology)
	for flag, want := range map[string]state.Resources{
		"auto": {
			Devices: []int{0, 1, 2, 3}, Near: [][]int{{0, 2}, {1, 3}, {0, 1}, {2, 3}},
			Models: []state.DeviceModel{
				{Kind: "nvidia", Name: "H", MemoryMiB: 1024, Driver: "550", Devices: []int{0, 1, 2, 3}},
			},
		},
		"0,2-3": {
			Devices: []int{0, 2, 3}, Near: [][]int{{0, 2}, {2, 3}},
			Models: []state.DeviceModel{
				{Kind: "nvidia", Name: "H", MemoryMiB: 1024, Driver: "550", Devices: []int{0, 2, 3}},
			},
		},
		"none": {},
	} {
		c := DefaultConfig()
		c.NodeID, c.DataDir = "n1", filepath.Join(t.TempDir(), "data")
		c.LogWriter, c.Ephemeral, c.GPUs = io.Discard, true, flag
		n, err := New(c)
		require.NoError(t, err)
		got := n.store.State().Nodes["n1"].Resources
		require.NoError(t, n.Close())
		got.Slots, got.PortLo, got.PortHi, got.Labels = 0, 0, 0, nil
		assert.Equal(t, want, got, flag)
	}
}
