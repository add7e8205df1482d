package inprocess

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// An application is deployed, is RUNNING, answers, and is deleted.
func TestFromDeployToAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(1))
		c.Deploy(simApp("chat", 4, "independent", "sim_step_ms: 10"))
		st := c.WaitStatus("chat", "RUNNING")
		assert.Equal(t, 4, st.Ready)

		s := c.StreamChat(t.Context(), "chat", 20)
		require.True(t, s.OK(), s)
		assert.Equal(t, 20, s.Chunks)

		resp, err := c.Post(t.Context(), "/v1/chat/completions", harness.Chat("chat", "hello", 20, false))
		require.NoError(t, err)
		defer resp.Body.Close()
		assert.Equal(t, http.StatusOK, resp.StatusCode)
		var answer struct {
			Choices []struct {
				Message struct{ Content string }
			}
			Usage struct {
				CompletionTokens int `json:"completion_tokens"`
			}
		}
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&answer))
		require.Len(t, answer.Choices, 1)
		assert.NotEmpty(t, answer.Choices[0].Message.Content)
		assert.Equal(t, 20, answer.Usage.CompletionTokens)

		c.Quiet()
		c.Delete("chat")
		c.Until("chat gone", gone(c, "chat"))
		assert.Empty(t, c.Engines.Live())
	})
}

// CC2, CC3, CC5: a deploy of the same file again is no change, and one changed field is that of its
// application alone. An application that a file lacks stays unless prune is asked for. A change made for an
// older revision is refused. Of two deploys at once for the last 8 slots one finds a place.
func TestDeploysBesideEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Slots(12))
		one, two := simApp("one", 2, "independent", ""), simApp("two", 2, "lockstep", "")
		both := one + strings.TrimPrefix(two, "applications:\n")
		c.Deploy(both)
		c.WaitStatus("one", "RUNNING")
		c.WaitStatus("two", "RUNNING")

		plan := func(text string) (changed []string, revision uint64) {
			code, answer := c.Do(http.MethodPost, "/api/v1/plan?file=app.yaml", text)
			require.Equal(t, http.StatusOK, code, answer)
			var got struct{ Plan client.Plan }
			require.NoError(t, json.Unmarshal([]byte(answer), &got))
			for _, a := range got.Plan.Apps {
				if a.Effect != client.EffectUnchanged {
					changed = append(changed, a.App)
				}
			}
			return changed, got.Plan.Revision
		}
		changed, revision := plan(both)
		assert.Empty(t, changed)
		changed, _ = plan(both + "    max_ongoing_requests: 7\n")
		assert.Equal(t, []string{"two"}, changed)

		at := fmt.Sprintf("/api/v1/apps?file=app.yaml&revision=%d", revision)
		code, answer := c.Do(http.MethodPut, at, one+"    max_ongoing_requests: 7\n")
		require.Equal(t, http.StatusAccepted, code, answer)
		_, ok := c.App("two")
		assert.True(t, ok, "no file deletes what it does not list")
		code, answer = c.Do(http.MethodPut, at, one+"    max_ongoing_requests: 8\n")
		assert.Equal(t, http.StatusConflict, code, answer)

		var racers sync.WaitGroup
		for _, name := range []string{"three", "four"} {
			racers.Go(func() { put(t.Context(), c.Peer(0), simApp(name, 8, "lockstep", "")) })
		}
		racers.Wait()
		c.Until("one of both runs, and the other is refused or waits", func() error {
			three, _ := c.App("three")
			four, _ := c.App("four")
			if three.Ready+four.Ready != 8 || three.Ready*four.Ready != 0 {
				return fmt.Errorf("three has %d ranks, four has %d", three.Ready, four.Ready)
			}
			return nil
		})
		assert.Len(t, c.Engines.Live(), 12, "one for each slot")

		code, answer = c.Do(http.MethodPut, "/api/v1/apps?file=app.yaml&prune=true", two)
		require.Equal(t, http.StatusAccepted, code, answer)
		for _, name := range []string{"one", "three", "four"} {
			c.Until(name+" gone", gone(c, name))
		}
		c.WaitStatus("two", "RUNNING")
	})
}

// A node without an ingress shows its ranks in /metrics, and nothing of an application that was deleted. The
// leader shows none of the application's units and picks any more.
func TestSeriesOfADeletedApplicationAreGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2), harness.Slots(2),
			harness.Roles(0, "control", "ingress"), harness.Roles(1, "worker"))
		c.Deploy(simApp("chat", 2, "independent", "sim_step_ms: 10"))
		c.WaitStatus("chat", "RUNNING")
		s := c.StreamChat(t.Context(), "chat", 5)
		require.True(t, s.OK(), s)
		c.Quiet()
		assert.Contains(t, metricsOf(t, c.Peer(0)), `dpserve_router_picks_total{app="chat"`)
		assert.Contains(t, metricsOf(t, c.Peer(1)), `dpserve_rank_inflight{app="chat",group="0",rank="1"} 0`)

		c.Delete("chat")
		c.Until("chat gone", gone(c, "chat"))
		for i := range 2 {
			c.Until("no series is left", func() error {
				if strings.Contains(metricsOf(t, c.Peer(i)), `app="chat"`) {
					return fmt.Errorf("node %d shows series of it", i)
				}
				return nil
			})
		}
	})
}

// Every node shows how many ranks of an application are ready and wanted, before an election and after it,
// and its version. No series has a name or a label that the list of metrics lacks.
func TestEveryNodeShowsTheRanksOfAnApplication(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(2), harness.Roles(0, "control", "ingress"))
		c.Expect(harness.NodeFails)
		c.WaitVoters(3)
		c.Deploy(spread("chat", 4))
		c.WaitStatus("chat", "RUNNING")
		ranks := []string{`dpserve_app_desired_ranks{app="chat"} 4`, `dpserve_app_ready_ranks{app="chat"} 4`}
		everyNodeShows := func() error {
			for _, p := range c.Peers() {
				if got := seriesOf(t, p, "dpserve_app_"); !slices.Equal(got, ranks) {
					return fmt.Errorf("%s shows %q", p.ID, got)
				}
			}
			return nil
		}
		c.Until("every node shows the ranks", everyNodeShows)

		require.True(t, c.Peer(0).Leads())
		c.Peer(0).Silence() // for less than a lease: its units and ranks are not touched
		c.Leader(c.Peers()[1:]...)
		c.Reconnect()
		c.Until("every node shows the ranks after the election", everyNodeShows)
		for _, p := range c.Peers() {
			info := seriesOf(t, p, "dpserve_build_info")
			require.Len(t, info, 1, p.ID)
			assert.Contains(t, info[0], `goversion="`+runtime.Version()+`"`, p.ID)
		}
		assertKnownSeries(t, metricsOf(t, c.Peer(0)))
	})
}

// assertKnownSeries asserts that the golden file of internal/telemetry has the names and labels of a page.
func assertKnownSeries(t *testing.T, page string) {
	t.Helper()
	golden, err := os.ReadFile("../../internal/telemetry/testdata/metrics.txt")
	require.NoError(t, err)
	value := regexp.MustCompile(`"[^"]*"`)
	known := map[string]bool{`dpserve_build_info{goversion="",version=""}`: true}
	for _, line := range linesWith(string(golden), "dpserve_") {
		series, _, _ := strings.Cut(value.ReplaceAllString(line, `""`), " ")
		known[series] = true
	}
	for _, line := range linesWith(page, "dpserve_") {
		series, _, _ := strings.Cut(value.ReplaceAllString(line, `""`), " ")
		assert.True(t, known[series], series)
	}
}

// seriesOf returns the series of a node's /metrics whose names begin so, with their values.
func seriesOf(t *testing.T, p *harness.Peer, prefix string) []string {
	t.Helper()
	return linesWith(metricsOf(t, p), prefix)
}

// linesWith returns the lines of a page of metrics that begin so.
func linesWith(page, prefix string) (out []string) {
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, prefix) {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return out
}

// metricsOf returns a node's /metrics.
func metricsOf(t *testing.T, p *harness.Peer) string {
	t.Helper()
	return adminPage(t, p, "/metrics")
}

// adminPage returns what a node's admin port has at a path.
func adminPage(t *testing.T, p *harness.Peer, path string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.Admin()+path, nil)
	require.NoError(t, err)
	resp, err := p.Send(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(page)
}
