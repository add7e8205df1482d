package system

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// accepting says that rows run at their full length.
func accepting() bool { return os.Getenv("DPSERVE_ACCEPTANCE") != "" }

// accept skips a test of load that is part of `make acceptance` only.
func accept(t *testing.T) {
	t.Helper()
	if !accepting() {
		t.Skip("a load of minutes: make acceptance")
	}
}

// routed is simApp with a routing part.
func routed(name string, dp int, coupling, args, routing string) string {
	return simApp(name, dp, coupling, args) + "    routing: " + routing + "\n"
}

// soak sends n requests over one protocol from clients at once and returns the statuses other than 200, and
// how many ranks answered.
func soak(t *testing.T, r *harness.Real, model, policy string, n int, http2 bool) (failed map[string]int,
	ranks int,
) {
	t.Helper()
	const clients = 32
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!http2)
	protocols.SetUnencryptedHTTP2(http2)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients, Protocols: protocols}}
	defer client.CloseIdleConnections()
	var mu sync.Mutex
	failed, served := map[string]int{}, map[string]bool{}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for {
				i := int(next.Add(1))
				if i > n {
					return
				}
				rank, err := soakOne(t.Context(), client, r.HTTP, model, i, http2, policy == "direct")
				mu.Lock()
				served[rank] = true
				if err != nil {
					failed[policy+": "+err.Error()]++
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	delete(served, "")
	return failed, len(served)
}

// soakOne is one request; every second one streams, and eight of them share a beginning. It names its rank
// only if asked to: that decides under every policy.
func soakOne(ctx context.Context, client *http.Client, addr, model string, i int, http2, named bool) (
	rank string, err error,
) {
	prompt := fmt.Sprintf("document %d: ", i/8) + strings.Repeat("text ", 40) + strconv.Itoa(i)
	body := harness.Chat(model, prompt, 4, i%2 == 0)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/chat/completions",
		strings.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("x-session-id", strconv.Itoa(i/8))
	if named {
		req.Header.Set("x-dpserve-rank", "0/"+strconv.Itoa(i%soakRanks))
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	whole := strings.Contains(string(text), `"finish_reason":"length"`) &&
		(i%2 == 1 || strings.HasSuffix(string(text), "data: [DONE]\n\n"))
	if resp.StatusCode != http.StatusOK || !whole || http2 != (resp.ProtoMajor == 2) {
		return "", fmt.Errorf("status %d, whole %v, %s", resp.StatusCode, whole, resp.Proto)
	}
	return resp.Header.Get("x-dpserve-rank"), nil
}

const soakRanks = 4

// routable says whether the ingress can pick so many ranks. A rank is ready a moment before each ingress
// knows it, and a request that names a rank does not wait for it.
func routable(r *harness.Real, app string, ranks int) error {
	code, text := r.Do(http.MethodPost, "/api/v1/routers/"+app+"/explain", `{"prompt":"hello"}`)
	var e client.Explanation
	if err := json.Unmarshal([]byte(text), &e); err != nil || code != http.StatusOK {
		return fmt.Errorf("explain: %d %s: %w", code, text, err)
	}
	n := 0
	for i := range e.Ranks {
		if e.Ranks[i].State == "ok" {
			n++
		}
	}
	if n != ranks {
		return fmt.Errorf("%d of %d ranks can be picked", n, ranks)
	}
	return nil
}

// SK3: 1,024 requests under every policy over HTTP/1 and as many over HTTP/2, one after the other put into
// the same running application, on engines at 1000 times speed; in a lockstep group at 50 times. No error,
// and nothing is left.
func TestSK3EveryPolicySoaked(t *testing.T) {
	accept(t)
	// without a KV index
	all := strings.Fields("round-robin random direct power-of-two least-loaded session-affinity " +
		"prefix-aware cache-aware least-kv scoring kv lmetric-1 lpwl mex")
	const requests = 1024
	for _, c := range []struct {
		coupling string
		speed    int
	}{{"independent", 1000}, {"lockstep", 50}} {
		t.Run(c.coupling, func(t *testing.T) {
			t.Parallel()
			r := harness.Start(t)
			for _, policy := range all {
				r.Deploy(routed("soak", soakRanks, c.coupling, fmt.Sprintf("sim_speed: %d", c.speed),
					"{policy: "+policy+"}"))
				r.Eventually(func() error {
					if st := r.App("soak"); st.Status != "RUNNING" || st.Policy != policy ||
						st.Ready != soakRanks {
						return fmt.Errorf("%s with %s, %d ready", st.Status, st.Policy, st.Ready)
					}
					return routable(r, "soak", soakRanks)
				}, policy+" runs")
				for _, http2 := range []bool{false, true} {
					failed, ranks := soak(t, r, "soak", policy, requests, http2)
					assert.Empty(t, failed)
					assert.Greater(t, ranks, 1, "ranks that answered under %s", policy)
					r.Quiet()
				}
			}
			t.Logf("%d requests over each of HTTP/1 and HTTP/2 under each of %d policies: 0 errors", requests,
				len(all))
			r.Delete("soak")
			assert.Empty(t, r.Children())
		})
	}
}

// cpu is the processor time that a process has used.
func cpu(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	_, after, ok := strings.Cut(string(text), ") ")
	require.True(t, ok)
	fields := strings.Fields(after)
	require.Greater(t, len(fields), 12)
	ticks := 0
	for _, field := range fields[11:13] { // user and system
		n, err := strconv.Atoi(field)
		require.NoError(t, err)
		ticks += n
	}
	const perSecond = 100 // USER_HZ, the same on every Linux that Go runs on
	return time.Duration(ticks) * time.Second / perSecond
}

// peak is the most memory that a process ever held.
func peak(t *testing.T, pid int) (mib int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.Fields(rest)[0])
			require.NoError(t, err)
			return kib >> 10
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

// SK4, long prompts: 100,000 tokens each, 50 a second, routed by cache: at most four cores (80 ms of
// processor time a request) and 2 GiB in dpserve.
func TestSK4LongPrompts(t *testing.T) {
	accept(t)
	const rate, tokens = 50, 100_000
	const n = 60 * rate
	r := harness.Start(t)
	r.Deploy(routed("long", 2, "independent", "sim_speed: 1000, max_model_len: 131072",
		"{policy: kv, preset: tuned}"))
	r.WaitStatus("long", "RUNNING")
	documents := make([]string, 8) // most of a prompt is one of these
	for i := range documents {
		var b strings.Builder
		for j := 0; b.Len() < 4*(tokens-100); j++ {
			fmt.Fprintf(&b, "%d.%d ", i, j)
		}
		documents[i] = b.String()
	}
	before := cpu(t, r.PID)
	began := time.Now()
	var failed atomic.Int64
	var wg sync.WaitGroup
	for i := range n {
		time.Sleep(time.Until(began.Add(time.Duration(i) * time.Second / rate)))
		wg.Go(func() {
			if !r.StreamChat(t.Context(), "long", documents[i%len(documents)]+strconv.Itoa(i), 1).OK() {
				failed.Add(1)
			}
		})
	}
	wg.Wait()
	took := cpu(t, r.PID) - before
	assert.Zero(t, failed.Load())
	assert.LessOrEqual(t, took/time.Duration(n), 4*time.Second/rate)
	assert.LessOrEqual(t, peak(t, r.PID), 2048)
	t.Logf("%d prompts of %d tokens at %d a second: %.1f ms of processor time each "+
		"(%.2f cores at that rate), at most %d MiB, %s of the prompt tokens cached",
		n, tokens, rate, float64(took.Microseconds())/1000/float64(n), took.Seconds()/float64(n)*rate,
		peak(t, r.PID), cachedShare(t, r, "long"))
	r.Quiet()
	r.Delete("long")
	assert.Empty(t, r.Children())
}

// cachedShare is what the engines of an app found in their caches.
func cachedShare(t *testing.T, r *harness.Real, app string) string {
	t.Helper()
	var all sim.Stats
	for _, u := range r.App(app).Units {
		for _, k := range u.Ranks {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, k.URL+"/_sim/stats", nil)
			require.NoError(t, err)
			resp, err := http.DefaultClient.Do(req)
			require.NoError(t, err)
			var st sim.Stats
			decode(t, resp, &st)
			all.PromptTokens, all.CachedTokens = all.PromptTokens+st.PromptTokens,
				all.CachedTokens+st.CachedTokens
		}
	}
	return fmt.Sprintf("%.0f %%", 100*float64(all.CachedTokens)/float64(max(1, all.PromptTokens)))
}

// SK4, idle: 100 ranks that publish KV events, with nothing to do, take at most 0.2 core of dpserve. Their
// engines live in this test's process, whose time does not count.
func TestSK4IdleRanks(t *testing.T) {
	accept(t)
	const ranks, idle, most = 100, time.Minute, 0.2
	var b strings.Builder
	b.WriteString(`applications:
  - name: idle
    model: {id: idle}
    routing: {policy: kv, busy_threshold: 0.9}
    engine:
      kind: attach
      family: vllm
      ranks:
`)
	base := ports.Take(t, 2*ranks)
	for i := range ranks {
		fmt.Fprintf(&b, "        - {url: %q}\n", attachedEngine(t, "idle", base+2*i))
	}
	r := harness.Start(t)
	r.Deploy(b.String())
	r.WaitStatus("idle", "RUNNING")
	for i := range ranks { // two blocks for each
		ids := strings.Repeat(strconv.Itoa(1000+i)+",", 39) + "1"
		code, text := r.Do(http.MethodPost, "/api/v1/routers/idle/generate",
			fmt.Sprintf(`{"token_ids":[%s],"worker":"0/%d","sampling":{"max_tokens":1}}`, ids, i))
		require.Equal(t, http.StatusOK, code, text)
	}
	r.Quiet()
	r.Eventually(func() error {
		for _, u := range r.App("idle").Units {
			if kv := u.Ranks[0].KV; kv == nil || kv.Events == nil || kv.Events.State != client.EventsLive {
				return fmt.Errorf("the events of %s are not live", u.Unit)
			}
		}
		return nil
	}, "every rank's events are live")
	before, began := cpu(t, r.PID), time.Now()
	time.Sleep(idle)
	took, wall := cpu(t, r.PID)-before, time.Since(began)
	assert.LessOrEqual(t, took.Seconds(), most*wall.Seconds())
	assert.Equal(t, ranks, r.App("idle").Ready)
	t.Logf("%d idle ranks: %.3f core over %s, at most %d MiB", ranks, took.Seconds()/wall.Seconds(),
		wall.Round(time.Second), peak(t, r.PID))
	r.Delete("idle")
}

// attachedEngine runs a simulated engine with KV events in this process until the test ends, on a port and
// the next one and returns its URL.
func attachedEngine(t *testing.T, model string, base int) string {
	t.Helper()
	port, events := strconv.Itoa(base), strconv.Itoa(base+1)
	cfg, _, err := sim.ParseFlags([]string{
		"--host", "127.0.0.1", "--port", port, "--served-model-name", model, "--num-gpu-blocks-override",
		"2048",
		"--kv-events-config", `{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:` +
			events + `"}`,
	})
	require.NoError(t, err)
	s := harness.StartSim(t, cfg)
	return s.URL()
}
