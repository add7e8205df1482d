//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/loadgen"
)

// TestPoolingsAreAccepted: every row of the comparison is a file that deploys.
func TestPoolingsAreAccepted(t *testing.T) {
	names := map[string]bool{}
	for _, r := range poolings() {
		_, warnings, err := app.Parse(app.Default(), "bench.yaml", []byte(r.yaml()))
		require.NoError(t, err, r.name)
		if r.name == "apart-always" {
			assert.Len(t, warnings, 1, "it is for comparison")
		} else {
			assert.Empty(t, warnings, r.name)
		}
		assert.False(t, names[r.name], r.name)
		names[r.name] = true
	}
	assert.Equal(t, "together", poolings()[0].name, "ratios are to the first row")
}

func TestMixturesFitTheRanks(t *testing.T) {
	for _, m := range mixtures() {
		assert.Positive(t, m.warmup, m.name)
		for _, s := range m.streams {
			assert.Positive(t, s.rate, s.name)
			longest := s.prompt + s.talk.SystemTokens + s.talk.Turns*(s.talk.TurnTokens+s.tokens)
			assert.LessOrEqual(t, longest, 32768, s.name)
		}
	}
}

// TestPoolFiguresOfAnEmptyRun: nothing was measured, and nothing is divided by it.
func TestPoolFiguresOfAnEmptyRun(t *testing.T) {
	run := &pdRun{reports: []*loadgen.Report{{}}}
	for _, f := range poolFigures() {
		assert.Zero(t, f.of(run, run, 0), f.head)
	}
}

func TestSumByLabel(t *testing.T) {
	const text = `# HELP dpserve_pd_requests_total Requests.
# TYPE dpserve_pd_requests_total counter
dpserve_pd_requests_total{app="a",outcome="ok",way="remote"} 3
dpserve_pd_requests_total{app="a",outcome="failed",way="remote"} 1
dpserve_pd_requests_total{app="a",outcome="ok",way="local"} 2e+00
dpserve_pd_requests_total_more{way="local"} 9
`
	got, err := sumByLabel(strings.NewReader(text), "dpserve_pd_requests_total", "way")
	require.NoError(t, err)
	assert.Equal(t, map[string]float64{"remote": 4, "local": 2}, got)
	assert.InDelta(t, 4.0/6, ways{4, 2, 0}.share(), 1e-9)
	assert.Zero(t, ways{}.share())
	_, err = sumByLabel(strings.NewReader("m{way=\"x\"} y\n"), "m", "way")
	require.ErrorIs(t, err, errUnexpected)
}

// TestMockAnswersAPrefillLeg: the mock knows the prefill leg that dpserve makes of the bench's requests, and
// its answer is one that dpserve accepts.
func TestMockAnswersAPrefillLeg(t *testing.T) {
	tr, ok := transfer.Named(transfer.NixlName)
	require.True(t, ok)
	_, body, _ := bytes.Cut(payload(64, 8, 20*time.Millisecond, true, false), []byte("\r\n\r\n"))
	var q transfer.Request
	require.NoError(t, q.Scan(tr, transfer.Chat, body))
	require.Equal(t, transfer.CanSplit, q.Reason)
	a, err := tr.Begin(&q, "id", transfer.Peer{}, nil)
	require.NoError(t, err)
	e := &engineConn{body: a.AppendPrefill(nil, &q)}
	assert.Contains(t, string(e.tail()), keepsBlocks)

	answer, failure := transfer.ReadPrefill(tr, &q, []byte(prefillBody))
	require.Equal(t, transfer.NoFailure, failure)
	e.body = a.AppendDecode(nil, &q, append([]byte(`"kv_transfer_params":`), answer.Params...))
	assert.NotContains(t, string(e.tail()), keepsBlocks)
	assert.Contains(t, string(e.tail()), `"stream":true`)
	assert.Equal(t, 8, e.field("max_tokens"))
	assert.Equal(t, 20000, e.field("pace_us"))
}

// TestWithMember: both legs of a client that sends them itself are whole requests.
func TestWithMember(t *testing.T) {
	req := payload(64, 8, 0, true, false)
	for _, leg := range [][]byte{prefillLeg(req), withMember(req, pullParams)} {
		head, body, _ := bytes.Cut(leg, []byte("\r\n\r\n"))
		assert.True(t, json.Valid(body), "%s", body)
		assert.Contains(t, string(head), "Content-Length: "+strconv.Itoa(len(body)))
	}
}
