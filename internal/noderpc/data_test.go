package noderpc

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/ports"
)

// TestDataStream: an engine's stream arrives whole, with its header and the ticket, and each chunk at once.
func TestDataStream(t *testing.T) {
	next := make(chan struct{})
	g := newDataRig(t, dataOptions{engine: func(w http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		w.Header().Set("X-Engine", "yes")
		for range 5 {
			<-next
			dataChunks(w, 1)
		}
	}})
	resp, rep, err := g.client.Ask(t.Context(),
		func() *rankleg.Request { feedSteps(next, 5); return g.dispatch() }())
	require.NoError(t, err)
	defer resp.Body.Close()
	assert.Equal(t, msg.AdmitReply{
		Epoch: 3, Seq: 12,
		Ticket: msg.Ticket{ID: ticketID, Epoch: 3, Incarnation: 9, Seq: 12, Rank: routing.ID(0, 1)},
	}, rep)
	assert.Equal(t, "yes", resp.Header.Get("X-Engine"))
	for name := range resp.Header {
		assert.NotContains(t, name, dataPrefix)
	}
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.Equal(t, strings.Repeat(dataChunk, 5), string(b))
	assert.Empty(t, g.rank.done(), "the ticket is the ingress's to give back")
}

// feedSteps sends n steps from another goroutine.
func feedSteps(c chan struct{}, n int) {
	go func() {
		for range n {
			c <- struct{}{}
		}
	}()
}

// TestDataChunkByChunk: no chunk waits for the next one.
func TestDataChunkByChunk(t *testing.T) {
	next := make(chan struct{})
	g := newDataRig(t, dataOptions{engine: func(w http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		for range next {
			dataChunks(w, 1)
		}
	}})
	go func() { next <- struct{}{} }()
	resp, _, err := g.client.Ask(t.Context(), g.dispatch())
	require.NoError(t, err)
	defer resp.Body.Close()
	buf := make([]byte, 4096)
	for i := range 3 {
		n, err := resp.Body.Read(buf)
		require.NoError(t, err)
		require.Equal(t, dataChunk, string(buf[:n]))
		if i < 2 {
			next <- struct{}{}
		}
	}
	close(next)
	_, err = resp.Body.Read(buf)
	assert.ErrorIs(t, err, io.EOF)
}

// TestDataWholeAndErrors: every answer of an engine passes byte for byte, also with statuses that the port
// itself uses.
func TestDataWholeAndErrors(t *testing.T) {
	for _, status := range []int{200, 400, 403, 413, 429, 500, 502, 503} {
		g := newDataRig(t, dataOptions{engine: func(w http.ResponseWriter, r *http.Request) {
			swallowBody(r)
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Retry-After", "7")
			w.Header().Set("Dpserve-Refused", "full") // an engine cannot speak for the port
			w.Header().Set("Dpserve-Cause", "refused")
			w.Header().Set("Connection", "X-Hop")
			w.Header().Set("X-Hop", "1")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, `{"a":1}`)
		}})
		a := g.send(g.dispatch())
		require.NoError(t, a.err)
		require.NoError(t, a.cut)
		assert.Equal(t, status, a.status)
		assert.Equal(t, `{"a":1}`, a.body)
		assert.EqualValues(t, ticketID, a.reply.Ticket.ID)
		assert.Equal(t, []string{"7"}, a.header["Retry-After"])
		assert.Equal(t, []string{"7"}, a.header["Content-Length"])
		assert.Empty(t, a.header["X-Hop"])
		assert.Empty(t, a.header["Dpserve-Refused"])
	}
}

// TestDataUnknownLength: an answer whose engine announces no length has none.
func TestDataUnknownLength(t *testing.T) {
	g := newDataRig(t, dataOptions{
		engine: writesAtOnce("Transfer-Encoding: chunked", "2\r\nok\r\n0\r\n\r\n"),
	})
	a := g.send(g.dispatch())
	require.NoError(t, a.err)
	require.NoError(t, a.cut)
	assert.Equal(t, "ok", a.body)
	assert.NotContains(t, a.header, "Content-Length")
}

// TestDataCutWhole: an engine that breaks off in an answer of known length is no fault of the node either.
func TestDataCutWhole(t *testing.T) {
	g := newDataRig(t, dataOptions{engine: writesAtOnce("Content-Length: 100", "hello")})
	a := g.send(g.dispatch())
	require.NoError(t, a.err)
	assert.Equal(t, "hello", a.body)
	assert.Equal(t, []string{"100"}, a.header["Content-Length"])
	require.Error(t, a.cut)
	require.NotErrorIs(t, a.cut, rankleg.ErrUnreachable)
}

// writesAtOnce is an engine whose answer is one write.
func writesAtOnce(field, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n"+field+"\r\n\r\n"+body)
			_ = conn.Close()
		}
	}
}

// TestDataAdmission: the rank gets the ingress's Admit with all hashes, and the engine gets the body alone.
func TestDataAdmission(t *testing.T) {
	bodies := make(chan string, 1)
	g := newDataRig(t, dataOptions{engine: func(_ http.ResponseWriter,
		r *http.Request,
	) {
		bodies <- swallowBody(r)
	}})
	for _, n := range []int{0, 1, 63, 5000} {
		d := g.dispatch()
		d.Body = bigBody(400 << 10)
		d.Admit.Hit, d.Admit.HitBlocks = 16*min(n, 1), min(n, 1)
		for i := range n {
			d.Admit.Blocks = append(d.Admit.Blocks, uint64(i)*0x9e3779b97f4a7c15+1)
		}
		d.Admit.Deadline, d.Admit.Weight = time.Now().Add(time.Hour), 6
		require.NoError(t, g.send(d).err)
		assert.Equal(t, string(d.Body), <-bodies)
		asked := g.rank.asked()
		m := asked[len(asked)-1]
		assert.Equal(t, d.Admit.Blocks, m.Blocks)
		assert.WithinDuration(t, d.Admit.Deadline, m.Deadline, time.Minute)
		require.NotNil(t, m.Ctx)
		m.Ctx, m.Reply, m.Deadline, m.Blocks = nil, nil, d.Admit.Deadline, d.Admit.Blocks
		assert.Equal(t, *d.Admit, m)
	}
}

// TestDataEngineHeader: the engine gets the header that the ingress prepared, and no field of the data port.
func TestDataEngineHeader(t *testing.T) {
	seen := make(chan http.Header, 1)
	g := newDataRig(t, dataOptions{engine: func(_ http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		seen <- r.Header
	}})
	d := g.dispatch()
	d.Header["Authorization"] = []string{"Bearer x"}
	d.Header["Dpserve-Rank"] = []string{"9/9"} // as a client might send it
	d.Header["Dpserve-Evil"] = []string{"1"}
	d.Header["X-Data-Parallel-Rank"] = []string{"4"}
	require.NoError(t, g.send(d).err)
	assert.Equal(t, http.Header{
		"Content-Type": {"application/json"}, "Authorization": {"Bearer x"}, "X-Request-Id": {"r1"},
		"Content-Length": {"13"},
	}, <-seen)
}

// TestDataAddressing: an engine that hosts several ranks gets the rank's number.
func TestDataAddressing(t *testing.T) {
	type got struct {
		header []string
		body   string
	}
	for mode, want := range map[string]got{
		"url": {nil, `{"model":"m"}`}, "header": {[]string{"6"}, `{"model":"m"}`},
		"body": {nil, `{"model":"m","routed_dp_rank":6}`},
	} {
		seen := make(chan got, 1)
		g := newDataRig(t, dataOptions{
			target: msg.Target{Addressing: mode, Selector: 6},
			engine: func(_ http.ResponseWriter, r *http.Request) {
				seen <- got{r.Header["X-Data-Parallel-Rank"], swallowBody(r)}
			},
		})
		require.NoError(t, g.send(g.dispatch()).err)
		assert.Equal(t, want, <-seen, mode)
	}
}

// TestDataRefusals: every refusal arrives unchanged.
func TestDataRefusals(t *testing.T) {
	g := newDataRig(t, dataOptions{url: "http://127.0.0.1:1"})
	for r := msg.Full; r <= msg.Overloaded; r++ {
		want := msg.AdmitReply{Refusal: r, Epoch: 8, Seq: 4}
		g.rank.set(func(k *dataMailbox) { k.reply = want })
		a := g.send(g.dispatch())
		require.NoError(t, a.err)
		assert.Equal(t, want, a.reply)
		assert.Zero(t, a.status)
	}
	assert.Equal(t, msg.NotReady, refusalOf("of_a_later_build"))
}

// TestDataUnknownRank: an unknown rank is refused as gone; a record of an older epoch changes nothing.
func TestDataUnknownRank(t *testing.T) {
	g := newDataRig(t, dataOptions{engine: func(_ http.ResponseWriter, r *http.Request) { swallowBody(r) }})
	for _, change := range []func(d *rankleg.Request){
		func(d *rankleg.Request) { d.Rank.Unit = "demo/1" },
		func(d *rankleg.Request) { d.Rank.App = "other" },
		func(d *rankleg.Request) { d.Rank.ID = routing.ID(0, 2) },
	} {
		d := g.dispatch()
		change(d)
		assert.Equal(t, msg.Gone, g.send(d).reply.Refusal)
	}
	gone := &msg.Record{
		App: "demo", Unit: "demo/0", Rank: routing.ID(0, 1), Epoch: 3, Incarnation: 8,
		Kind: msg.RecGone,
	}
	g.feed.emit(gone)
	assert.Equal(t, 200, g.send(g.dispatch()).status, "of another incarnation")
	g.snapshot(2, 9, msg.Target{URL: "http://127.0.0.1:1"})
	assert.Equal(t, 200, g.send(g.dispatch()).status, "of an older epoch")
	gone.Incarnation = 9
	g.feed.emit(gone)
	assert.Equal(t, msg.Gone, g.send(g.dispatch()).reply.Refusal)
}

// TestDataMailbox: a full, a stopped and a silent mailbox, as for a rank of the own node.
func TestDataMailbox(t *testing.T) {
	g := newDataRig(t, dataOptions{
		url:    "http://127.0.0.1:1",
		config: func(c *DataConfig) { c.Admit = 20 * time.Millisecond },
	})
	g.rank.set(func(k *dataMailbox) { k.full = true })
	assert.Equal(t, msg.Overloaded, g.send(g.dispatch()).reply.Refusal)
	g.rank.set(func(k *dataMailbox) { k.full, k.mute = false, true })
	d := g.dispatch()
	d.Admit.Blocks = []uint64{1, 2, 3}
	assert.Equal(t, msg.Overloaded, g.send(d).reply.Refusal)
	g.rank.set(func(k *dataMailbox) {
		assert.Equal(t, []uint64{1, 2, 3}, k.held[0].Blocks, "the message's own until it is answered")
		k.held[0].Reply <- k.reply
	})
	dataEventually(t, func() bool { return len(g.rank.done()) == 1 }, "the late ticket comes back")
	assert.Equal(t, msg.Done{TicketID: ticketID, Outcome: msg.Refused, Cause: "late_ticket"},
		g.rank.done()[0])
	close(g.rank.stopped)
	assert.Equal(t, msg.Gone, g.send(g.dispatch()).reply.Refusal)
	g.rank.set(func(k *dataMailbox) { k.full = true })
	assert.Equal(t, msg.Gone, g.send(g.dispatch()).reply.Refusal)
}

// TestDataEngineLost: an engine that refuses the connection differs from one that breaks off; both answers
// carry the ticket.
func TestDataEngineLost(t *testing.T) {
	a := newDataRig(t, dataOptions{url: "http://" + ports.TakeAddr(t)}).send(newDispatch())
	require.ErrorIs(t, a.err, rankleg.ErrEngineRefused)
	assert.EqualValues(t, ticketID, a.reply.Ticket.ID)

	a = newDataRig(t, dataOptions{engine: func(_ http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		panic(http.ErrAbortHandler)
	}}).send(newDispatch())
	require.Error(t, a.err)
	require.NotErrorIs(t, a.err, rankleg.ErrEngineRefused)
	require.NotErrorIs(t, a.err, rankleg.ErrUnreachable)
	assert.EqualValues(t, ticketID, a.reply.Ticket.ID)
}

func newDispatch() *rankleg.Request { return (&dataRig{}).dispatch() }

// TestDataResend: a re-used connection that turns out closed costs one resend, which the answer reports.
func TestDataResend(t *testing.T) {
	var n atomic.Int32
	g := newDataRig(t, dataOptions{engine: func(w http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		if n.Add(1) == 2 {
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(w, "{}")
	}})
	d := g.dispatch()
	require.Equal(t, 200, g.send(d).status)
	assert.False(t, d.Resent)
	require.Equal(t, 200, g.send(d).status)
	assert.True(t, d.Resent)
	assert.EqualValues(t, 3, n.Load())
}

// TestDataFirstToken: an engine that does not answer in time has its own cause, and its connection is closed.
func TestDataFirstToken(t *testing.T) {
	left := make(chan struct{})
	g := newDataRig(t, dataOptions{engine: func(_ http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		<-r.Context().Done()
		close(left)
	}})
	d := g.dispatch()
	d.FirstToken = 20 * time.Millisecond
	a := g.send(d)
	require.ErrorIs(t, a.err, rankleg.ErrFirstToken)
	assert.EqualValues(t, ticketID, a.reply.Ticket.ID)
	<-left
}

// TestDataCut: an engine that breaks off in mid-stream resets the stream: no clean end, and no fault of the
// node.
func TestDataCut(t *testing.T) {
	g := newDataRig(t, dataOptions{engine: func(w http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		dataChunks(w, 2)
		panic(http.ErrAbortHandler)
	}})
	a := g.send(g.dispatch())
	require.NoError(t, a.err)
	require.Error(t, a.cut)
	require.NotErrorIs(t, a.cut, rankleg.ErrUnreachable)
	assert.Equal(t, strings.Repeat(dataChunk, 2), a.body)
}

// lateEngine answers with a chunk, or not at all, and then waits until its client leaves.
func lateEngine() (engine http.HandlerFunc, came, left chan struct{}) {
	came, left = make(chan struct{}, 4), make(chan struct{}, 4)
	return func(w http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		if r.Header.Get("X-Mute") == "" {
			dataChunks(w, 1)
		}
		came <- struct{}{}
		<-r.Context().Done()
		left <- struct{}{}
	}, came, left
}

// midway starts a stream whose first chunk has come, and a request whose engine has not answered; the
// channels get their ends.
func (g *dataRig) midway(ctx context.Context, came chan struct{}) (begun, mute chan error) {
	begun, mute = make(chan error, 1), make(chan error, 1)
	resp, _, err := g.client.Ask(ctx, g.dispatch())
	require.NoError(g.t, err)
	_, err = io.ReadFull(resp.Body, make([]byte, len(dataChunk)))
	require.NoError(g.t, err)
	go func() {
		defer resp.Body.Close()
		_, err := resp.Body.Read(make([]byte, 100))
		begun <- err
	}()
	d := g.dispatch()
	d.Header = map[string][]string{"X-Mute": {"1"}}
	go func() { mute <- g.sendCtx(ctx, d).err }()
	<-came
	<-came
	return begun, mute
}

// assertReturned: the data port gives back the ticket that no ingress knows; the other one belongs to the
// ingress.
func (g *dataRig) assertReturned() {
	dataEventually(g.t, func() bool { return len(g.rank.done()) == 1 }, "the ticket that nobody heard of")
	assert.Equal(g.t, msg.Done{TicketID: ticketID, Outcome: msg.Cancelled, Cause: "client_gone"},
		g.rank.done()[0])
}

// TestDataNodeLost: a lost connection is the node's fault, before the answer and within it.
func TestDataNodeLost(t *testing.T) {
	engine, came, left := lateEngine()
	g := newDataRig(t, dataOptions{engine: engine})
	begun, mute := g.midway(t.Context(), came)
	require.NoError(t, g.http.Close())
	require.ErrorIs(t, <-begun, rankleg.ErrUnreachable)
	require.ErrorIs(t, <-mute, rankleg.ErrUnreachable)
	<-left
	<-left
	require.ErrorIs(t, g.send(g.dispatch()).err, rankleg.ErrUnreachable, "nobody listens any more")
	g.assertReturned()
}

// TestDataCancel: an ingress that cancels ends the engine's requests, within a stream and before its answer.
func TestDataCancel(t *testing.T) {
	engine, came, left := lateEngine()
	g := newDataRig(t, dataOptions{engine: engine})
	ctx, cancel := context.WithCancel(t.Context())
	begun, mute := g.midway(ctx, came)
	cancel()
	<-left
	<-left
	require.ErrorIs(t, <-begun, context.Canceled)
	require.ErrorIs(t, <-mute, context.Canceled)
	g.assertReturned()
}

// TestDataHold: a ticket without a request lives as long as its stream.
func TestDataHold(t *testing.T) {
	g := newDataRig(t, dataOptions{url: "http://127.0.0.1:1"})
	ctx, cancel := context.WithCancel(t.Context())
	d := g.dispatch()
	d.Body, d.Header, d.Admit.Ctx = nil, nil, ctx
	rep, err := g.client.Reserve(t.Context(), d)
	require.NoError(t, err)
	assert.EqualValues(t, ticketID, rep.Ticket.ID)
	held := g.rank.asked()[0].Ctx
	require.NoError(t, held.Err())
	cancel()
	<-held.Done()
}

// TestDataNoTicket: a tokenizer request needs no admission.
func TestDataNoTicket(t *testing.T) {
	g := newDataRig(t, dataOptions{engine: func(w http.ResponseWriter, r *http.Request) {
		swallowBody(r)
		_, _ = io.WriteString(w, r.URL.Path)
	}})
	d := g.dispatch()
	d.Route, d.Admit = openai.Tokenize, nil
	a := g.send(d)
	assert.Equal(t, "/tokenize", a.body)
	assert.Equal(t, msg.AdmitReply{Ticket: msg.Ticket{Rank: d.Rank.ID}}, a.reply)
	assert.Empty(t, g.rank.asked())
}

// TestDataLease: a node without its lease admits no request and forwards no bytes.
func TestDataLease(t *testing.T) {
	var serves atomic.Bool
	serves.Store(true)
	next := make(chan struct{})
	g := newDataRig(t, dataOptions{
		config: func(c *DataConfig) { c.Serves = serves.Load },
		engine: func(w http.ResponseWriter, r *http.Request) {
			swallowBody(r)
			dataChunks(w, 1)
			<-next
			dataChunks(w, 1)
		},
	})
	resp, _, err := g.client.Ask(t.Context(), g.dispatch())
	require.NoError(t, err)
	defer resp.Body.Close()
	buf := make([]byte, 4096)
	n, err := resp.Body.Read(buf)
	require.NoError(t, err)
	require.Equal(t, dataChunk, string(buf[:n]))
	serves.Store(false)
	close(next)
	n, err = resp.Body.Read(buf)
	require.Error(t, err)
	require.NotErrorIs(t, err, io.EOF)
	assert.Zero(t, n)
	assert.Equal(t, msg.NoLease, g.send(g.dispatch()).reply.Refusal)
}
