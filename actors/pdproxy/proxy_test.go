package pdproxy

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeBackend is an ingress with ranks that a test changes.
type fakeBackend struct {
	mu      sync.Mutex
	ranks   [2][]routing.RankRef
	table   *routing.PairTable
	fails   map[warmKey]int // prewarm legs that fail first
	tried   map[warmKey]int
	running map[routing.RankRef]int // prewarm legs by decode rank
	most    int                     // of running, ever
	bad     map[warmKey]error
	resets  []routing.RankRef
	stuck   int // resets that fail
	noReset bool
	alarms  int
	met     int
	all     int
	why     string
}

func newFakeBackend(prefills, decodes int) *fakeBackend {
	b := &fakeBackend{
		table: routing.NewPairTable(true), fails: map[warmKey]int{}, tried: map[warmKey]int{},
		running: map[routing.RankRef]int{}, bad: map[warmKey]error{},
	}
	for i := range prefills {
		b.ranks[dispatch.Prefill] = append(b.ranks[dispatch.Prefill],
			routing.RankRef{ID: routing.ID(0, i), Incarnation: 1})
	}
	for i := range decodes {
		b.ranks[dispatch.Decode] = append(b.ranks[dispatch.Decode],
			routing.RankRef{ID: routing.ID(0, i), Incarnation: 1})
	}
	return b
}

func (b *fakeBackend) Ranks(dst []routing.RankRef, s dispatch.Side) []routing.RankRef {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append(dst, b.ranks[s]...)
}

func (b *fakeBackend) UpdateTable(change func(t *routing.PairTable)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change(b.table)
}

func (b *fakeBackend) CannotPair(p, d routing.RankRef) error { return b.bad[warmKey{p, d}] }

func (b *fakeBackend) Prewarm(ctx context.Context, p, d routing.RankRef) error {
	b.mu.Lock()
	b.running[d]++
	b.most = max(b.most, b.running[d])
	key := warmKey{p, d}
	b.tried[key]++
	fails := b.fails[key] > 0
	b.fails[key]--
	b.mu.Unlock()
	select {
	case <-time.After(time.Millisecond):
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running[d]--
	if fails {
		return errors.New("no answer")
	}
	return ctx.Err()
}

func (b *fakeBackend) ResetCache(_ context.Context, d routing.RankRef) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.resets = append(b.resets, d)
	if b.noReset {
		return ErrNoReset
	}
	if b.stuck > 0 {
		b.stuck--
		return errors.New("no answer")
	}
	return nil
}

func (b *fakeBackend) SetPairs(met, all int, why string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.met, b.all, b.why = met, all, why
}

func (b *fakeBackend) CountAlarm() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.alarms++
}

func (b *fakeBackend) do(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
}

func (b *fakeBackend) is(f func() bool) func() bool {
	return func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return f()
	}
}

func startProxy(t *testing.T, b *fakeBackend) *Proxy {
	t.Helper()
	sys := inbox.NewSystem(slog.New(slog.DiscardHandler))
	p, err := NewProxy(sys, t.Name(), b, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(func() {
		p.Close()
		sys.Shutdown()
	})
	return p
}

func eventually(t *testing.T, what func() bool, text string) {
	t.Helper()
	require.Eventually(t, what, 30*time.Second, time.Millisecond, text)
}

// TestPrewarms: each pair is prewarmed, one at a time per decode rank; one that fails is tried again, and the
// report says why it has not met. Another incarnation begins anew.
func TestPrewarms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend(2, 3)
		hard := warmKey{b.ranks[dispatch.Prefill][1], b.ranks[dispatch.Decode][2]}
		b.fails[hard] = 1
		startProxy(t, b)
		eventually(t, b.is(func() bool { return b.met == 5 && b.all == 6 && b.why != "" }), "five have met")
		b.do(func() { assert.Contains(t, b.why, "prefill 0/1 and decode 0/2: no answer") })
		eventually(t, b.is(func() bool { return b.met == 6 && b.why == "" }), "all have met")
		b.do(func() {
			assert.Equal(t, 2, b.tried[hard])
			assert.Equal(t, 1, b.most)
			assert.True(t, b.table.HasMet(hard.prefill, hard.decode))
			b.ranks[dispatch.Decode][0].Incarnation = 2
		})
		eventually(t, b.is(func() bool {
			return b.table.HasMet(b.ranks[dispatch.Prefill][0], b.ranks[dispatch.Decode][0]) && b.met == 6
		}), "the new incarnation has met")
		b.do(func() {
			old := routing.RankRef{ID: routing.ID(0, 0), Incarnation: 1}
			assert.False(t, b.table.HasMet(b.ranks[dispatch.Prefill][0], old))
			b.ranks[dispatch.Prefill] = nil
		})
		eventually(t, b.is(func() bool { return b.met == 0 && b.all == 0 }), "no pair is left")
	})
}

// TestBadPair: engines that do not fit are not asked.
func TestBadPair(t *testing.T) {
	b := newFakeBackend(1, 2)
	bad := warmKey{b.ranks[dispatch.Prefill][0], b.ranks[dispatch.Decode][1]}
	b.bad[bad] = errors.New("their KV blocks differ")
	startProxy(t, b)
	eventually(t, b.is(func() bool { return b.met == 1 && b.all == 2 }), "the other pair has met")
	b.do(func() {
		assert.Zero(t, b.tried[bad])
		assert.Contains(t, b.why, "their KV blocks differ")
	})
}

// TestAlarms: an alarm of a decode rank resets its cache, that of a prefill rank those that it has met.
func TestAlarms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend(2, 2)
		b.noReset = true
		p := startProxy(t, b)
		eventually(t, b.is(func() bool { return b.met == 4 }), "all have met")
		p.Alarm(b.ranks[dispatch.Decode][1])
		p.Alarm(b.ranks[dispatch.Decode][1]) // at once: it is being reset
		eventually(t, b.is(func() bool { return len(b.resets) == 1 }), "it is reset")
		p.PrefillAlarm(b.ranks[dispatch.Prefill][0])
		eventually(t, b.is(func() bool { return slices.Contains(b.resets, b.ranks[dispatch.Decode][0]) }),
			"the other one too")
		synctest.Wait()
		b.do(func() { assert.Equal(t, len(b.resets), b.alarms) })
	})
}

// TestResetsAreRepeated: a reset that fails is tried until the rank is gone, and an alarm while one runs is
// followed by another.
func TestResetsAreRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend(1, 1)
		b.stuck = 25 // more attempts than one reset has time for
		p := startProxy(t, b)
		p.Alarm(b.ranks[dispatch.Decode][0])
		p.Alarm(b.ranks[dispatch.Decode][0])
		time.Sleep(time.Minute)
		synctest.Wait()
		b.do(func() {
			assert.Zero(t, b.stuck)
			assert.GreaterOrEqual(t, len(b.resets), 26)
		})
		n := len(b.resets)
		p.Alarm(b.ranks[dispatch.Decode][0])
		time.Sleep(time.Second)
		b.do(func() { assert.Greater(t, len(b.resets), n) })
	})
}

// TestHold: tokens stay counted until the lease is over.
func TestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend(1, 1)
		p := startProxy(t, b)
		rk := &routing.Rank{ID: b.ranks[dispatch.Prefill][0].ID, Incarnation: 1}
		b.UpdateTable(func(t *routing.PairTable) { t.Lease(b.ranks[dispatch.Prefill][0], 100) })
		p.Hold(b.ranks[dispatch.Prefill][0], 100, p.Now().Now+600*time.Millisecond)
		b.do(func() { assert.EqualValues(t, 100, b.table.Leased(rk)) })
		eventually(t, b.is(func() bool { return b.table.Leased(rk) == 0 }), "released")
	})
}

// TestProxyCloses: the actor waits for the last flight.
func TestProxyCloses(t *testing.T) {
	b := newFakeBackend(0, 0)
	sys := inbox.NewSystem(slog.New(slog.DiscardHandler))
	defer sys.Shutdown()
	p, err := NewProxy(sys, t.Name(), b, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	f := p.Begin(fakeConfig(dispatch.PrefillFirst), false, &tape{})
	closed := make(chan struct{})
	go func() { p.Close(); close(closed) }()
	select {
	case <-closed:
		t.Fatal("a flight is under way")
	case <-time.After(2 * dispatch.WatchPeriod):
	}
	f.End()
	<-closed
}

// TestClock: the clock goes on, and a gap is noticed.
func TestClock(t *testing.T) {
	c := NewClock()
	before := c.Now()
	assert.Positive(t, before.Now)
	assert.GreaterOrEqual(t, c.Now().Now, before.Now)
	fake := &fakeClock{now: time.Minute}
	c = &Clock{now: fake.read}
	first := c.Now()
	fake.advance(time.Second)
	assert.Equal(t, first.Gap, c.Now().Gap)
	fake.advance(3 * time.Second)
	assert.Equal(t, fake.read(), c.Now().Gap)
}
