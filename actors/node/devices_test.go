package node

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/state"
)

// fakeDevices are devices whose memory is held until a time.
type fakeDevices struct {
	mu      sync.Mutex
	broken  error
	held    time.Time // until then
	checked [][]int
	asked   []string // units of Check and Held
	looks   int
}

// Check implements Devices.
func (d *fakeDevices) Check(_ context.Context, unit string, devices []int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.checked, d.asked = append(d.checked, devices), append(d.asked, unit)
	return d.broken
}

// Held implements Devices.
func (d *fakeDevices) Held(_ context.Context, unit string, _ []int) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.looks++
	d.asked = append(d.asked, unit)
	if time.Now().Before(d.held) {
		return "device 3: 60.0 of 80.0 GiB are in use by process 77"
	}
	return ""
}

func (d *fakeDevices) holdFor(t time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held = time.Now().Add(t)
}

// withDevices runs f in a bubble whose node has a unit on devices 2 and 3.
func withDevices(t *testing.T, f func(t *testing.T, b *bubble, d *fakeDevices)) {
	t.Helper()
	d := &fakeDevices{}
	inBubble(t, func(c *Config) { c.Devices = d }, func(t *testing.T, b *bubble) {
		m := b.order("demo/0/0", 1)
		m.Ranks[0].Devices = []int{2, 3}
		require.NoError(t, b.node.StartRank(t.Context(), m))
		time.Sleep(100 * time.Millisecond)
		f(t, b, d)
	})
}

func (b *bubble) stop(unit string, epoch uint64) {
	b.t.Helper()
	require.NoError(b.t, b.node.StopRank(b.t.Context(),
		&msg.StopRank{Unit: unit, Epoch: epoch, Reason: "deleted"}))
}

// HF77: A unit is gone when the memory of its devices is free, and the next one begins only then.
func TestAUnitIsGoneWhenItsDevicesAreFree(t *testing.T) {
	withDevices(t, func(t *testing.T, b *bubble, d *fakeDevices) {
		assert.Equal(t, state.Ready, b.phase("demo/0/0"))
		assert.Equal(t, [][]int{{2, 3}}, d.checked)
		d.holdFor(5 * time.Second)
		b.stop("demo/0/0", 1)
		require.NoError(t, b.start("demo/0/0", 2))
		time.Sleep(4 * time.Second)
		assert.NotContains(t, b.leader.kinds("demo/0/0"), "1:gone")
		assert.Equal(t, 1, b.launched())
		assert.Contains(t, b.node.RankStatuses(), "demo/0/0")
		time.Sleep(2 * time.Second)
		assert.Contains(t, b.leader.kinds("demo/0/0"), "1:gone")
		assert.Contains(t, b.leader.kinds("demo/0/0"), "2:ready")
		assert.NotContains(t, b.leader.reason("demo/0/0"), "held")
		assert.Equal(t, []string{"demo/0/0"}, slices.Compact(d.asked))
	})
}

// After 10 s the reason names who holds the memory, and after 30 s the node goes on: it is no process of the
// unit.
func TestDeviceMemoryThatStaysHeldIsNamed(t *testing.T) {
	withDevices(t, func(t *testing.T, b *bubble, d *fakeDevices) {
		d.holdFor(time.Hour)
		b.stop("demo/0/0", 1)
		time.Sleep(DefaultVerifyNamed + time.Second)
		assert.Equal(t, "deleted; still held after 10s: device 3: 60.0 of 80.0 GiB are in use by process 77",
			b.leader.reason("demo/0/0"))
		assert.Equal(t, state.Killing, b.phase("demo/0/0"))
		time.Sleep(DefaultDeviceWait)
		assert.Contains(t, b.leader.kinds("demo/0/0"), "1:gone")
		assert.Equal(t, "deleted; still held after 30s: device 3: 60.0 of 80.0 GiB are in use by process 77",
			b.leader.reason("demo/0/0"))
	})
}

// HF77: A process belongs to the unit of its engine's first process: as its child, or by its group after its
// parent has died. Others belong to none.
func TestWhichUnitAProcessBelongsTo(t *testing.T) {
	engines := map[int]string{100: "demo/0/0", 200: "demo/0/1"}
	stats := map[int]process.Stat{
		1: {PID: 1}, 50: {PID: 50, Parent: 1, Group: 50}, 100: {PID: 100, Parent: 50, Group: 100},
		101: {PID: 101, Parent: 100, Group: 100}, 102: {PID: 102, Parent: 101, Group: 102},
		200: {PID: 200, Parent: 50, Group: 200}, 201: {PID: 201, Parent: 1, Group: 200},
		300: {PID: 300, Parent: 1, Group: 300}, 400: {PID: 400, Parent: 400, Group: 400},
	}
	read := func(pid int) (process.Stat, bool) { s, ok := stats[pid]; return s, ok }
	for pid, want := range map[int]string{
		100: "demo/0/0", 101: "demo/0/0", 102: "demo/0/0", 201: "demo/0/1", 50: "", 300: "", 400: "", 999: "",
	} {
		assert.Equal(t, want, unitOf(pid, engines, read), pid)
	}
}

// The node's own end does not wait for memory: nothing is started on it any more.
func TestANodeThatEndsDoesNotWaitForDeviceMemory(t *testing.T) {
	withDevices(t, func(t *testing.T, b *bubble, d *fakeDevices) {
		d.holdFor(time.Hour)
		began := time.Now()
		require.NoError(t, b.node.Close(t.Context(), 0))
		assert.Less(t, time.Since(began), time.Second)
	})
}

// Nothing is started on devices that are not there, and nothing is looked for after an engine that never ran.
func TestAMissingDeviceFailsTheStart(t *testing.T) {
	d := &fakeDevices{broken: errors.New("device 3 is not there any more")}
	inBubble(t, func(c *Config) { c.Devices = d }, func(t *testing.T, b *bubble) {
		m := b.order("demo/0/0", 1)
		m.Ranks[0].Devices = []int{3}
		require.NoError(t, b.node.StartRank(t.Context(), m))
		time.Sleep(time.Second)
		assert.Equal(t, []string{"1:started", "1:killing", "1:gone"}, b.leader.kinds("demo/0/0"))
		assert.Equal(t, "device 3 is not there any more", b.leader.reason("demo/0/0"))
		assert.Zero(t, b.launched()+d.looks)
		require.NoError(t, b.start("demo/0/1", 1))
		time.Sleep(time.Second)
		assert.Equal(t, state.Ready, b.phase("demo/0/1"), "a rank without devices is not concerned")
	})
}
