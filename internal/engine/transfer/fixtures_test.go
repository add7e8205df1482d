package transfer

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// captured is a request of testdata.
type captured struct {
	Path    string            `json:"path"`
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body"`
}

func request(t testing.TB, name string) captured {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".req.json"))
	require.NoError(t, err)
	var c captured
	require.NoError(t, json.Unmarshal(text, &c))
	return c
}

// answer is the status and the body of an answer of testdata.
func answer(t testing.TB, name string) (status int, body []byte) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name+".resp.http"))
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(raw)), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, body
}

func transfer(t testing.TB, name string) Transfer {
	t.Helper()
	tr, ok := Named(name)
	require.True(t, ok, name)
	return tr
}

// scan is Scan of a body that must be accepted.
func scan(t testing.TB, name string, route Route, body string) *Request {
	t.Helper()
	var q Request
	require.NoError(t, q.Scan(transfer(t, name), route, []byte(body)), body)
	return &q
}

// fields are the members of an object.
func fields(t testing.TB, body []byte) map[string]json.RawMessage {
	t.Helper()
	var m map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(body, &m), "%s", body)
	return m
}

// without is body without some members, encoded again.
func without(t testing.TB, body []byte, names ...string) string {
	t.Helper()
	m := fields(t, body)
	for _, name := range names {
		delete(m, name)
	}
	out, err := json.Marshal(m)
	require.NoError(t, err)
	return string(out)
}

// TestPullLegsAreThoseOfRealEngines: from the client's body of each route both legs are made as they were
// sent to real engines, with the params that the engine answered, byte for byte.
func TestPullLegsAreThoseOfRealEngines(t *testing.T) {
	for name, want := range map[string]Answer{
		"completions": {Ending: EndedByLength, PromptTokens: 46, RemoteTokens: 46},
		"chat":        {Ending: EndedByLength, PromptTokens: 53, RemoteTokens: 53},
		"chat_stream": {Ending: EndedByLength, PromptTokens: 55, RemoteTokens: 55},
	} {
		t.Run(name, func(t *testing.T) {
			prefill, decode := request(t, name+".p"), request(t, name+".d")
			route := RouteOf(prefill.Path)
			client := without(t, []byte(decode.Body), "kv_transfer_params")
			tr := transfer(t, NixlName)
			q := scan(t, NixlName, route, client)
			require.Equal(t, CanSplit, q.Reason)
			a, err := tr.Begin(q, "id", Peer{}, nil)
			require.NoError(t, err)

			body := a.AppendPrefill(nil, q)
			assert.JSONEq(t, "false", string(fields(t, body)["stream"]))
			assert.JSONEq(t, without(t, []byte(prefill.Body), "stream", "max_tokens"),
				without(t, body, "stream", "max_tokens"))
			assert.Equal(t, "1", string(fields(t, body)["max_tokens"]))

			_, text := answer(t, name+".p")
			got, failure := ReadPrefill(tr, q, text)
			require.Equal(t, NoFailure, failure)
			assert.Contains(t, string(text), `"kv_transfer_params":`+string(got.Params))
			want.Params = got.Params
			assert.Equal(t, want, got)

			source := Source{"app/g/0", 7}
			p := NewParams(got.Params, source, start, 0)
			params, err := p.Take(start, source)
			require.NoError(t, err)
			body = a.AppendDecode(nil, q, params)
			assert.JSONEq(t, decode.Body, string(body))
			assert.Equal(t, client[:len(client)-1]+`,"kv_transfer_params":`+string(got.Params)+`}`,
				string(body))
		})
	}
}

// TestAnswersOfRealPrefillEnginesThatCannotBeUsed reads answers that must not lead to a decode leg with
// parameters.
func TestAnswersOfRealPrefillEnginesThatCannotBeUsed(t *testing.T) {
	tr := transfer(t, NixlName)
	for name, want := range map[string]Failure{
		"p_leg_streamed": PrefillBroken,
		"p_leg_stop":     NoFailure, // a stop keeps the blocks, too
		"two_prompts.p":  PrefillBroken,
		"n2_both.p":      PrefillBroken,
	} {
		_, text := answer(t, name)
		_, got := ReadPrefill(tr, scan(t, NixlName, Completions, `{"prompt":"x"}`), text)
		assert.Equal(t, want, got, name)
	}
}

// TestRequestsThatSpoiledTextsAreNotSplit: these requests gave a wrong text, or a right one by luck.
func TestRequestsThatSpoiledTextsAreNotSplit(t *testing.T) {
	two, many := request(t, "two_prompts.p"), request(t, "n2_both.p")
	assert.Equal(t, PromptList, scan(t, NixlName, RouteOf(two.Path), two.Body).Reason)
	assert.Equal(t, SeveralChoices, scan(t, NixlName, RouteOf(many.Path), many.Body).Reason)
}

// TestParamsThatEndedEnginesAreRefused: params of requests that ended a real decode engine.
func TestParamsThatEndedEnginesAreRefused(t *testing.T) {
	tr := transfer(t, NixlName)
	q := scan(t, NixlName, Completions, `{"prompt":"x"}`)
	for _, name := range []string{
		"kill_flat_block_ids", "kill_string_block_ids", "kill_only_do_remote_prefill",
	} {
		params := fields(t, []byte(request(t, name+".d").Body))["kv_transfer_params"]
		text := `{"choices":[{"finish_reason":"length"}],"kv_transfer_params":` + string(params) + `}`
		_, got := ReadPrefill(tr, q, []byte(text))
		assert.Equal(t, PrefillUnfit, got, name)
	}
}

// TestPushLegsAreThoseOfRealEngines: the same for a push, whose decode leg is sent before the prefill's
// answer.
func TestPushLegsAreThoseOfRealEngines(t *testing.T) {
	prefill, decode := request(t, "push_decode_first.p"), request(t, "push_decode_first.d")
	client := without(t, []byte(decode.Body), "kv_transfer_params")
	_, text := answer(t, "push_decode_first.p")
	tr := transfer(t, NixlPushName)
	q := scan(t, NixlPushName, RouteOf(decode.Path), client)
	got, failure := ReadPrefill(tr, q, text)
	require.Equal(t, NoFailure, failure)
	peer, ok := PeerOfAnswer(got.Params)
	require.True(t, ok)
	assert.Equal(t, Peer{EngineID: "push-p-1", Host: "127.0.0.1", Port: 16000, TPSize: 1, PPSize: 1}, peer)

	a, err := tr.Begin(q, decode.Headers["X-Request-Id"], peer, nil)
	require.NoError(t, err)
	assert.JSONEq(t, prefill.Body, string(a.AppendPrefill(nil, q)))
	assert.JSONEq(t, decode.Body, string(a.AppendDecode(nil, q, nil)))
	assert.Equal(t, prefill.Headers["X-Request-Id"], tr.Traits().RequestID(&a, "the client's"))

	_, pull := answer(t, "completions.p")
	_, ok = PeerOfAnswer(fields(t, pull)["kv_transfer_params"])
	assert.False(t, ok, "a pull engine cannot be pushed from")
}
