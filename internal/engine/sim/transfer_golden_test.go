package sim

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// FS14: Prefill legs byte by byte as they were sent to real engines; what comes back has the captured form.
func TestGoldenPrefillLegs(t *testing.T) {
	s := start(t, pairConfig(RoleProducer))
	playFolder(t, "pd", func(string) *Server { return s })
}

func fixtureBody(t *testing.T, name string) []byte {
	t.Helper()
	wire, err := os.ReadFile(filepath.Join(goldenDir, name+".resp.http"))
	require.NoError(t, err)
	return readAnswer(t, "POST", bytes.NewReader(wire)).body
}

// The members of the parameters stand in the captured order: some proxies pass them on as bytes.
func TestGoldenOrderOfParameters(t *testing.T) {
	order := func(body []byte) (names []string) {
		var a legAnswer
		require.NoError(t, json.Unmarshal(body, &a))
		d := json.NewDecoder(bytes.NewReader(a.Params))
		_, err := d.Token()
		require.NoError(t, err)
		for d.More() {
			name, err := d.Token()
			require.NoError(t, err)
			names = append(names, name.(string))
			var value json.RawMessage
			require.NoError(t, d.Decode(&value))
		}
		return names
	}
	_, body := ask(t, start(t, pairConfig(RoleProducer)), "/v1/completions",
		`{"prompt":"x","max_tokens":1,"kv_transfer_params":`+prefillParams+`}`)
	assert.Equal(t, order(fixtureBody(t, "pd/completions.p")), order([]byte(body)))
}

// FS14: The answers of decode engines that failed are the captured ones.
func TestGoldenErrorsOfDecodeLegs(t *testing.T) {
	isBody(t, string(fixtureBody(t, "pd_errors/wrong_engine_id.d")), failedBody)
	isBody(t, string(fixtureBody(t, "pd_errors/kill_flat_block_ids.d")), deadBody)
	p, d := startPair(t)
	params := member(t, prefill(t, p, words(1, 40)), "remote_engine_id", `"another"`)
	_, body := decode(t, d, words(1, 40), params, `,"stream":true`)
	assert.Equal(t, string(fixtureBody(t, "pd_errors/dead_side_channel_stream.d")), body)
	_, body = decode(t, d, words(1, 40), params, `,"temperature":-1`)
	want := fixtureBody(t, "pd_errors/lease_released_by_rejected_decode.d")
	compareValues(t, "pd", "", "", parse(t, want), parse(t, []byte(body)))
}

// Names, types and labels of the series of a connector are the captured ones.
func TestGoldenTransferMetrics(t *testing.T) {
	want, err := os.ReadFile(filepath.Join(goldenDir, "metrics", "pd_decode.txt"))
	require.NoError(t, err)
	_, d := startPair(t)
	wantTypes, wantLabels := metricShapes(string(want))
	page := strings.ReplaceAll(get(t, d, "/metrics"), `le="`, `le_is="`)
	gotTypes, gotLabels := metricShapes(page)
	seen := 0
	for name, kind := range wantTypes {
		if strings.HasPrefix(name, "vllm:nixl") {
			seen++
		}
		assert.Equal(t, kind, gotTypes[name], name)
	}
	assert.Equal(t, 4*2+4*2, seen, "four histograms and four counters, each with the time it was created")
	for name, labels := range wantLabels {
		assert.Equal(t, labels, gotLabels[name], name)
	}
	for name := range gotTypes {
		if strings.HasPrefix(name, "vllm:nixl") {
			assert.Contains(t, wantTypes, name)
		}
	}
}
