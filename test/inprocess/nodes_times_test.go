package inprocess

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/test/harness"
)

// timeline keeps what an ingress hears of requests. It implements msg.Sink.
type timeline struct {
	mu   sync.Mutex
	seen []msg.Record
}

func (l *timeline) Deliver(rec *msg.Record) {
	switch rec.Kind {
	case msg.RecAdmitted, msg.RecFirstToken, msg.RecProgress, msg.RecDone:
		l.mu.Lock()
		defer l.mu.Unlock()
		l.seen = append(l.seen, *rec)
	default:
	}
}

// take gives what has come since it was asked last.
func (l *timeline) take() []msg.Record {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := l.seen
	l.seen = nil
	return out
}

// The rank's own time and the outputs of requests reach the ingress of another node with the records:
// streamed and not, asked near and far. They are those that the rank's own node hears, in whole microseconds,
// and a rank that is started again has another clock.
func TestTheRanksTimeAndOutputsReachAnotherNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const tokens = 50
		c := harness.New(t, harness.Nodes(2), harness.Roles(1, "ingress", "control"))
		c.Expect(harness.EngineFails)
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 20"))
		c.WaitStatus("a", "RUNNING")
		c.Peer(1).WaitStatus("a", "RUNNING")
		near, far := &timeline{}, &timeline{}
		defer c.Peer(0).Feed().Subscribe(near)()
		defer c.Peer(1).Feed().Subscribe(far)()
		time.Sleep(time.Minute)

		// ask runs one request and returns its records as another node hears them.
		ask := func(p *harness.Peer, streamed bool) []msg.Record {
			answer := p.Chat(t.Context(), "a", tokens, streamed)
			require.True(t, answer.Whole())
			time.Sleep(time.Second)
			here, there := near.take(), far.take()
			require.Len(t, there, len(here))
			require.Equal(t, msg.RecAdmitted, there[0].Kind)
			for i := range there {
				want := here[i]
				want.At = (want.At + time.Microsecond - 1).Truncate(time.Microsecond)
				require.Equal(t, want, there[i])
				require.Positive(t, there[i].At)
				if i > 0 {
					require.GreaterOrEqual(t, there[i].At, there[i-1].At)
				}
			}
			last := there[len(there)-1]
			require.Equal(t, msg.RecDone, last.Kind)
			// as chunks, without a usage
			assert.InDelta(t, tokens, last.Out, 2, "the role and the end of a stream may count")
			inHand := last.At - there[0].At
			assert.InDelta(t, answer.Total.Seconds(), inHand.Seconds(), 0.1,
				"it is given back in a message of its own")
			if streamed {
				require.Equal(t, msg.RecFirstToken, there[1].Kind)
				assert.InDelta(t, answer.First.Seconds(), (there[1].At - there[0].At).Seconds(), 0.005,
					"however late its message is")
			}
			return there
		}
		var before, latest time.Duration
		incarnation := uint64(0)
		for _, p := range c.Peers() {
			for _, streamed := range []bool{true, false} {
				got := ask(p, streamed)
				latest = got[len(got)-1].At
				assert.Greater(t, got[0].At, before, "one clock for all requests of an incarnation")
				before, incarnation = latest, got[0].Incarnation
			}
		}
		assert.Greater(t, latest, time.Minute)

		require.True(t, c.Kill("a", 0, 0))
		time.Sleep(30 * time.Second)
		c.WaitStatus("a", "RUNNING")
		c.Peer(1).WaitStatus("a", "RUNNING")
		got := ask(c.Peer(1), true)
		assert.NotEqual(t, incarnation, got[0].Incarnation)
		assert.Less(t, got[len(got)-1].At, latest, "its clock began with it")
		c.Quiet()
	})
}
