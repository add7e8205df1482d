package system

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
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

func cmdline(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	require.NoError(t, err)
	return strings.ReplaceAll(string(b), "\x00", " ")
}

// FS1: one of 8 replicas is SIGKILLed under 64 clients on one shared prefix. TestFS1SurvivorsShareTheLoad
// (test/inprocess) has the others' shares: here an engine that gets more of the processor serves more.
func TestFS1KillOneOfEight(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Expect(harness.EngineFails, harness.StreamBreaks)
	// mex may leave a rank idle that has not seen the prefix, while a few more streams beside others cost
	// less than computing it
	r.Deploy(simApp("fs", 8, "independent", "sim_step_ms: 10") + "    routing: {policy: lmetric-1}\n")
	st := r.WaitStatus("fs", "RUNNING")

	const clients, rounds = 64, 6
	prefix := strings.Repeat("shared system prompt ", 100)
	victim := st.Units[3].Ranks[0]
	var kill sync.Once
	var mu sync.Mutex
	broken := 0
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for i := range rounds {
				if i == 2 {
					kill.Do(func() { assert.NoError(t, syscall.Kill(victim.PID, syscall.SIGKILL)) })
				}
				s := r.StreamChat(context.Background(), "fs", fmt.Sprintf("%s client %d", prefix, c), 30)
				mu.Lock()
				switch {
				case s.OK():
				case !s.FirstByte():
					t.Errorf("client error before the first byte: %v", s)
				default:
					broken++
					assert.Equal(t, "upstream_lost", s.Error,
						"a cut stream ends with a well-formed error event: %v", s)
					assert.False(t, s.Done, "no [DONE] after an error event")
					assert.Empty(t, s.Finish, "no invented finish_reason")
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	assert.LessOrEqual(t, broken, clients, "only streams on the killed rank broke")
	waitEpoch(r, "fs", 3, victim.Epoch+1)
	r.Quiet()
}

// FS4: every replica answers 500; then every replica refuses the connection.
func TestFS4EveryReplicaFails(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Expect(harness.EngineFails, harness.RequestsFail)
	r.Deploy(simApp("sick", 4, "independent", "sim_step_ms: 1"))
	r.WaitStatus("sick", "RUNNING")
	// A rank whose canaries fail restarts, which may happen at any moment of a slow run.
	tell := func(path, body string) {
		for rank := range 4 {
			r.Eventually(func() error { return trySimPost(t, r, "sick", 0, rank, path, body) },
				fmt.Sprintf("rank %d is told to %s", rank, path))
		}
	}
	for _, mode := range []string{"http-500", "refuse"} {
		tell("fail", `{"mode":"`+mode+`"}`)
		const n = 100
		attempts := 0
		for range n {
			start := time.Now()
			resp, err := r.Post(t.Context(), "/v1/chat/completions", harness.Chat("sick", "hi", 4, true))
			require.NoError(t, err)
			if resp.StatusCode == http.StatusOK { // a rank is back, or a connection of before is still open
				require.NoError(t, resp.Body.Close())
				isBack := func(u client.UnitStatus) bool { return u.Epoch > 1 }
				assert.True(t, mode == "refuse" || slices.ContainsFunc(r.App("sick").Units, isBack))
				continue
			}
			var e struct{ Error struct{ Code any } }
			require.NoError(t, json.NewDecoder(resp.Body).Decode(&e))
			require.NoError(t, resp.Body.Close())
			assert.Contains(t, []int{
				http.StatusBadGateway, http.StatusServiceUnavailable,
				http.StatusInternalServerError,
			}, resp.StatusCode)
			if resp.StatusCode != http.StatusInternalServerError { // that is the engine's own
				assert.Contains(t, []any{"upstream_failed", "no_ready_rank", "overloaded"}, e.Error.Code)
				assert.NotEmpty(t, resp.Header.Get("Retry-After"))
			}
			assert.Less(t, time.Since(start), 20*time.Second, "no request hangs")
			a, err := strconv.Atoi(resp.Header.Get("x-dpserve-attempts"))
			if err == nil {
				assert.LessOrEqual(t, a, 3)
				attempts += a
			}
			if mode == "refuse" {
				break // the first failure fences the ranks; later requests wait for their restart
			}
		}
		assert.LessOrEqual(t, attempts, 2*n, "two ranks that say the same end a request under %s", mode)
		if mode == "http-500" {
			tell("recover", "")
			r.WaitStatus("sick", "RUNNING")
			r.Eventually(func() error {
				if s := r.StreamChat(t.Context(), "sick", "hi", 2); !s.OK() {
					return fmt.Errorf("%v", s)
				}
				return nil
			}, "serves again after recovery")
		}
	}
	r.Eventually(func() error {
		if s := r.StreamChat(t.Context(), "sick", "hi", 2); !s.OK() {
			return fmt.Errorf("%v", s)
		}
		return nil
	}, "serves again after the restart")
	r.Quiet()
}

// simStats are the engine's own counters.
type simStats struct{ Running, Waiting, Aborted int }

func statsOf(t *testing.T, url string) simStats {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/_sim/stats", nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	var s simStats
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&s))
	return s
}

// FS6: the client leaves during a long prefill, and again in mid-stream; the engine stops working for it.
func TestFS6ClientLeaves(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Deploy(simApp("leave", 1, "independent", "max_num_batched_tokens: 16, sim_step_ms: 200"))
	st := r.WaitStatus("leave", "RUNNING")
	url := st.Units[0].Ranks[0].URL
	for name, prompt := range map[string]string{
		"prefill":    strings.Repeat("a long prompt ", 1500), // 16 tokens per 200 ms: about a minute
		"mid-stream": "hi",
	} {
		before := statsOf(t, url)
		ctx, cancel := context.WithCancel(t.Context())
		resp := make(chan struct{})
		go func() {
			defer close(resp)
			if res, err := r.Post(ctx, "/v1/chat/completions", harness.Chat("leave", prompt, 500,
				true)); err == nil {
				_, _ = res.Body.Read(make([]byte, 64))
				<-ctx.Done()
				_ = res.Body.Close()
			}
		}()
		r.Eventually(func() error {
			if s := statsOf(t, url); s.Running == 0 {
				return fmt.Errorf("%+v", s)
			}
			return nil
		}, name+" runs")
		if name == "mid-stream" {
			time.Sleep(300 * time.Millisecond) // let the first token pass; nothing depends on it
		}
		cancel()
		left := time.Now()
		r.Eventually(func() error {
			if s := statsOf(t, url); s.Running+s.Waiting != 0 || s.Aborted != before.Aborted+1 {
				return fmt.Errorf("%+v", s)
			}
			return nil
		}, name+": the engine dropped the request")
		took := time.Since(left)
		assert.Less(t, took, slack*time.Second, "%s: the engine is free", name)
		t.Logf("%s: engine free %s after the client left", name, took.Round(time.Millisecond))
		<-resp
	}
	r.Quiet()
}
