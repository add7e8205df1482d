package sim

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/memnet"
	"github.com/dpserve/dpserve/test/ports"
)

const goldenDir = "testdata/v0.32.0"

// notPlayed are fixtures that another test reads.
var notPlayed = map[string]string{
	"http/kv_event_sources":                               "names fixed ports: TestKVEventSources",
	"moe_external_lb/r0_kv_event_sources":                 "names fixed ports: TestKVEventSources",
	"moe_external_lb/r1_kv_event_sources":                 "names fixed ports: TestKVEventSources",
	"dense_internal_lb/kv_event_sources":                  "names fixed ports: TestKVEventSources",
	"http_auth_force_usage/auth_kv_event_sources_missing": "names fixed ports: TestKVEventSources",
	"http_dev/kv_event_sources":                           "names fixed ports: TestKVEventSources",
}

// edits are requests that are sent in other words: what stands there depends on the captured model.
var edits = map[string]struct{ why, from, to string }{
	"http/err_oov_id": {"another vocabulary", "100000", "5000000000"},
}

// textDecides are fixtures whose number of chunks and end depend on the words of the answer: compared event
// by event as far as both go, ends aside.
var textDecides = map[string]string{
	"http/cmpl_stop_string":          "stop strings meet other words",
	"http/cmpl_stream_stop":          "stop strings meet other words",
	"http/chat_stream_stop_eos":      "stop strings meet other words",
	"http/chat_stream_stop_token_id": "stop tokens are other ids",
	"pd/p_leg_stop":                  "stop strings meet other words",
}

// wordingDiffers are errors whose text comes from Python's parsers: everything else of them is the same.
var wordingDiffers = map[string]string{
	"http/err_malformed_json": "the JSON parser's own words",
	"http/err_neg_id":         "lists every type that was tried",
	"http/err_oov_id":         "names the id: see edits",
}

// mayDiffer are the values that a made-up model cannot share with the captured one, by the last key of their
// path. Types and nulls must still be equal.
var mayDiffer = map[string]string{
	"id": "random", "created": "time", "text": "words", "content": "words", "system_fingerprint": "hash",
	"prompt_tokens": "tokenizer", "total_tokens": "tokenizer", "cached_tokens": "order of play",
	"token": "words", "tokens": "words", "token_strs": "words", "bytes": "words", "logprob": "made up",
	"rank":          "made up",
	"decoded_token": "words", "token_logprobs": "made up", "text_offset": "words", "top_logprobs": "words",
	"token_ids": "tokenizer", "prompt_token_ids": "tokenizer", "count": "tokenizer", "prompt": "words",
	"root": "model folder", "prompt_logprobs": "tokenizer",
	"created_cache_tokens": "order of play", "remote_engine_id": "random", "remote_request_id": "random",
	"remote_port": "any free one", "remote_block_ids": "order of play", "remote_num_tokens": "tokenizer",
	"remote_prefill_cached_tokens": "order of play",
}

// lengthMayDiffer are lists and maps whose size depends on the tokenizer or on a clash of token texts.
var lengthMayDiffer = map[string]bool{
	"token_ids": true, "prompt_token_ids": true, "tokens": true, "token_strs": true, "bytes": true,
	"prompt_logprobs": true, "top_logprobs": true, "remote_block_ids": true,
}

// headersAside are not compared: transport and time.
var headersAside = []string{"Date", "Connection", "Content-Length", "Keep-Alive"}

// metricsAside are the captured metrics that the simulated engine does not have.
var metricsAside = map[string]string{
	"estimated_": "private to the engine: estimates of its work",
	"mm_cache_":  "private to the engine: pictures and sound",
}

func goldenConfig() Config {
	c := Default()
	c.Names, c.Model.MaxModelLen, c.Model.BlockSize, c.Model.MaxSeqs = []string{"tiny"}, 2048, 32, 64
	c.Model.Fixed = true
	c.AutoToolChoice = false // the captured engine ran without it
	return c
}

// inMemory is the same on a network in memory.
func inMemory(c Config) Config {
	c.Listen = func(_ context.Context, addr string) (net.Listener, error) {
		return goldenNetwork.Listen(addr)
	}
	return c
}

func start(t *testing.T, c Config) *Server {
	t.Helper()
	s, err := startServer(t.Context(), c)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.Close()) })
	return s
}

// FS14: the simulated engine plays every captured request of vLLM 0.32.0: HTTP, prefill legs, KV events,
// replays, `/metrics`: Status, headers, members in order with types and nulls, error texts, events of
// streams, message frames, metric names, types and labels are the captured ones; the tables at the head of
// `golden_test.go` name every difference.
func TestGoldens(t *testing.T) {
	t.Run("http", func(t *testing.T) {
		s := start(t, inMemory(goldenConfig()))
		playFolder(t, "http", func(string) *Server { return s })
	})
	t.Run("http_auth_force_usage", func(t *testing.T) {
		c := goldenConfig()
		c.APIKey, c.ForceIncludeUsage = "secret", true
		s := start(t, inMemory(c))
		playFolder(t, "http_auth_force_usage", func(string) *Server { return s })
	})
	t.Run("dense_internal_lb", func(t *testing.T) {
		c := goldenConfig()
		c.InternalLB, c.DevMode = 2, true
		s := start(t, inMemory(c))
		playFolder(t, "dense_internal_lb", func(string) *Server { return s })
	})
	t.Run("moe_external_lb", func(t *testing.T) {
		c := goldenConfig()
		c.RPCAddr = ports.TakeAddr(t)
		group, err := startGroup(t.Context(), c, 2)
		require.NoError(t, err)
		for _, s := range group {
			t.Cleanup(func() { assert.NoError(t, s.Close()) })
		}
		playFolder(t, "moe_external_lb", func(name string) *Server { return group[name[1]-'0'] })
	})
	t.Run("http_dev", func(t *testing.T) {
		c := goldenConfig()
		c.RequestIDHeaders, c.DevMode = true, true
		c.Model.MaxModelLen, c.Model.FixedStep = 512, time.Millisecond
		free := start(t, inMemory(c))
		c.Model.MaxQueuedReqs = 4
		full := start(t, c)
		fill(t, full, 4)
		playFolder(t, "http_dev", func(name string) *Server {
			if strings.HasPrefix(name, "queue") {
				return full
			}
			return free
		})
	})
}

// fill makes n requests wait in a hung engine.
func fill(t *testing.T, s *Server, n int) {
	t.Helper()
	require.NoError(t, s.Fail(Fault{Mode: ModeHang}))
	for range n {
		resp := post(t, s, "/v1/completions", `{"prompt":"x","stream":true}`)
		t.Cleanup(func() { _ = resp.Body.Close() })
	}
	eventually(t, func() bool { return s.Stats().Waiting == n })
}

func playFolder(t *testing.T, folder string, server func(name string) *Server) {
	files, err := filepath.Glob(filepath.Join(goldenDir, folder, "*.req.json"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".req.json")
		full := folder + "/" + name
		if notPlayed[full] != "" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			playOne(t, full, server(name))
		})
	}
}

// answer is a response taken apart for comparison.
type answer struct {
	status  int
	header  http.Header
	body    []byte
	chunked bool
}

func playOne(t *testing.T, name string, s *Server) {
	raw, err := os.ReadFile(filepath.Join(goldenDir, name+".req.json"))
	require.NoError(t, err)
	var req struct {
		Method, Path string
		Headers      map[string]string
		Body         string
	}
	require.NoError(t, json.Unmarshal(raw, &req))
	if e := edits[name]; e.from != "" {
		require.Contains(t, req.Body, e.from)
		req.Body = strings.ReplaceAll(req.Body, e.from, e.to)
		req.Headers["Content-Length"] = strconv.Itoa(len(req.Body))
	}
	wire, err := os.ReadFile(filepath.Join(goldenDir, name+".resp.http"))
	require.NoError(t, err)
	want := readAnswer(t, req.Method, bytes.NewReader(wire))

	conn, err := dial(t, s)
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\n", req.Method, req.Path)
	for k, v := range req.Headers {
		fmt.Fprintf(&b, "%s: %s\r\n", k, v)
	}
	_, err = io.WriteString(conn, b.String()+"\r\n"+req.Body)
	require.NoError(t, err)
	got := readAnswer(t, req.Method, conn)
	compareAnswers(t, name, want, got)
}

// goldenNetwork is the network in memory of the engines that play the fixtures.
var goldenNetwork memnet.Network

// dial connects to an engine, on the network that it listens on.
func dial(t *testing.T, s *Server) (net.Conn, error) {
	t.Helper()
	if s.cfg.Listen != nil {
		return goldenNetwork.DialContext(t.Context(), "", s.gate.Addr().String())
	}
	return (&net.Dialer{}).DialContext(t.Context(), "tcp", s.gate.Addr().String())
}

func readAnswer(t *testing.T, method string, r io.Reader) answer {
	t.Helper()
	resp, err := http.ReadResponse(bufio.NewReader(r), &http.Request{Method: method})
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return answer{resp.StatusCode, resp.Header, body, slices.Contains(resp.TransferEncoding, "chunked")}
}

func compareAnswers(t *testing.T, name string, want, got answer) {
	assert.Equal(t, want.status, got.status, "%s", got.body)
	assert.Equal(t, want.chunked, got.chunked)
	assert.Equal(t, headerNames(want.header), headerNames(got.header))
	for _, h := range []string{"Content-Type", "Allow", "Vary", "Server"} {
		assert.Equal(t, want.header.Get(h), got.header.Get(h), h)
	}
	if !strings.HasPrefix(want.header.Get("Content-Type"), "text/event-stream") {
		compareJSON(t, name, want.body, got.body)
		return
	}
	w, g := byChoice(events(t, want.body)), byChoice(events(t, got.body))
	if textDecides[name] != "" {
		compareEvents(t, name, trim(w), trim(g))
		return
	}
	require.Len(t, g, len(w), "number of events: %s", got.body)
	for i := range w {
		compareEvent(t, name, w[i], g[i])
	}
}

// trim leaves the events in front of the finishing one, in equal numbers by the caller.
func trim(events []string) []string { return events[:len(events)-2] }

func compareEvents(t *testing.T, name string, want, got []string) {
	for i := range min(len(want), len(got)) {
		compareEvent(t, name, want[i], got[i])
	}
}

func compareEvent(t *testing.T, name, want, got string) {
	if want == "[DONE]" {
		assert.Equal(t, want, got)
		return
	}
	if strings.HasPrefix(want, `{"error"`) {
		assert.True(t, strings.HasPrefix(got, `{"error": {"message": "`), "spaced: %s", got)
		compareValues(t, name, "", "", parse(t, []byte(want)), parse(t, []byte(got)))
		return
	}
	compareJSON(t, name, []byte(want), []byte(got))
}

func headerNames(h http.Header) []string {
	var names []string
	for k := range h {
		if !slices.Contains(headersAside, k) {
			names = append(names, k)
		}
	}
	slices.Sort(names)
	return names
}

func events(t *testing.T, body []byte) []string {
	t.Helper()
	var out []string
	for e := range strings.SplitSeq(strings.TrimSuffix(string(body), "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(e, "data: ")
		require.True(t, ok, "event %q", e)
		out = append(out, data)
	}
	return out
}

// byChoice sorts the events by choice: how several choices interleave is a matter of time, in the captures
// too.
func byChoice(events []string) []string {
	index := func(e string) int {
		var v completion
		if err := json.Unmarshal([]byte(e), &v); err != nil || len(v.Choices) == 0 {
			return 1 << 20
		}
		return v.Choices[0].Index
	}
	slices.SortStableFunc(events, func(a, b string) int { return index(a) - index(b) })
	return events
}

func compareJSON(t *testing.T, name string, want, got []byte) {
	if len(want) == 0 {
		assert.Empty(t, got)
		return
	}
	assert.NotContains(t, string(got), `, "`, "compact, not spaced")
	compareValues(t, name, "", "", parse(t, want), parse(t, got))
}

// jsonObject is a JSON object with its members in order.
type jsonObject []jsonMember

type jsonMember struct {
	key   string
	value any
}

func (o jsonObject) keys() []string {
	keys := []string{}
	for _, m := range o {
		keys = append(keys, m.key)
	}
	return keys
}

// parse decodes JSON: objects as jsonObject, lists as []any, numbers as they are spelt.
func parse(t *testing.T, raw []byte) any {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	return parseNext(t, d)
}

func parseNext(t *testing.T, d *json.Decoder) any {
	t.Helper()
	token, err := d.Token()
	require.NoError(t, err)
	switch token {
	case json.Delim('{'):
		out := jsonObject{}
		for d.More() {
			key, err := d.Token()
			require.NoError(t, err)
			out = append(out, jsonMember{fmt.Sprint(key), parseNext(t, d)})
		}
		_, err = d.Token()
		require.NoError(t, err)
		return out
	case json.Delim('['):
		out := []any{}
		for d.More() {
			out = append(out, parseNext(t, d))
		}
		_, err = d.Token()
		require.NoError(t, err)
		return out
	}
	return token
}

func compareValues(t *testing.T, name, path, key string, want, got any) {
	if textDecides[name] != "" &&
		(key == "finish_reason" || key == "stop_reason" || key == "completion_tokens") {
		return
	}
	if !assert.IsType(t, want, got, "type of %s", path) {
		return
	}
	switch want := want.(type) {
	case jsonObject:
		if lengthMayDiffer[key] || key == "" && strings.Contains(path, "logprobs") {
			return
		}
		got := got.(jsonObject)
		if !assert.Equal(t, want.keys(), got.keys(), "keys of %s, in order", path) {
			return
		}
		for i, m := range want {
			compareValues(t, name, path+"."+m.key, m.key, m.value, got[i].value)
		}
	case []any:
		compareLists(t, name, path, key, want, got.([]any))
	default:
		if mayDiffer[key] == "" && (key != "message" || wordingDiffers[name] == "") {
			assert.Equal(t, want, got, "value of %s", path)
		}
	}
}

func compareLists(t *testing.T, name, path, key string, want, got []any) {
	if !lengthMayDiffer[key] {
		assert.Len(t, got, len(want), "length of %s", path)
	}
	for i := range min(len(want), len(got)) {
		next := key
		if _, ok := want[i].(jsonObject); ok && key != "top_logprobs" && key != "prompt_logprobs" {
			next = ""
		}
		compareValues(t, name, fmt.Sprintf("%s[%d]", path, i), next, want[i], got[i])
	}
}

func TestGoldenTablesNameRealFixtures(t *testing.T) {
	for _, table := range []map[string]string{notPlayed, textDecides, wordingDiffers} {
		for name := range table {
			assert.FileExists(t, filepath.Join(goldenDir, name+".req.json"))
		}
	}
	for name := range edits {
		assert.FileExists(t, filepath.Join(goldenDir, name+".req.json"))
	}
}

// FS14: Names, types and labels of every engine metric are the captured ones.
func TestGoldenMetrics(t *testing.T) {
	for file, edit := range map[string]func(*Config){
		"dense_one_rank_after_load":    func(*Config) {},
		"dense_after_queue_rejections": func(c *Config) { c.Model.MaxQueuedReqs = 4 },
		"moe_external_lb_rank0":        func(c *Config) { c.DPSize, c.RPCAddr = 2, "127.0.0.1:1" },
		"moe_external_lb_rank1": func(c *Config) {
			c.DPSize, c.DPRank, c.RPCAddr = 2, 1, "127.0.0.1:1"
		},
	} {
		t.Run(file, func(t *testing.T) {
			want, err := os.ReadFile(filepath.Join(goldenDir, "metrics", file+".txt"))
			require.NoError(t, err)
			c := goldenConfig()
			edit(&c)
			s, err := New(c) // not listening: a rank of a group would wait for the others
			require.NoError(t, err)
			defer func() { assert.NoError(t, s.Close()) }()
			for _, path := range []string{"/v1/models", "/metrics"} {
				w := httptest.NewRecorder()
				api{s}.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
				if path == "/metrics" {
					compareMetrics(t, string(want), w.Body.String())
				}
			}
		})
	}
}

func compareMetrics(t *testing.T, want, got string) {
	t.Helper()
	isAside := func(name string) bool {
		for part := range metricsAside {
			if strings.Contains(name, part) {
				return true
			}
		}
		return !strings.HasPrefix(name, "vllm:") // of the libraries that the engine is made of
	}
	wantTypes, wantLabels := metricShapes(want)
	gotTypes, gotLabels := metricShapes(got)
	for name, kind := range wantTypes {
		if !isAside(name) {
			assert.Equal(t, kind, gotTypes[name], name)
		}
	}
	for name, labels := range wantLabels {
		if gotTypes[name] == "" && gotLabels[name] == nil || name == "vllm:cache_config_info" ||
			strings.HasSuffix(name, "_bucket") {
			continue
		}
		assert.Equal(t, labels, gotLabels[name], name)
	}
	for name := range gotTypes {
		assert.Contains(t, wantTypes, name, "no metric of our own under a foreign name")
	}
}

func metricShapes(page string) (types map[string]string, labels map[string][]string) {
	types, labels = map[string]string{}, map[string][]string{}
	for line := range strings.Lines(page) {
		if f := strings.Fields(line); len(f) == 4 && f[1] == "TYPE" {
			types[f[2]] = f[3]
			continue
		}
		if strings.HasPrefix(line, "#") {
			continue
		}
		name, rest, ok := strings.Cut(line, "{")
		if !ok {
			continue
		}
		set, _, _ := strings.Cut(rest, "}")
		labels[name] = append(labels[name], set)
	}
	return types, labels
}
