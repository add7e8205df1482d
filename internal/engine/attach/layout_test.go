package attach_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/attach"
)

// CC13: the table of what stands behind attached URLs: independent ranks, ports of one group, several front
// ends.
func TestArrange(t *testing.T) {
	one := func(url string, ranks ...int) attach.Found { return attach.Found{URL: url, Ranks: ranks} }
	low, high := one("u", 0, 1), one("v", 2, 3)
	high.CountsFromZero = true
	cases := map[string]struct {
		engines  []attach.Found
		ranks    []attach.Rank // without their numbers
		lockstep bool
		note     string
	}{
		"independent": {
			[]attach.Found{one("u", 0), one("v", 0), one("w")},
			[]attach.Rank{{URL: "u", Selector: -1}, {URL: "v", Selector: -1}, {URL: "w", Selector: -1}},
			false, "",
		},
		"a port for each rank": {
			[]attach.Found{one("v", 1), one("u", 0)},
			[]attach.Rank{{URL: "u", Selector: -1}, {URL: "v", Selector: -1}},
			true, "ranks 0, 1 of one lockstep group: when one fails",
		},
		"front ends that count from 0": {
			[]attach.Found{low, high},
			[]attach.Rank{
				{URL: "u", Selector: 0},
				{URL: "u", Selector: 1},
				{URL: "v", Selector: 0},
				{URL: "v", Selector: 1},
			},
			true, "ranks 0, 1, 2, 3 of one lockstep group",
		},
		"front ends that take numbers": {
			[]attach.Found{low, one("v", 2, 3)},
			[]attach.Rank{
				{URL: "u", Selector: 0},
				{URL: "u", Selector: 1},
				{URL: "v", Selector: 2},
				{URL: "v", Selector: 3},
			},
			true, "one lockstep group",
		},
		"a rank is missing": {
			[]attach.Found{one("u", 0), one("v", 3)},
			[]attach.Rank{{URL: "u", Selector: -1}, {URL: "v", Selector: -1}},
			true, "rank 1, 2 of the group is not among them, attach it too",
		},
		"two groups": {
			[]attach.Found{one("u", 0), one("v", 1), one("w", 0), one("x", 1)},
			[]attach.Rank{
				{URL: "u", Selector: -1},
				{URL: "v", Selector: -1},
				{URL: "w", Selector: -1},
				{URL: "x", Selector: -1},
			},
			false, "ranks 0, 0, 1, 1, so they are of several groups",
		},
		"some say nothing": {
			[]attach.Found{one("u", 1), one("v")},
			[]attach.Rank{{URL: "u", Selector: -1}, {URL: "v", Selector: -1}},
			false, "others do not",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			l := attach.Arrange(attach.VLLM, c.engines)
			for i := range l.Ranks {
				l.Ranks[i] = attach.Rank{URL: l.Ranks[i].URL, Selector: l.Ranks[i].Selector}
			}
			assert.Equal(t, c.ranks, l.Ranks)
			assert.Equal(t, c.lockstep, l.IsLockstep)
			assert.Contains(t, l.Note, c.note)
			assert.Equal(t, c.note == "", l.Note == "")
		})
	}
	mixed := attach.Arrange(attach.OpenAI, []attach.Found{low, high})
	assert.Len(t, mixed.Ranks, 2, "nothing but the API is assumed")
	assert.False(t, mixed.IsLockstep)
}

// CC13: Numbers come from the event sources, else from the metrics. A front end with ranks 4 and 5 is asked
// whether it takes 5 for a rank.
func TestProbeFindsTheRanksBehindAURL(t *testing.T) {
	const vllm = `{"data":[{"id":"m","owned_by":"vllm"}]}`
	metrics := `vllm:num_requests_running{engine="4",model_name="m"} 0.0` + "\n" +
		`vllm:num_requests_running{engine="5",model_name="m"} 0.0` + "\n"
	probe := func(answers map[string]string) attach.Found {
		f, err := attach.Probe(t.Context(), engine(t, answers), nil)
		require.NoError(t, err)
		return f
	}
	f := probe(map[string]string{"/v1/models": vllm, "/kv_event_sources": `{"1":{},"0":{}}`})
	assert.Equal(t, []int{0, 1}, f.Ranks)
	assert.False(t, f.CountsFromZero)
	f = probe(map[string]string{"/v1/models": vllm, "/kv_event_sources": `{}`, "/metrics": metrics})
	assert.Equal(t, []int{4, 5}, f.Ranks)
	f = probe(map[string]string{"/v1/models": `{"data":[{"id":"m","owned_by":"me"}]}`, "/metrics": metrics})
	assert.Empty(t, f.Ranks, "another family's metrics mean something else")

	for lowest, counts := range map[int]bool{0: true, 4: false} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			rank, err := strconv.Atoi(r.Header.Get("X-Data-Parallel-Rank"))
			switch {
			case r.URL.Path == "/v1/models":
				_, _ = io.WriteString(w, vllm)
			case r.URL.Path == "/metrics":
				_, _ = io.WriteString(w, metrics)
			case r.URL.Path == "/v1/completions" && err == nil && rank >= lowest && rank < lowest+2:
				_, _ = io.WriteString(w, `{"choices":[{"finish_reason":"length"}]}`)
			default:
				http.Error(w, `{"error":{"message":"data_parallel_rank is out of range"}}`, 400)
			}
		}))
		f, err := attach.Probe(t.Context(), srv.URL, nil)
		srv.Close()
		require.NoError(t, err)
		assert.Equal(t, []int{4, 5}, f.Ranks)
		assert.Equal(t, counts, f.CountsFromZero)
	}
}
