package system

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// simFail tells a simulated engine, on its own loopback port, to fail.
func simFail(t *testing.T, r *harness.Real, app string, group, rank int, body string) {
	t.Helper()
	simPost(t, r, app, group, rank, "fail", body)
}

func simPost(t *testing.T, r *harness.Real, app string, group, rank int, path, body string) {
	t.Helper()
	require.NoError(t, trySimPost(t, r, app, group, rank, path, body))
}

// trySimPost is simPost for a rank whose engine may be on its way.
func trySimPost(t *testing.T, r *harness.Real, app string, group, rank int, path, body string) error {
	t.Helper()
	k, _ := r.Rank(app, group, rank)
	if k.URL == "" {
		return fmt.Errorf("rank %d/%d has no engine", group, rank)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, k.URL+"/_sim/"+path,
		strings.NewReader(body))
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	require.NoError(t, resp.Body.Close())
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s", path, body, resp.Status)
	}
	return nil
}

// simVanish is simFail for modes that end the process, sometimes before it has answered.
func simVanish(t *testing.T, r *harness.Real, app string, group, rank int, body string) {
	t.Helper()
	k, ok := r.Rank(app, group, rank)
	require.True(t, ok, "rank %d/%d is listed", group, rank)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, k.URL+"/_sim/fail",
		strings.NewReader(body))
	require.NoError(t, err)
	if resp, err := http.DefaultClient.Do(req); err == nil {
		_ = resp.Body.Close()
	}
}

// pids lists the engine processes of an app.
func pids(st client.AppStatus) []int {
	var out []int
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			if k.PID != 0 {
				out = append(out, k.PID)
			}
		}
	}
	return out
}

func requireDead(t *testing.T, r *harness.Real, pids []int) {
	t.Helper()
	deadline := time.Now().Add(harness.Patience)
	for _, p := range pids {
		for harness.Alive(p) {
			if time.Now().After(deadline) {
				t.Fatalf("process %d still lives; output:\n%s", p, r.Output())
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// RG6: one rank of a lockstep group fails at start, always, then once.
func TestRG6StartFailures(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Expect(harness.RequestRefused)
	t.Run("always", func(t *testing.T) {
		r.Deploy(simApp("always", 8, "lockstep", `sim_fail: "start-exit%5"`))
		st := r.WaitStatus("always", "DEPLOY_FAILED")
		u := st.Units[0]
		assert.Equal(t, "failed", u.Phase)
		assert.Equal(t, 3, u.Attempt)
		assert.EqualValues(t, 3, u.Epoch)
		assert.Contains(t, u.Reason, "rank 5")
		assert.NotEmpty(t, u.LogTail)
		assert.LessOrEqual(t, len(u.LogTail), 20)
		assert.Empty(t, pids(st), "all 8 are stopped")
		resp, err := r.Post(t.Context(), "/v1/chat/completions", harness.Chat("always", "hi", 1, false))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, http.StatusServiceUnavailable, resp.StatusCode, "never routable")
	})
	t.Run("once", func(t *testing.T) {
		marker := filepath.Join(t.TempDir(), "failed-once")
		r.Deploy(simApp("once", 8, "lockstep", `sim_fail: "start-exit-once=`+marker+`%5"`))
		st := r.WaitStatus("once", "RUNNING")
		assert.EqualValues(t, 2, st.Units[0].Epoch)
		assert.Equal(t, 1, st.Units[0].Restarts)
		assert.True(t, r.StreamChat(t.Context(), "once", "hi", 4).OK())
	})
	r.Delete("always")
	r.Delete("once")
	r.Quiet()
}

// TestHF50ModelStoreAwayForAWhile: what the engines need is gone while they restart, and then while the
// machine boots, for as long as five starts (20 s with the timers that users have). They serve again by
// themselves.
func TestHF50ModelStoreAwayForAWhile(t *testing.T) {
	t.Parallel()
	timers := []string{"--timers", "restart_min=50ms,restart_max=200ms"}
	r := harness.Start(t, timers...)
	r.Expect(harness.EngineFails)
	away := filepath.Join(t.TempDir(), "away")
	r.Deploy(simApp("a", 2, "independent", `sim_fail: "start-exit-while=`+away+`"`))
	r.WaitStatus("a", "RUNNING")
	comesBack := func(begin func()) {
		epoch := r.App("a").Units[0].Epoch
		require.NoError(t, os.WriteFile(away, nil, 0o600))
		begin()
		r.Eventually(func() error {
			st := r.App("a")
			require.NotEqual(t, "DEPLOY_FAILED", st.Status)
			if n := st.Units[0].Epoch - epoch; n < 5 {
				return fmt.Errorf("%d starts, status %s", n, st.Status)
			}
			return nil
		}, "five starts fail")
		require.NoError(t, os.Remove(away))
		r.WaitStatus("a", "RUNNING")
	}
	comesBack(func() {
		simVanish(t, r, "a", 0, 0, `{"mode": "kill"}`)
		simVanish(t, r, "a", 0, 1, `{"mode": "kill"}`)
	})
	comesBack(func() {
		r.Signal(syscall.SIGTERM)
		<-r.Exited()
		r = harness.StartIn(t, r.Dir, timers...)
		r.Expect(harness.EngineFails)
	})
	assert.True(t, r.StreamChat(t.Context(), "a", "hi", 4).OK())
	r.Quiet()
}

// RG9: engines that ignore SIGTERM, and a front process whose child lives on with its ports.
func TestRG9StubbornEngines(t *testing.T) {
	t.Parallel()
	r := harness.Start(t, "--timers", "kill_grace=500ms")
	r.Expect(harness.EngineFails)
	r.Deploy(simApp("stubborn", 2, "lockstep", ""))
	st := r.WaitStatus("stubborn", "RUNNING")
	for rank := range 2 {
		simFail(t, r, "stubborn", 0, rank, `{"mode":"ignore-sigterm"}`)
	}
	ports := portsOf(t, st)
	const goal = 10 * time.Second
	began := time.Now()
	r.Delete("stubborn")
	requireDead(t, r, pids(st))
	for _, p := range ports {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", p)
		require.NoError(t, err, "port is free after delete")
		require.NoError(t, l.Close())
	}
	assert.Less(t, time.Since(began), slack*goal, "processes and ports are gone")

	r.Deploy(simApp("orphan", 2, "lockstep", ""))
	before := r.WaitStatus("orphan", "RUNNING")
	began = time.Now()
	simVanish(t, r, "orphan", 0, 1, `{"mode":"orphan"}`)
	r.Eventually(func() error {
		if st := r.App("orphan"); st.Status != "RUNNING" || st.Units[0].Epoch <= before.Units[0].Epoch {
			return fmt.Errorf("%s, epoch %d", st.Status, st.Units[0].Epoch)
		}
		return nil
	}, "group restarted after its orphan was killed")
	assert.Less(t, time.Since(began), slack*goal, "the group runs again")
	for _, pid := range pids(before) {
		assert.False(t, harness.Alive(pid), "no start before process %d has ended", pid)
	}
	r.Delete("orphan")
	assert.Empty(t, r.Children(), "no process is left")
}

func portsOf(t *testing.T, st client.AppStatus) []string {
	t.Helper()
	var out []string
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			addr, err := url.Parse(k.URL)
			require.NoError(t, err)
			out = append(out, addr.Host)
		}
	}
	return out
}

// RG11: dense model, dp 4; one replica is killed, the others serve on, the fourth comes back with its number.
func TestRG11IndependentRanks(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Expect(harness.EngineFails)
	r.Deploy(simApp("dense", 4, "independent", "sim_step_ms: 1"))
	st := r.WaitStatus("dense", "RUNNING")
	require.Len(t, st.Units, 4)
	for _, p := range pids(st) {
		assert.NotContains(t, cmdline(t, p), "data-parallel", "independent ranks get no DP flags")
	}

	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var mu sync.Mutex
	served := map[string]int{}
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				s := r.StreamChat(context.Background(), "dense", "hello", 4)
				mu.Lock()
				served[s.Rank]++
				if !s.OK() && (s.Rank != "0/2" || !s.FirstByte()) {
					t.Errorf("request failed beside the killed rank, or before its first byte: %v", s)
				}
				mu.Unlock()
			}
		})
	}
	victim := st.Units[2].Ranks[0]
	require.NoError(t, syscall.Kill(victim.PID, syscall.SIGKILL))
	r.Eventually(func() error {
		k, ok := r.Rank("dense", 0, 2)
		if !ok || k.Phase != "ready" || k.Epoch != victim.Epoch+1 {
			return fmt.Errorf("rank 2: %+v", k)
		}
		return nil
	}, "rank 2 back with its number and epoch+1")
	mu.Lock()
	served["0/2"] = 0
	mu.Unlock()
	r.Eventually(func() error {
		mu.Lock()
		defer mu.Unlock()
		if served["0/2"] == 0 {
			return fmt.Errorf("served %v", served)
		}
		return nil
	}, "rank 2 serves again")
	stop()
	wg.Wait()
	after := r.App("dense")
	for i, u := range after.Units {
		if i != 2 {
			assert.Equal(t, st.Units[i].Epoch, u.Epoch, "the others kept their epoch")
			assert.Equal(t, st.Units[i].Ranks[0].PID, u.Ranks[0].PID)
		}
	}
	r.Quiet()
}

// RG13: epochs count starts of the unit, incarnations are per process; tombstones survive delete and restart.
func TestRG13EpochsAndIncarnations(t *testing.T) {
	t.Parallel()
	dir := harness.DataDir(t)
	r := harness.StartIn(t, dir)
	r.Expect(harness.EngineFails)
	r.Deploy(simApp("lock", 2, "lockstep", ""))
	r.Deploy(simApp("ind", 2, "independent", ""))
	lock, ind := r.WaitStatus("lock", "RUNNING"), r.WaitStatus("ind", "RUNNING")
	require.EqualValues(t, 1, lock.Units[0].Epoch)
	seen := map[string]bool{}
	note := func(st client.AppStatus) {
		t.Helper()
		for _, u := range st.Units {
			for _, k := range u.Ranks {
				require.NotEmpty(t, k.Incarnation)
				assert.False(t, seen[k.Incarnation], "incarnation %s is new", k.Incarnation)
				seen[k.Incarnation] = true
				assert.Equal(t, u.Epoch, k.Epoch)
			}
		}
	}
	note(lock)
	note(ind)

	require.NoError(t, syscall.Kill(lock.Units[0].Ranks[1].PID, syscall.SIGKILL))
	require.NoError(t, syscall.Kill(ind.Units[1].Ranks[0].PID, syscall.SIGKILL))
	waitEpoch(r, "lock", 0, 2)
	waitEpoch(r, "ind", 1, 2)
	note(r.WaitStatus("lock", "RUNNING"))
	assert.EqualValues(t, 1, r.App("ind").Units[0].Epoch, "the other independent rank keeps its epoch")

	r.Delete("lock")
	r.Stop()
	r = harness.StartIn(t, dir)
	r.Expect(harness.EngineFails)
	st := r.WaitStatus("ind", "RUNNING")
	note(st)
	assert.EqualValues(t, 2, st.Units[0].Epoch)
	assert.EqualValues(t, 3, st.Units[1].Epoch)
	r.Deploy(simApp("lock", 2, "lockstep", ""))
	note(r.WaitStatus("lock", "RUNNING"))
	assert.EqualValues(t, 3, r.App("lock").Units[0].Epoch, "the tombstone survived delete and restart")
	r.Quiet()
}

func waitEpoch(r *harness.Real, app string, unit int, epoch uint64) {
	r.T.Helper()
	r.Eventually(func() error {
		st := r.App(app)
		if u := st.Units[unit]; u.Epoch != epoch || u.Phase != "ready" {
			return fmt.Errorf("unit %s: %s, epoch %d", u.Unit, u.Phase, u.Epoch)
		}
		return nil
	}, fmt.Sprintf("%s unit %d ready at epoch %d", app, unit, epoch))
}

// A kill -9 of dpserve leaves no engine behind that may not wait for the next process.
func TestKillNineLeavesNoProcess(t *testing.T) {
	t.Parallel()
	r := harness.Start(t, "--orphan-timeout", "0")
	r.Deploy(simApp("a", 4, "lockstep", ""))
	st := r.WaitStatus("a", "RUNNING")
	require.Len(t, pids(st), 4)
	r.Signal(syscall.SIGKILL)
	<-r.Exited()
	requireDead(t, r, pids(st))
}
