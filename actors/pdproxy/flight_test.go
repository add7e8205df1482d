package pdproxy

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/routing"
)

// fakeClock is a clock that a test sets.
type fakeClock struct {
	mu  sync.Mutex
	now time.Duration
}

func (c *fakeClock) read() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now += d
}

// tape is a shell that keeps its commands.
type tape struct {
	mu      sync.Mutex
	kinds   []CommandKind
	cmds    []Command
	prefill func(cmd Command) (Event, bool)
}

func (s *tape) Do(cmd *Command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kinds, s.cmds = append(s.kinds, cmd.Kind), append(s.cmds, *cmd)
}

func (s *tape) RunPrefill(cmd Command) (Event, bool) { return s.prefill(cmd) }

func (s *tape) take() (kinds []CommandKind, cmds []Command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kinds, cmds, s.kinds, s.cmds = s.kinds, s.cmds, nil, nil
	return kinds, cmds
}

// bareProxy is a proxy without its actor.
func bareProxy() (*Proxy, *fakeClock) {
	c := &fakeClock{now: time.Hour}
	return &Proxy{clock: &Clock{now: c.read}, log: slog.New(slog.DiscardHandler)}, c
}

var (
	rankP = routing.RankRef{ID: 1, Incarnation: 11}
	rankD = routing.RankRef{ID: 2, Incarnation: 22}
)

func fakeConfig(o transfer.Order) Config {
	return Config{
		Order: o, Lease: 30 * time.Second, PrefillLimit: time.Minute, DecodeLimit: time.Minute,
		LocalLimit: time.Minute, MaxDecodes: 3,
	}
}

// next requires the kind of the next command.
func next(t *testing.T, f *Flight, kind CommandKind) Command {
	t.Helper()
	cmd, ok := f.Next(t.Context(), func() bool { return false })
	require.True(t, ok)
	require.Equal(t, kind, cmd.Kind)
	return cmd
}

// begin brings a flight to where both tickets are held.
func begin(t *testing.T, p *Proxy, s Shell, o transfer.Order, whole bool) *Flight {
	t.Helper()
	f := p.Begin(fakeConfig(o), s)
	f.Tell(Event{Kind: EvStart, Whole: whole})
	cmd := next(t, f, CmdChoose)
	f.Tell(Event{Kind: EvChosen, Number: cmd.Number, Remote: true, Prefill: rankP, Decode: rankD})
	for range 2 {
		cmd = next(t, f, CmdReserve)
		f.Tell(Event{Kind: EvReserved, Number: cmd.Number})
	}
	return f
}

// TestFlight: a request over both ranks, in order, on one goroutine.
func TestFlight(t *testing.T) {
	p, _ := bareProxy()
	s := &tape{}
	f := begin(t, p, s, prefillFirst, false)
	assert.Len(t, p.flights.all(), 1)
	cmd := next(t, f, CmdStartPrefill)
	f.Tell(Event{Kind: EvDone, Number: cmd.Number, Params: 5})
	cmd = next(t, f, CmdStartDecode)
	assert.EqualValues(t, 5, cmd.Params)
	assert.True(t, f.IsUsable(&cmd.Fence))
	assert.Equal(t, 25*time.Second, f.TimeLeft(&cmd.Fence))
	f.Tell(Event{Kind: EvSent, Number: cmd.Number})
	f.Tell(Event{Kind: EvFirstByte, Number: cmd.Number})
	kinds, _ := s.take()
	assert.Equal(t, []CommandKind{CmdPassOn, CmdDiscard, CmdRelease}, kinds)
	f.Tell(Event{Kind: EvDone, Number: cmd.Number})
	_, ok := f.Next(t.Context(), nil)
	assert.False(t, ok)
	kinds, _ = s.take()
	assert.Equal(t, []CommandKind{CmdRelease, CmdCount}, kinds)
	f.End()
	assert.Empty(t, p.flights.all())
	f.End()
	f.Tell(Event{Kind: EvTick}) // late events do nothing
}

// TestFlightBesides: of transfers that need both legs at once, the prefill leg has its own goroutine, and its
// failure cancels the decode leg at once.
func TestFlightBesides(t *testing.T) {
	for _, o := range []transfer.Order{together, decodeFirst} {
		p, _ := bareProxy()
		fails := make(chan struct{})
		s := &tape{}
		s.prefill = func(cmd Command) (Event, bool) {
			<-fails
			return Event{Kind: EvError, Number: cmd.Number}, true
		}
		f := begin(t, p, s, o, false)
		cmd := next(t, f, CmdStartDecode)
		if o == decodeFirst {
			f.Tell(Event{Kind: EvSent, Number: cmd.Number})
		}
		close(fails)
		cmd = next(t, f, CmdChoose) // it waits for the failure
		kinds, cmds := s.take()
		assert.Equal(t, CmdNote, kinds[0])
		assert.Contains(t, kinds, CmdCancel)
		for _, c := range cmds {
			if c.Kind == CmdRelease && c.Side == Decode {
				assert.Equal(t, EndCancelled, c.Ending)
			}
		}
		f.Tell(Event{Kind: EvNoRank, Number: cmd.Number})
		_, ok := f.Next(t.Context(), nil)
		assert.False(t, ok)
		f.End()
	}
}

// TestFlightLeaves: a client that leaves ends the flight; what was not begun is answered, and its load is
// given back.
func TestFlightLeaves(t *testing.T) {
	p, _ := bareProxy()
	s := &tape{}
	f := p.Begin(fakeConfig(prefillFirst), s)
	defer f.End()
	f.Tell(Event{Kind: EvStart})
	cmd := next(t, f, CmdChoose)
	f.Tell(Event{Kind: EvChosen, Number: cmd.Number, Remote: true, Prefill: rankP, Decode: rankD})
	f.Tell(Event{Kind: EvClientGone})
	_, ok := f.Next(t.Context(), nil)
	assert.False(t, ok, "both reservations were dropped")
	kinds, cmds := s.take()
	assert.Equal(t, []CommandKind{CmdUndoChoice, CmdUndoChoice, CmdCount}, kinds)
	assert.Equal(t, OutcomeClientGone, cmds[2].Outcome)
	assert.ElementsMatch(t, []routing.RankRef{rankP, rankD}, []routing.RankRef{cmds[0].Rank, cmds[1].Rank})
}

// TestFlightWaits: Next tells the flight that the request is over when its context ends.
func TestFlightWaits(t *testing.T) {
	for late, outcome := range map[bool]Outcome{false: OutcomeClientGone, true: OutcomeDeadline} {
		p, _ := bareProxy()
		s := &tape{}
		f := begin(t, p, s, prefillFirst, false)
		next(t, f, CmdStartPrefill)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, ok := f.Next(ctx, func() bool { return late })
		assert.False(t, ok)
		_, cmds := s.take()
		assert.Equal(t, outcome, cmds[len(cmds)-1].Outcome)
		f.End()
	}
}

// TestFlightTicks: the proxy tells a flight that its time is over.
func TestFlightTicks(t *testing.T) {
	p, c := bareProxy()
	s := &tape{}
	f := begin(t, p, s, prefillFirst, false)
	defer f.End()
	next(t, f, CmdStartPrefill)
	for range 4 * 59 {
		c.advance(WatchPeriod)
		f.tick(p.clock.Now())
	}
	kinds, _ := s.take()
	assert.Empty(t, kinds)
	for range 5 {
		c.advance(WatchPeriod)
		f.tick(p.clock.Now())
	}
	kinds, _ = s.take()
	assert.Contains(t, kinds, CmdCancel)
	next(t, f, CmdChoose)
}

// TestFlightWhole: an answer that comes as a whole may take as long as it takes; its prefill rank is released
// when the decode rank must have read the prompt.
func TestFlightWhole(t *testing.T) {
	p, c := bareProxy()
	s := &tape{}
	f := begin(t, p, s, prefillFirst, true)
	defer f.End()
	cmd := next(t, f, CmdStartPrefill)
	f.Tell(Event{Kind: EvDone, Number: cmd.Number, Params: 5})
	cmd = next(t, f, CmdStartDecode)
	f.Tell(Event{Kind: EvSent, Number: cmd.Number})
	for range 4 * 50 {
		c.advance(WatchPeriod)
		f.tick(p.clock.Now())
	}
	kinds, cmds := s.take()
	require.Equal(t, []CommandKind{CmdRelease}, kinds)
	assert.Equal(t, Prefill, cmds[0].Side)
	assert.Equal(t, EndOK, cmds[0].Ending)
	assert.Zero(t, cmds[0].HeldUntil)
	f.Tell(Event{Kind: EvFirstByte, Number: cmd.Number})
	kinds, _ = s.take()
	assert.Equal(t, []CommandKind{CmdPassOn, CmdDiscard}, kinds)
	f.Tell(Event{Kind: EvDone, Number: cmd.Number})
	kinds, _ = s.take()
	assert.Equal(t, []CommandKind{CmdRelease, CmdCount}, kinds)
}

// TestFlightManyTell: events may come from any goroutine at any time; each flight ends once.
func TestFlightManyTell(t *testing.T) {
	p, _ := bareProxy()
	for range 200 {
		s := &tape{}
		f := begin(t, p, s, prefillFirst, false)
		cmd := next(t, f, CmdStartPrefill)
		var all sync.WaitGroup
		for _, ev := range []Event{
			{Kind: EvDone, Number: cmd.Number, Params: 5},
			{Kind: EvFenced, Side: Prefill, Rank: rankP},
			{Kind: EvFenced, Side: Decode, Rank: rankD},
			{Kind: EvDeadline},
			{Kind: EvClientGone},
			{Kind: EvTick},
		} {
			all.Go(func() { f.Tell(ev) })
		}
		f.Later(Event{Kind: EvTick})
		all.Wait()
		for {
			cmd, ok := f.Next(t.Context(), nil)
			if !ok {
				break
			}
			switch cmd.Kind {
			case CmdChoose:
				f.Tell(Event{Kind: EvNoRank, Number: cmd.Number})
			case CmdReserve:
				f.Tell(Event{Kind: EvRefused, Number: cmd.Number})
			default:
			}
		}
		f.End()
		counted, released := 0, map[uint32]int{}
		_, cmds := s.take()
		for _, c := range cmds {
			switch c.Kind {
			case CmdCount:
				counted++
			case CmdRelease:
				released[c.Number]++
			default:
			}
		}
		assert.Equal(t, 1, counted)
		assert.Len(t, released, 2)
		for _, n := range released {
			assert.Equal(t, 1, n)
		}
	}
}
