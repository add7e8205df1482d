package system

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// sharedEngine starts a simulated engine by hand with more flags, and returns its URL.
func sharedEngine(t *testing.T, flags ...string) string {
	t.Helper()
	addr := ports.TakeAddr(t)
	_, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	harness.Run(t, append([]string{
		"engine", "sim", "--host", "127.0.0.1", "--port", port, "--served-model-name", "edge",
		"--sim-step-ms", "1",
	}, flags...)...)
	waitHealthy(t, addr)
	return "http://" + addr
}

// finished is how many requests a rank's engine has ended, by its own account.
func finished(t *testing.T, url, label string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/metrics", nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	m := regexp.MustCompile(`vllm:request_success_total\{engine="` + label +
		`",finished_reason="length",[^}]*\} ([0-9.]+)`).FindSubmatch(page)
	require.NotNil(t, m, "%s", page)
	n, err := strconv.ParseFloat(string(m[1]), 64)
	require.NoError(t, err)
	return int(n)
}

// place is where a rank is: the URL of its front end, and its label in the metrics there.
type place struct{ url, label string }

// RG12: eight ranks behind front ends of three kinds: one for each rank; two for four ranks each that count
// their ranks from 0; two that take the numbers of the whole group. Each rank is reached by its number, by
// the engines' own count; a ninth is refused. 320 requests a rank under DPSERVE_ACCEPTANCE, else 40.
func TestRG12EveryRankIsReached(t *testing.T) {
	t.Parallel()
	each := 40
	if accepting() {
		each = 320
	}
	kinds := map[string]func() (ranks []string, at []place){
		"external": func() (ranks []string, at []place) {
			for range 8 {
				url := sharedEngine(t)
				ranks = append(ranks, fmt.Sprintf("{url: %q}", url))
				at = append(at, place{url, "0"})
			}
			return ranks, at
		},
		"local index": func() ([]string, []place) { return twoFrontEnds(t, 0) },
		"global index": func() ([]string, []place) {
			return twoFrontEnds(t, 4, "--sim-global-index")
		},
	}
	for name, start := range kinds {
		ranks, at := start()
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := harness.Start(t)
			r.Deploy("applications: [{name: edge, model: {id: edge}, data_parallel: {dp_size: 8, coupling: " +
				"lockstep}, engine: {kind: attach, family: vllm, ranks: [" + strings.Join(ranks, ", ") +
				"]}}]")
			r.WaitStatus("edge", "RUNNING")
			before := make([]int, len(at))
			for i, p := range at {
				before[i] = finished(t, p.url, p.label)
			}
			var wg sync.WaitGroup
			for rank := range at {
				wg.Go(func() {
					for range each {
						code, name, text := askRank(t, r, rank)
						assert.Equal(t, http.StatusOK, code, text)
						assert.Equal(t, strconv.Itoa(rank), name)
					}
				})
			}
			wg.Wait()
			for i, p := range at {
				assert.Equal(t, each, finished(t, p.url, p.label)-before[i], "rank %d", i)
			}
			code, _, text := askRank(t, r, 8)
			assert.Equal(t, http.StatusBadRequest, code)
			assert.Contains(t, text, "this application has no rank 0/8 (it has 0/0 to 0/7)")
			r.Quiet()
		})
	}
}

// twoFrontEnds starts two front ends of one group of eight. second is the index of the first rank of the
// second one.
func twoFrontEnds(t *testing.T, second int, flags ...string) (ranks []string, at []place) {
	t.Helper()
	for i, index := range []int{0, second} {
		url := sharedEngine(t, append(flags, "--sim-internal-lb", "4", "--sim-first-rank",
			strconv.Itoa(4*i))...)
		for k := range 4 {
			ranks = append(ranks, fmt.Sprintf("{url: %q, addressing: header, selector: %d}", url, index+k))
			at = append(at, place{url, strconv.Itoa(4*i + k)})
		}
	}
	return ranks, at
}

// askRank sends a request to a rank of group 0 by its number.
func askRank(t *testing.T, r *harness.Real, rank int) (code int, answered, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+r.HTTP+"/v1/completions",
		strings.NewReader(`{"model":"edge","prompt":"hi","max_tokens":1}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Dpserve-Rank", "0/"+strconv.Itoa(rank))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header.Get("X-Dpserve-Rank"), string(b) + errText(err)
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
