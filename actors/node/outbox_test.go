package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

// lossyLeader is a sequence of leaders on a bad network.
type lossyLeader struct {
	mu   sync.Mutex
	rand *rand.Rand
	calm bool

	high uint64                   // events taken by the current leader
	view map[string]msg.UnitEvent // view of the current leader
	seen map[uint64]bool          // events that some leader took
	bad  []string
}

var errLost = errors.New("lost")

func (l *lossyLeader) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	l.mu.Lock()
	fate := l.rand.IntN(10)
	if l.calm {
		fate = 9
	}
	l.mu.Unlock()
	switch fate {
	case 0: // the report never arrives
		<-ctx.Done()
		return msg.Lease{}, context.Cause(ctx)
	case 1: // refused at once
		return msg.Lease{}, errLost
	case 2: // slow
		time.Sleep(700 * time.Millisecond)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if fate == 3 { // another node leads, and knows nothing
		l.high, l.view = 0, map[string]msg.UnitEvent{}
	}
	l.take(r)
	if fate == 4 { // the answer is lost
		return msg.Lease{}, errLost
	}
	return msg.Lease{TTL: 10 * time.Second, Acked: l.high}, nil
}

func (l *lossyLeader) take(r *msg.NodeReport) {
	last := uint64(0)
	for _, e := range r.Events {
		if e.Number <= last {
			l.bad = append(l.bad, fmt.Sprintf("event %d after %d", e.Number, last))
		}
		last = e.Number
		if e.Number <= l.high {
			continue
		}
		if l.high > 0 && e.Number != l.high+1 {
			l.bad = append(l.bad, fmt.Sprintf("event %d is missing: %d came", l.high+1, e.Number))
		}
		l.high, l.seen[e.Number] = e.Number, true
		if e.Epoch >= l.view[e.Unit].Epoch {
			l.view[e.Unit] = e
		}
	}
	for _, e := range r.Units { // level-triggered
		if have := l.view[e.Unit]; e.Epoch > have.Epoch || e.Epoch == have.Epoch && e.Number >= have.Number {
			l.view[e.Unit] = e
		} else if len(r.Events) < maxSentEvents {
			l.bad = append(l.bad, fmt.Sprintf("the digest is older than the events: %v, %v", e, have))
		}
	}
}

// Whatever the network does, some leader takes every event, each leader takes them in order, and on a quiet
// network the leader's view becomes the node's.
func TestEveryEventArrivesInOrderAndTheViewConverges(t *testing.T) {
	for seed := range uint64(150) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 5))
			l := &lossyLeader{
				rand: rand.New(rand.NewPCG(seed, 6)), view: map[string]msg.UnitEvent{},
				seen: map[uint64]bool{},
			}
			n := &Node{
				cfg: Config{
					Leader: l, Self: func() state.Node { return state.Node{ID: "n"} },
					Store: &fakeStore{now: state.New()},
				},
				log: slog.New(slog.DiscardHandler), timers: Timers{}.withDefaults(),
				core: NewCore(time.Now(), CoreConfig{
					Node: "n", Incarnation: 7, LeaseTTL: DefaultLeaseTTL, LeaseRenew: DefaultLeaseRenew,
				}),
			}
			w := newLeaseKeeper(n)
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() { w.run(ctx) })
			truth := map[string]msg.UnitEvent{}
			kinds := []msg.UnitEventKind{
				msg.UnitStarted, msg.UnitReady, msg.UnitFenced, msg.UnitKilling,
				msg.UnitGone,
			}
			number := uint64(0)
			for range 1 + r.IntN(60) {
				for range r.IntN(8) {
					number++
					e := msg.UnitEvent{
						Number: number, Unit: fmt.Sprint("u/", r.IntN(5)),
						Epoch: 1 + uint64(r.IntN(3)), Kind: kinds[r.IntN(len(kinds))],
					}
					if e.Epoch >= truth[e.Unit].Epoch {
						truth[e.Unit] = e
					}
					n.mu.Lock()
					n.core.tell(time.Now(), e)
					n.mu.Unlock()
					w.ring()
				}
				time.Sleep(time.Duration(r.IntN(1500)) * time.Millisecond)
			}
			l.mu.Lock()
			l.calm = true
			l.mu.Unlock()
			time.Sleep(4 * time.Second)
			synctest.Wait()
			l.mu.Lock()
			assert.Empty(t, l.bad, "seed %d", seed)
			assert.Len(t, l.seen, int(number), "seed %d", seed)
			for unit, e := range truth {
				have := l.view[unit]
				assert.Equal(t, [...]any{e.Epoch, e.Kind, e.Number},
					[...]any{have.Epoch, have.Kind, have.Number}, "seed %d: %s", seed, unit)
			}
			assert.Len(t, l.view, len(truth))
			l.mu.Unlock()
			n.mu.Lock()
			assert.False(t, n.core.Waiting())
			n.mu.Unlock()
			cancel()
			running.Wait()
		})
	}
}

func TestWhatWaitsForALeaderIsBounded(t *testing.T) {
	n := newEventOutbox()
	long := []string{strings.Repeat("x", 100<<10)}
	first := 0
	for i := range 3000 {
		before := n.full
		n.add(msg.UnitEvent{
			Number: uint64(i + 1), Unit: fmt.Sprint("u", i%2000), Epoch: 1,
			LogTail: long,
		})
		if n.full && !before {
			first = i
		}
	}
	assert.Equal(t, maxWaitingEvents, first, "it is told once")
	events, units := n.report()
	assert.Len(t, events, maxSentEvents)
	assert.Equal(t, uint64(3000-maxWaitingEvents+1), events[0].Number, "the oldest went")
	assert.Len(t, units, 2000)
	bytes := 0
	for _, e := range append(events, units...) {
		for _, line := range e.LogTail {
			bytes += len(line)
		}
	}
	assert.LessOrEqual(t, bytes, tailBytes)
	assert.Positive(t, bytes)
	assert.True(t, n.acknowledge(2900))
	assert.False(t, n.acknowledge(2900), "nobody takes more")
	assert.False(t, n.acknowledge(3000))
	n.forget(func(unit string, epoch uint64) bool { return unit == "u1" && epoch < 1 })
	require.Len(t, n.newest, 2000)
	n.forget(func(unit string, epoch uint64) bool { return unit == "u1" && epoch <= 1 })
	require.Len(t, n.newest, 1999)
}

// More events than one report may hold are sent at once, in several reports.
func TestABurstLeavesInPieces(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		before := b.leader.renewals()
		for i := range 3 * maxSentEvents {
			b.node.mu.Lock()
			b.node.core.tell(time.Now(), msg.UnitEvent{Unit: "u", Epoch: 1, Kind: msg.UnitStarted, Rank: i})
			b.node.mu.Unlock()
			b.node.leaseKeeper.ring()
		}
		synctest.Wait()
		b.leader.mu.Lock()
		assert.Len(t, b.leader.events, 3*maxSentEvents)
		b.leader.mu.Unlock()
		assert.LessOrEqual(t, b.leader.renewals()-before, 3*maxSentEvents)
	})
}
