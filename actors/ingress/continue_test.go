package ingress

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// prose is an engine that writes one text: from its beginning, or from where the text in a request ends.
type prose struct {
	stops int  // dies behind so many bytes of the text; 0: it does not
	deaf  bool // does not know continue_final_message
	calls atomic.Int32
	asked atomic.Int32 // how long its prompt is
	says  func(w http.ResponseWriter)
}

const proseText = "It was a bright cold day in April, and all the clocks \"were\" striking\n\nthirteen. "

// then is an engine that has died after its first stream, and is next from then on.
func (p *prose) then(next *prose) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if p.calls.Load() == 0 {
			p.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(w, r)
	}
}

func (p *prose) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	raw, _ := io.ReadAll(r.Body)
	var body struct {
		Messages []struct{ Role, Content string }
		Prompt   string
		Max      int  `json:"max_tokens"`
		Goes     bool `json:"continue_final_message"`
		Stream   bool
	}
	_ = json.Unmarshal(raw, &body)
	if !body.Stream {
		p.asked.Add(1)
		n := 9
		if body.Goes && !p.deaf {
			n = 7
		}
		replies(http.StatusOK, fmt.Sprintf(`{"usage":{"prompt_tokens":%d}}`, n))(w, r)
		return
	}
	call := p.calls.Add(1)
	if p.says != nil {
		p.says(w)
		return
	}
	isChat := len(body.Messages) > 0
	had := strings.TrimPrefix(body.Prompt, "hi")
	if isChat && body.Goes {
		had = body.Messages[len(body.Messages)-1].Content
	}
	chunk := func(delta, text, finish string) string {
		part := fmt.Sprintf(`"text":%q`, text)
		if isChat {
			part = `"delta":{` + delta + `}`
		}
		return fmt.Sprintf(`{"id":"id-%d-%d","created":%d,"choices":[{"index":0,%s,"finish_reason":%s}]}`,
			p.stops, call, p.stops, part, finish)
	}
	if isChat {
		sse(w, chunk(`"role":"assistant","content":""`, "", "null"))
	}
	out, prompt := 0, 5+len(strings.SplitAfter(had, " "))-1
	for _, word := range strings.SplitAfter(strings.TrimPrefix(proseText, had), " ") {
		had += word
		if p.stops > 0 && len(had) > p.stops {
			panic(http.ErrAbortHandler)
		}
		sse(w, chunk(fmt.Sprintf(`"content":%q`, word), word, "null"))
		if out++; out == body.Max {
			break
		}
	}
	sse(w, chunk("", "", `"stop"`), fmt.Sprintf(`{"choices":[],"usage":{"prompt_tokens":%d,`+
		`"completion_tokens":%d,"total_tokens":%d}}`, prompt, out, prompt+out), doneEvent)
}

// streamText is what a client has of a stream: its text, its ids and how it ended.
type streamText struct {
	text, finish, failed string
	ids, roles           int
	done                 bool
	usage                int
}

func readStream(t *testing.T, body string) (s streamText) {
	t.Helper()
	ids := map[string]bool{}
	for _, line := range strings.Split(body, "\n") {
		data, ok := strings.CutPrefix(line, "data: ")
		if !ok || data == doneEvent {
			s.done = s.done || ok
			continue
		}
		var chunk struct {
			ID      string
			Created int
			Choices []struct {
				Text   string
				Finish string `json:"finish_reason"`
				Delta  struct{ Role, Content string }
			}
			Error *struct{ Code string }
			Usage *struct{}
		}
		require.NoError(t, json.Unmarshal([]byte(data), &chunk), data)
		if chunk.Error != nil {
			s.failed = chunk.Error.Code
			continue
		}
		if chunk.ID != "" {
			ids[chunk.ID] = true
		}
		for _, c := range chunk.Choices {
			s.text += c.Text + c.Delta.Content
			s.finish += c.Finish
			if c.Delta.Role != "" {
				s.roles++
			}
		}
		if chunk.Usage != nil {
			s.usage++
		}
	}
	s.ids = len(ids)
	return s
}

const completionBody = `{"model":"demo","stream":true,"prompt":"hi","max_tokens":99}`

// proseRig is a rig of such engines; requests go to them in turn.
func proseRig(t *testing.T, o options, engines ...*prose) *rig {
	t.Helper()
	for _, e := range engines {
		o.engines = append(o.engines, e.ServeHTTP)
	}
	if o.app == nil {
		o.app = func(a *app.Application) { a.Retries.ContinueStreams = true }
	}
	return newRig(t, o)
}

// pathOf is the path for a body.
func pathOf(body string) string {
	if strings.Contains(body, `"prompt"`) {
		return "/v1/completions"
	}
	return "/v1/chat/completions"
}

// FS5: a stream whose rank dies after its first byte goes on from another rank. The client gets one stream:
// one id, one role, one finish_reason, one usage, and the text of an engine that lives.
func TestStreamsGoOn(t *testing.T) {
	for _, far := range []bool{false, true} {
		for _, body := range []string{streamBody, completionBody} {
			for stops := 4; stops < len(proseText); stops += 9 {
				dies := &prose{stops: stops}
				g := proseRig(t, options{far: far}, dies, &prose{})
				var streams []streamText
				for len(streams) < 2 || dies.calls.Load() == 0 {
					streams = append(streams, readStream(t, g.post(pathOf(body), body).body))
				}
				for _, got := range streams {
					want := streamText{
						text: proseText, finish: "stop", ids: 1, roles: 1, done: true, usage: 1,
					}
					if body == completionBody {
						want.roles = 0
					}
					assert.Equal(t, want, got, "%v %s %d", far, body, stops)
				}
				assert.Contains(t, g.logs.String(), "goes on from another rank")
			}
		}
	}
}

// FS5: what happens to a stream that does not go on: it ends with its error event, as one whose application
// does not want it.
func TestStreamsThatEnd(t *testing.T) {
	events := func(list ...string) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) { sse(w, list...) }
	}
	whole := func(status int, body string) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
		}
	}
	role := strings.Replace(roleChunk, "assistant", "user", 1)
	tool := `{"id":"c","choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]},"finish_reason":null}]}`
	anew := strings.Replace(textChunk, `"a"`, `"`+proseText[:35]+`"`, 1)
	for name, c := range map[string]struct {
		second  *prose
		members string
		off     bool
		calls   int32 // of the second engine
	}{
		"it is off": {second: &prose{}, off: true},
		"tools":     {second: &prose{}, members: `"tools":[{"type":"function"}],`},
		"penalties": {second: &prose{}, members: `"presence_penalty":1,`},
		"deaf":      {second: &prose{deaf: true}}, // does not know the fields
		"dies too":  {second: &prose{stops: 60}, calls: 1},
		"refuses":   {second: &prose{says: whole(400, `{"error":{"message":"no"}}`)}, calls: 1},
		"role":      {second: &prose{says: events(role, textChunk, stopChunk, doneEvent)}, calls: 1},
		"tool call": {second: &prose{says: events(tool, stopChunk, doneEvent)}, calls: 1},
		"anew":      {second: &prose{says: events(anew, stopChunk, doneEvent)}, calls: 1},
		"no stream": {second: &prose{says: whole(200, wholeAnswer)}, calls: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dies := &prose{stops: 40}
			g := proseRig(t, options{app: func(a *app.Application) {
				a.Retries.ContinueStreams = !c.off
			}}, dies, c.second)
			body := strings.Replace(streamBody, "{", "{"+c.members, 1)
			var got streamText
			for before := int32(0); dies.calls.Load() == 0; {
				before = c.second.calls.Load()
				got = readStream(t, g.post("/v1/chat/completions", body).body)
				assert.Contains(t, []int32{before + 1, before + c.calls}, c.second.calls.Load())
			}
			assert.Equal(t, "upstream_lost", got.failed)
			assert.False(t, got.done)
			assert.Empty(t, got.finish)
			assert.True(t, strings.HasPrefix(proseText, got.text), got.text)
		})
	}
}

// FS5: a stream that breaks while no other rank is ready waits for one, as long as a request may, and goes
// on: a chat, too, whose engines were not asked before whether they go on. The client hears that it waits.
func TestStreamsWaitForARank(t *testing.T) {
	lost := func(g *rig) {
		g.replicas[0].say(false, true, "process_exit")
		g.phase("demo/0/0", state.Starting, 2)
	}
	for name, c := range map[string]struct {
		happens  func(g *rig) // after the break
		headers  []string
		after    time.Duration
		comments int
		fails    string // "": the stream goes on
	}{
		"it comes back": {happens: func(g *rig) {
			time.Sleep(time.Second)
			lost(g)
			time.Sleep(39 * time.Second)
			g.replicas[0].reborn()
			g.phase("demo/0/0", state.Ready, 2)
		}, after: 40 * time.Second, comments: 2},
		"it lives":     {after: deadEngineWait, fails: "upstream_lost"},
		"none in time": {happens: lost, after: 100 * time.Second, comments: 6, fails: "upstream_lost"},
		"deadline": {
			happens: lost, headers: []string{"x-dpserve-timeout-ms", "5000"}, after: 5 * time.Second,
			fails: "deadline_exceeded",
		},
	} {
		for _, body := range []string{streamBody, completionBody} {
			t.Run(name+pathOf(body), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					dies, next := &prose{stops: 40}, &prose{}
					g := keepaliveRig(t, options{
						engines: []http.HandlerFunc{dies.then(next)},
						app:     func(a *app.Application) { a.Retries.ContinueStreams = true },
					})
					began := time.Now()
					answers := make(chan answer)
					go func() { answers <- g.post(pathOf(body), body, c.headers...) }()
					synctest.Wait()
					if c.happens != nil {
						c.happens(g)
					}
					a := <-answers
					late := time.Since(began) - c.after // a phase takes a little
					assert.LessOrEqual(t, late.Abs(), 5*time.Millisecond)
					assert.Equal(t, c.comments, strings.Count(a.body, sign), a.body)
					got := readStream(t, a.body)
					assert.Equal(t, c.fails, got.failed)
					if c.fails == "" {
						assert.Equal(t, proseText, got.text)
						assert.True(t, got.done)
					}
				})
			})
		}
	}
}

// FS5: a client that leaves while its stream waits for another rank leaves nothing behind.
func TestClientLeavesInTheSeam(t *testing.T) {
	t.Parallel()
	came, ends := make(chan struct{}), make(chan struct{})
	second := &prose{says: func(http.ResponseWriter) {
		came <- struct{}{}
		<-ends
	}}
	dies := &prose{stops: 40}
	g := proseRig(t, options{}, dies, second)
	for dies.calls.Load() == 0 {
		ctx, leave := context.WithCancel(t.Context())
		go func() {
			<-came
			leave()
		}()
		_ = g.postCtx(ctx, "/v1/chat/completions", streamBody)
	}
	close(ends)
}

// BenchmarkKeptChunk is CPU per chunk, of engine, ingress and client, of 64 paced streams whose text is
// kept so that they can go on from another rank, and of streams whose text is not.
func BenchmarkKeptChunk(b *testing.B) {
	const chunks, streams, rounds = 100, 64, 6
	engine := benchEngine(b, chunks, 10*time.Millisecond)
	var targets [2]string
	for i := range targets {
		targets[i] = newRig(b, options{
			urls: []string{engine}, max: 1024, level: slog.LevelError,
			app: func(a *app.Application) { a.Retries.ContinueStreams = i > 0 },
		}).url
		load(b, targets[i], streamBody, streams, streams)
	}
	b.ResetTimer()
	var total [2]time.Duration
	for range rounds {
		for i, t := range targets {
			total[i] += load(b, t, streamBody, max(b.N, streams), streams)
		}
	}
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 / (rounds * chunks) }
	b.ReportMetric(us(total[1]), "us-kept")
	b.ReportMetric(us(total[0]), "us-not-kept")
	b.ReportMetric(us(total[1])/us(total[0]), "ratio")
	b.ReportMetric(0, "ns/op") // says nothing here
}
