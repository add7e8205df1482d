package api_test

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/promtext"
	"github.com/dpserve/dpserve/internal/state"
)

// enginePage is the page of the engine of one rank of application a.
func enginePage(rank int, epoch uint64, text string) *msg.EnginePage {
	return &msg.EnginePage{Epoch: epoch, Source: promtext.Source{
		App: "a", Ranks: []promtext.Rank{{Number: rank}}, Text: text,
	}}
}

// threeRanks is the state of application a: three ranks, each a unit.
func threeRanks() *state.State {
	st := state.New()
	for i, id := range []string{"a/0/0", "a/0/1", "a/0/2"} {
		st.Units[id] = &state.Unit{ID: id, App: "a", Ranks: []state.RankGrant{{Rank: i}}}
	}
	return st
}

// scrapeEngines asks the handler of /metrics/engines.
func scrapeEngines(t *testing.T, h http.Handler, accept string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics/engines", http.NoBody)
	r.Header.Set("Accept-Encoding", accept)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// CC18: One page has the metrics of the engines of all nodes and says which ranks are missing; of an engine
// that ends and the next one of its rank, it has the next one's.
func TestMetricsOfAllEngines(t *testing.T) {
	views := api.NodeViews{
		"n0": &viewedNode{
			pages: []*msg.EnginePage{enginePage(1, 1, "x 1\n"), enginePage(0, 2, "x 2\nno sample\n")},
			err:   errors.New("cut off after two pages"),
		},
		"n1": &viewedNode{pages: []*msg.EnginePage{enginePage(1, 2, "x 3\n")}},
		"n2": &viewedNode{err: errors.New("cut off")},
	}
	h := api.NewEngineMetrics(func() api.NodeViews { return views }, threeRanks)
	w := scrapeEngines(t, h, "")
	assert.Equal(t, http.StatusOK, w.Code)
	assert.Equal(t, promtext.ContentType, w.Header().Get("Content-Type"))
	const want = `# HELP dpserve_engine_metrics_skipped_lines Lines of the engine's page that are not in this page.
# TYPE dpserve_engine_metrics_skipped_lines gauge
dpserve_engine_metrics_skipped_lines{app="a",group="0",rank="0"} 1
# HELP dpserve_engine_metrics_up 1 if this page has the metrics of the rank's engine, 0 if they did not come.
# TYPE dpserve_engine_metrics_up gauge
dpserve_engine_metrics_up{app="a",group="0",rank="0"} 1
dpserve_engine_metrics_up{app="a",group="0",rank="1"} 1
dpserve_engine_metrics_up{app="a",group="0",rank="2"} 0
# TYPE x untyped
x{app="a",group="0",rank="0"} 2
x{app="a",group="0",rank="1"} 3
`
	assert.Equal(t, want, w.Body.String())

	w = scrapeEngines(t, h, "deflate, gzip")
	assert.Equal(t, "gzip", w.Header().Get("Content-Encoding"))
	zip, err := gzip.NewReader(w.Body)
	require.NoError(t, err)
	text, err := io.ReadAll(zip)
	require.NoError(t, err)
	assert.Equal(t, want, string(text))
}

// TestANodeThatDoesNotAnswer costs the others nothing: the page comes before a scraper gives up.
func TestANodeThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		views := api.NodeViews{
			"n0": &viewedNode{pages: []*msg.EnginePage{enginePage(0, 1, "x 1\n")}, hangs: true},
			"n1": &viewedNode{pages: []*msg.EnginePage{enginePage(1, 1, "x 2\n")}},
		}
		began := time.Now()
		h := api.NewEngineMetrics(func() api.NodeViews { return views }, threeRanks)
		text := scrapeEngines(t, h, "").Body.String()
		assert.Equal(t, 8*time.Second, time.Since(began), "fake time; Prometheus waits 10 s")
		assert.Contains(t, text, `x{app="a",group="0",rank="0"} 1`)
		assert.Contains(t, text, `x{app="a",group="0",rank="1"} 2`)
	})
}

// TestPagesBeyondTheLimitAreLeftOut: a rank whose page does not fit is shown as missing.
func TestPagesBeyondTheLimitAreLeftOut(t *testing.T) {
	views := api.NodeViews{
		"n0": &viewedNode{pages: []*msg.EnginePage{
			enginePage(0, 1, "x 1\n"), enginePage(1, 1, strings.Repeat("\n", 64<<20)),
		}},
		"n1": &viewedNode{pages: []*msg.EnginePage{enginePage(2, 1, "x 3\n")}},
	}
	h := api.NewEngineMetrics(func() api.NodeViews { return views }, threeRanks)
	text := scrapeEngines(t, h, "").Body.String()
	for rank, up := range []string{"1", "0", "1"} {
		gauge := fmt.Sprintf(`dpserve_engine_metrics_up{app="a",group="0",rank="%d"} `, rank)
		assert.Contains(t, text, gauge+up)
	}
}

// TestScrapesOfAllEnginesAreBounded: a scrape beside as many as are allowed is refused, and asks no node.
func TestScrapesOfAllEnginesAreBounded(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	h := api.NewEngineMetrics(func() api.NodeViews {
		entered <- struct{}{}
		<-leave
		return nil
	}, state.New)
	ended := make(chan int, 2)
	for range cap(ended) {
		go func() { ended <- scrapeEngines(t, h, "").Code }()
		<-entered
	}
	w := scrapeEngines(t, h, "")
	assert.Equal(t, http.StatusServiceUnavailable, w.Code)
	assert.Contains(t, w.Body.String(), "2 scrapes of all engines run already")
	close(leave)
	for range cap(ended) {
		assert.Equal(t, http.StatusOK, <-ended)
	}
}
