package noderpc

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// dataFeed is a msg.Feed whose records a test sends.
type dataFeed struct {
	mu   sync.Mutex
	sink msg.Sink
}

func (f *dataFeed) List(msg.Sink) {}

func (f *dataFeed) Subscribe(s msg.Sink) func() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sink = s
	return func() {}
}

func (f *dataFeed) emit(rec *msg.Record) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sink != nil { // else the port listens to another feed
		f.sink.Deliver(rec)
	}
}

// dataMailbox is a DPServer's mailbox that grants, refuses, or does not answer.
type dataMailbox struct {
	mu      sync.Mutex
	reply   msg.AdmitReply
	mute    bool
	full    bool
	stopped chan struct{}
	admits  []msg.Admit // with copies of their blocks
	held    []*msg.Admit
	dones   []msg.Done
}

func (r *dataMailbox) Stopped() <-chan struct{} { return r.stopped }

func (r *dataMailbox) TrySend(m any) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.full {
		return msg.ErrOverloaded
	}
	r.take(m)
	return nil
}

func (r *dataMailbox) Send(m any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.take(m)
}

func (r *dataMailbox) take(m any) {
	switch m := m.(type) {
	case *msg.Admit:
		kept := *m
		kept.Blocks = append([]uint64(nil), m.Blocks...)
		r.admits = append(r.admits, kept)
		if r.mute {
			r.held = append(r.held, m)
			return
		}
		m.Reply <- r.reply
	case *msg.Done:
		r.dones = append(r.dones, *m)
	}
}

func (r *dataMailbox) set(f func(r *dataMailbox)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(r)
}

func (r *dataMailbox) asked() []msg.Admit {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]msg.Admit(nil), r.admits...)
}

func (r *dataMailbox) done() []msg.Done {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]msg.Done(nil), r.dones...)
}

// dataRig is a data port with one rank, its engine, and a client of another node on loopback.
type dataRig struct {
	t      *testing.T
	feed   *dataFeed
	rank   *dataMailbox
	server *DataServer
	http   *http.Server
	client *DataClient
	way    *nodeport.Transport
	addr   string
	target msg.Target // of the rank
}

const (
	dataTestNode = "n2"
	ticketID     = 77
)

// dataOptions change a rig before it starts.
type dataOptions struct {
	engine http.HandlerFunc
	url    string // of the engine, instead of one
	target msg.Target
	config func(c *DataConfig)
}

func newDataRig(t *testing.T, o dataOptions) *dataRig {
	t.Helper()
	g := &dataRig{t: t, feed: &dataFeed{}, rank: &dataMailbox{stopped: make(chan struct{})}}
	if o.engine != nil {
		srv := httptest.NewServer(o.engine)
		t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
		o.url = srv.URL
	}
	o.target.URL = o.url
	if o.target.Addressing == "" {
		o.target.Addressing = "url"
	}
	g.target = o.target
	g.rank.reply = msg.AdmitReply{Epoch: 3, Seq: 12, Ticket: msg.Ticket{
		ID: ticketID, Epoch: 3,
		Incarnation: 9, Seq: 12, Rank: routing.ID(0, 1),
	}}
	cfg := DataConfig{
		Feed: g.feed, Caller: func(context.Context) (string, bool) { return "n1", true },
		Log: slog.New(slog.DiscardHandler),
	}
	if o.config != nil {
		o.config(&cfg)
	}
	g.server = NewDataServer(cfg)
	g.snapshot(3, 9, o.target)
	g.serve()
	g.connect()
	t.Cleanup(func() {
		g.way.Close()
		require.NoError(t, g.server.Close())
		require.NoError(t, g.http.Close())
	})
	return g
}

func (g *dataRig) snapshot(epoch, incarnation uint64, target msg.Target) {
	g.feed.emit(&msg.Record{
		App: "demo", Unit: "demo/0", Rank: routing.ID(0, 1), Epoch: epoch, Incarnation: incarnation,
		Kind:     msg.RecSnapshot,
		Snapshot: &msg.Snapshot{Node: dataTestNode, Target: target, Mailbox: g.rank},
	})
}

func (g *dataRig) serve() {
	g.http = &http.Server{
		Handler: g.server, ReadHeaderTimeout: time.Minute,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	l, err := (&net.ListenConfig{}).Listen(g.t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(g.t, err)
	g.addr = l.Addr().String()
	go func() { _ = g.http.Serve(l) }()
}

func (g *dataRig) connect() {
	g.way = nodeport.NewTransport(func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", g.addr)
	})
	g.client = NewDataClient(func(node string) (DataTransport, error) {
		assert.Equal(g.t, dataTestNode, node)
		return g.way, nil
	})
}

// dispatch is a plain request, which tests modify.
func (g *dataRig) dispatch() *rankleg.Request {
	return &rankleg.Request{
		Rank: &rankleg.Rank{
			Node: dataTestNode, App: "demo", Unit: "demo/0", ID: routing.ID(0, 1), Epoch: 3, Incarnation: 9,
		},
		Route: openai.Chat, OnTicket: func(*msg.Ticket) {},
		Header: map[string][]string{
			"Content-Type": {"application/json"}, "X-Request-Id": {"r1"},
			"User-Agent": nil,
		}, Body: []byte(`{"model":"m"}`),
		Admit: &msg.Admit{ReqID: 5, Epoch: 3, Tokens: 40, Estimated: true, Whole: true, Ingress: "n1"},
	}
}

// dataAnswer is the result of a dispatch.
type dataAnswer struct {
	status int
	header http.Header
	body   string
	reply  msg.AdmitReply
	err    error // of Send
	cut    error // of the body
}

func (g *dataRig) send(d *rankleg.Request) dataAnswer { return g.sendCtx(g.t.Context(), d) }

func (g *dataRig) sendCtx(ctx context.Context, d *rankleg.Request) dataAnswer {
	resp, rep, err := g.client.Ask(ctx, d)
	a := dataAnswer{reply: rep, err: err}
	if resp == nil {
		return a
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	a.status, a.header, a.body, a.cut = resp.StatusCode, resp.Header, string(b), err
	return a
}

func dataEventually(t *testing.T, what func() bool, text string) {
	t.Helper()
	require.Eventually(t, what, 30*time.Second, time.Millisecond, text)
}

const dataChunk = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n"

// dataChunks writes n chunks, one flush each.
func dataChunks(w http.ResponseWriter, n int) {
	w.Header().Set("Content-Type", "text/event-stream")
	for range n {
		_, _ = io.WriteString(w, dataChunk)
		w.(http.Flusher).Flush()
	}
}

func swallowBody(r *http.Request) string {
	b, _ := io.ReadAll(r.Body)
	return string(b)
}

func bigBody(n int) []byte { return []byte(`{"prompt":"` + strings.Repeat("x", n) + `"}`) }
