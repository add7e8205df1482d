package devices

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// quarters are the grants of four units that share device 0.
func quarters() []Grant {
	var out []Grant
	for _, unit := range []string{"a", "b", "c", "d"} {
		out = append(out, Grant{Unit: unit, Devices: []int{0}, Share: 2500})
	}
	return out
}

// HF77: a unit waits for the memory of its own engine, and not for what the others may hold: their shares, or
// what their processes hold if that is more.
func TestUnitsThatShareADeviceDoNotWaitForEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{used: [2]int{400, 400}}
		owners := map[int]string{}
		k := open(t, m, KeeperConfig{
			Granted: quarters, UnitOf: func(pid int) string { return owners[pid] },
		})
		ask := func(used int, apps string) string {
			m.set(func() { m.used[0], m.apps = used, apps })
			return k.Held(t.Context(), "a", []int{0})
		}
		for _, unit := range []string{"a", "b", "c", "d"} { // the first ones hold memory already
			require.NoError(t, k.Check(t.Context(), unit, []int{0}))
			m.set(func() { m.used[0] += 18000 })
		}
		const share, driver = 81920 / 4, 512
		assert.Empty(t, ask(400+3*18000, ""), "the others go on")
		assert.Empty(t, ask(400+3*share+driver, ""), "they may have that much")
		assert.Equal(t, "device 0: 60.9 of 80.0 GiB are in use (0.4 before the start)",
			ask(400+3*share+driver+1, ""), "the rest is of the engine that has ended")

		owners[999999996], owners[999999997] = "b", "b" // its file has a larger gpu_memory_utilization
		apps := "GPU-0, 999999996, 20000\nGPU-0, 999999997, 20000\n"
		assert.Empty(t, ask(400+2*share+40000+driver, apps), "more than its share, which is known")
		assert.Contains(t, ask(400+2*share+40000+driver+1, apps), "process 999999997 of b with 19.5 GiB")
		owners[999999996], owners[999999997] = "a", "a"
		assert.Empty(t, ask(400+3*share, apps), "the unit's own processes take what the others may have")

		m.set(func() { m.used[1] = 70000 })
		assert.NotEmpty(t, k.Held(t.Context(), "a", []int{1}), "a device that no other unit has")
	})
}

// HF77: what the others hold at the start of an engine counts as theirs, not as what was there before it.
func TestARestartOnASharedDevice(t *testing.T) {
	m := &machine{used: [2]int{400, 0}}
	k := open(t, m, KeeperConfig{Granted: func() []Grant { return quarters()[:2] }})
	require.NoError(t, k.Check(t.Context(), "b", []int{0}))
	m.set(func() { m.used[0] = 400 + 18000 })
	require.NoError(t, k.Check(t.Context(), "a", []int{0}))
	m.set(func() { m.used[0] = 400 + 2*18000 })
	assert.NotEmpty(t, k.Held(t.Context(), "a", []int{0}), "its engine is not gone yet")
	m.set(func() { m.used[0] = 400 + 18000 })
	assert.Empty(t, k.Held(t.Context(), "a", []int{0}))
}

// HF77: engines that use a device which they were not granted are known as this node's, and another program
// is still another program.
func TestEnginesWithoutADeviceAreNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{used: [2]int{55700, 300}, apps: "GPU-0, 999999997, 13900\nGPU-0, 999999998, 13900\n"}
		k := open(t, m, KeeperConfig{UnitOf: func(pid int) string {
			return map[int]string{999999997: "chat/0/0", 999999998: "chat/0/1"}[pid]
		}})
		assert.Equal(t, "device 0: 54.4 of 80.0 GiB are in use by process 999999997 of chat/0/0 with 13.6 "+
			"GiB, process 999999998 of chat/0/1 with 13.6 GiB, and was granted to no rank (write "+
			"resources.gpus for ranks that use devices, a share such as 0.25 if they share one)", k.Trouble())
		m.set(func() { m.apps = "GPU-0, 999999999, 13900\n" })
		time.Sleep(DefaultReread)
		k.read(t.Context())
		assert.Contains(t, k.Trouble(), "process 999999999 with 13.6 GiB, and no rank of this node has it")
	})
}
