package system

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

var urlLine = regexp.MustCompile(`http://127\.0\.0\.1:\d+`)

// waitOutput waits until the process has printed something matching re.
func waitOutput(t *testing.T, r *harness.Real, re *regexp.Regexp) string {
	t.Helper()
	deadline := time.Now().Add(harness.Patience)
	for {
		if m := re.FindString(r.Output()); m != "" {
			return m
		}
		select {
		case <-r.Exited():
			t.Fatalf("dpserve ended before it printed %s:\n%s", re, r.Output())
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("dpserve did not print %s:\n%s", re, r.Output())
		}
	}
}

// upServes waits until `up` serves, and reads its addresses and the curl line that it prints.
func upServes(t *testing.T, r *harness.Real) (curl string) {
	t.Helper()
	curl = waitOutput(t, r, regexp.MustCompile(`curl [^\n]*`))
	r.HTTP = strings.TrimPrefix(urlLine.FindString(curl), "http://")
	_, rest, ok := strings.Cut(r.Output(), "\nadmin http://")
	require.True(t, ok, r.Output())
	r.Admin, _, _ = strings.Cut(rest, "\n")
	return curl
}

// CC6: `up` and `up FILE` on a host without a GPU, with both default ports taken.
func TestCC6Up(t *testing.T) {
	release, err := ports.TakeFixed(t.Context(), "127.0.0.1:8000", "127.0.0.1:8265")
	require.NoError(t, err)
	defer release()
	file := filepath.Join(t.TempDir(), "app.yaml")
	require.NoError(t, os.WriteFile(file, []byte(simApp("mine", 4, "independent", "")), 0o600))
	for _, args := range [][]string{{"up"}, {"up", file}} {
		start := time.Now()
		r := harness.Run(t, args...)
		curl := upServes(t, r)
		t.Logf("%v: curl line after %s", args, time.Since(start).Round(time.Millisecond))
		assert.Contains(t, r.Output(), "8000", "a taken port is named")
		base := urlLine.FindString(curl)
		require.NotEmpty(t, base)
		assert.NotContains(t, base, ":8000")

		body := regexp.MustCompile(`-d '([^']*)'`).FindStringSubmatch(curl)
		require.Len(t, body, 2, curl)
		u, err := url.Parse(urlLine.FindString(curl) + "/v1/chat/completions")
		require.NoError(t, err)
		require.Contains(t, curl, u.Path)
		resp, err := r.Post(t.Context(), u.Path, body[1])
		require.NoError(t, err)
		text, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, http.StatusOK, resp.StatusCode, "%s", text)

		kids := r.Children()
		assert.Len(t, kids, 4)
		r.Quiet()
		r.Signal(os.Interrupt)
		assert.Equal(t, 0, r.ExitCode(), r.Output())
		requireDead(t, r, kids)
	}

	vllm := filepath.Join(t.TempDir(), "vllm.yaml")
	app := "applications:\n  - name: v\n    model: {id: v}\n    engine: {kind: vllm}\n"
	require.NoError(t, os.WriteFile(vllm, []byte(app), 0o600))
	r := harness.Run(t, "up", vllm)
	assert.Equal(t, 5, r.ExitCode(), r.Output())
	assert.Contains(t, r.Output(), "hint: ")
	assert.Contains(t, r.Output(), "--engine sim")
	r = harness.Run(t, "up", "--engine", "sim", vllm)
	waitOutput(t, r, regexp.MustCompile(`curl [^\n]*`))
	r.Signal(os.Interrupt)
	assert.Equal(t, 0, r.ExitCode(), r.Output())
}

// CC13, FS3: `up --attach` puts one endpoint in front of engines that already run; one dies and returns.
func TestUpAttach(t *testing.T) {
	t.Parallel()
	var engines []*harness.Real
	var addrs []string
	engine := func(addr string) *harness.Real {
		_, port, err := net.SplitHostPort(addr)
		require.NoError(t, err)
		return harness.Run(t, "engine", "sim", "--host", "127.0.0.1", "--port", port, "--served-model-name",
			"attached", "--sim-step-ms", "1")
	}
	for range 2 {
		addr := ports.TakeAddr(t)
		engines, addrs = append(engines, engine(addr)), append(addrs, addr)
	}
	for _, a := range addrs {
		waitHealthy(t, a)
	}
	r := harness.Run(t, "up", "--attach", "http://"+addrs[0], "--attach", "http://"+addrs[1])
	r.Expect(harness.EngineFails)
	upServes(t, r)
	for _, line := range []string{`id: "attached"`, "kind: attach", "family: vllm", addrs[0], addrs[1]} {
		assert.Contains(t, r.Output(), line, "the app.yaml it stands for is printed")
	}
	assert.NotContains(t, r.Output(), "lockstep", "the engines are independent")
	answered := func(n int) {
		for range n {
			s := r.StreamChat(t.Context(), "attached", "hi", 3)
			require.True(t, s.OK(), "%v", s)
		}
	}
	answered(100)
	engines[1].Stop()
	answered(100)
	engines[1] = engine(addrs[1])
	waitHealthy(t, addrs[1])
	deadline := time.Now().Add(harness.Patience)
	for back := false; !back; {
		require.True(t, time.Now().Before(deadline), "rank 1 serves again")
		s := r.StreamChat(t.Context(), "attached", "hi", 3)
		require.True(t, s.OK(), "%v", s)
		back = s.Rank == "0/1"
	}
	assert.Empty(t, r.Children(), "no engine process is started for attach")
	r.Quiet()
	r.Signal(os.Interrupt)
	assert.Equal(t, 0, r.ExitCode())
	for _, e := range engines {
		assert.True(t, harness.Alive(e.PID), "an attached engine is not stopped")
	}
}

func waitHealthy(t *testing.T, addr string) {
	t.Helper()
	deadline := time.Now().Add(harness.Patience)
	for {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			fmt.Sprintf("http://%s/health", addr), nil)
		require.NoError(t, err)
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		require.True(t, time.Now().Before(deadline), "engine on %s gets healthy", addr)
		time.Sleep(20 * time.Millisecond)
	}
}
