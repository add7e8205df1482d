package system

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// isDead is harness.Alive for the other answer.
func isDead(pid int) bool { return !harness.Alive(pid) }

// PL4: rounds of deploy and delete that each take every slot, device and port block of the node, with a
// request and a reservation in each. What one round left behind would make the next one fail.
func TestPL4RoundsOfDeployAndDelete(t *testing.T) {
	t.Parallel()
	const rounds, ranks = 4, 4
	r := harness.Start(t, "--slots", strconv.Itoa(ranks), "--gpus", strconv.Itoa(2*ranks))
	for i := range rounds {
		app := fmt.Sprintf("round%d", i%2) // names return too
		r.Deploy(strings.Replace(onDevices(app, ranks, 2), "timeout_s: 2", "timeout_s: 0.2", 1))
		st := r.WaitStatus(app, "RUNNING")
		assert.Equal(t, ranks, st.Ready)
		full := onlyNode(r)
		assert.Equal(t, [2]int{ranks, 2 * ranks}, [2]int{full.SlotsUsed, int(full.GPUsUsed)})
		r.Quiet() // also without the reservation of the round before that had this name
		code, text := r.Do(http.MethodPost, "/api/v1/routers/"+app+"/best_worker",
			`{"token_ids": [1, 2, 3], "request_id": "kept"}`) // its caller never frees it
		assert.Equal(t, http.StatusOK, code, text)
		resp, err := r.Post(t.Context(), "/v1/chat/completions", harness.Chat(app, "hello", 4, false))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, http.StatusOK, resp.StatusCode)

		r.Delete(app)
		waitNode(r, "all slots and devices free", func(n *client.NodeStatus) bool {
			return n.SlotsUsed == 0 && n.GPUsUsed == 0 && n.Ranks == 0
		})
		r.Eventually(func() error {
			if left := slices.DeleteFunc(r.Children(), isDead); len(left) > 0 {
				return fmt.Errorf("processes %v", left)
			}
			return nil
		}, "no process left")
		r.Quiet()
	}
}
