package inbox_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/asynkron/protoactor-go/actor"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/inbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type receive func(m any)

func (f receive) Receive(m any) { f(m) }

func system(t testing.TB, log *slog.Logger) *actor.ActorSystem {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	sys := inbox.NewSystem(log)
	t.Cleanup(sys.Shutdown)
	return sys
}

func spawn(t testing.TB, sys *actor.ActorSystem, bound int, f receive) *inbox.Inbox {
	box, err := inbox.Spawn(sys, t.Name(), bound, func() inbox.Receiver { return f })
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(t, box.Stop(ctx))
	})
	return box
}

// one is a message with a body, so that a queue without a bound would be seen in memory.
type one struct {
	sender, n int
	_         [64]byte
}

// TestSK8BoundHoldsAgainstAStoppedReader: a million messages to a reader that does not read stay within the
// bound; what gives back passes; order per sender holds once it reads again.
func TestSK8BoundHoldsAgainstAStoppedReader(t *testing.T) {
	total := 1_000_000
	if testing.Short() {
		total = 50_000
	}
	const bound, senders, dones = 4096, 4, 100
	sys, gate := system(t, nil), make(chan struct{})
	var got []*one
	var ends int
	finished := make(chan struct{})
	entered := make(chan struct{}, 1)
	box := spawn(t, sys, bound, func(m any) {
		switch m := m.(type) {
		case string:
			entered <- struct{}{}
			<-gate
		case *one:
			got = append(got, m)
		case int:
			if ends++; ends == dones {
				close(finished)
			}
		}
	})
	require.NoError(t, box.TrySend("block"))
	<-entered

	before := heap()
	var wg sync.WaitGroup
	var accepted [senders]int
	for s := range senders {
		wg.Go(func() {
			for n := range total / senders {
				err := box.TrySend(&one{sender: s, n: n})
				if err == nil {
					accepted[s]++
				} else if !errors.Is(err, inbox.ErrOverloaded) {
					t.Errorf("wanted ErrOverloaded, got %v", err)
				}
			}
		})
	}
	wg.Wait()
	assert.Equal(t, bound, accepted[0]+accepted[1]+accepted[2]+accepted[3])
	assert.Equal(t, bound, box.Pending())
	assert.Less(t, heap()-before, 4<<20, "memory of a full inbox")
	for range dones {
		box.Send(1)
	}
	require.ErrorIs(t, box.TrySend(&one{}), inbox.ErrOverloaded)

	close(gate)
	<-finished
	require.Len(t, got, bound)
	last := [senders]int{-1, -1, -1, -1}
	for _, m := range got {
		require.Greater(t, m.n, last[m.sender], "order of sender %d", m.sender)
		last[m.sender] = m.n
	}
	assert.Zero(t, box.Pending())
}

func heap() int {
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int(s.HeapAlloc)
}

// TestSK8StopPassesAFullInbox: the system message overtakes a full queue.
func TestSK8StopPassesAFullInbox(t *testing.T) {
	sys, gate := system(t, nil), make(chan struct{})
	box := spawn(t, sys, 8, func(any) { <-gate })
	for box.TrySend(1) == nil {
		continue
	}
	box.Halt()
	close(gate)
	<-box.Stopped()
	require.ErrorIs(t, box.TrySend(1), inbox.ErrStopped)
	box.Send(1)
	box.Halt()
}

// SK8: a sender faster than its inbox is refused and never waits; each message that was accepted arrives.
func TestSK8FastSenderNeverBlocksAndLosesNothingAccepted(t *testing.T) {
	sys := system(t, nil)
	var got int
	done := make(chan struct{})
	box := spawn(t, sys, 16, func(m any) {
		if _, ok := m.(string); ok {
			close(done)
			return
		}
		got++
	})
	accepted := 0
	for range 100_000 {
		if box.TrySend(1) == nil {
			accepted++
		}
	}
	box.Send("end")
	<-done
	assert.Equal(t, accepted, got)
}

func TestPanicCostsOneMessageAndMakesANewReceiver(t *testing.T) {
	var buf bytes.Buffer
	sys := system(t, slog.New(slog.NewTextHandler(&buf, nil)))
	starts := 0
	reply := make(chan int, 1)
	box, err := inbox.Spawn(sys, "fragile", 64, func() inbox.Receiver {
		starts++
		seen := 0
		return receive(func(m any) {
			if secret, ok := m.(string); ok {
				panic(len(secret))
			}
			seen++
			reply <- starts*100 + seen
		})
	})
	require.NoError(t, err)
	require.NoError(t, box.TrySend(1))
	assert.Equal(t, 101, <-reply)
	for range 20 { // more than the default supervision allows in ten seconds
		require.NoError(t, box.TrySend("secret prompt"))
	}
	require.NoError(t, box.TrySend(1))
	assert.Equal(t, 2101, <-reply)
	require.NoError(t, box.Stop(t.Context()))
	assert.Contains(t, buf.String(), "actor panicked")
	assert.Equal(t, 20, strings.Count(buf.String(), "type=string"))
	assert.NotContains(t, buf.String(), "secret")
}

func TestNamesAreUniqueAndFreeAfterStop(t *testing.T) {
	sys := system(t, nil)
	newReceiver := func() inbox.Receiver { return receive(func(any) {}) }
	box, err := inbox.Spawn(sys, "x", 1, newReceiver)
	require.NoError(t, err)
	_, err = inbox.Spawn(sys, "x", 1, newReceiver)
	require.ErrorIs(t, err, actor.ErrNameExists)
	_, err = inbox.Spawn(sys, "y", 0, newReceiver)
	require.EqualError(t, err, "spawn y: the bound must be at least 1, not 0")
	require.NoError(t, box.Stop(t.Context()))
	require.NoError(t, box.Stop(t.Context()))
	box, err = inbox.Spawn(sys, "x", 1, newReceiver)
	require.NoError(t, err)
	require.NoError(t, box.Stop(t.Context()))
}

func TestStopGivesUpWithTheContext(t *testing.T) {
	sys, busy, gate := system(t, nil), make(chan struct{}), make(chan struct{})
	box := spawn(t, sys, 1, func(any) { close(busy); <-gate })
	require.NoError(t, box.TrySend(1))
	<-busy // a stop overtakes what is queued
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, box.Stop(ctx), context.Canceled)
	close(gate)
}

func TestAnActorMayHaltItself(t *testing.T) {
	sys := system(t, nil)
	ready := make(chan *inbox.Inbox, 1)
	box := spawn(t, sys, 1, func(any) { (<-ready).Halt() })
	ready <- box
	require.NoError(t, box.TrySend(1))
	<-box.Stopped()
}

// BenchmarkTrySendReply is one question and answer: a one-slot reply channel in the message. Goal: 2 µs.
func BenchmarkTrySendReply(b *testing.B) {
	sys := system(b, nil)
	box := spawn(b, sys, 64, func(m any) { m.(chan int) <- 1 })
	reply := make(chan int, 1)
	b.ReportAllocs()
	for b.Loop() {
		if err := box.TrySend(reply); err != nil {
			b.Fatal(err)
		}
		<-reply
	}
}
