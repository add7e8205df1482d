package system

import (
	"fmt"
	"net"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// HF68: Programs of the machine's user listen on 18000 and inside several blocks of test ports: a node of a
// test and its engines start beside them at the first attempt. So do those of a second node with the same
// ports for engines.
func TestDeployBesideProgramsOnTestPorts(t *testing.T) {
	t.Parallel()
	listen := func(port int) {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil { // another program will do as well
			t.Cleanup(func() { _ = l.Close() })
		}
	}
	listen(18_000)
	const size, blocks = 500, 4
	var releases []func()
	for range blocks {
		base, release, err := ports.Hold(t.Context(), size)
		require.NoError(t, err)
		releases = append(releases, release)
		listen(base)            // the first engine's
		listen(base + size/2)   // one in the middle
		listen(base + size - 1) // the node's own
	}
	for _, release := range releases {
		release()
	}
	r := harness.Start(t)
	r.Deploy(simApp("beside", 4, "independent", "sim_step_ms: 1"))
	st := r.WaitStatus("beside", "RUNNING")
	for _, u := range st.Units {
		assert.Equal(t, uint64(1), u.Epoch, "%s starts at the first attempt: %s", u.Unit, u.Reason)
	}

	// HF68: a second node on the machine has the same range, whose first blocks are in use
	lo, hi := r.EnginePorts()
	other := harness.Start(t, "--port-range", fmt.Sprintf("%d-%d", lo, hi))
	other.Deploy(simApp("beside", 3, "independent", "sim_step_ms: 1"))
	for _, u := range other.WaitStatus("beside", "RUNNING").Units {
		assert.Equal(t, 1, u.Attempt, "%s: a port that is taken is no attempt", u.Unit)
	}
	r.WaitStatus("beside", "RUNNING")
	for _, n := range []*harness.Real{other, r} {
		n.Delete("beside")
		n.Quiet()
	}
}
