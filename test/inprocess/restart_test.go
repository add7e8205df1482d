package inprocess

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/harness"
)

// waits are the times a unit spent in backoff, in order.
func waits(c *harness.Cluster, app, unit string) []time.Duration {
	var out []time.Duration
	var since time.Time
	for _, e := range c.Events(app) {
		if e.Unit != unit {
			continue
		}
		if e.Phase == "starting" && !since.IsZero() {
			out = append(out, e.Time.Sub(since))
		}
		since = time.Time{}
		if e.Phase == "backoff" {
			since = e.Time
		}
	}
	return out
}

// seconds makes durations of a list.
func seconds(list ...int) []time.Duration {
	var out []time.Duration
	for _, s := range list {
		out = append(out, time.Duration(s)*time.Second)
	}
	return out
}

// requireWaits compares times in backoff with whole seconds. Chance makes waits after ready up to a quarter
// shorter.
func requireWaits(t *testing.T, got []time.Duration, want ...int) {
	t.Helper()
	require.Len(t, got, len(want), "%v", got)
	for i, s := range want {
		longest := time.Duration(s) * time.Second
		require.LessOrEqual(t, got[i], longest, "%v", got)
		require.GreaterOrEqual(t, got[i], longest*3/4, "%v", got)
	}
}

// RG6: Failures after ready: restart for ever, 1, 2, 4 … 300 s apart; ten minutes of health begin the count
// again, less do not.
func TestRestartBackoffAndItsReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Expect(harness.EngineFails)
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 10"))
		u := c.WaitUnit("a/0/0", "ready", 1)
		crash := func() {
			require.True(t, c.Kill("a", 0, 0))
			u = c.WaitUnit("a/0/0", "ready", u.Epoch+1)
		}
		for range 10 {
			crash()
		}
		time.Sleep(10*time.Minute - 5*time.Second)
		crash()
		time.Sleep(10 * time.Minute)
		crash()
		crash()
		requireWaits(t, waits(c, "a", "a/0/0"), 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 1, 2)
		assert.Equal(t, uint64(14), u.Epoch)
		assert.Equal(t, 13, u.Restarts)
	})
}

// HF50, HF52: TestHF50ModelStoreAwayForTenMinutes, at a restart of the engines and at a reboot of the
// machine, and longer than the first attempts last at a first deploy: the ranks serve again by themselves.
func TestHF50ModelStoreAwayForTenMinutes(t *testing.T) {
	away := filepath.Join(t.TempDir(), "away")
	args := `sim_step_ms: 10, sim_fail: "start-exit-while=` + away + `"`
	takeAway := func(t *testing.T) { require.NoError(t, os.WriteFile(away, nil, 0o600)) }
	for name, begin := range map[string]func(t *testing.T, c *harness.Cluster){
		"restart": func(t *testing.T, c *harness.Cluster) {
			takeAway(t)
			require.True(t, c.Kill("a", 0, 0))
			require.True(t, c.Kill("a", 0, 1))
		},
		"reboot": func(t *testing.T, c *harness.Cluster) {
			takeAway(t)
			c.Peer(0).Close()
			require.NoError(t, c.Peer(0).Again(nil))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t, harness.OnDisk())
				c.Expect(harness.EngineFails, harness.NodeFails)
				c.Deploy(simApp("a", 2, "independent", args))
				c.WaitStatus("a", "RUNNING")
				begin(t, c)
				for range 20 {
					time.Sleep(30 * time.Second)
					st, _ := c.App("a")
					require.Contains(t, []string{"UNHEALTHY", "DEPLOYING"}, st.Status, st.Message)
					require.Zero(t, st.Ready)
				}
				require.NoError(t, os.Remove(away))
				time.Sleep(state.DefaultRestartMax + time.Second)
				st, _ := c.App("a")
				require.Equal(t, "RUNNING", st.Status, st.Message)
				assert.True(t, c.StreamChat(t.Context(), "a", 5).OK())
			})
		})
	}
	t.Run("first deploy", func(t *testing.T) {
		takeAway(t)
		synctest.Test(t, func(t *testing.T) {
			c := harness.New(t)
			c.Deploy(simApp("a", 2, "independent", args))
			next := c.WaitStatus("a", "DEPLOY_FAILED").Units[0].NextTry
			require.Greater(t, time.Until(next), 3*time.Minute)
			time.Sleep(10 * time.Minute)
			st, _ := c.App("a")
			require.Equal(t, "DEPLOY_FAILED", st.Status)
			assert.Contains(t, st.Units[0].Reason, "engine exited with code 1")
			assert.GreaterOrEqual(t, st.Units[0].Attempt, 5, "it was tried again")
			require.NoError(t, os.Remove(away))
			time.Sleep(state.DefaultFailedRetry + time.Second)
			st, _ = c.App("a")
			require.Equal(t, "RUNNING", st.Status, st.Message)
		})
	})
}

// RG6: Failed starts: three attempts, 1 and 2 s apart, then failed, with the engine's last words; a deploy
// gives three more.
func TestStartFailsThreeTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Expect(harness.RequestRefused)
		yaml := simApp("a", 1, "independent", "sim_step_ms: 10, sim_fail: start-exit")
		c.Deploy(yaml)
		st := c.WaitStatus("a", "DEPLOY_FAILED")
		require.Len(t, st.Units, 1)
		u := st.Units[0]
		assert.Equal(t, "failed", u.Phase)
		assert.Equal(t, uint64(3), u.Epoch)
		assert.Contains(t, u.Reason, "engine exited with code 1")
		assert.Contains(t, u.LogTail, "engine sim: start fails as told: drop --sim-fail start-exit")
		assert.Equal(t, seconds(1, 2), waits(c, "a", "a/0/0"))

		s := c.StreamChat(t.Context(), "a", 1)
		assert.Equal(t, "no_ready_rank", s.Error, "at once: nothing is on its way")
		assert.Zero(t, s.Total)

		c.Deploy(yaml)
		c.WaitUnit("a/0/0", "failed", 6)
		assert.Equal(t, seconds(1, 2, 1, 2), waits(c, "a", "a/0/0"))
	})
}

// RG5: One rank dies and takes its group along: out of routing at once, back as a group under the next epoch.
// The other app never hears of it.
func TestLockstepGroupFailsAsOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Expect(harness.EngineFails, harness.StreamBreaks)
		c.Deploy(simApp("gang", 4, "lockstep", "sim_step_ms: 20") + simApp("calm", 2, "independent",
			"sim_step_ms: 20")[len("applications:\n"):])
		c.WaitStatus("gang", "RUNNING")
		before := c.WaitStatus("calm", "RUNNING")

		cut, calm := make(chan *harness.Stream, 4), make(chan *harness.Stream, 4)
		for i := range 4 {
			go func() {
				cut <- c.StreamChat(t.Context(), "gang", 500, "x-dpserve-rank", "0/"+strconv.Itoa(i))
			}()
			go func() { calm <- c.StreamChat(t.Context(), "calm", 500) }()
		}
		time.Sleep(2 * time.Second)
		died := time.Now()
		require.True(t, c.Kill("gang", 0, 2))
		synctest.Wait()
		st, _ := c.App("gang")
		assert.Zero(t, st.Ready, "the whole group is out at the moment of the death")
		assert.NotEqual(t, "ready", st.Units[0].Phase)
		late := c.StreamChat(t.Context(), "gang", 5) // waits for the group to come back
		assert.True(t, late.OK(), late)
		assert.GreaterOrEqual(t, late.Total, 750*time.Millisecond)

		u := c.WaitUnit("gang/0", "ready", 2)
		require.Len(t, u.Ranks, 4)
		for _, k := range u.Ranks {
			assert.Equal(t, uint64(2), k.Epoch)
		}
		for range 4 {
			s := <-cut
			assert.True(t, s.OK(), "it goes on when the group is back: %s", s)
		}
		for range 4 {
			s := <-calm
			assert.True(t, s.OK(), s)
		}
		for _, e := range c.Events("gang") {
			if e.Phase == "fenced" {
				assert.True(t, died.Equal(e.Time), "%s, killed at %s", e.Time, died)
				assert.Contains(t, e.Reason, "rank 2: ",
					"its exit, or a probe that met its closed port first")
			}
		}
		requireWaits(t, waits(c, "gang", "gang/0"), 1)
		after, _ := c.App("calm")
		for i, u := range after.Units {
			assert.Equal(t, before.Units[i].Epoch, u.Epoch)
			assert.Equal(t, before.Units[i].Since, u.Since)
			assert.Equal(t, before.Units[i].Ranks[0].Incarnation, u.Ranks[0].Incarnation)
		}
		c.Quiet()
	})
}

// A rank that hangs with work in hand: 20 s without progress, a probe with 10 s, fence, restart. Its request
// is not lost.
func TestHungRankIsFencedByProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Expect(harness.EngineFails)
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 10"))
		c.WaitUnit("a/0/0", "ready", 1)
		c.Fail("a", 0, 0, sim.Fault{Mode: sim.ModeHang})
		began := time.Now()
		s := c.StreamChat(t.Context(), "a", 5)
		assert.True(t, s.OK(), s)
		assert.Equal(t, uint64(2), c.WaitUnit("a/0/0", "ready", 2).Epoch)
		for _, e := range c.Events("a") {
			if e.Phase != "fenced" {
				continue
			}
			took := e.Time.Sub(began)
			assert.GreaterOrEqual(t, took, 30*time.Second)
			assert.Less(t, took, 31*time.Second, "the watch looks once a second")
			assert.Contains(t, e.Reason, "no progress for 20")
		}
		c.Quiet()
	})
}
