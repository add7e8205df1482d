package ingress

import (
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/routing"
)

// eventSpy is a policy that records the events of its Router.
type eventSpy struct {
	routing.RoundRobin

	mu    sync.Mutex
	heard []routing.Event
}

// Observe implements routing.Policy. A dispatch has no time of its own, so it is recorded with the view's.
func (s *eventSpy) Observe(st routing.State, v *routing.View, e *routing.Event) {
	s.RoundRobin.Observe(st, v, e)
	kept := *e
	kept.Snapshot, kept.Request = nil, nil
	if kept.Kind == routing.EvDispatched {
		kept.Now = v.Now
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heard = append(s.heard, kept)
}

// of returns the events of some kinds, in their order.
func (s *eventSpy) of(kinds ...routing.EventKind) (out []routing.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.heard {
		if slices.Contains(kinds, e.Kind) {
			out = append(out, e)
		}
	}
	return out
}

// listen replaces the application's Router by one with an eventSpy.
func (g *rig) listen() *eventSpy {
	s, ar := &eventSpy{}, g.in.findAppRouter("demo")
	r := routing.NewRouter(s, 1)
	r.OnRoom = ar.queue.room
	ar.replaceRouter(r)
	return s
}

// TestTheRouterHearsTheRanksTime: every record of a request gives the rank's time to the Router. A record of
// an older version has none, and a new incarnation has another clock.
func TestTheRouterHearsTheRanksTime(t *testing.T) {
	g := newRig(t, options{urls: []string{"http://127.0.0.1:1"}})
	s, r := g.listen(), g.replicas[0]
	tell := func(times ...time.Duration) {
		r.mu.Lock()
		defer r.mu.Unlock()
		for i, kind := range []msg.RecordKind{
			msg.RecAdmitted, msg.RecFirstToken, msg.RecProgress,
			msg.RecDone,
		} {
			r.emit(&msg.Record{Kind: kind, ReqID: 1, Ingress: "n2", Tokens: 10, Out: i, At: times[i]})
		}
	}
	type event struct {
		kind        routing.EventKind
		incarnation uint64
		at          time.Duration
	}
	tell(time.Second, 2*time.Second, 3*time.Second, 4*time.Second)
	tell(0, 0, 0, 0)
	first := r.incarnation
	r.reborn()
	tell(1, 2, 3, 4)
	var got []event
	for _, e := range s.of(routing.EvAdmitted, routing.EvFirstToken, routing.EvProgress, routing.EvFinished) {
		got = append(got, event{e.Kind, e.Incarnation, e.At})
	}
	assert.Equal(t, []event{
		{routing.EvAdmitted, first, time.Second},
		{routing.EvFirstToken, first, 2 * time.Second},
		{routing.EvProgress, first, 3 * time.Second},
		{routing.EvFinished, first, 4 * time.Second},
		{routing.EvAdmitted, first, 0},
		{routing.EvFirstToken, first, 0},
		{routing.EvProgress, first, 0},
		{routing.EvFinished, first, 0},
		{routing.EvAdmitted, first + 1, 1},
		{routing.EvFirstToken, first + 1, 2},
		{routing.EvProgress, first + 1, 3},
		{routing.EvFinished, first + 1, 4},
	}, got)
}

// TestOutputsReachTheRouter: the end of a request reports its number of output tokens, whatever the form of
// its answer and wherever its rank is. A stream without usage counts by its chunks.
func TestOutputsReachTheRouter(t *testing.T) {
	const whole = `{"id":"c","choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}],` +
		`"usage":{"prompt_tokens":5,"completion_tokens":9}}`
	for name, c := range map[string]struct {
		body   string
		engine http.HandlerFunc
		want   int
	}{
		"streamed, usage": {streamBody, sends(textChunk, stopChunk, usageChunk, doneEvent), 7},
		"streamed, no usage": {
			streamBody, sends(textChunk, textChunk, textChunk, stopChunk, doneEvent),
			4,
		},
		"streamed, cut short": {streamBody, cutAfter(textChunk, textChunk), 2},
		"not streamed":        {chatBody, replies(http.StatusOK, whole), 9},
		"not streamed, no usage": {chatBody, replies(
			http.StatusOK, `{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}]}`), 0},
		"refused by the engine": {chatBody, replies(
			http.StatusBadRequest, `{"error":{"message":"no","code":400}}`), 0},
	} {
		for where, far := range map[string]bool{"near": false, "far": true} {
			t.Run(name+", "+where, func(t *testing.T) {
				g := newRig(t, options{far: far, engines: []http.HandlerFunc{c.engine}})
				s := g.listen()
				g.post("/v1/chat/completions", c.body)
				eventually(t, func() bool { return len(s.of(routing.EvFinished)) > 0 },
					"the end of the request")
				assert.Equal(t, c.want, s.of(routing.EvFinished)[0].Out)
			})
		}
	}
}

// TestTicketsTellTheRouterTheTime: a ticket, and the end of a dispatch without one, have the ingress's time
// like the pick, even if no record of a rank arrived in between.
func TestTicketsTellTheRouterTheTime(t *testing.T) {
	follows := func(t *testing.T, s *eventSpy, kind routing.EventKind) {
		t.Helper()
		picks, got := s.of(routing.EvDispatched), s.of(kind)
		require.Len(t, picks, 1)
		require.Len(t, got, 1)
		assert.Positive(t, picks[0].Now)
		assert.GreaterOrEqual(t, got[0].Now, picks[0].Now)
		assert.Equal(t, picks[0].ReqID, got[0].ReqID)
	}
	for where, far := range map[string]bool{"near": false, "far": true} {
		t.Run(where, func(t *testing.T) {
			g := newRig(t, options{far: far, engines: []http.HandlerFunc{
				replies(http.StatusOK, wholeAnswer),
			}})
			s := g.listen()
			require.Equal(t, http.StatusOK, g.post("/v1/chat/completions", chatBody).status)
			follows(t, s, routing.EvTicket)
			ask := client.BestWorkerRequest{TokenIDs: []uint32{1, 2, 3}, RequestID: "r1"}

			s = g.listen()
			_, err := g.in.BestWorker(t.Context(), "demo", &ask)
			require.NoError(t, err)
			follows(t, s, routing.EvTicket)
			require.NoError(t, g.in.Free("demo", "r1"))

			s = g.listen()
			g.replicas[0].setRefuse(func(*msg.Admit) msg.Refusal { return msg.Draining })
			_, err = g.in.BestWorker(t.Context(), "demo", &ask)
			require.Error(t, err)
			follows(t, s, routing.EvUndo)
		})
	}
}
