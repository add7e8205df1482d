package inprocess

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// mostAway is how long the old revision may be away from a rank of which the new one has ended.
const mostAway = 20 * time.Second

// CC4: A revision whose engines end 3 s after they were ready, or do not start, is halted at its first rank:
// under load no request fails, no other rank is ever missing, and the rank is back on the old revision soon.
func TestARevisionThatDiesTakesOneRank(t *testing.T) {
	t.Parallel()
	for _, fault := range []string{"crash@3", "start-exit"} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { dieAfterDeploy(t, fault) })
		})
	}
}

func dieAfterDeploy(t *testing.T, fault string) {
	c := harness.New(t)
	c.Expect(harness.EngineFails)
	c.Deploy(simApp("a", 4, "independent", "sim_step_ms: 10"))
	c.WaitStatus("a", "RUNNING")
	time.Sleep(time.Second)
	load := ask(t, c.Peer(0), "a", 125*time.Millisecond, 40)
	time.Sleep(2 * time.Second)
	fewest := fewestReady(c.Peer(0), "a")
	c.Deploy(simApp("a", 4, "independent", "sim_step_ms: 10, sim_fail: "+fault))
	var st client.AppStatus
	c.Until("the roll-out is halted", func() error {
		if st, _ = c.App("a"); st.Halt == nil {
			return fmt.Errorf("%s, rolling out: %t", st.Status, st.RollingOut)
		}
		return nil
	})
	halt := *st.Halt
	assert.Equal(t, [2]uint64{2, 1}, [2]uint64{halt.Revision, halt.BackTo})
	assert.Equal(t, fault == "start-exit", halt.Unready)
	assert.NotEmpty(t, halt.LogTail)
	c.Until("it is back", func() error { return allReady(c, "a", 4) })
	assert.LessOrEqual(t, time.Since(halt.At), mostAway)
	time.Sleep(20 * time.Second)
	assert.GreaterOrEqual(t, fewest(), 3)
	st, _ = c.App("a")
	assert.Equal(t, client.StatusRunning, st.Status)
	assert.Equal(t, uint64(3), st.Revision)
	for _, u := range st.Units {
		if u.Unit != halt.Unit {
			assert.Equal(t, uint64(1), u.Epoch, "%s was never touched", u.Unit)
		}
	}
	assert.Zero(t, clean(t, load.end()))
}

// FS10: A roll-out over two groups, or over three ranks, cuts none of the streams that are longer than it,
// whose ranks drain for a second. Streams of an application that the same file lists, unchanged, do not move.
func TestRollingCutsNoStream(t *testing.T) {
	t.Parallel()
	for name, app := range map[string]func(args string) string{
		"groups": func(args string) string {
			return simApp("a", 2, "lockstep", args, "num_groups: 2", "graceful_shutdown_timeout_s: 1")
		},
		"ranks": func(args string) string {
			return simApp("a", 3, "independent", args, "graceful_shutdown_timeout_s: 1")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const clients, tokens = 64, 400 // of 40 s
				other := simApp("other", 1, "independent", "sim_step_ms: 100")[len("applications:\n"):]
				c := harness.New(t)
				c.Deploy(app("sim_step_ms: 100") + other)
				c.WaitStatus("a", "RUNNING")
				c.WaitStatus("other", "RUNNING")
				time.Sleep(5 * time.Second)
				beside := askAtOnce(t, c.Peer(0), "other", 8, tokens)
				got := greedy(t, c.Peer(0), "a", clients, tokens, func() {
					time.Sleep(2 * time.Second)
					c.Deploy(app("sim_step_ms: 100, max_num_seqs: 200") + other)
				})
				assert.NotEmpty(t, c.Journal.Find("a stream broke and goes on", `"app":"a"`))
				assert.Empty(t, c.Journal.Find("a stream broke", `"app":"other"`))
				for i, s := range got {
					require.True(t, s.OK(), "client %d: %s", i, s)
				}
				assert.Zero(t, clean(t, beside.end()))
				c.Until("it is rolled out", func() error {
					if st, _ := c.App("a"); st.Status != client.StatusRunning || st.RollingOut {
						return fmt.Errorf("%s, rolling out: %t", st.Status, st.RollingOut)
					}
					return nil
				})
			})
		})
	}
}
