package system

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// A changed application rolls out under load, as docs/rollout.md says: one of several independent ranks is
// missing at any time, and no request fails.
func TestAChangedApplicationRollsOut(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts every engine twice")
	}
	const ranks = 3
	r := harness.Start(t)
	y, least := changeUnderLoad(r, ranks, "independent")
	assert.GreaterOrEqual(t, least, ranks-1, "ranks that were ready at any time")
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "what clients saw: %v", y)
	r.Quiet()
}

// A changed application with a single lockstep group is away as a whole, as docs/rollout.md says: requests
// are refused while the group drains, and wait while it starts. No stream breaks, and no request hangs.
func TestAChangedLockstepGroupIsAwayAsAWhole(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts every engine twice")
	}
	r := harness.Start(t)
	r.Expect(harness.RequestRefused)
	y, _ := changeUnderLoad(r, 2, "lockstep")
	assert.Zero(t, y.Broken+y.Cut+y.Hung, "what clients saw: %v", y)
	r.Quiet()
}

// changeUnderLoad deploys an application, changes what its engines are started with, and waits until each of
// its units was replaced once. least is the lowest number of ready ranks that it saw.
func changeUnderLoad(r *harness.Real, ranks int, coupling string) (y harness.Tally, least int) {
	r.T.Helper()
	r.Deploy(simApp("changed", ranks, coupling, "sim_step_ms: 2"))
	r.WaitStatus("changed", client.StatusRunning)
	load := harness.StartLoad(r.T, "changed", 4, 20, r.HTTP)
	load.Reaches(20)
	r.Deploy(simApp("changed", ranks, coupling, "sim_step_ms: 3"))
	least = ranks
	r.Eventually(func() error {
		st := r.App("changed")
		least = min(least, st.Ready)
		for _, u := range st.Units {
			if u.Epoch != 2 || u.Phase != "ready" {
				return fmt.Errorf("%s is %s in epoch %d", u.Unit, u.Phase, u.Epoch)
			}
		}
		return nil
	}, "every unit was replaced once")
	load.Reaches(20)
	y = load.End()
	r.Delete("changed")
	return y, least
}
