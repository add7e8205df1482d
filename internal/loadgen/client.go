package loadgen

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"
)

const (
	readBuffer  = 32 << 10
	maxAnswer   = 64 << 20 // bytes of an answer that is not streamed
	maxFailure  = 64 << 10 // bytes of an error's body
	dialTimeout = 10 * time.Second
	// idleTimeout is shorter than the 5 s after which uvicorn, the HTTP server of vLLM and SGLang, closes
	// idle connections. A request on a connection that the engine closes at the same moment would fail.
	idleTimeout = 4 * time.Second
)

// sample is one request as its client measured it.
type sample struct {
	intended time.Time // when it should have been sent
	sent     time.Time
	first    time.Time // first token; zero if none came
	last     time.Time // last token
	end      time.Time
	chunks   int // events with tokens
	usage    usage
	gaps     []time.Duration // between chunks
	failure  string          // kind of the error; empty = good
	proxied  bool            // the side of a comparison
	rank     string          // app/group/rank, if the answer names one

	keepsAnswer bool   // answer is recorded
	answer      []byte // text of the first choice
	reusable    int    // prompt tokens that an unlimited cache holds
}

// client sends requests of one shape. Safe for concurrent use.
type client struct {
	http     *http.Client
	template *http.Request
	prompts  *prompts
	cfg      Config
	buffers  sync.Pool // of *[]byte
}

func newClient(ctx context.Context, cfg Config) (*client, error) {
	target := strings.TrimSuffix(cfg.URL, "/") + "/v1/completions"
	if cfg.Route == Chat {
		target = strings.TrimSuffix(cfg.URL, "/") + "/v1/chat/completions"
	}
	template, err := http.NewRequestWithContext(ctx, http.MethodPost, target, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("build the request: %w", err)
	}
	template.Header.Set("Content-Type", "application/json")
	template.Header.Set("User-Agent", "dpserve-bench")
	if cfg.APIKey != "" {
		template.Header.Set("Authorization", "Bearer "+cfg.APIKey)
	}
	c := &client{template: template, prompts: newPrompts(cfg), cfg: cfg}
	c.buffers.New = func() any { b := make([]byte, readBuffer); return &b }
	c.http = &http.Client{Transport: &http.Transport{
		Proxy:                 nil, // the environment's proxy must not see prompts
		DialContext:           (&net.Dialer{Timeout: dialTimeout}).DialContext,
		DisableCompression:    true,
		MaxIdleConns:          cfg.Concurrency,
		MaxIdleConnsPerHost:   cfg.Concurrency,
		IdleConnTimeout:       idleTimeout,
		TLSHandshakeTimeout:   dialTimeout,
		ResponseHeaderTimeout: cfg.Timeout,
		ReadBufferSize:        readBuffer,
	}}
	return c, nil
}

func (c *client) close() { c.http.CloseIdleConnections() }

// do sends request number n and waits for its end. Errors become part of the sample.
func (c *client) do(ctx context.Context, n uint64, intended time.Time) *sample {
	return c.send(ctx, c.prompts.body(n), "", &sample{intended: intended})
}

// turn sends a turn of a session and waits for its end.
func (c *client) turn(ctx context.Context, body []byte, session string, intended time.Time) *sample {
	return c.send(ctx, body, session, &sample{intended: intended, keepsAnswer: true})
}

// sessionHeader is the header that names a request's conversation.
const sessionHeader = "X-Session-Id"

// send sends body and fills in s; session may be empty.
func (c *client) send(ctx context.Context, body []byte, session string, s *sample) *sample {
	c.exchange(ctx, body, session, s)
	if c.cfg.Record != nil {
		c.cfg.Record(&Sent{At: s.sent, Body: body, Prompt: s.usage.Prompt, Output: s.tokens()})
	}
	if s.failure != "" && ctx.Err() != nil { // the run was stopped; the server did not fail
		s.failure = failureStopped
	}
	return s
}

func (c *client) exchange(ctx context.Context, body []byte, session string, s *sample) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	req := c.template.WithContext(ctx) // the copy shares the headers, which the transport only reads
	req.ContentLength = int64(len(body))
	req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	req.Body = io.NopCloser(bytes.NewReader(body))
	if session != "" {
		req.Header = req.Header.Clone()
		req.Header.Set(sessionHeader, session)
	}
	s.sent = time.Now()
	if s.intended.IsZero() {
		s.intended = s.sent
	}
	resp, err := c.http.Do(req)
	if err != nil {
		s.fail(classifyFailure(err))
		return
	}
	defer func() { _ = resp.Body.Close() }()
	s.rank = parseRank(resp.Header)
	switch {
	case resp.StatusCode != http.StatusOK:
		s.fail(statusFailure(resp))
	case c.cfg.Stream:
		c.readStream(resp.Body, s)
	default:
		s.readWhole(resp.Body)
	}
	s.end = time.Now()
}

func (s *sample) fail(kind string) {
	if s.failure == "" {
		s.failure = kind
	}
	s.end = time.Now()
}

// readWhole reads an answer that is not streamed; it has no first token.
func (s *sample) readWhole(body io.Reader) {
	text, err := io.ReadAll(io.LimitReader(body, maxAnswer))
	if err != nil {
		s.fail(classifyFailure(err))
		return
	}
	s.usage = parseUsage(text)
	switch {
	case !json.Valid(text):
		s.fail("bad answer")
	case hasMember(text, finishKey, `"abort"`):
		s.fail("abort")
	}
}

// readStream reads events to the end of the body and records the time of each token. Events of one read share
// a time.
func (c *client) readStream(body io.Reader, s *sample) {
	buffer, _ := c.buffers.Get().(*[]byte)
	defer c.buffers.Put(buffer)
	var (
		cut      splitter
		finished bool
		now      time.Time
	)
	note := func(data []byte) { finished = s.addEvent(data, now) || finished }
	for {
		n, err := body.Read(*buffer)
		now = time.Now()
		if n > 0 {
			if tooLong := cut.feed((*buffer)[:n], note); tooLong != nil {
				s.fail("bad answer")
				return
			}
		}
		if errors.Is(err, io.EOF) {
			if !finished {
				s.fail("cut stream")
			}
			return
		}
		if err != nil {
			s.fail(classifyFailure(err))
			return
		}
	}
}

// addEvent records one event and reports whether it finishes a choice.
func (s *sample) addEvent(data []byte, now time.Time) bool {
	kind := classify(data)
	switch kind {
	case doneEvent, roleEvent:
		return false
	case usageEvent:
		s.usage = parseUsage(data)
		return false
	case errorEvent:
		s.fail("error event" + errorWord(data))
		return false
	case abortEvent:
		s.fail("abort")
		return false
	case tokenEvent, finishEvent:
	}
	s.chunks++
	if s.first.IsZero() {
		s.first = now
	} else {
		s.gaps = append(s.gaps, now.Sub(s.last))
	}
	s.last = now
	if s.keepsAnswer {
		s.answer = append(s.answer, parseDelta(data)...)
	}
	return kind == finishEvent
}

// classifyFailure returns the kind of a transport error: a few words without addresses.
func classifyFailure(err error) string {
	var op *net.OpError
	var timeout net.Error
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	case errors.As(err, &op) && op.Op == "dial":
		return "connect"
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return "cut stream"
	default:
		return "connection lost"
	}
}

// failureStopped marks requests that the end of the run cut off; they do not count.
const failureStopped = "stopped"

// statusFailure returns the HTTP status and the error's code word.
func statusFailure(resp *http.Response) string {
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxFailure))
	if err != nil {
		text = nil
	}
	return fmt.Sprintf("http %d", resp.StatusCode) + errorWord(text)
}

var codeWord = regexp.MustCompile(`^[A-Za-z][A-Za-z_]{2,39}$`)

// errorWord returns the code or type of an OpenAI error after a blank, "" if it has none. Other texts could
// contain parts of the prompt.
func errorWord(text []byte) string {
	var body struct {
		Error struct {
			Code any    `json:"code"`
			Type string `json:"type"`
		} `json:"error"`
	}
	if json.Unmarshal(text, &body) != nil {
		return ""
	}
	if word, ok := body.Error.Code.(string); ok && codeWord.MatchString(word) {
		return " " + word
	}
	if codeWord.MatchString(body.Error.Type) {
		return " " + body.Error.Type
	}
	return ""
}

// parseRank reads the response headers in which dpserve names the rank.
func parseRank(h http.Header) string {
	name, group, rank := h.Get("x-dpserve-app"), h.Get("x-dpserve-group"), h.Get("x-dpserve-rank")
	if name == "" || group == "" || rank == "" {
		return ""
	}
	return name + "/" + group + "/" + rank
}
