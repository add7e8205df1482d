package ingress

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// malformed are requests that a proxy in front may read in another way than a server behind it. Each one
// lacks only what follows its body.
func malformed() []string {
	const post, length = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n", "Content-Length: 4\r\n"
	var out []string
	add := func(heads ...string) {
		for _, head := range heads {
			out = append(out, post+head+"\r\n0\r\n\r\n")
		}
	}
	for _, coding := range []string{
		"chunked", "Chunked", "chunked ", "\tchunked", "identity, chunked", "gzip, chunked", "x",
		"chunked, chunked", "\vchunked", "chunked;a=b", `"chunked"`, "chunked, identity",
	} {
		te := "Transfer-Encoding: " + coding + "\r\n"
		add(length+te, te+length)
	}
	for _, coding := range []string{"x", "identity", "gzip, chunked", "chunked, identity", "\vchunked"} {
		add("Transfer-Encoding: " + coding + "\r\n")
	}
	add("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "Transfer-Encoding : chunked\r\n",
		"Transfer-Encoding\t: chunked\r\n", length+"Content-Length: 5\r\n", "Content-Length : 4\r\n")
	for _, n := range []string{
		"+5", "-1", "0x4", "4 4", "4.0", "1e1", "٤", "", "4\x00", "99999999999999999999", "4;", "'4'", "4,5",
	} {
		add("Content-Length: " + n + "\r\n")
	}
	add("A\x00: b\r\n", "A: \x00\r\n", "A b: c\r\n", ": b\r\n", "A : b\r\n", "\x01: b\r\n", "A\r: b\r\n",
		"A: b\rc\r\n", "nothing\r\n", "A: b\r\n c\r\n", "A: b\r\n\tc\r\n", "Host: y\r\n")
	for _, line := range []string{
		"POST  /v1/completions HTTP/1.1", "POST /v1/completions HTTP/1.1 x", "POST /v1/completions HTTP/2.0",
		"POST /v1/completions HTTP/9.9", "POST /v1/completions", "P\x00ST /v1/completions HTTP/1.1",
		"POST /\x00 HTTP/1.1",
	} {
		out = append(out, line+"\r\nHost: x\r\n"+length+"\r\nabcd")
	}
	out = append(out, "POST /v1/completions HTTP/1.1\r\n"+length+"\r\nabcd",
		"POST /v1/completions HTTP/1.1\r\nHost: a b\r\n"+length+"\r\nabcd")
	for _, chunk := range []string{
		"+5\r\nhello\r\n", "0x5\r\nhello\r\n", "-1\r\nhello\r\n", "5;\nhello\r\n", "g\r\nhello\r\n",
		"5\nhello\r\n", "FFFFFFFFFFFFFFFFF\r\nhello\r\n", "5\r\nhelloX\r\n", "5\r\nhello\n",
	} {
		out = append(out, post+"Transfer-Encoding: chunked\r\n\r\n"+chunk+"0\r\n\r\n")
	}
	return out
}

// SP3: of more than 60 requests whose end is in doubt, no engine gets a byte: each is answered once with an
// error, its connection is closed, and what follows on it is not served as a request.
func TestRequestsWithoutAClearEndAreRefused(t *testing.T) {
	var asked atomic.Int32
	g := newRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		replies(200, wholeAnswer)(w, r)
	}}})
	inner := fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s",
		len(chatBody), chatBody)
	cases := malformed()
	assert.Greater(t, len(cases), 60)
	for _, text := range cases {
		got := raw(t, g, text+inner)
		assert.Equal(t, 1, strings.Count(got, "HTTP/1."), "%q: %s", text, got)
		status, _, _ := strings.Cut(strings.TrimPrefix(got, "HTTP/1.1 "), " ")
		assert.Contains(t, []string{"400", "501", "505"}, status, "%q: %s", text, got)
	}
	assert.Zero(t, asked.Load())
	assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
}

// SP9: dpserve opens no connection to what a prompt names, and follows no redirect of an engine.
func TestNothingThatAPromptNamesIsFetched(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var fetched atomic.Int32
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fetched.Add(1)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close() })
	there := "http://" + l.Addr().String() + "/latest/meta-data"
	var got atomic.Value
	g := newRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got.Store(string(body))
		w.Header().Set("Location", there)
		w.WriteHeader(http.StatusTemporaryRedirect)
	}}})
	g.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	for _, target := range []string{there, "file:///etc/passwd", "ftp://" + l.Addr().String()} {
		part := `[{"type":"image_url","image_url":{"url":"` + target + `"}}]`
		for path, body := range map[string]string{
			"/v1/chat/completions": `{"messages":[{"role":"user","content":` + part + `}]}`,
			"/v1/messages": `{"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url",` +
				`"url":"` + target + `"}}]}]}`,
			"/v1/responses": `{"input":[{"role":"user","content":[{"type":"input_image","image_url":"` +
				target + `"}]}]}`,
			"/generate":      `{"text":"x","image_data":"` + target + `"}`,
			"/v1/embeddings": `{"messages":[{"role":"user","content":` + part + `}]}`,
			"/invocations":   `{"url":"` + target + `"}`,
		} {
			a := g.send("POST", path, "application/json", body)
			require.NoError(t, a.err)
			assert.Equal(t, body, got.Load(), path)
			want := 502 // no answer of this route
			if path == "/invocations" {
				want = 307
			}
			assert.Equal(t, want, a.status, path)
		}
	}
	assert.Zero(t, fetched.Load())
}

// CC16: on every route that takes a body, one of 20 MB is refused before it is read, and one that stands
// still ends at its deadline. Everywhere a websocket is refused, and HEAD and OPTIONS are answered.
func TestBodiesThatNeverEndOfEveryRoute(t *testing.T) {
	t.Parallel()
	engine := func(_ http.ResponseWriter, r *http.Request) { t.Errorf("an engine got %s", r.RequestURI) }
	g := newRig(t, options{
		engines: []http.HandlerFunc{engine}, timers: Timers{BodyStall: 50 * time.Millisecond},
	})
	sound, formType := form(t, "file", "RIFF", "model", "demo")
	for r := openai.Completions; r <= openai.Other; r++ {
		path, kind, text := strings.ReplaceAll(r.Path(), "{id}", "resp_1"), "application/json", `{"x":`
		switch r {
		case openai.Transcriptions, openai.Translations:
			kind, text = formType, sound[:len(sound)/2]
		case openai.Other:
			path = "/invocations"
		case openai.ResponseDelete:
			continue // the path is that of ResponseRead
		default:
		}
		assert.Equal(t, 204, g.send("OPTIONS", path, "", "").status, path)
		upgrade, _ := g.raw(t, r.Method()+" "+path+" HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\n"+
			"Upgrade: websocket\r\n\r\n", false)
		assert.Equal(t, 426, upgrade.StatusCode, path)
		if r.Method() != http.MethodPost {
			continue
		}
		if r != openai.Other {
			assert.Equal(t, 405, g.send("HEAD", path, "", "").status, path)
		}
		begins := `{"error":{`
		if r.Shape() == openai.Anthropic {
			begins = `{"type":"error","error":{`
		}
		head := "POST " + path + " HTTP/1.1\r\nHost: h\r\nContent-Type: " + kind + "\r\nContent-Length: "
		for length, want := range map[string]int{"20000000": 413, "1000": 408} {
			resp, body := g.raw(t, head+length+"\r\n\r\n"+text, false)
			assert.Equal(t, want, resp.StatusCode, "%s: %s", path, body)
			assert.True(t, strings.HasPrefix(body, begins), "%s: %s", path, body)
			assert.True(t, resp.Close, path)
		}
	}
	assert.Zero(t, g.in.bodies.taken.Load())
	page := g.page()
	for _, route := range []string{"chat", "messages", "transcriptions", "other"} {
		for _, code := range []string{"408", "413", "426"} {
			assert.Contains(t, page, `dpserve_requests_total{app="",code="`+code+`",route="`+route+`"} `)
		}
	}
}

// OV6: a client that leaves, and a request whose deadline runs out, give their places in the queue back at
// once. No engine sees them, and the others keep their order.
func TestLeavingTheQueue(t *testing.T) {
	e := newGatedEngine()
	served := make(chan string, 5)
	engine := func(w http.ResponseWriter, r *http.Request) {
		served <- r.Header.Get("X-Request-Id")
		e.ServeHTTP(w, r)
	}
	g := newRig(t, options{engines: []http.HandlerFunc{engine}, max: 1, app: func(a *app.Application) {
		a.Timeouts.QueueS = soon.Seconds()
	}})
	first := make(chan answer, 1)
	go func() { first <- g.postCtx(t.Context(), chatPath, chatBody, "X-Request-Id", "first") }()
	eventually(t, func() bool { return g.replicas[0].inFlight() == 1 }, "the place is taken")
	before := queueUp(g, 1, 1)
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan answer, 1)
	go func() { left <- g.postCtx(ctx, chatPath, chatBody, "X-Request-Id", "left") }()
	eventually(t, func() bool { return g.in.QueueLen("demo") == 2 }, "queued")
	behind := queueUp(g, 2, 1)
	cancel()
	require.Error(t, (<-left).err)
	eventually(t, func() bool { return g.in.QueueLen("demo") == 2 }, "a client that left leaves the queue")
	a := g.post(chatPath, chatBody, "X-Request-Id", "late", "X-Dpserve-Timeout-Ms", "20")
	assert.Equal(t, 504, a.status, a.body)
	assert.Equal(t, 2, g.in.QueueLen("demo"), "its place is free when the client has its answer")
	for i, got := range []chan answer{first, before, behind} {
		assert.Equal(t, []string{"first", "q1", "q2"}[i], <-served)
		e.open <- struct{}{}
		assert.Equal(t, 200, (<-got).status)
	}
	assert.Empty(t, served)
}
