package routing

import (
	"container/heap"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// mocks are three ranks of engines that tell nothing of themselves and answer after a time that does not
// depend on their load.
type mocks struct {
	t      *testing.T
	router *Router
	now    time.Duration
	due    fleetQueue
	events uint64
	seqs   [3]uint64
	lag    time.Duration // of the ranks' records
	choice Decision
}

func (m *mocks) after(d time.Duration, do func()) {
	m.events++
	heap.Push(&m.due, fleetEvent{m.now + d, m.events, do})
}

func (m *mocks) tell(id RankID, e Event) {
	seq := &m.seqs[id.Rank()]
	*seq++
	e.Rank, e.Incarnation, e.Seq, e.At = id, 7, *seq, m.now+time.Hour
	m.after(m.lag, func() {
		e.Now = m.now
		m.router.Observe(&e)
	})
}

// ask sends a request, which is answered after d.
func (m *mocks) ask(q *Request, d time.Duration, done func()) RankID {
	q.Now = m.now
	m.router.Pick(q, &m.choice)
	require.Equal(m.t, Route, m.choice.Kind)
	id := m.choice.Ranked[0]
	m.after(200*time.Microsecond, func() {
		m.tell(id, Event{Kind: EvAdmitted, ReqID: q.ID, Tokens: q.Tokens})
		m.router.Observe(&Event{
			Kind: EvTicket, Rank: id, ReqID: q.ID, Incarnation: 7, Seq: m.seqs[id.Rank()], Now: m.now,
		})
		m.after(d, func() {
			m.tell(id, Event{Kind: EvFirstToken, ReqID: q.ID})
			m.tell(id, Event{Kind: EvFinished, ReqID: q.ID, Out: 8, End: EndGood})
			m.after(30*time.Millisecond, done)
		})
	})
	return id
}

// RT11: where nothing tells ranks apart they are shared: engines that report nothing and answer faster than
// any that the cost model knows, before 96 clients. The first requests are for learning that.
func TestEqualRanksAreShared(t *testing.T) {
	const ranks, clients, first, requests = 3, 96, 3000, 6000
	for _, tokens := range []int{20, 450} {
		for _, answer := range []time.Duration{5 * time.Millisecond, 200 * time.Millisecond} {
			m := &mocks{t: t, router: NewRouter(newPolicy(t, nameMex), 1), lag: 10 * time.Millisecond}
			for i := range ranks {
				m.router.Observe(up(ID(0, i), 1<<20))
			}
			rnd, sent, got := seeded(7), uint64(0), [ranks]int{}
			var ask func()
			ask = func() {
				if sent++; sent > requests {
					return
				}
				q := &Request{ID: sent, Tokens: 5 + rnd.IntN(tokens)}
				id := m.ask(q, answer+time.Duration(rnd.IntN(2000))*time.Microsecond, ask)
				if sent > first {
					got[id.Rank()]++
				}
			}
			for range clients {
				m.after(0, ask)
			}
			for len(m.due) > 0 {
				e, ok := heap.Pop(&m.due).(fleetEvent)
				require.True(t, ok)
				m.now = e.at
				e.do()
			}
			for _, n := range got {
				share := float64(n) / (requests - first)
				assert.True(t, share >= 0.3 && share <= 0.37, "%d tokens, answers after %s: %v", tokens,
					answer, got)
			}
		}
	}
}
