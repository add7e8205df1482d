package ingress

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/noderpc"
	"github.com/dpserve/dpserve/internal/rawconn"
)

// dataPort is another node's data port on loopback, or in the rig's network. Its connections are those of a
// node port without TLS.
type dataPort struct {
	server *noderpc.DataServer
	http   *http.Server
	client *noderpc.DataClient
}

// dataPort makes the rig's ranks those of another node.
func (g *rig) dataPort(o *options) *dataPort {
	for _, r := range g.replicas[:len(g.replicas)-o.home] {
		r.node = "n2"
	}
	return newDataPort(g.t, g.feed, o)
}

func newDataPort(tb testing.TB, f *feed, o *options) *dataPort {
	tb.Helper()
	c := noderpc.DataConfig{
		Feed: portFeed{f}, Caller: func(context.Context) (string, bool) { return "n1", true },
		Serves: o.lease, Log: slog.New(slog.DiscardHandler), Admit: o.timers.Admit,
	}
	dial := (&net.Dialer{}).DialContext
	var l net.Listener
	var err error
	if o.network == nil {
		l, err = (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	} else {
		dial, c.Dial = o.network.DialContext, o.network.DialContext
		l, err = o.network.Listen("n2:80")
	}
	require.NoError(tb, err)
	server := noderpc.NewDataServer(c)
	p := &dataPort{server: server, http: &http.Server{
		Handler: server, ReadHeaderTimeout: time.Minute,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}}
	go func() { _ = p.http.Serve(rawListener{l}) }()
	way := nodeport.NewTransport(func(ctx context.Context) (net.Conn, error) {
		c, err := dial(ctx, "tcp", l.Addr().String())
		return rawconn.Conn(c), err
	})
	p.client = noderpc.NewDataClient(func(string) (noderpc.DataTransport, error) { return way, nil })
	tb.Cleanup(func() {
		way.Close()
		assert.NoError(tb, server.Close())
		assert.NoError(tb, p.http.Close())
	})
	return p
}

// rawListener makes a raw connection of each that it accepts, as a node's port does.
type rawListener struct{ net.Listener }

func (l rawListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return rawconn.Conn(c), nil
}

// RP13, RP49b, RP50, RP53, RP60: for ranks of another node, clients and ranks see the same as for ranks of
// this node. The tests of rank_conformance_test.go run for both anyway.
func TestFar(t *testing.T) {
	for name, test := range map[string]func(t *testing.T){
		"Stalled": TestStalledStream, "SlowReader": TestSlowReader,
		"Fenced":  TestToldFencedIsTriedAgainAtOnce,
		"Drain":   TestTheEndOfADrainCutsAttachedStreams,
		"Streams": TestStreamsPass, "Bodies": TestBodiesPass,
		"Long": TestLongWholeAnswerStreams, "After": TestAfterTheFirstByte,
		"Blocks": TestAdmitCarriesBlocksAndHit, "TokenIdentity": TestTokenIdentity,
		"BodiesGivenBack": TestBodiesAreGivenBackAtTheFirstByte, "LargeBodies": TestLargeBodiesPass,
		"PassedOn": TestALargeBodyIsPassedOn, "PassedOnce": TestALargeBodyIsSentOnce,
		"Reservation": TestReservation, "Generate": TestGenerate,
		"GenerateEnds": TestGenerateEndsWithItsCaller,
		"Comments":     TestClientsOfStreamsHearThatTheyWait, "Leaves": TestAClientThatLeavesWhileItWaits,
		"CommentsInTheSeam": TestClientsHearInTheSeam, "Waits": TestStreamsWaitForARank,
	} {
		t.Run(name, test)
	}
}

// TestFarDeadline: a request whose deadline is over leaves nothing on the other node, however far it got.
func TestFarDeadline(t *testing.T) {
	t.Parallel()
	var h hangingEngine
	for _, list := range [][]string{nil, {textChunk}} {
		g := newRig(t, options{far: true, engines: []http.HandlerFunc{h.sends(list...)}})
		for _, ms := range []string{"1", "5", "20", "100"} {
			assert.Contains(t, g.post("/v1/chat/completions", streamBody, "X-Dpserve-Timeout-Ms", ms).body,
				`"code":"deadline_exceeded"`)
		}
	}
}

// TestLease: a node without its lease ends its streams with an error event and begins none; so does a data
// port.
func TestLease(t *testing.T) {
	for _, far := range []bool{false, true} {
		var lost atomic.Bool
		next := make(chan struct{})
		g := newRig(t, options{
			far: far, lease: func() bool { return !lost.Load() },
			engines: []http.HandlerFunc{
				func(w http.ResponseWriter, r *http.Request) {
					drain(r)
					sse(w, textChunk)
					<-next
					sse(w, stopChunk, doneEvent)
				},
			},
		})
		answers := make(chan answer)
		go func() { answers <- g.post("/v1/chat/completions", streamBody) }()
		eventually(t, func() bool {
			g.replicas[0].mu.Lock()
			defer g.replicas[0].mu.Unlock()
			return g.replicas[0].firsts == 1
		}, "the first token")
		lost.Store(true)
		close(next)
		a := <-answers
		require.Error(t, a.err)
		assert.Contains(t, a.body, "upstream_lost")
		assert.NotContains(t, a.body, doneEvent)
		assert.Equal(t, 503, g.post("/v1/chat/completions", chatBody).status, "no rank is asked")
	}
}

// TestWithoutRemote: without Config.Remote every mailbox is in this process, whatever nodes the ranks name.
func TestWithoutRemote(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	g.replicas[0].node = "n2"
	g.replicas[0].reborn()
	g.phase("demo/0/0", "ready", 2)
	assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
	assert.Equal(t, 1, g.replicas[0].granted())
}

// TestNodeLost: when the connection to a node is lost, its requests without a first byte are retried for
// free, however many they are, and streams end with an error event; neither counts against the rank.
func TestNodeLost(t *testing.T) {
	h := &hangingEngine{}
	g := newRig(t, options{
		max: 128, far: true, home: 1,
		engines: []http.HandlerFunc{h.sends(textChunk), h.sends(), replies(200, wholeAnswer)},
	})
	const n = 90 // a third each: more than the retry budget pays for
	answers := make(chan answer, n)
	for range n {
		go func() { answers <- g.post("/v1/chat/completions", streamBody) }()
	}
	eventually(t, func() bool { return h.came.Load() == 2*n/3 && g.replicas[0].inFlight() == n/3 },
		"all wait")
	eventually(t, func() bool {
		g.replicas[0].mu.Lock()
		defer g.replicas[0].mu.Unlock()
		return g.replicas[0].firsts == n/3
	}, "a third streams")
	require.NoError(t, g.port.http.Close())
	cut := 0
	for range n {
		a := <-answers
		assert.Equal(t, 200, a.status)
		if a.err != nil {
			cut++
			assert.Contains(t, a.body, "upstream_lost")
		}
	}
	assert.Equal(t, n/3, cut)
	g.replicas[0].mu.Lock()
	defer g.replicas[0].mu.Unlock()
	for _, d := range g.replicas[0].dones {
		assert.Equal(t, "node_unreachable", d.Cause)
		assert.False(t, d.Charge || d.CheckHealth)
	}
}
