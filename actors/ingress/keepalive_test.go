package ingress

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/test/memnet"
	"github.com/dpserve/dpserve/test/pairengine"
)

// sign is the comment of a stream whose client waits.
const sign = ": keepalive\n\n"

const pings = "event: ping\ndata: {\"type\": \"ping\"}\n\n"

// silent is an engine that is silent for a while before it answers.
func silent(silence time.Duration, then http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		select {
		case <-time.After(silence):
			then(w, r)
		case <-r.Context().Done():
		}
	}
}

// late is an engine that writes a stream as it stands, in the end.
func late(text string) http.HandlerFunc {
	return silent(longWait, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, text)
	})
}

var keepaliveTimes = app.Timeouts{QueueS: 100, FirstTokenS: 100, BetweenTokensS: 30, KeepaliveS: 15}

// keepaliveRig is a rig in fake time whose clients hear something every 15 s.
func keepaliveRig(t *testing.T, o options) *rig {
	t.Helper()
	o.network = &memnet.Network{}
	change := o.app
	o.app = func(a *app.Application) {
		a.Timeouts = keepaliveTimes
		if change != nil {
			change(a)
		}
	}
	return newRig(t, o)
}

const (
	longWait      = 40 * time.Second // two times 15 s, and some
	responsesBody = `{"model":"demo","stream":true,"input":"hi"}`
	generateBody  = `{"model":"demo","stream":true,"text":"hi"}`
)

// RP60: a client that waits for the first token of its stream hears something every 15 s, in the way of its
// route, and then gets the engine's bytes. What begins before, or is no stream, is as without.
func TestClientsOfStreamsHearThatTheyWait(t *testing.T) {
	const chat, messages = "/v1/chat/completions", "/v1/messages"
	tokens, answer := sends(textChunk, stopChunk, doneEvent), events(textChunk, stopChunk, doneEvent)
	begun, twice, whole := events(roleChunk, textChunk), sign+sign, replies(200, wholeAnswer)
	anthropic := "event: message_start\ndata: {\"type\":\"message_start\"}\n\n" +
		"event: content_block_delta\ndata: {\"type\":\"content_block_delta\"}\n\n" +
		"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
	responses := "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\"}\n\n" +
		"event: response.completed\ndata: {\"type\":\"response.completed\"}\n\n"
	generated := "data: {\"text\":\"a\"}\n\ndata: [DONE]\n\n"
	for name, c := range map[string]struct {
		path, body string
		engine     http.HandlerFunc
		off        bool
		want       string
	}{
		"a long prompt":     {chat, streamBody, late(answer), false, twice + answer},
		"completions":       {"/v1/completions", completionBody, late(answer), false, twice + answer},
		"messages":          {messages, streamBody, late(anthropic), false, pings + pings + anthropic},
		"responses":         {"/v1/responses", responsesBody, late(responses), false, twice + responses},
		"generate":          {"/generate", generateBody, late(generated), false, twice + generated},
		"a short prompt":    {chat, streamBody, silent(14*time.Second, tokens), false, answer},
		"no stream":         {chat, chatBody, silent(longWait, whole), false, wholeAnswer},
		"it is off":         {chat, streamBody, late(answer), true, answer},
		"a silent stream":   {chat, streamBody, pauses(longWait), false, begun + twice + answer},
		"one with pings":    {chat, streamBody, pingsAndAnswers, false, ": ping\n\n: ping\n\n" + answer},
		"a slow whole body": {chat, streamBody, slowlyReplies, false, wholeAnswer},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				o := options{engines: []http.HandlerFunc{c.engine}}
				o.app = func(a *app.Application) {
					if c.off {
						a.Timeouts.KeepaliveS = 0
					}
				}
				g := keepaliveRig(t, o)
				a := g.post(c.path, c.body)
				require.NoError(t, a.err)
				assert.Equal(t, http.StatusOK, a.status)
				assert.Equal(t, c.want, a.body)
				assert.Equal(t, strings.Contains(c.want, "data: "),
					strings.HasPrefix(a.header.Get("Content-Type"), "text/event-stream"))
				assert.Equal(t, "demo", a.header.Get("X-Dpserve-App"))
				assert.NotEmpty(t, a.header.Get("X-Request-Id"))
			})
		})
	}
}

// pingsAndAnswers is an engine that sends comments of its own before its first token.
func pingsAndAnswers(w http.ResponseWriter, r *http.Request) {
	drain(r)
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, ": ping\n\n: ping\n\n")
	sse(w, textChunk, stopChunk, doneEvent)
}

// slowlyReplies is an engine that answers with JSON, and takes its time for the body.
func slowlyReplies(w http.ResponseWriter, r *http.Request) {
	drain(r)
	w.Header().Set("Content-Type", "application/json")
	w.(http.Flusher).Flush()
	time.Sleep(longWait)
	_, _ = io.WriteString(w, wholeAnswer)
}

// RP61: what fails after a client has heard something is an error event in the shape of its route, and the
// connection is cut. Metrics and logs have the status that the answer would have had.
func TestLateFailuresAreErrorEvents(t *testing.T) {
	const chat = "/v1/chat/completions"
	refuses := replies(400, `{"error":{"message":"too long","type":"BadRequestError","code":400}}`)
	own := `{"message":"every rank that was asked failed; try again","type":"server_error"`
	anthropic := `{"type":"error","error":{"type":"invalid_request_error","message":"too long","code":"400"}}`
	openAI := `{"message":"too long","type":"BadRequestError","param":null,"code":"400"}`
	for name, c := range map[string]struct {
		path, body string
		engine     http.HandlerFunc
		want       string
		code       int
	}{
		"the engine's words":      {chat, streamBody, refuses, `data: {"error":` + openAI, 400},
		"messages":                {"/v1/messages", streamBody, refuses, "error\ndata: " + anthropic, 400},
		"responses":               {"/v1/responses", responsesBody, refuses, `"error":` + openAI, 400},
		"generate":                {"/generate", generateBody, refuses, `"too long","code":"400"}`, 400},
		"an error as first event": {chat, streamBody, sends(busyError), `"code":"503"}}`, 503},
		"no words":                {chat, streamBody, replies(422, ""), `"Unprocessable Entity"`, 422},
		"no engine answers":       {chat, streamBody, resets, own, 502},
		"no stream after all":     {chat, streamBody, replies(200, wholeAnswer), own, 502},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g := keepaliveRig(t, options{engines: []http.HandlerFunc{silent(longWait, c.engine)}})
				a := g.post(c.path, c.body)
				require.Error(t, a.err, "the connection is cut")
				assert.Equal(t, http.StatusOK, a.status)
				rest, isOpen := strings.CutPrefix(strings.ReplaceAll(a.body, pings, sign), sign+sign)
				assert.True(t, isOpen, a.body)
				assert.Contains(t, rest, c.want)
				assert.Equal(t, 1, strings.Count(rest, "data: "), "one event")
				assert.Equal(t, strings.HasPrefix(c.path, "/v1/m"), strings.Contains(a.body, pings))
				synctest.Wait()
				assert.Contains(t, g.page(), fmt.Sprintf(`code="%d"`, c.code))
				assert.NotContains(t, g.page(), `code="200"`)
				assert.Contains(t, g.logs.String(), fmt.Sprintf("code=%d", c.code))
			})
		})
	}
}

// RP60: requests that wait for a rank with room, and those whose rank fails them, hear that too: a comment
// ends no retry.
func TestAClientThatHasHeardACommentIsRetried(t *testing.T) {
	tokens, whole := sends(textChunk, stopChunk, doneEvent), events(textChunk, stopChunk, doneEvent)
	for name, c := range map[string]struct {
		fails bool    // the first engine that is asked
		queue float64 // queue_s, behind another request; 0: there is none
		want  string
	}{
		"another rank":       {true, 0, sign + sign + sign + whole},
		"a queue":            {false, 100, strings.Repeat(sign, 5) + whole},
		"a queue that is up": {false, 35, sign + sign + `data: {"error":{"message":"no rank had room`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var asked atomic.Int32
				engine := func(w http.ResponseWriter, r *http.Request) {
					if asked.Add(1) == 1 && c.fails {
						silent(20*time.Second, resets)(w, r)
						return
					}
					silent(longWait, tokens)(w, r)
				}
				o := options{engines: []http.HandlerFunc{engine}, max: 1}
				if c.fails {
					o.engines = append(o.engines, engine)
				}
				o.app = func(a *app.Application) { a.Timeouts.QueueS = c.queue }
				g := keepaliveRig(t, o)
				var before sync.WaitGroup
				if c.queue > 0 {
					before.Go(func() { g.post("/v1/chat/completions", streamBody) })
					time.Sleep(time.Second)
				}
				a := g.post("/v1/chat/completions", streamBody)
				assert.Contains(t, a.body, c.want)
				assert.Equal(t, strings.HasSuffix(c.want, whole), a.err == nil, "%v", a.err)
				before.Wait()
			})
		})
	}
}

// RP60: a client that has heard something and leaves, in the queue or at an engine, leaves nothing behind.
func TestAClientThatLeavesWhileItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h hangingEngine
		g := keepaliveRig(t, options{engines: []http.HandlerFunc{h.sends()}, max: 1})
		for _, patience := range []time.Duration{longWait + time.Second, longWait} { // the second one queues
			ctx, leave := context.WithTimeout(t.Context(), patience)
			defer leave()
			go g.postCtx(ctx, "/v1/chat/completions", streamBody)
			synctest.Wait()
		}
		time.Sleep(longWait + 2*time.Second)
		synctest.Wait()
		assert.EqualValues(t, 1, h.came.Load())
		assert.EqualValues(t, 1, h.left.Load())
		assert.Contains(t, g.logs.String(), "code=499")
		assert.Equal(t, dispatch.ClientGone.String(), g.replicas[0].lastDone(t).Cause)
	})
}

// RP60: a split request hears it during both of its legs.
func TestClientsOfSplitRequestsHearThatTheyWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newPairRig(t, options{
			prefills: 1, decodes: 1, network: &memnet.Network{},
			change: func(p, d *app.Application) {
				for _, a := range []*app.Application{p, d} {
					a.Timeouts = keepaliveTimes
				}
			},
		})
		g.p[0].Do(func(l *pairengine.Leg) bool { return l.StallUntil(after(longWait)) })
		g.d[0].Do(func(l *pairengine.Leg) bool { return l.StallUntil(after(10 * time.Second)) })
		a := g.post("/v1/chat/completions", streamBody)
		require.NoError(t, a.err)
		assert.True(t, strings.HasPrefix(a.body, sign+sign+sign+"data: "), a.body)
		assert.True(t, strings.HasSuffix(a.body, events(doneEvent)), a.body)
	})
}

// RP60, FS5: a stream that waits for a rank to go on at hears it as well, and is one stream still.
func TestClientsHearInTheSeam(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dies, second := &prose{stops: 40}, &prose{}
		g := keepaliveRig(t, options{
			engines: []http.HandlerFunc{dies.ServeHTTP, func(w http.ResponseWriter, r *http.Request) {
				time.Sleep(longWait)
				second.ServeHTTP(w, r)
			}},
			app: func(a *app.Application) { a.Retries.ContinueStreams = true },
		})
		a := g.post("/v1/completions", completionBody)
		for dies.calls.Load() == 0 {
			a = g.post("/v1/completions", completionBody)
		}
		require.NoError(t, a.err)
		assert.Equal(t, 2, strings.Count(a.body, sign), a.body)
		got := readStream(t, a.body)
		assert.Equal(t, streamText{text: proseText, finish: "stop", ids: 1, done: true, usage: 1}, got)
	})
}
