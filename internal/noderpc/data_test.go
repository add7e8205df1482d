package noderpc

import (
	"context"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/ports"
)

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
