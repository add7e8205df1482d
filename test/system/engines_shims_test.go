package system

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/shim"
	"github.com/dpserve/dpserve/test/harness"
)

// shimsFail is the line of a node whose shim is killed.
var shimsFail = harness.Fault{
	{Msg: "an engine's shim has ended, and its engine with it", Why: "the test has killed it"},
}

// launched is the folder of an engine below the data dir, with what its shim has noted there.
type launched struct {
	dir   string
	spec  shim.Spec
	state shim.State
}

// launchOf finds the folder of the engine with a process id.
func launchOf(t testing.TB, engines string, pid int) launched {
	t.Helper()
	folders, err := filepath.Glob(filepath.Join(engines, "*"))
	require.NoError(t, err)
	for _, dir := range folders {
		l := launched{dir: dir}
		for name, into := range map[string]any{"spec.json": &l.spec, "state.json": &l.state} {
			text, err := os.ReadFile(filepath.Join(dir, name))
			require.NoError(t, err)
			require.NoError(t, json.Unmarshal(text, into))
		}
		if l.state.PID == pid {
			return l
		}
	}
	require.Fail(t, "no folder", "of process %d in %s", pid, engines)
	return launched{}
}

// kill ends the shim with SIGKILL and waits for the end of its engine.
func (l *launched) kill(c *harness.Members) {
	c.T.Helper()
	began := time.Now()
	require.NoError(c.T, syscall.Kill(l.state.Shim, syscall.SIGKILL))
	dead(c, "the engine of a killed shim", []int{l.state.PID})
	c.T.Logf("NUMBER an engine has ended %s after SIGKILL of its shim", time.Since(began))
}

// restartedOnce breaks one rank of an application on the first node, and waits until it has another process
// with the next epoch. The others are as before. It returns all.
func restartedOnce(c *harness.Members, app, victim string, before map[string]client.RankStatus,
	breaks func(l launched),
) map[string]client.RankStatus {
	c.T.Helper()
	l := launchOf(c.T, filepath.Join(c.All[0].Dir, "engines"), before[victim].PID)
	breaks(l)
	st := c.WaitApp(app, victim+" is back", func(st *client.AppStatus) error {
		k := seats(st)[victim]
		if st.Ready != st.Desired || k.Epoch == before[victim].Epoch {
			return fmt.Errorf("%d of %d ready, %+v", st.Ready, st.Desired, k)
		}
		return harness.Accounted(st)
	})
	after := seats(&st)
	for seat, was := range before {
		k := after[seat]
		if seat == victim {
			assert.Equal(c.T, was.Epoch+1, k.Epoch, "restarted once")
			assert.NotEqual(c.T, was.PID, k.PID)
			continue
		}
		assert.Equal(c.T, was, k, "rank %s", seat)
	}
	assert.Empty(c.T, l.state.Left())
	return after
}

// sameImage reports whether two processes run the same file, which may be deleted.
func sameImage(t *testing.T, a, b int) bool {
	t.Helper()
	var files [2]os.FileInfo
	for i, pid := range []int{a, b} {
		var err error
		files[i], err = os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
		require.NoError(t, err)
	}
	return os.SameFile(files[0], files[1])
}

// How long the next process of a node needs for 64 engines that were left behind. It is measured under
// DPSERVE_ACCEPTANCE only, and printed: the goal is 1 s on a machine with a core for each few engines.
func TestEN3ManyEnginesAreAdopted(t *testing.T) {
	if !accepting() {
		t.Skip("DPSERVE_ACCEPTANCE is not set")
	}
	t.Parallel()
	const many = 64
	c := harness.StartMembers(t, harness.Each(1), harness.MemberSlots(many), harness.Calm)
	c.Expect(harness.NodeFails, harness.EngineFails, harness.StreamBreaks)
	w := c.All[0]
	w.Want(simApp("many", many, "independent", "sim_step_ms: 5"))
	st := c.Running("many")
	before := seats(&st)
	w.Crash()
	began := time.Now()
	w.Start()
	answers := time.Since(began)
	routesTo(c, w, "many", on(before, w.Name))
	routed := time.Since(began)
	unchanged(c, "many", before)
	t.Logf("NUMBER %d engines adopted and in routing %s after the start of the node's process; its admin "+
		"API answers after %s", many, routed, answers)
}
