package ingress

import (
	"bufio"
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

const (
	pictureHead = `{"model":"demo","stream":false,"messages":[{"role":"user","content":[{` +
		`"type":"image_url","image_url":{"url":"data:image/png;base64,`
	pictureTail = `"}}]}],"max_tokens":8}`
)

// largeBody is a request with a picture of n bytes, and the sum of all that was read.
func largeBody(n int64, tail string) (body io.Reader, size int64, sum hash.Hash) {
	sum = sha256.New()
	body = io.MultiReader(strings.NewReader(pictureHead), io.LimitReader(letters{}, n),
		strings.NewReader(tail))
	return io.TeeReader(body, sum), int64(len(pictureHead)) + n + int64(len(tail)), sum
}

type letters struct{}

func (letters) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'A' + byte(i%26)
	}
	return len(p), nil
}

func (g *rig) postLarge(ctx context.Context, body io.Reader, size int64) answer {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.url+"/v1/chat/completions", body)
	require.NoError(g.t, err)
	req.ContentLength = size
	return g.do(req)
}

// sumEngine answers with the length and the sum of what it got.
func sumEngine(w http.ResponseWriter, r *http.Request) {
	sum := sha256.New()
	n, _ := io.Copy(sum, r.Body)
	_, _ = fmt.Fprintf(w, `{"choices":[{"message":{"content":"%d %d %x"},"finish_reason":"stop"}]}`,
		r.ContentLength, n, sum.Sum(nil))
}

// RP53: a body of 48 MiB reaches its engine byte for byte, while the ingress holds less than 16 MiB. A rank
// of this node that refuses the connection costs nothing.
func TestALargeBodyIsPassedOn(t *testing.T) {
	var g *rig
	var most atomic.Int64
	refuses := []string{"http://127.0.0.1:1"}
	if isFar(t) {
		refuses = nil
	}
	g = newRig(t, options{
		limits: Limits{MaxBody: LargestMaxBody}, urls: refuses,
		engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
			r.Body = io.NopCloser(io.TeeReader(r.Body, watcher(func() {
				most.Store(max(most.Load(), g.in.bodies.taken.Load()))
			})))
			sumEngine(w, r)
		}},
	})
	for _, n := range []int64{48 << 20, 5 << 20} {
		body, size, sum := largeBody(n, pictureTail)
		a := g.postLarge(t.Context(), body, size)
		assert.Equal(t, 200, a.status, a.body)
		assert.Contains(t, a.body, fmt.Sprintf("%d %d %x", size, size, sum.Sum(nil)))
	}
	assert.Positive(t, most.Load())
	assert.Less(t, most.Load(), int64(16<<20))
}

type watcher func()

func (w watcher) Write(p []byte) (int, error) {
	w()
	return len(p), nil
}

// RP53: what an engine says of it is the last word, also early.
func TestALargeBodyIsSentOnce(t *testing.T) {
	var asked atomic.Int32
	early := make(chan struct{})
	for name, engine := range map[string]http.HandlerFunc{
		"late": func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			replies(500, `{"error":{"message":"no"}}`)(w, r)
		},
		"early": func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			_, _ = io.CopyN(io.Discard, r.Body, 5<<20)
			conn, rw, _ := w.(http.Hijacker).Hijack()
			_, _ = rw.WriteString("HTTP/1.1 413 Request Entity Too Large\r\nContent-Length: 2\r\n\r\nno")
			_ = rw.Flush()
			<-early
			_ = conn.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			asked.Store(0)
			g := newRig(t, options{
				engines: []http.HandlerFunc{engine, engine}, limits: Limits{MaxBody: 64 << 20},
			})
			body, size, _ := largeBody(40<<20, pictureTail)
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(g.url, "http://"))
			require.NoError(t, err)
			defer conn.Close()
			go func() {
				_, _ = fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"+
					"Content-Length: %d\r\n\r\n", size)
				_, _ = io.Copy(conn, body) // ends with the connection, if the answer is early
			}()
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			text, _ := io.ReadAll(resp.Body)
			assert.Contains(t, string(text), "no")
			assert.Equal(t, map[string]int{"late": 500, "early": 413}[name], resp.StatusCode)
			assert.Equal(t, name == "early" && g.port == nil, resp.Close,
				"what the client still sends is no request")
			assert.EqualValues(t, 1, asked.Load())
		})
	}
	close(early)
}

// RP53: an engine that has begun to get a body hears that the client has left, and that it sends what only
// dpserve may set.
func TestALargeBodyBreaksOff(t *testing.T) {
	t.Parallel()
	for name, tail := range map[string]string{
		"leaves": "", "reserved": `"}}]}],"kv_transfer_params":{}}`, "twice": `"}}]}],"stream":true}`,
		"escaped": `"}}]}],"\u006dodel":"other"}`, "slow": "",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ended := make(chan error, 1)
			var timers Timers
			if name == "slow" {
				timers.BodyStall = time.Second
			}
			g := newRig(t, options{
				limits: Limits{MaxBody: 64 << 20}, timers: timers,
				engines: []http.HandlerFunc{func(_ http.ResponseWriter, r *http.Request) {
					_, err := io.Copy(io.Discard, r.Body)
					ended <- err
				}},
			})
			ctx, cancel := context.WithTimeout(t.Context(), 4*soon)
			defer cancel()
			body, size, _ := largeBody(6<<20, tail)
			if tail == "" {
				size += 1 << 20
				body = io.MultiReader(body, waits{ctx})
			}
			if name == "leaves" {
				go func() {
					assert.Eventually(t, func() bool { return g.replicas[0].inFlight() == 1 }, soon,
						time.Millisecond)
					cancel()
				}()
			}
			a := g.postLarge(ctx, body, size)
			require.Error(t, <-ended)
			switch name {
			case "leaves":
				require.Error(t, a.err)
			case "slow":
				assert.Equal(t, 408, a.status, a.body)
			default:
				assert.Equal(t, 400, a.status, a.body)
				assert.Contains(t, a.body, "send it before messages, once")
			}
		})
	}
}

// waits is a client that sends nothing more.
type waits struct{ ctx context.Context } //nolint:containedctx // the client's life

func (w waits) Read([]byte) (int, error) {
	<-w.ctx.Done()
	return 0, w.ctx.Err()
}

// RP54: a body is held whole if dpserve needs more of it than its beginning. Then the bound of the memory of
// bodies holds, and says so.
func TestWhichLargeBodiesAreHeld(t *testing.T) {
	text := strings.Repeat("x", 5<<20)
	messages := `"messages":[{"role":"user","content":"` + text + `"}]`
	for body, isPassed := range map[string]bool{
		`{"model":"demo","stream":false,` + messages + `}`:                         true,
		`{"stream":true,"n":2,` + messages + `,"user":"x"}`:                        true,
		`{"model":"demo",` + messages + `,"stream":false}`:                         false,
		`{` + messages + `,"model":"demo","stream":false}`:                         false,
		`{"model":"demo","stream":false,"kv_transfer_params":{},` + messages + `}`: false,
		`{"model":"demo","stream":false,"x":"` + text + `",` + messages + `}`:      false,
	} {
		req := request{question: question{
			route: openai.Chat, body: &bodyBuffer{[]byte(body[:passedHead])},
			r: &http.Request{ContentLength: 5 << 20},
		}}
		s, ar := newRouteScope(), newAppRouter(bareIngress(), "demo")
		s.add(&appRoute{appRevision: &appRevision{app: demoApp(), names: []string{model1}}, router: ar})
		assert.Equal(t, isPassed, req.canPassOn(s), body[:60])
		ar.policyInputs.Store(&policyInputs{needs: routing.Needs{Hits: true}})
		assert.False(t, req.canPassOn(s), "the policy reads the prompt")
		req.r.ContentLength = 64<<20 + 1
		assert.Equal(t, isPassed, req.canPassOn(s), body[:60])
		s.only.pair = &pairApp{}
		assert.False(t, req.canPassOn(s), "it would be sent twice")
	}
	g := newRig(t, options{
		engines: []http.HandlerFunc{sumEngine}, limits: Limits{MaxBody: LargestMaxBody, BodyBytes: 8 << 20},
	})
	held := `{"model":"demo",` + messages + `}`
	a := g.post("/v1/chat/completions", held)
	assert.Equal(t, "overloaded", a.code(t))
	assert.Contains(t, a.body, "--max-body")
	a = g.postLarge(t.Context(), io.MultiReader(strings.NewReader(held[:passedHead]), waits{t.Context()}),
		100<<20)
	assert.Equal(t, "body_too_large", a.code(t))
	assert.Contains(t, a.body, "--max-body")
	a = g.post("/v1/chat/completions", `{"model":"demo","stream":false,`+messages+`}`)
	assert.Equal(t, 200, a.status, a.body)
}
