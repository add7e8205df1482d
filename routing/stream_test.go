package routing

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// replica is a truthful rank: it numbers its records and sends them, in order, to every router.
type replica struct {
	rank  RankID
	seq   uint64
	room  int
	open  map[uint64]*Open
	links []*link
}

// link is one ingress: its router, what the replica's stream has under way to it, and its own requests under
// way.
type link struct {
	r       *Router
	stream  []Event
	asks    []uint64 // Admit messages under way
	answers []Event  // tickets and refusals under way
	alive   map[uint64]bool
}

func (p *replica) emit(e Event) {
	p.seq++
	e.Rank, e.Incarnation, e.Seq = p.rank, 7, p.seq
	for _, l := range p.links {
		l.stream = append(l.stream, e)
	}
}

// admit answers the oldest Admit of l.
func (p *replica) admit(l *link) {
	key := l.asks[0]
	l.asks = l.asks[1:]
	if len(p.open) >= p.room {
		l.answers = append(l.answers, Event{Kind: EvUndo, Rank: p.rank, ReqID: key})
		delete(l.alive, key)
		return
	}
	p.open[key] = &Open{ReqID: key, Tokens: 3}
	p.emit(Event{Kind: EvAdmitted, ReqID: key, Tokens: 3})
	l.answers = append(l.answers, Event{Kind: EvTicket, Rank: p.rank, ReqID: key, Incarnation: 7, Seq: p.seq})
}

func (p *replica) advance(t *rapid.T, key uint64) {
	switch o := p.open[key]; {
	case !o.Decoding:
		o.Decoding = true
		p.emit(Event{Kind: EvFirstToken, ReqID: key})
	case rapid.Bool().Draw(t, "more"):
		o.Out++
		p.emit(Event{Kind: EvProgress, ReqID: key, Out: o.Out})
	default:
		delete(p.open, key)
		for _, l := range p.links {
			delete(l.alive, key)
		}
		p.emit(Event{Kind: EvFinished, ReqID: key})
	}
}

// snapshot loses l's stream and begins it anew, as after a gap.
func (p *replica) snapshot(l *link) {
	e := Event{Kind: EvRankUp, Rank: p.rank, Epoch: 1, Incarnation: 7, MaxOngoing: p.room, Seq: p.seq}
	for _, o := range p.open {
		e.Snapshot = append(e.Snapshot, *o)
	}
	l.stream = append(l.stream[:0], e)
}

func (l *link) deliver() {
	e := l.stream[0]
	l.stream = l.stream[1:]
	l.r.Observe(&e)
}

func (l *link) answer() {
	e := l.answers[0]
	l.answers = l.answers[1:]
	l.r.Observe(&e)
}

// Two ingresses, one truthful rank, every interleaving of stream and answers, gaps included: no view ever
// counts a request twice or goes below zero, and when all has arrived both views equal the rank's own
// account.
func TestViewsConvergeToTheReplicasAccount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := &replica{rank: ID(0, 0), room: 6, open: map[uint64]*Open{}}
		for range 2 {
			p.links = append(p.links, &link{r: routerWith(PowerOfTwo{}, 1, 1<<20), alive: map[uint64]bool{}})
		}
		next := uint64(0)
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			l := p.links[rapid.IntRange(0, 1).Draw(t, "ingress")]
			switch act := rapid.IntRange(0, 12).Draw(t, "act"); {
			case act < 3:
				next++
				pick(l.r, Request{ID: next, Tokens: 3})
				l.asks, l.alive[next] = append(l.asks, next), true
			case act < 5 && len(l.asks) > 0:
				p.admit(l)
			case act < 7 && len(l.answers) > 0:
				l.answer()
			case act < 9 && len(p.open) > 0:
				p.advance(t, oldest(p.open))
			case act < 12 && len(l.stream) > 0:
				l.deliver()
			case act == 12:
				p.snapshot(l)
			}
			checkBounds(t, p, next)
		}
		settle(t, p)
	})
}

func oldest(open map[uint64]*Open) uint64 {
	least := ^uint64(0)
	for key := range open {
		least = min(least, key)
	}
	return least
}

func checkBounds(t *rapid.T, p *replica, dispatched uint64) {
	for _, l := range p.links {
		load := loadOf(l.r, p.rank)
		require.GreaterOrEqual(t, min(load.W, load.F, load.R), 0)
		require.GreaterOrEqual(t, min(load.Q, load.K, load.Kq), int64(0))
		require.LessOrEqual(t, uint64(load.O()), dispatched, "a request was counted twice")
		// the stream is at its end: own dispatches that live are all counted, none twice
		if len(l.stream) == 0 {
			require.GreaterOrEqual(t, load.O(), len(p.open))
		}
	}
}

// settle lets everything under way arrive, in an order of its own, then ends the requests.
func settle(t *rapid.T, p *replica) {
	for _, l := range p.links {
		for len(l.asks) > 0 {
			p.admit(l)
		}
	}
	drain := func() {
		for _, l := range p.links {
			for len(l.answers)+len(l.stream) > 0 {
				if len(l.stream) == 0 || len(l.answers) > 0 && rapid.Bool().Draw(t, "answer first") {
					l.answer()
				} else {
					l.deliver()
				}
			}
		}
	}
	drain()
	var want Load
	for _, o := range p.open {
		entry := open{tokens: int32(o.Tokens), out: int32(o.Out), phase: admitted}
		if o.Decoding {
			entry.phase = decoding
		}
		want.add(&entry, 1)
	}
	for _, l := range p.links {
		require.Equal(t, want, loadOf(l.r, p.rank))
	}
	for len(p.open) > 0 {
		p.advance(t, oldest(p.open))
	}
	drain()
	for _, l := range p.links {
		require.Equal(t, Load{}, loadOf(l.r, p.rank), "pending 0 at the end")
	}
}
