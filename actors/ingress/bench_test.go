package ingress

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// typicalChunk is what an engine sends per token.
const typicalChunk = `data: {"id":"chatcmpl-req-fixed-1","object":"chat.completion.chunk",` +
	`"created":1795230441,"model":"tiny","choices":[{"index":0,"delta":{"content":" over"},` +
	`"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n"

// chunks is an engine's body of n chunks, one per read.
type chunks struct{ left int }

func (c *chunks) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, io.EOF
	}
	c.left--
	return copy(p, typicalChunk), nil
}

func (c *chunks) Close() error { return nil }

// sinkWriter is a client that reads everything.
type sinkWriter struct {
	header http.Header
	n      int
}

func (w *sinkWriter) Header() http.Header         { return w.header }
func (w *sinkWriter) Write(b []byte) (int, error) { w.n += len(b); return len(b), nil }
func (w *sinkWriter) WriteHeader(int)             {}
func (w *sinkWriter) FlushError() error           { return nil }

// discardWriter is a mailbox that drops every message.
type discardWriter struct{}

func (discardWriter) TrySend(any) error        { return nil }
func (discardWriter) Send(any)                 {}
func (discardWriter) Stopped() <-chan struct{} { return nil }

// relayRig is the relay loop alone: no sockets, no net/http.
func relayRig(tb testing.TB) (send func(n int)) {
	tb.Helper()
	in := bareIngress()
	ar := newAppRouter(in, "demo")
	ar.metrics.Store(telemetry.New().App("demo", "random"))
	req := newRequest(in)
	spec := &appRevision{app: demoApp(), firstToken: time.Hour, between: time.Hour, attempts: 3}
	hr, err := http.NewRequestWithContext(context.Background(), http.MethodPost, "/", nil)
	require.NoError(tb, err)
	w := &sinkWriter{header: http.Header{}}
	req.w, req.r, req.rc, req.flush, req.route = w, hr, http.NewResponseController(w), w.FlushError,
		openai.Chat
	req.app, req.scan.Choices = &appRoute{appRevision: spec, router: ar}, 1
	body := &chunks{}
	resp := &http.Response{StatusCode: 200, Header: http.Header{}, Body: body}
	rk := &rank{Rank: &rankleg.Rank{Mailbox: discardWriter{}}}
	ctx, cancel := context.WithCancelCause(context.Background())
	tb.Cleanup(func() { cancel(nil) })
	return func(n int) {
		req.plan.Begin(&dispatch.Config{IsAlone: true, Attempts: 3, Refusals: 16}, false)
		for _, ev := range []dispatch.Event{{Kind: dispatch.EvStart}, {Kind: dispatch.EvPicked, Number: 1}} {
			req.plan.Step(dispatch.Instant{}, &ev)
		}
		req.number = 2
		req.attempt = attempt{rank: rk, start: time.Now(), cancel: cancel}
		req.timer.attach(cancel)
		req.status, req.cutConn, body.left = 0, false, n
		res := relay{req}.relayStream(ctx, resp)
		req.timer.detach()
		if res.cause != dispatch.UpstreamLost { // the chunks never finish
			tb.Fatal(res.cause, res.err)
		}
	}
}

func bareIngress() *Ingress {
	in := &Ingress{
		node: "n1", timers: Timers{}.withDefaults(), limits: Limits{}.withDefaults(),
		log: slog.New(slog.DiscardHandler), clockBase: time.Now(),
	}
	in.requestPool.New = func() any { return newRequest(in) }
	return in
}

// FS11: a stream of 3,000 chunks allocates no more than one of 1,000.
func TestRelayAllocatesNothingPerChunk(t *testing.T) {
	relay := relayRig(t)
	relay(10)
	short := testing.AllocsPerRun(10, func() { relay(1000) })
	long := testing.AllocsPerRun(10, func() { relay(3000) })
	assert.InDelta(t, short, long, 4, "only a Progress message now and then may differ")
}

// counter is a mailbox that counts messages.
type counter struct {
	discardWriter
	firsts, progress int
}

func (m *counter) Send(v any) {
	switch v.(type) {
	case *msg.FirstToken:
		m.firsts++
	case *msg.Progress:
		m.progress++
	}
}

// TestReports: a rank gets FirstToken once and Progress at intervals; of a stream that has ended it gets only
// Done.
func TestReports(t *testing.T) {
	req := newRequest(bareIngress())
	box := &counter{}
	now := time.Now()
	req.attempt = attempt{rank: &rank{Rank: &rankleg.Rank{Mailbox: box}}}
	relay{req}.reportProgress(now)
	assert.Equal(t, counter{}, *box, "no token yet")
	relay{req}.countOutput(1, now)
	relay{req}.reportProgress(now)
	relay{req}.countOutput(1, now)
	relay{req}.reportProgress(now.Add(progressEvery - 1))
	assert.Equal(t, counter{firsts: 1}, *box)
	relay{req}.reportProgress(now.Add(progressEvery))
	relay{req}.reportProgress(now.Add(progressEvery + 1))
	assert.Equal(t, counter{firsts: 1, progress: 1}, *box)
}

func BenchmarkRelayChunk(b *testing.B) {
	relay := relayRig(b)
	b.ReportAllocs()
	b.SetBytes(int64(len(typicalChunk)))
	b.ResetTimer()
	relay(b.N)
}

// cpu is the process's CPU time.
func cpu() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// benchEngine answers like an engine on a raw connection, so that the engine's own cost is small: whole
// answers, or n paced chunks.
func benchEngine(b *testing.B, paced int, pace time.Duration) string {
	b.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	require.NoError(b, err)
	srv := &http.Server{
		ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			drain(r)
			if paced == 0 {
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, wholeAnswer)
				return
			}
			w.Header().Set("Content-Type", "text/event-stream")
			f := w.(http.Flusher)
			tick := time.NewTicker(pace)
			defer tick.Stop()
			for range paced {
				<-tick.C
				_, _ = io.WriteString(w, typicalChunk)
				f.Flush()
			}
			sse(w, stopChunk, doneEvent)
		}),
	}
	go func() { _ = srv.Serve(l) }()
	b.Cleanup(func() { _ = srv.Close() })
	return "http://" + l.Addr().String()
}

// plainProxy is httputil.ReverseProxy that reads the body whole, for comparison.
func plainProxy(b *testing.B, engine string) string {
	b.Helper()
	target, err := url.Parse(engine)
	require.NoError(b, err)
	p := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		FlushInterval: -1,
		Transport:     &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true},
	}
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		p.ServeHTTP(w, r)
	})
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	require.NoError(b, err)
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: h}
	go func() { _ = srv.Serve(l) }()
	b.Cleanup(func() { _ = srv.Close() })
	return "http://" + l.Addr().String()
}

// benchIngress is an ingress in front of one engine, with a fake replica; far: on another node.
func benchIngress(b *testing.B, engine string, far bool) string {
	b.Helper()
	return newRig(b, options{
		urls: []string{engine}, max: 1024, far: far, app: withRouting("power-of-two"), level: slog.LevelError,
	}).url
}

const chatPath = "/v1/chat/completions"

// load sends n requests over c connections and gives the CPU of the whole process per request: engine, client
// and proxy.
func load(b *testing.B, target, body string, n, c int) time.Duration {
	b.Helper()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true}}
	defer client.CloseIdleConnections()
	jobs, errs := make(chan struct{}), make(chan error, c)
	before := cpu()
	for range c {
		go func() {
			for range jobs {
				if err := once(client, target, body); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range n {
		jobs <- struct{}{}
	}
	close(jobs)
	for range c {
		require.NoError(b, <-errs)
	}
	return (cpu() - before) / time.Duration(n)
}

func once(client *http.Client, target, body string) error {
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, target,
		strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// BenchmarkSmallRequest compares CPU per small request: direct, through the ingress, through a plain
// ReverseProxy, in one run. The proxies' own cost is the difference to direct.
func BenchmarkSmallRequest(b *testing.B) { compare(b, chatBody, 0, 0, 8, 1) }

// BenchmarkLargeRequest is the same with a body of 400 KB.
func BenchmarkLargeRequest(b *testing.B) {
	compare(b, `{"model":"demo","messages":[{"role":"user","content":"`+strings.Repeat(
		"a prompt. ", 40<<10)+`"}]}`, 0, 0, 4, 1)
}

// BenchmarkUnknownRoute compares the ingress's own CPU per request of an unknown route with that of a small
// chat, in one run (goal: a ratio of 1 at most).
func BenchmarkUnknownRoute(b *testing.B) {
	engine := benchEngine(b, 0, 0)
	ingress := benchIngress(b, engine, false)
	targets := []string{
		engine + "/invocations", ingress + "/invocations", engine + chatPath, ingress + chatPath,
	}
	var total [4]time.Duration
	const rounds, conc = 4, 8
	n := max(b.N/rounds, conc)
	for _, t := range targets {
		load(b, t, chatBody, n, conc) // warm
	}
	b.ResetTimer()
	for range rounds {
		for i, t := range targets {
			total[i] += load(b, t, chatBody, n, conc)
		}
	}
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 / rounds }
	other, chat := us(total[1]-total[0]), us(total[3]-total[2])
	b.ReportMetric(chat, "us-chat")
	b.ReportMetric(other, "us-unknown")
	b.ReportMetric(other/chat, "ratio")
	b.ReportMetric(0, "ns/op") // says nothing here
}

// BenchmarkPacedChunk is CPU per chunk: 64 streams, one chunk per 10 ms each.
func BenchmarkPacedChunk(b *testing.B) { compare(b, streamBody, 200, 10*time.Millisecond, 64, 200) }

func compare(b *testing.B, body string, paced int, pace time.Duration, conc, per int) {
	engine := benchEngine(b, paced, pace)
	targets := []string{engine, benchIngress(b, engine, false), plainProxy(b, engine)}
	var total [3]time.Duration
	n := max(b.N, conc) / 2
	for _, t := range targets {
		load(b, t+chatPath, body, min(n, conc), conc) // warm
	}
	rounds := 0
	b.ResetTimer()
	for range 2 {
		for i, t := range targets {
			total[i] += load(b, t+chatPath, body, max(n, conc), conc)
		}
		rounds++
	}
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 / float64(rounds*per) }
	own, plain := us(total[1]-total[0]), us(total[2]-total[0])
	b.ReportMetric(own, "us-ingress")
	b.ReportMetric(plain, "us-reverseproxy")
	b.ReportMetric(own/plain, "ratio")
	b.ReportMetric(us(total[0]), "us-direct")
}

// deadlineWriter is a sinkWriter of a connection that has deadlines.
type deadlineWriter struct{ sinkWriter }

func (*deadlineWriter) SetReadDeadline(time.Time) error { return nil }

// TestReadingABodyAllocatesNothing: neither a small one nor one that grows, once the pools are warm.
func TestReadingABodyAllocatesNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("under the race detector pools forget")
	}
	in := bareIngress()
	in.bodies.budget, in.bodies.most = 1<<30, 1<<30
	req := newRequest(in)
	req.rc = http.NewResponseController(&deadlineWriter{})
	for _, size := range []int{100, 400 << 10} {
		text := strings.NewReader(strings.Repeat("x", size))
		req.r = &http.Request{Body: io.NopCloser(text), ContentLength: int64(size)}
		req.bodySettled = true
		read := func() {
			_, _ = text.Seek(0, io.SeekStart)
			if req.readBody(in, nil, req.rc, nil) != nil || len(req.body.b) != size {
				panic("not read")
			}
			req.releaseBody()
		}
		read()
		assert.Less(t, testing.AllocsPerRun(200, read), 1.0, "%d bytes", size)
	}
}
