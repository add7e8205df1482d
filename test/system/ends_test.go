package system

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// CC16: a route that the kind of the application lacks is answered 404 by dpserve itself: the engine never
// sees it.
func TestCC16UnsupportedRouteAsksNoEngine(t *testing.T) {
	t.Parallel()
	engine := handEngine(t)
	var mu sync.Mutex
	asked := map[string]bool{}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		asked[req.URL.Path] = true
		mu.Unlock()
		forward(w, req, engine)
	}))
	t.Cleanup(front.Close)
	r := harness.Start(t)
	r.Deploy(edgeApp(front.URL) + "\n")
	r.WaitStatus("edge", "RUNNING")
	require.True(t, r.StreamChat(t.Context(), "edge", "hello", 3).OK())
	unknown := []string{
		"/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/audio/transcriptions", "/pooling",
		"/inference/v1/generate", "/v1/chat/completions/render",
	}
	for _, path := range unknown {
		resp, err := r.Post(t.Context(), path, `{"model":"edge","input":"x","prompt":"x"}`)
		require.NoError(t, err)
		var e struct{ Error struct{ Code string } }
		decode(t, resp, &e)
		assert.Equal(t, http.StatusNotFound, resp.StatusCode, path)
		assert.Equal(t, "unsupported_route", e.Error.Code, path)
	}
	mu.Lock()
	defer mu.Unlock()
	assert.True(t, asked["/v1/chat/completions"], "%v", asked)
	for _, path := range unknown {
		assert.False(t, asked[path], path)
	}
}

// forward passes a request to an engine and its answer back.
func forward(w http.ResponseWriter, req *http.Request, engine string) {
	out, err := http.NewRequestWithContext(req.Context(), req.Method, engine+req.URL.Path, req.Body)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	out.Header = req.Header.Clone()
	resp, err := http.DefaultTransport.RoundTrip(out)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, resp.Body)
}

// CC16: SIGTERM to `up` and to `start` while a stream runs: the stream ends whole, the exit code is 0, and no
// engine lives on.
func TestCC16SIGTERMDrains(t *testing.T) {
	t.Parallel()
	yaml := strings.Replace(simApp("slow", 2, "independent", "sim_step_ms: 20"),
		"graceful_shutdown_timeout_s: 2", "graceful_shutdown_timeout_s: 60", 1)
	start := func(t *testing.T) *harness.Real {
		r := harness.Start(t)
		r.Deploy(yaml)
		r.WaitStatus("slow", "RUNNING")
		return r
	}
	up := func(t *testing.T) *harness.Real {
		file := filepath.Join(t.TempDir(), "app.yaml")
		require.NoError(t, os.WriteFile(file, []byte(yaml), 0o600))
		r := harness.Run(t, "up", file)
		upServes(t, r)
		return r
	}
	for name, run := range map[string]func(t *testing.T) *harness.Real{"start": start, "up": up} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t)
			kids := r.Children()
			require.Len(t, kids, 2)
			resp, err := r.Post(t.Context(), "/v1/chat/completions", harness.Chat("slow", "hi", 100, true))
			require.NoError(t, err)
			defer resp.Body.Close()
			stream := bufio.NewReader(resp.Body)
			first, err := stream.ReadString('\n')
			require.NoError(t, err)
			assert.Contains(t, first, "data: ")
			r.Signal(syscall.SIGTERM)
			rest, err := io.ReadAll(stream)
			require.NoError(t, err)
			assert.Contains(t, string(rest), "data: [DONE]")
			assert.Equal(t, 100, strings.Count(first+string(rest), `"content":`)-1, "the first one is empty")
			assert.NotContains(t, string(rest), `"error"`)
			assert.Equal(t, 0, r.ExitCode(), r.Output())
			requireDead(t, r, kids)
		})
	}
}

// CC16: a data dir of another cluster is refused with exit code 1, with the reason and what to do.
func TestCC16DataDirOfAnotherCluster(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(1))
	dir := harness.DataDir(t)
	port := strconv.Itoa(c.NodePort())
	other := harness.StartIn(t, dir, "--advertise", c.NextIP(), "--node-port", port, "--gossip-port", "0",
		"--node-id", "stranger")
	other.Stop()
	for name, args := range map[string][]string{
		"join": {
			"join", c.All[0].NodePort(), "--token", c.Token(), "--advertise", c.NextIP(), "--node-port", port,
			"--gossip-port", "0", "--node-id", "stranger",
		},
		"start, as another node": {"start", "--node-id", "b"},
	} {
		r := harness.Run(t, append(args, "--data-dir", dir, "--http-bind", "127.0.0.1:0", "--admin-bind",
			"127.0.0.1:0")...)
		assert.Equal(t, 1, r.ExitCode(), "%s: %s", name, r.Output())
		assert.Regexp(t, `belongs to (another cluster than the token|node stranger, not b)`, r.Output(), name)
		assert.Contains(t, r.Output(), "\nhint: ", name)
	}
	c.WaitNode("a", "leads on", alive)
	list, err := c.Nodes()
	require.NoError(t, err)
	assert.Len(t, list, 1, "nobody else is in")
}

// MB8: a replica is there before its engine answers: it is shown with what it waits for and gets no request.
// An engine that answers /health and computes nothing is not healthy: a canary decides, not traffic. It
// serves within 5 s of answering.
func TestMB8EngineThatAnswersLate(t *testing.T) {
	t.Parallel()
	addr := ports.TakeAddr(t)
	r := harness.Start(t)
	r.Expect(harness.EngineFails, harness.RequestRefused)
	r.Deploy(edgeApp("http://" + addr))
	waits := func(what string) {
		r.Eventually(func() error {
			k, ok := r.Rank("edge", 0, 0)
			if !ok || k.Phase == "ready" || !strings.Contains(k.Progress, what) {
				return fmt.Errorf("%+v", k)
			}
			return nil
		}, "the rank is shown, and waits: "+what)
	}
	waits("/health")
	assert.NotEqual(t, client.StatusRunning, r.App("edge").Status)

	_, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	harness.Run(t, "engine", "sim", "--host", "127.0.0.1", "--port", port, "--served-model-name", "edge",
		"--sim-step-ms", "5", "--sim-startup-s", "1", "--sim-fail", "http-500")
	waitHealthy(t, addr)
	waits("the engine is up and does not compute")
	stats := func() sim.Stats {
		var st sim.Stats
		resp, err := askEngine(t, http.MethodGet, addr, "/_sim/stats")
		require.NoError(t, err)
		decode(t, resp, &st)
		return st
	}
	assert.Zero(t, stats().Tokens)
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		k, ok := r.Rank("edge", 0, 0)
		require.True(t, ok && k.Phase != "ready", "%+v", k)
	}

	resp, err := askEngine(t, http.MethodPost, addr, "/_sim/recover")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	answers := time.Now()
	r.Eventually(func() error {
		if k, _ := r.Rank("edge", 0, 0); k.Phase != "ready" {
			return errors.New(k.Phase + ": " + k.Progress)
		}
		return nil
	}, "it is ready")
	took := time.Since(answers)
	assert.EqualValues(t, 1, stats().Tokens, "one token of the canary, and no client's request")
	require.True(t, r.StreamChat(t.Context(), "edge", "hello", 3).OK())
	t.Logf("MB8: ready %s after the engine answered", took.Round(time.Millisecond))
	assert.Less(t, took, slack*5*time.Second)
}

// askEngine sends a request to an engine directly.
func askEngine(t *testing.T, method, addr, path string) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+addr+path, nil)
	require.NoError(t, err)
	return http.DefaultClient.Do(req)
}
