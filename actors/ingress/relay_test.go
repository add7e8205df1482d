package ingress

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
)

// pieces is an engine that writes a stream piece by piece.
func pieces(list ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		w.Header().Set("Content-Type", "text/event-stream")
		for _, p := range list {
			_, _ = io.WriteString(w, p)
			w.(http.Flusher).Flush()
		}
	}
}

// RP49b: streams of many servers, however they are cut, are complete and reach the client byte for byte.
func TestStreamsPass(t *testing.T) {
	chunk := func(delta string) string {
		return `{"id":"c","choices":[{"index":0,"delta":` + delta + `,"finish_reason":null}]}`
	}
	long := func(n int) string { return chunk(`{"content":"` + strings.Repeat("x", n) + `"}`) }
	const usageNull = `{"id":"c","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}],` +
		`"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}`
	whole := events(roleChunk, textChunk, stopChunk, doneEvent)
	for name, list := range map[string][]string{
		"a byte per chunk":         strings.Split(whole, ""),
		"CRLF":                     {strings.ReplaceAll(whole, "\n", "\r\n")},
		"a byte per chunk of CRLF": strings.Split(strings.ReplaceAll(whole, "\n", "\r\n"), ""),
		"data: without a blank":    {strings.ReplaceAll(whole, "data: ", "data:")},
		"event, id and retry": {
			"retry: 3000\n\n", strings.ReplaceAll(whole, "data: ", "event: message\nid: 7\ndata: "),
		},
		"comments":             {": a\n\n", events(textChunk), ":\n\n: b\n\n" + events(stopChunk, doneEvent)},
		"a byte order mark":    {"\ufeff" + whole},
		"usage in every chunk": {events(usageNull, usageNull, stopChunk, usageChunk, doneEvent)},
		"Azure's first chunk": {
			events(`{"id":"","choices":[],"prompt_filter_results":[{}]}`, textChunk, stopChunk, doneEvent),
		},
		"no [DONE]":              {events(textChunk, stopChunk)},
		"no blank behind [DONE]": {events(textChunk, stopChunk) + "data: [DONE]"},
		"nulls": {events(
			chunk(`{"role":"assistant","content":null,"reasoning_content":null,"tool_calls":null}`),
			chunk(`{"content":null,"reasoning_content":"hm","refusal":null}`),
			chunk(`{"tool_calls":[{"index":0,"id":null,"function":{"name":null,"arguments":""}}]}`),
			stopChunk, doneEvent,
		)},
		"several data lines of one event": {
			"data: {\"id\":\"c\",\ndata: \"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":" +
				"\"stop\"}]}\n\n", events(doneEvent),
		},
		"a long event first":  {events(long(300<<10), textChunk, stopChunk, doneEvent)},
		"a long event behind": {events(textChunk, long(3<<20), textChunk, stopChunk, doneEvent)},
		"300 empty chunks":    {strings.Repeat(events(emptyChunk), 300), events(stopChunk, doneEvent)},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, options{engines: []http.HandlerFunc{pieces(list...)}})
			a := g.post("/v1/chat/completions", streamBody)
			require.NoError(t, a.err)
			requireBytes(t, strings.Join(list, ""), a.body)
			assert.Equal(t, "text/event-stream", a.header.Get("Content-Type"))
			assert.Equal(t, "no", a.header.Get("X-Accel-Buffering"))
			assert.Equal(t, msg.OK, g.replicas[0].lastDone(t).Outcome)
		})
	}
}

// RP49b: what clients send beyond what dpserve reads reaches the engine as it is.
func TestBodiesPass(t *testing.T) {
	var got string
	g := newRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got = string(b)
		replies(200, wholeAnswer)(w, r)
	}}})
	message := func(m string) string { return `{"model":"demo","messages":[` + m + `]}` }
	field := func(f string) string { return `{"model":"demo","messages":[],` + f + `}` }
	function := func(f string) string { return `{"type":"function","function":` + f + `}` }
	part := func(p string) string { return message(`{"role":"user","content":[` + p + `]}`) }
	for name, body := range map[string]string{
		"content null":         message(`{"role":"assistant","content":null,"tool_calls":[]}`),
		"no content":           message(`{"role":"assistant"}`),
		"arguments null":       message(`{"tool_calls":[{"function":{"arguments":null}}]}`),
		"arguments, an object": message(`{"tool_calls":[{"function":{"arguments":{"a":1}}}]}`),
		"reasoning, developer": message(`{"role":"developer","content":"a","reasoning_content":"b"}`),
		"tools, no parameters": field(`"tools":[` + strings.Repeat(function(`{"name":"f"}`)+",", 46) + `{}]`),
		"a custom tool":        field(`"tools":[{"type":"custom","custom":{"format":{"type":"text"}}}]`),
		"tool_choice, object":  field(`"tool_choice":{"type":"function","function":{"name":"f"}}`),
		"json_schema":          field(`"response_format":{"json_schema":{"schema":{"a":[null]}}}`),
		"options":              field(`"logit_bias":{"1":-1},"service_tier":"auto","store":true`),
		"template arguments":   field(`"chat_template_kwargs":{"enable_thinking":false}`),
		"stream null":          field(`"stream":null`),
		"media": part(`{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="},"uuid":"u"},` +
			`{"type":"input_audio","input_audio":{"data":"AA==","format":"wav"}},` +
			`{"type":"video_url","video_url":{"url":"http://h/v"}}`),
		"image_url null":         part(`{"type":"image_url","image_url":null,"uuid":"u"}`),
		"400 KB of CJK":          message(`{"role":"user","content":"` + strings.Repeat("漢字", 60_000) + `"}`),
		"NUL and a surrogate":    message(`{"role":"user","content":"\u0000 \ud800 \udc00\ud83d"}`),
		"blanks and odd escapes": " {\n\t\"model\" : \"d\\u0065mo\" , \"messages\":[ ]\r\n}\n",
	} {
		a := g.post("/v1/chat/completions", body)
		assert.Equal(t, 200, a.status, "%s: %s", name, a.body)
		requireBytes(t, body, got)
	}
	body := `{"model":"demo","prompt":null,"prompt_embeds":"AAAA"}`
	assert.Equal(t, 200, g.post("/v1/completions?api-version=2024-10-21", body, "Authorization",
		"Bearer "+strings.Repeat("k", 8<<10)).status)
	requireBytes(t, body, got)
	// but for what only dpserve may set
	a := g.post("/v1/completions", `{"model":"demo","routed_dp_rank":3,"prompt":"x","unknown":{"a":1e400}}`)
	assert.Equal(t, 200, a.status, a.body)
	requireBytes(t, `{"model":"demo","prompt":"x","unknown":{"a":1e400}}`, got)
}

func TestLongWholeAnswerStreams(t *testing.T) {
	long := `{"choices":[{"text":"` + strings.Repeat("y", 3<<20) + `"}]}`
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, long)}})
	a := g.post("/v1/completions", `{"model":"demo","prompt":"x"}`)
	require.NoError(t, a.err)
	assert.Equal(t, long, a.body)
}

// largeHead is an engine whose answer has a larger head than an ingress takes.
func largeHead(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Large", strings.Repeat("x", 100<<10))
	replies(200, wholeAnswer)(w, r)
}

// RP4, RP26: TestOutOfTries is the table of what a client sees when no attempt is left. Which failures leave
// none is in the rows of package dispatch.
func TestOutOfTries(t *testing.T) {
	const words = `{"error":{"message":"why"}}`
	const refused = `{"error":{"message":"why","type":"BadRequestError","code":400}}`
	cases := []struct {
		name       string
		engine     http.HandlerFunc
		refuse     msg.Refusal
		status     int
		code       string // "": the engine's words
		retryAfter bool
		admits     int
	}{
		{ // a refusal is no attempt: every rank is asked
			name: "only refusals", refuse: msg.NotReady, status: 503, code: "no_ready_rank", retryAfter: true,
			admits: 4,
		},
		{name: "400", engine: replies(400, words), status: 400, admits: 1},
		{name: "400 as event", engine: sends(refused, doneEvent), status: 400, admits: 1},
		{name: "429", engine: replies(429, words), status: 429, retryAfter: true, admits: 4},
		{name: "500 of two ranks", engine: replies(500, words), status: 500, admits: 2},
		{name: "500 without words", engine: replies(500, `{}`), status: 500, admits: 3},
		{
			name: "500 as event", engine: sends(`{"error":{"message":"why","code":502}}`), status: 502,
			admits: 2,
		},
		{
			name: "two ranks die of it", engine: resets, status: 502, code: "upstream_failed",
			retryAfter: true, admits: 2,
		},
		{
			name: "empty", engine: replies(200, ``), status: 502, code: "upstream_failed", retryAfter: true,
			admits: 3,
		},
		{name: "expired", refuse: msg.Expired, status: 504, code: "deadline_exceeded", admits: 1},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			engine := c.engine
			if engine == nil {
				engine = sends(textChunk, stopChunk, doneEvent)
			}
			g := newRig(t, options{
				engines: []http.HandlerFunc{engine, engine, engine, engine},
				app:     func(a *app.Application) { a.Timeouts.QueueS = 0.2 },
			})
			for _, r := range g.replicas {
				if c.refuse != 0 {
					r.setRefuse(func(*msg.Admit) msg.Refusal { return c.refuse })
				}
			}
			a := g.post("/v1/chat/completions", streamBody)
			require.NoError(t, a.err)
			assert.Equal(t, c.status, a.status, a.body)
			switch {
			case c.code != "":
				assert.Equal(t, c.code, a.code(t))
			case c.name == "500 without words":
				assert.Equal(t, `{}`, a.body)
			case c.name == "500 as event":
				assert.Contains(t, a.body, "why")
			case c.name == "400 as event":
				requireBytes(t, refused, a.body)
				assert.Equal(t, "application/json", a.header.Get("Content-Type"))
			default:
				requireBytes(t, words, a.body)
			}
			assert.Equal(t, c.retryAfter, a.header.Get("Retry-After") != "")
			admits := 0
			for _, r := range g.replicas {
				assert.LessOrEqual(t, r.admits, 1, "no rank twice")
				admits += r.admits
			}
			assert.Equal(t, c.admits, admits)
			assert.Equal(t, 1, strings.Count(g.logs.String(), "\n"), g.logs.String())
		})
	}
}

// TestRefusalsAreNoAttempts: a request that more ranks refuse than it has attempts is served by the first one
// that admits it, also as a reservation. Each rank refuses it once, and at most maxRefusals ranks do.
func TestRefusalsAreNoAttempts(t *testing.T) {
	fence := func(replicas []*replica) {
		for _, r := range replicas {
			r.setRefuse(func(*msg.Admit) msg.Refusal { return msg.Fenced })
		}
	}
	admits := func(g *rig) (sum int) {
		for _, r := range g.replicas {
			assert.LessOrEqual(t, r.admits, 1, "no rank twice")
			sum += r.admits
		}
		return sum
	}
	serves := func(n int) []http.HandlerFunc { return engines(n, sends(textChunk, stopChunk, doneEvent)) }

	for _, policy := range []string{"least-loaded", "cache-aware"} { // which may ask a rank 3 times
		g := newRig(t, options{engines: serves(6), app: withRouting(policy)})
		fence(g.replicas[:5])
		a := g.post("/v1/chat/completions", streamBody)
		require.Equal(t, 200, a.status, a.body)
		assert.Equal(t, "5", a.header.Get("X-Dpserve-Rank"))
		assert.Equal(t, "1", a.header.Get("X-Dpserve-Attempts"))
		admits(g)
	}

	g := newRig(t, options{engines: serves(6)})
	fence(g.replicas[:5])
	w, err := g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{
		TokenIDs:  []uint32{1},
		RequestID: "r",
	})
	require.NoError(t, err)
	assert.Equal(t, "0/5", w.Worker)
	require.NoError(t, g.in.Free("demo", "r"))

	g = newRig(t, options{engines: serves(maxRefusals + 4)})
	fence(g.replicas)
	a := g.post("/v1/chat/completions", streamBody)
	assert.Equal(t, 503, a.status)
	assert.Equal(t, "no_ready_rank", a.code(t))
	assert.Equal(t, maxRefusals, admits(g))
}

// TestAfterTheFirstByte: an error event in the route's shape, no [DONE], no invented finish_reason, a cut
// connection.
func TestAfterTheFirstByte(t *testing.T) {
	cases := []struct {
		name   string
		engine http.HandlerFunc
	}{
		{"reset", cutAfter(roleChunk, textChunk)},
		{"end without finish_reason", sends(roleChunk, textChunk)},
		{"[DONE] without finish_reason", sends(roleChunk, textChunk, doneEvent)},
		{"error event 500", sends(roleChunk, textChunk,
			`{"error": {"message": "EngineCore encountered an issue", "code": 500}}`, doneEvent)},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			g := newRig(t, options{engines: []http.HandlerFunc{c.engine, c.engine}})
			a := g.post("/v1/chat/completions", streamBody)
			require.Error(t, a.err, "the connection must not end cleanly")
			assert.Equal(t, 200, a.status)
			rest, ok := strings.CutPrefix(a.body, events(roleChunk, textChunk))
			require.True(t, ok, a.body)
			assert.Contains(t, rest, `"code":"upstream_lost"`)
			assert.NotContains(t, a.body, "[DONE]")
			assert.NotContains(t, a.body, "EngineCore")
			assert.True(t, strings.HasSuffix(a.body, "\n\n"))
			eventually(t, func() bool { return g.replicas[0].inFlight()+g.replicas[1].inFlight() == 0 },
				"load given back")
			assert.Equal(t, 1, g.replicas[0].admits+g.replicas[1].admits)
			for _, r := range g.replicas {
				if r.admits > 0 {
					assert.True(t, r.lastDone(t).Charge)
				}
			}
		})
	}
}

// RP26: an error event, and an answer that somebody has aborted, reach the client as the engine wrote them,
// streamed or not, and count against no rank.
func TestTheEnginesOwnWordsPass(t *testing.T) {
	const boom = `{"error": {"message": "boom", "code": 500}}`
	const bad = `{"error": {"message": "m", "type": "BadRequestError", "code": 400}}`
	aborted := strings.Replace(wholeAnswer, `"stop"`, `"abort"`, 1)
	for name, c := range map[string]struct {
		engine      http.HandlerFunc
		body        string
		want        string
		outcome     msg.Outcome
		checkHealth bool
	}{
		"error event": {
			sends(roleChunk, textChunk, boom, doneEvent), streamBody,
			events(roleChunk, textChunk, boom, doneEvent), msg.FailedOutcome, true,
		},
		"error event below 500": {
			sends(textChunk, bad, doneEvent), streamBody, events(textChunk, bad, doneEvent),
			msg.FailedOutcome, true,
		},
		"error event without code": {
			sends(textChunk, `{"error": "boom"}`), streamBody, events(textChunk, `{"error": "boom"}`),
			msg.FailedOutcome, true,
		},
		"abort after content": {
			sends(roleChunk, textChunk, abortChunk, doneEvent), streamBody,
			events(roleChunk, textChunk, abortChunk, doneEvent), msg.OK, false,
		},
		"abort": {
			sends(roleChunk, abortChunk, doneEvent), streamBody, events(roleChunk, abortChunk, doneEvent),
			msg.OK, false,
		},
		"abort of a whole answer": {replies(200, aborted), chatBody, aborted, msg.OK, false},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, options{engines: []http.HandlerFunc{c.engine, c.engine}})
			a := g.post("/v1/chat/completions", c.body)
			require.NoError(t, a.err)
			assert.Equal(t, 200, a.status)
			assert.Equal(t, c.want, a.body)
			assert.Equal(t, 1, g.replicas[0].admits+g.replicas[1].admits)
			for _, r := range g.replicas {
				if r.admits > 0 {
					d := r.lastDone(t)
					assert.Equal(t, []any{c.outcome, false, c.checkHealth},
						[]any{d.Outcome, d.Charge, d.CheckHealth})
				}
			}
		})
	}
}

// RP26: its engine gives up all of its requests.
func TestAnAbortOfADrainingRankIsAskedAgain(t *testing.T) {
	var g *rig
	drains := func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		g.replicas[0].say(false, false, "draining")
		sse(w, roleChunk, abortChunk, doneEvent)
	}
	g = newRig(t, options{engines: []http.HandlerFunc{drains, sends(textChunk, stopChunk, doneEvent)}})
	for g.replicas[0].granted() == 0 {
		a := g.post("/v1/chat/completions", streamBody)
		assert.Equal(t, events(textChunk, stopChunk, doneEvent), a.body)
	}
}

// TestFamilyOpenAIEndsAsItLikes: of an engine of family openai only the API is known, so a clean end is a
// complete answer; a broken one is not.
func TestFamilyOpenAIEndsAsItLikes(t *testing.T) {
	cases := []struct {
		name   string
		engine http.HandlerFunc
		whole  bool
	}{
		{"[DONE] without finish_reason", sends(textChunk, textChunk, doneEvent), true},
		{"end without [DONE] and finish_reason", sends(textChunk, textChunk), true},
		{"one choice of two", sends(textChunk, stopChunk, doneEvent), true},
		{"reset", cutAfter(textChunk, textChunk), false},
		{"nothing but [DONE]", sends(doneEvent), false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			g := newRig(t, options{
				engines: []http.HandlerFunc{c.engine},
				app:     func(a *app.Application) { a.Engine.Family = app.FamilyOpenAI },
			})
			a := g.post("/v1/chat/completions", strings.Replace(streamBody, "{", `{"n":2,`, 1))
			assert.Equal(t, c.whole, a.err == nil && a.status == 200, a)
			assert.Equal(t, c.whole, g.replicas[0].lastDone(t).Outcome == msg.OK)
			assert.Equal(t, !c.whole, g.replicas[0].lastDone(t).Charge)
		})
	}
}

func TestDrainedRankSaysSo(t *testing.T) {
	release := make(chan struct{})
	g := newRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		sse(w, textChunk)
		<-release
		panic(http.ErrAbortHandler)
	}}})
	got := make(chan answer, 1)
	go func() { got <- g.postCtx(t.Context(), "/v1/chat/completions", streamBody) }()
	eventually(t, func() bool { return g.replicas[0].inFlight() == 1 }, "in flight")
	g.replicas[0].say(false, false, "draining")
	close(release)
	a := <-got
	require.Error(t, a.err)
	assert.Contains(t, a.body, `"code":"drained"`)
}

func TestToldFencedIsTriedAgainAtOnce(t *testing.T) {
	var h hangingEngine
	g := newRig(t, options{engines: []http.HandlerFunc{h.sends(), sends(textChunk, stopChunk, doneEvent)}})
	var got [2]answer
	done := make(chan int, 2)
	for i := range got {
		go func() {
			got[i] = g.postCtx(t.Context(), "/v1/chat/completions", streamBody)
			done <- i
		}()
	}
	eventually(t, func() bool { return h.came.Load() == 1 }, "one hangs")
	g.replicas[0].say(false, true, "process exited")
	for range got {
		a := got[<-done]
		require.NoError(t, a.err)
		assert.Equal(t, 200, a.status, a.body)
		assert.Equal(t, "1", a.header.Get("X-Dpserve-Rank"))
	}
	eventually(t, func() bool { return h.left.Load() == 1 }, "the engine's request is closed")
}

// requireBytes compares byte for byte: equal JSON is not enough.
func requireBytes(t *testing.T, want, got string) {
	t.Helper()
	require.Equal(t, []byte(want), []byte(got), "got %s", got)
}
