package devices

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func read(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(t, err)
	return string(b)
}

// answers is a Runner that gives these texts: by the name of the program, and for nvidia-smi by its first
// argument up to the "=".
type answers map[string]string

var errExit = errors.New("exit status 9")

// run implements Runner. A text that begins with "!" comes with a failure.
func (a answers) run(_ context.Context, name string, args ...string) ([]byte, error) {
	question, _, _ := strings.Cut(args[0], "=")
	for _, key := range []string{name + " " + question, name} {
		if text, ok := a[key]; ok {
			if out, failed := strings.CutPrefix(text, "!"); failed {
				return []byte(out), errExit
			}
			return []byte(text), nil
		}
	}
	return nil, exec.ErrNotFound
}

func hgx8(t testing.TB) answers {
	return answers{
		"nvidia-smi --query-gpu":          read(t, "hgx8.gpus.csv"),
		"nvidia-smi --query-compute-apps": read(t, "hgx8.apps.csv"),
		"nvidia-smi topo":                 read(t, "hgx8.topo.txt"),
	}
}

func TestNvidiaDevices(t *testing.T) {
	inv, err := Probe(t.Context(), hgx8(t).run)
	require.NoError(t, err)
	assert.Equal(t, Nvidia, inv.Kind)
	assert.Equal(t, "550.54.15", inv.Driver)
	assert.Equal(t, []int{0, 1, 2, 3, 4, 5, 6, 7}, inv.indices())
	assert.Empty(t, inv.Warnings)
	assert.Equal(t, &Device{
		Index: 2, UUID: "GPU-00000002-1111-2222-3333-444444444442", Name: "NVIDIA H100 80GB HBM3",
		TotalMiB: 81559, UsedMiB: 70213,
		Holders: []Holder{{PID: 4711, MiB: 69650}, {PID: 4712, MiB: Unknown}},
	}, inv.Find(2))
	assert.Empty(t, inv.Find(0).Holders)
	assert.Equal(t, [][]int{{0, 1, 2, 3}, {4, 5, 6, 7}}, inv.Near)
}

func TestNvidiaTopologies(t *testing.T) {
	for name, want := range map[string][][]int{
		"hgx8":     {{0, 1, 2, 3}, {4, 5, 6, 7}},
		"mesh8":    {{0, 1, 2, 3}, {4, 5, 6, 7}},
		"bridges4": {{0, 1}, {2, 3}},
		"pcie2":    nil,
	} {
		top := parseNvidiaTopology(read(t, name+".topo.txt"))
		n := map[string]int{"hgx8": 8, "mesh8": 8, "bridges4": 4, "pcie2": 2}[name]
		assert.Equal(t, want, top.near(numbers(n)), name)
	}
	mesh := parseNvidiaTopology(read(t, "mesh8.topo.txt"))
	assert.True(t, mesh.isLinked(0, 7) && mesh.isLinked(7, 0))
	assert.False(t, mesh.isLinked(0, 5))
	assert.Equal(t, "1", mesh.numa[5])
}

func numbers(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

func TestTheClosestSetsComeFirst(t *testing.T) {
	top := newTopology() // bridges across the NUMA nodes
	for i := range 4 {
		top.link(i, i+4)
	}
	for i := range 8 {
		top.setNUMA(i, string(rune('0'+i/4)))
	}
	assert.Equal(t, [][]int{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 1, 2, 3}, {4, 5, 6, 7}}, top.near(numbers(8)))
	assert.Equal(t, [][]int{{1, 5}, {0, 1}, {5, 6}}, Within(top.near(numbers(8)), []int{0, 1, 5, 6}))
	assert.Empty(t, Within(top.near(numbers(8)), []int{0, 1}), "a set of all tells nothing")
	assert.Empty(t, newTopology().near(numbers(8)))
}

func TestDevicesThatDoNotWork(t *testing.T) {
	inv, none := parseNvidiaDevices(read(t, "lost.gpus.csv"))
	assert.False(t, none)
	assert.Equal(t, []string{"", "GPU is lost", "GPU requires reset"},
		[]string{inv.Devices[0].Fault, inv.Devices[1].Fault, inv.Devices[2].Fault})

	inv, none = parseNvidiaDevices(read(t, "handle.gpus.csv"))
	assert.False(t, none)
	assert.Equal(t, []int{0, 2}, inv.indices())
	assert.Equal(t, []string{
		"nvidia-smi: Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error",
	}, inv.Warnings)

	inv, _ = parseNvidiaDevices(read(t, "unified.gpus.csv"))
	assert.Equal(t, []Device{
		{Index: 0, UUID: "GPU-aaaa", Name: "NVIDIA GB10", TotalMiB: Unknown, UsedMiB: Unknown},
	}, inv.Devices)
}

func TestAMDDevices(t *testing.T) {
	inv, err := Probe(t.Context(), answers{
		"rocm-smi --showproductname": read(t, "mi8.json"),
		"rocm-smi --showtopotype":    read(t, "mi8.topo.json"),
	}.run)
	require.NoError(t, err)
	assert.Equal(t, AMD, inv.Kind)
	assert.Equal(t, "6.8.5", inv.Driver)
	assert.Len(t, inv.Devices, 8)
	assert.Equal(t, Device{
		Index: 7, UUID: "0x7f00d", Name: "AMD Instinct MI300X OAM", TotalMiB: 196592, UsedMiB: 283,
	}, inv.Devices[7])
	assert.Equal(t, [][]int{{0, 1, 2, 3}, {4, 5, 6, 7}}, inv.Near)

	old, err := Probe(t.Context(), answers{"rocm-smi": read(t, "radeon2.json")}.run)
	require.NoError(t, err)
	assert.Equal(t, []Device{
		{Index: 0, UUID: "N/A", Name: "Radeon RX 7900 XTX", TotalMiB: 24560, UsedMiB: 26},
		{Index: 1, Name: "0x744c", TotalMiB: Unknown, UsedMiB: Unknown},
	}, old.Devices)
	assert.Empty(t, old.Near)
}

func TestTheFirstProgramThatAnswersCounts(t *testing.T) {
	both := hgx8(t)
	both["rocm-smi"] = read(t, "mi8.json")
	inv, err := Probe(t.Context(), both.run)
	require.NoError(t, err)
	assert.Equal(t, Nvidia, inv.Kind)

	both["nvidia-smi --query-gpu"] = "!NVIDIA-SMI has failed because it couldn't communicate with the driver."
	inv, err = Probe(t.Context(), both.run)
	require.NoError(t, err)
	assert.Equal(t, AMD, inv.Kind)

	inv, err = Probe(t.Context(), answers{}.run)
	require.NoError(t, err)
	assert.Equal(t, Inventory{}, inv, "no program, no devices, no trouble")

	inv, err = Probe(t.Context(), answers{"nvidia-smi": "!No devices were found\n"}.run)
	require.NoError(t, err)
	assert.Equal(t, Inventory{Kind: Nvidia}, inv, "a driver without a device")
}

func TestProgramsThatFail(t *testing.T) {
	for name, c := range map[string]struct {
		answers answers
		want    string
	}{
		"driver": {
			answers{"nvidia-smi": "!\nFailed to initialize NVML: Driver/library version mismatch\nNVML\n"},
			"nvidia-smi: exit status 9: Failed to initialize NVML: Driver/library version mismatch",
		},
		"garbage": {
			answers{"nvidia-smi": "\x00\x01what, is, this\nand this\n"},
			`nvidia-smi lists no device, it prints "what, is, this"`,
		},
		"nothing":      {answers{"nvidia-smi": ""}, `nvidia-smi lists no device, it prints ""`},
		"rocm garbage": {answers{"rocm-smi": "usage"}, `rocm-smi prints no JSON: "usage"`},
		"rocm fails":   {answers{"rocm-smi": "!ERROR: denied"}, "rocm-smi: exit status 9: ERROR: denied"},
		"half a JSON": {
			answers{"rocm-smi": `{"card0": {"Unique ID": `}, "read the JSON of rocm-smi: unexpected EOF",
		},
	} {
		inv, err := Probe(t.Context(), c.answers.run)
		require.EqualError(t, err, c.want, name)
		assert.Empty(t, inv, name)
	}
}

func TestAnswersThatAreMissing(t *testing.T) {
	few := hgx8(t)
	few["nvidia-smi --query-compute-apps"], few["nvidia-smi topo"] = "!not supported", "!"
	inv, err := Probe(t.Context(), few.run)
	require.NoError(t, err)
	assert.Len(t, inv.Devices, 8)
	assert.Empty(t, inv.Near)
	assert.Equal(t, []string{
		"it is not known which processes hold device memory: nvidia-smi: exit status 9: not supported",
	}, inv.Warnings)
}

func TestLongTextsAreCut(t *testing.T) {
	line := "3, GPU-x, " + strings.Repeat("n", 4000) + ", 1, 1, 1\n" + strings.Repeat("junk\n", 100)
	inv, _ := parseNvidiaDevices(line)
	assert.Less(t, len(inv.Devices[0].Name), maxText+4)
	assert.Len(t, inv.Warnings, maxWarnings)
}

// checkInventory checks what holds for any input.
func checkInventory(t *testing.T, inv *Inventory) {
	t.Helper()
	assert.True(t, slices.IsSorted(inv.indices()))
	assert.Len(t, slices.Compact(inv.indices()), len(inv.Devices))
	assert.LessOrEqual(t, len(inv.Warnings), maxWarnings)
	for i := range inv.Devices {
		d := &inv.Devices[i]
		assert.True(t, d.Index >= 0 && d.Index < maxDevices)
		assert.True(t, d.TotalMiB >= Unknown && d.UsedMiB >= Unknown)
		assert.LessOrEqual(t, len(d.Name)+len(d.UUID)+len(d.Fault), 3*(maxText+4))
		assert.LessOrEqual(t, len(d.Holders), maxHolders)
		for _, h := range d.Holders {
			assert.True(t, h.PID > 0 && h.MiB >= Unknown)
		}
	}
}

func checkNear(t *testing.T, near [][]int, devices []int) {
	t.Helper()
	for _, set := range near {
		assert.True(t, len(set) > 1 && len(set) < len(devices) && slices.IsSorted(set))
		for _, d := range set {
			assert.Contains(t, devices, d)
		}
	}
}

func FuzzNvidiaDevices(f *testing.F) {
	for _, name := range []string{"hgx8", "lost", "handle", "unified"} {
		f.Add(read(f, name+".gpus.csv"), read(f, "hgx8.apps.csv"))
	}
	f.Add("0,,,,,", "No running processes found")
	f.Fuzz(func(t *testing.T, gpus, apps string) {
		inv, _ := parseNvidiaDevices(gpus)
		parseNvidiaHolders(apps, &inv)
		checkInventory(t, &inv)
	})
}

func FuzzNvidiaTopology(f *testing.F) {
	for _, name := range []string{"hgx8", "mesh8", "bridges4", "pcie2"} {
		f.Add(read(f, name+".topo.txt"))
	}
	f.Fuzz(func(t *testing.T, text string) {
		near := parseNvidiaTopology(text).near(numbers(16))
		checkNear(t, near, numbers(16))
		checkNear(t, Within(near, numbers(5)), numbers(5))
	})
}

func FuzzAMD(f *testing.F) {
	for _, name := range []string{"mi8.json", "mi8.topo.json", "radeon2.json"} {
		f.Add([]byte(read(f, name)))
	}
	f.Fuzz(func(t *testing.T, out []byte) {
		if inv, err := parseAMDDevices(out); err == nil {
			checkInventory(t, &inv)
		}
		if top, err := parseAMDTopology(out); err == nil {
			checkNear(t, top.near(numbers(16)), numbers(16))
		}
	})
}
