package noderpc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/asynkron/protoactor-go/actor"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/dpserver"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/enginehttp"
	"github.com/dpserve/dpserve/internal/rankleg"
)

// RP53b: large bodies that together need more than the data port has for them are refused before they are
// read, and the memory is free again when a request has ended.
func TestLargeBodiesAreBounded(t *testing.T) {
	s := &DataServer{largeLimit: 12 << 20}
	for range 2 {
		assert.True(t, s.takeLarge(6<<20))
		assert.True(t, s.takeLarge(6<<20))
		assert.False(t, s.takeLarge(largeBody+1))
		assert.True(t, s.takeLarge(largeBody), "small bodies do not count")
		s.giveLarge(largeBody)
		s.giveLarge(6 << 20)
		s.giveLarge(6 << 20)
		assert.Zero(t, s.large.Load())
	}
	g := newDataRig(t, dataOptions{url: "http://127.0.0.1:1", config: func(c *DataConfig) {
		c.LargeBodies = 1 << 20
	}})
	d := g.dispatch()
	d.Body = make([]byte, 5<<20)
	_, reply, err := g.client.Ask(t.Context(), d)
	require.NoError(t, err)
	assert.Equal(t, msg.Overloaded, reply.Refusal)
}

// TestDataStrangers: requests of nodes without role ingress, and malformed ones, are refused before they
// reach a rank.
func TestDataStrangers(t *testing.T) {
	var denied atomic.Bool
	g := newDataRig(t, dataOptions{url: "http://127.0.0.1:1", config: func(c *DataConfig) {
		c.Caller = func(context.Context) (string, bool) { return "n1", !denied.Load() }
		c.MaxBody = 1000
	}})
	for text, change := range map[string]func(d *rankleg.Request){
		"malformed":  func(d *rankleg.Request) { d.Route = openai.Models },
		"\"denied\"": func(d *rankleg.Request) { d.Admit.Ingress = "n7" },
		"too_large":  func(d *rankleg.Request) { d.Body = make([]byte, 1000) },
	} {
		d := g.dispatch()
		d.Admit.Blocks = []uint64{1}
		change(d)
		a := g.send(d)
		require.ErrorIs(t, a.err, rankleg.ErrUnreachable)
		require.ErrorContains(t, a.err, text)
	}
	denied.Store(true)
	require.ErrorContains(t, g.send(g.dispatch()).err, "denied")
	assert.Empty(t, g.rank.asked())
	_, _, err := NewDataClient(func(string) (DataTransport, error) {
		return nil, errors.New("no such node")
	}).Ask(t.Context(), g.dispatch())
	assert.ErrorIs(t, err, rankleg.ErrUnreachable)
}

// TestDataBodyStalls: an upload that stalls is cancelled.
func TestDataBodyStalls(t *testing.T) {
	g := newDataRig(t, dataOptions{
		url:    "http://127.0.0.1:1",
		config: func(c *DataConfig) { c.Body = 20 * time.Millisecond },
	})
	body, w := io.Pipe()
	go func() { _, _ = w.Write([]byte("{")) }()
	_, err := g.way.Send(t.Context(), "/v1/completions", writeHead(g.dispatch(), false, time.Now()), nil,
		enginehttp.Guard{Rest: body, RestSize: 100, EndRest: func() { _ = w.Close() }})
	require.Error(t, err)
	assert.Empty(t, g.rank.asked())
}

// cutTransport counts its cuts.
type cutTransport struct {
	DataTransport
	cuts atomic.Int32
}

func (c *cutTransport) Cut() { c.cuts.Add(1) }

// TestASilentPeerIsCut: HTTP/1.1 has no pings. The requests to a node end when the stream of its ranks has
// been silent for 8 s, those of an ingress 5 s after its last stream has ended.
func TestASilentPeerIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var way cutTransport
		c := NewDataClient(func(string) (DataTransport, error) { return &way, nil })
		for range 3 {
			c.Heard("n2")
			time.Sleep(nodeSilence - time.Nanosecond)
		}
		assert.Zero(t, way.cuts.Load())
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		assert.EqualValues(t, 1, way.cuts.Load())
		assert.Empty(t, c.silent)

		server := &DataServer{open: map[*dataRequest]struct{}{}, streams: map[string]int{}}
		begin := func(ingress string) context.Context {
			ctx, cancel := context.WithCancelCause(t.Context())
			rc := http.NewResponseController(httptest.NewRecorder())
			server.open[&dataRequest{ingress: ingress, cancel: cancel, rc: rc}] = struct{}{}
			return ctx
		}
		gone, back := begin("gone"), begin("back")
		for _, ingress := range []string{"gone", "back"} {
			server.CountStream(ingress, 1)
			server.CountStream(ingress, -1)
		}
		server.CountStream("back", 1)
		time.Sleep(ingressGone)
		synctest.Wait()
		require.ErrorIs(t, context.Cause(gone), errIngressGone)
		assert.NoError(t, back.Err())
	})
}

// TestDataSlowReaders: 64 stalled readers do not stop one that reads.
func TestDataSlowReaders(t *testing.T) {
	const slow = 64
	part := strings.Repeat("x", 64<<10)
	g := newDataRig(t, dataOptions{engine: func(w http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		for range 32 { // 2 MiB: far more than a window
			if _, err := io.WriteString(w, part); err != nil {
				return
			}
		}
	}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var stuck sync.WaitGroup
	for range slow {
		stuck.Go(func() {
			resp, _, err := g.client.Ask(ctx, g.dispatch())
			if assert.NoError(t, err) {
				t.Cleanup(func() { _ = resp.Body.Close() })
			}
		})
	}
	stuck.Wait()
	for range 3 {
		a := g.send(g.dispatch())
		require.NoError(t, a.cut)
		require.Len(t, a.body, 32*len(part))
	}
}

// TestDataClose: running requests are cut, and Close waits for them.
func TestDataClose(t *testing.T) {
	came, left := make(chan struct{}), make(chan struct{})
	g := newDataRig(t, dataOptions{engine: func(w http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		dataChunks(w, 1)
		close(came)
		<-r.Context().Done()
		close(left)
	}})
	over := make(chan dataAnswer, 1)
	go func() { over <- g.send(g.dispatch()) }()
	<-came
	require.NoError(t, g.server.Close())
	<-left
	a := <-over
	require.Error(t, errors.Join(a.err, a.cut))
	require.ErrorIs(t, g.send(g.dispatch()).err, rankleg.ErrUnreachable)
	require.NoError(t, g.server.Close())
}

// TestDataCloseStuck: a stalled reader does not block Close.
func TestDataCloseStuck(t *testing.T) {
	left := make(chan struct{})
	g := newDataRig(t, dataOptions{engine: func(w http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		for r.Context().Err() == nil {
			_, _ = io.WriteString(w, strings.Repeat("x", 64<<10))
		}
		close(left)
	}})
	resp, _, err := g.client.Ask(t.Context(), g.dispatch())
	require.NoError(t, err)
	defer resp.Body.Close()
	time.Sleep(50 * time.Millisecond) // the windows fill; earlier is no harm
	require.NoError(t, g.server.Close())
	<-left
}

// TestDataConcurrent: many concurrent requests keep their bodies, hashes and answers apart.
func TestDataConcurrent(t *testing.T) {
	g := newDataRig(t, dataOptions{engine: func(w http.ResponseWriter, r *http.Request) {
		_,
			_ = io.WriteString(w, swallowBody(r))
	}})
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for k := range 30 {
				d := g.dispatch()
				d.Body = []byte(strings.Repeat(string(rune('a'+i)), 1+k*700))
				d.Admit.Blocks = make([]uint64, k)
				ctx, cancel := context.WithCancel(t.Context())
				if k%7 == 3 {
					go cancel()
				}
				if a := g.sendCtx(ctx, d); a.err == nil && a.cut == nil {
					assert.Equal(t, string(d.Body), a.body)
				} else {
					assert.Equal(t, 3, k%7, "%v %v", a.err, a.cut)
				}
				cancel()
			}
		})
	}
	wg.Wait()
}

// FuzzDataHead: no header breaks the reader, and accepted values are within bounds.
func FuzzDataHead(f *testing.F) {
	f.Add("demo", "demo/0", "0/1", "both", "17", "40", "3", "1", "/v1/completions")
	f.Add("demo", "demo/0", "0/1", "held", "17", "40", "0", "0", "/v1/completions")
	f.Add("", "x", "65536/1", "hold", "-1", "4294967296", "", "9", "/x")
	f.Fuzz(func(t *testing.T, app, unit, rank, class, req, tokens, blocks, hits, path string) {
		var w fieldWriter
		for _, f := range [][2]string{
			{fieldApp, app},
			{fieldUnit, unit},
			{fieldRank, rank},
			{fieldClass, class},
			{fieldReq, req},
			{fieldTokens, tokens},
			{fieldBlocks, blocks},
			{fieldHitBlocks, hits},
			{fieldIngress, app},
			{fieldDeadline, tokens},
			{fieldFirstToken, req},
			{fieldSession, req},
			{fieldInc, req},
			{fieldOnce, "1"},
			{fieldWriteBy, tokens},
		} {
			w.set(f[0], f[1])
		}
		h := http.Header{dataFields: {string(w)}}
		d, err := readHead(h, path, time.Unix(0, 0))
		if err != nil {
			return
		}
		assert.True(t, d.blocks >= 0 && d.blocks <= maxDataBlocks && d.admit.HitBlocks <= d.blocks &&
			d.admit.Tokens >= 0)
		assert.NotEmpty(t, d.app)
		again := &rankleg.Request{
			Rank: &rankleg.Rank{App: d.app, Unit: d.unit, ID: d.rank}, Route: d.route,
			FirstToken: d.firstToken, Guard: &rankleg.Guard{},
		}
		if d.writeBy > 0 {
			again.Guard.TimeLeft = func() time.Duration { return d.writeBy }
		}
		switch class {
		case classHeld:
			again.IsHeld, again.Rank.Incarnation = true, d.incarnation
		case classBoth, classHold:
			again.Admit = &d.admit
			again.Admit.Blocks = make([]uint64, d.blocks)
			if d.blocks == 0 {
				again.Admit.Hit, d.admit.HitBlocks = 0, 0
			}
		}
		back, err := readHead(writeHead(again, class == classHold, time.Unix(0, 0)), path, time.Unix(0, 0))
		require.NoError(t, err)
		back.admit.Blocks = d.admit.Blocks
		assert.Equal(t, d, back)
	})
}

// FuzzDataAnswer: whatever a data port answers, a dispatch ends in an answer with its ticket, a refusal, or
// an error.
func FuzzDataAnswer(f *testing.F) {
	f.Add(200, "", "", "5", "1")
	f.Add(503, "full", "", "", "x")
	f.Add(502, "", "refused", "5", "")
	f.Fuzz(func(t *testing.T, status int, refused, cause, ticket, seq string) {
		rec := httptest.NewRecorder()
		h := http.Header{dataTicket: {ticket}, dataSeq: {seq}}
		if refused != "" {
			h[dataRefused] = []string{refused}
		}
		if cause != "" {
			h[dataCause] = []string{cause}
		}
		resp := rec.Result()
		resp.Header, resp.StatusCode = h, status
		got, rep, err := readAnswer(t.Context(), newDispatch(), resp)
		switch {
		case got != nil:
			require.NoError(t, err)
			assert.NotZero(t, rep.Ticket.ID)
			assert.Empty(t, got.Header)
		case err == nil:
			assert.NotEqual(t, msg.Granted, rep.Refusal)
		}
	})
}

// healthyEngine is an engine without faults.
type healthyEngine struct{}

func (healthyEngine) Health(context.Context) (engine.Health, error) { return engine.Alive, nil }

func (healthyEngine) Models(context.Context) ([]engine.Model, error) { return nil, nil }
func (healthyEngine) Probe(context.Context, string) error            { return nil }
func (healthyEngine) Counters(context.Context) (engine.Counters, error) {
	return engine.Counters{}, nil
}

// replicaEvents ignores the events.
type replicaEvents struct{}

func (replicaEvents) ReplicaEvent(msg.ReplicaEvent) {}

// TestDataIngressKilled: a ticket whose ingress dies lapses, and the engine's connection is closed at once.
func TestDataIngressKilled(t *testing.T) {
	answers, came, left := lateEngine()
	log := slog.New(slog.DiscardHandler)
	system := actor.NewActorSystem(actor.WithLoggerFactory(func(*actor.ActorSystem) *slog.Logger {
		return log
	}))
	defer system.Shutdown()
	f := &dpserver.Factory{
		System: system, Hub: msg.NewHub(), Log: log,
		Timers:    dpserver.Timers{TicketLapse: 30 * time.Millisecond},
		NewEngine: func(*msg.ReplicaSpec) dpserver.Engine { return healthyEngine{} },
	}
	g := newDataRig(t, dataOptions{engine: answers, config: func(c *DataConfig) { c.Feed = f.Hub }})
	a := &app.Application{Name: "demo", Engine: app.Engine{Kind: app.KindSim}}
	rank, err := f.New(msg.ReplicaSpec{
		App: a, Unit: "demo/0", Rank: 1, Epoch: 3, Node: dataTestNode,
		Target: g.target, Watcher: replicaEvents{},
	})
	require.NoError(t, err)
	defer func() { require.NoError(t, rank.Stop(context.Background())) }()
	require.NoError(t, rank.Ready(t.Context(), msg.Facts{Incarnation: 9, MaxOngoing: 2}))
	id := newDispatch().Rank.ID
	dataEventually(t, func() bool { return g.server.table.find("demo", "demo/0", id) != nil },
		"the rank is known")

	resp, rep, err := g.client.Ask(t.Context(), g.dispatch())
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	assert.EqualValues(t, 9, rep.Ticket.Incarnation)
	assert.NotZero(t, rep.Ticket.Seq)
	<-came
	dataEventually(t, func() bool { return rank.Status().InFlight == 1 }, "the ticket counts")
	stale := g.dispatch()
	stale.Admit.Epoch = 2
	assert.Equal(t, msg.StaleEpoch, g.send(stale).reply.Refusal)
	hung := g.dispatch()
	hung.Header = map[string][]string{"X-Mute": {"1"}}
	go func() { _ = g.send(hung) }()
	<-came
	assert.Equal(t, msg.Full, g.send(g.dispatch()).reply.Refusal)
	require.NoError(t, g.http.Close()) // what a killed ingress looks like from here
	<-left
	<-left
	dataEventually(t, func() bool { return rank.Status().InFlight == 0 }, "both tickets have lapsed")
}
