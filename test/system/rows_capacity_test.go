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

// PL2: 16 ranks where 8 can exist, by slots and by devices: plan and deploy refuse at once, say what is
// needed and what each node has free, and start nothing.
func TestPL2MoreRanksThanCanExist(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(2, "--gpus", "8"), harness.MemberSlots(4), harness.Calm)
	a := c.All[0]
	for _, row := range []struct {
		name, file string
		want       []string
	}{
		{"slots", simApp("wide", 16, "lockstep", ""), []string{
			"8 of 16 ranks can be placed", "need: 16 ranks of 1 slot each, PACK",
			"node a: 4 of 4 slots free, 8 of 8 devices free, room for 4 ranks",
			"node b: 4 of 4 slots free, 8 of 8 devices free, room for 4 ranks",
		}},
		{"independent", simApp("wide", 1, "independent", "") + "    num_replicas: 16\n", []string{
			"node a: ", "node b: ", "need: ",
		}},
		{"devices", strings.Replace(onDevices("wide", 16, 2), "independent", "lockstep", 1), []string{
			"8 of 16 ranks can be placed", "need: 16 ranks of 1 slot and 2 devices each, PACK",
			"node a: 4 of 4 slots free, 8 of 8 devices free, room for 4 ranks",
		}},
	} {
		file := written(t, row.file)
		for _, word := range []string{"plan", "deploy"} {
			code, text := command(a, word, file)
			assert.Equal(t, 5, code, "%s of %s: %s", word, row.name, text)
			for _, want := range row.want {
				assert.Contains(t, text, want, "%s of %s", word, row.name)
			}
			assert.Contains(t, text, "hint: ", "%s of %s", word, row.name)
		}
	}
	_, err := a.AppOf("wide")
	require.Error(t, err, "a refused deploy leaves nothing")
	for _, m := range c.All {
		assert.Empty(t, m.Children(), "no process was started")
	}
}

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
