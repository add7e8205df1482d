package pdproxy

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/dispatch"
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
	kinds   []dispatch.CommandKind
	cmds    []dispatch.Command
	prefill func(cmd dispatch.Command) (dispatch.Event, bool)
}

func (s *tape) Do(cmd *dispatch.Command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kinds, s.cmds = append(s.kinds, cmd.Kind), append(s.cmds, *cmd)
}

func (s *tape) RunPrefill(cmd dispatch.Command) (dispatch.Event, bool) { return s.prefill(cmd) }

func (s *tape) take() (kinds []dispatch.CommandKind, cmds []dispatch.Command) {
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

func fakeConfig(o dispatch.Order) *dispatch.Config {
	return &dispatch.Config{
		Order: o, Lease: 30 * time.Second, PrefillLimit: time.Minute, DecodeLimit: time.Minute,
		LocalLimit: time.Minute, Attempts: 3, Refusals: 16,
	}
}

// next requires the kind of the next command.
func next(t *testing.T, f *Flight, kind dispatch.CommandKind) dispatch.Command {
	t.Helper()
	cmd, ok := f.Next(t.Context(), func() bool { return false })
	require.True(t, ok)
	require.Equal(t, kind, cmd.Kind)
	return cmd
}

// picked is a pair.
func picked(number uint32) dispatch.Event {
	return dispatch.Event{
		Kind: dispatch.EvPicked, Number: number, IsRemote: true, Prefill: rankP, Decode: rankD,
	}
}

// begin brings a flight to where both tickets are held.
func begin(t *testing.T, p *Proxy, s Shell, o dispatch.Order, whole bool) *Flight {
	t.Helper()
	f := p.Begin(fakeConfig(o), whole, s)
	f.Tell(dispatch.Event{Kind: dispatch.EvStart})
	cmd := next(t, f, dispatch.CmdPick)
	f.Tell(picked(cmd.Number))
	for range 2 {
		cmd = next(t, f, dispatch.CmdReserve)
		f.Tell(dispatch.Event{Kind: dispatch.EvReserved, Number: cmd.Number})
	}
	return f
}

// TestFlight: a request over both ranks, in order, on one goroutine.
func TestFlight(t *testing.T) {
	p, _ := bareProxy()
	s := &tape{}
	f := begin(t, p, s, dispatch.PrefillFirst, false)
	assert.Len(t, p.flights.all(), 1)
	cmd := next(t, f, dispatch.CmdSend)
	f.Tell(dispatch.Event{Kind: dispatch.EvEnded, Number: cmd.Number, Params: 5})
	cmd = next(t, f, dispatch.CmdSend)
	assert.EqualValues(t, 5, cmd.Params)
	assert.True(t, f.IsUsable(&cmd.Fence))
	assert.Equal(t, 25*time.Second, f.TimeLeft(&cmd.Fence))
	f.Tell(dispatch.Event{Kind: dispatch.EvSent, Number: cmd.Number})
	f.Tell(dispatch.Event{Kind: dispatch.EvContent, Number: cmd.Number})
	kinds, _ := s.take()
	assert.Equal(t,
		[]dispatch.CommandKind{dispatch.CmdRelay, dispatch.CmdDiscard, dispatch.CmdRelease}, kinds)
	f.Tell(dispatch.Event{Kind: dispatch.EvEnded, Number: cmd.Number})
	_, ok := f.Next(t.Context(), nil)
	assert.False(t, ok)
	kinds, _ = s.take()
	assert.Equal(t, []dispatch.CommandKind{dispatch.CmdRelease, dispatch.CmdCount}, kinds)
	f.End()
	assert.Empty(t, p.flights.all())
	f.End()
	f.Tell(dispatch.Event{Kind: dispatch.EvTick}) // late events do nothing
}

// TestFlightBesides: of transfers that need both legs at once, the prefill leg has its own goroutine, and its
// failure cancels the decode leg at once.
func TestFlightBesides(t *testing.T) {
	for _, o := range []dispatch.Order{dispatch.Together, dispatch.DecodeFirst} {
		p, _ := bareProxy()
		fails := make(chan struct{})
		s := &tape{}
		s.prefill = func(cmd dispatch.Command) (dispatch.Event, bool) {
			<-fails
			return dispatch.Event{
				Kind: dispatch.EvEnded, Cause: dispatch.EngineError, Number: cmd.Number,
			}, true
		}
		f := begin(t, p, s, o, false)
		cmd := next(t, f, dispatch.CmdSend)
		if o == dispatch.DecodeFirst {
			f.Tell(dispatch.Event{Kind: dispatch.EvSent, Number: cmd.Number})
		}
		close(fails)
		cmd = next(t, f, dispatch.CmdPick) // it waits for the failure
		kinds, cmds := s.take()
		assert.Equal(t, dispatch.CmdNote, kinds[0])
		assert.Contains(t, kinds, dispatch.CmdCancel)
		for _, c := range cmds {
			if c.Kind == dispatch.CmdRelease && c.Side == dispatch.Decode {
				assert.Equal(t, dispatch.GivenUp, c.Cause)
			}
		}
		f.Tell(dispatch.Event{Kind: dispatch.EvNoRank, Number: cmd.Number})
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
	f := p.Begin(fakeConfig(dispatch.PrefillFirst), false, s)
	defer f.End()
	f.Tell(dispatch.Event{Kind: dispatch.EvStart})
	cmd := next(t, f, dispatch.CmdPick)
	f.Tell(picked(cmd.Number))
	f.Tell(dispatch.Event{Kind: dispatch.EvClientGone})
	_, ok := f.Next(t.Context(), nil)
	assert.False(t, ok, "both reservations were dropped")
	kinds, cmds := s.take()
	assert.Equal(t, []dispatch.CommandKind{dispatch.CmdUndo, dispatch.CmdUndo, dispatch.CmdCount}, kinds)
	assert.Equal(t, dispatch.ResultClientGone, cmds[2].Result)
	assert.ElementsMatch(t, []routing.RankRef{rankP, rankD}, []routing.RankRef{cmds[0].Rank, cmds[1].Rank})
}

// TestFlightWaits: Next tells the flight that the request is over when its context ends.
func TestFlightWaits(t *testing.T) {
	for late, outcome := range map[bool]dispatch.Result{
		false: dispatch.ResultClientGone, true: dispatch.ResultDeadline,
	} {
		p, _ := bareProxy()
		s := &tape{}
		f := begin(t, p, s, dispatch.PrefillFirst, false)
		next(t, f, dispatch.CmdSend)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, ok := f.Next(ctx, func() bool { return late })
		assert.False(t, ok)
		_, cmds := s.take()
		assert.Equal(t, outcome, cmds[len(cmds)-1].Result)
		f.End()
	}
}

// TestFlightTicks: the proxy tells a flight that its time is over.
func TestFlightTicks(t *testing.T) {
	p, c := bareProxy()
	s := &tape{}
	f := begin(t, p, s, dispatch.PrefillFirst, false)
	defer f.End()
	next(t, f, dispatch.CmdSend)
	for range 4 * 59 {
		c.advance(dispatch.WatchPeriod)
		f.tick(p.clock.Now())
	}
	kinds, _ := s.take()
	assert.Empty(t, kinds)
	for range 5 {
		c.advance(dispatch.WatchPeriod)
		f.tick(p.clock.Now())
	}
	kinds, _ = s.take()
	assert.Contains(t, kinds, dispatch.CmdCancel)
	next(t, f, dispatch.CmdPick)
}

// TestFlightWhole: an answer that comes as a whole may take as long as it takes; its prefill rank is released
// when the decode rank must have read the prompt.
func TestFlightWhole(t *testing.T) {
	p, c := bareProxy()
	s := &tape{}
	f := begin(t, p, s, dispatch.PrefillFirst, true)
	defer f.End()
	cmd := next(t, f, dispatch.CmdSend)
	f.Tell(dispatch.Event{Kind: dispatch.EvEnded, Number: cmd.Number, Params: 5})
	cmd = next(t, f, dispatch.CmdSend)
	f.Tell(dispatch.Event{Kind: dispatch.EvSent, Number: cmd.Number})
	for range 4 * 50 {
		c.advance(dispatch.WatchPeriod)
		f.tick(p.clock.Now())
	}
	kinds, cmds := s.take()
	require.Equal(t, []dispatch.CommandKind{dispatch.CmdRelease}, kinds)
	assert.Equal(t, dispatch.Prefill, cmds[0].Side)
	assert.Equal(t, dispatch.OK, cmds[0].Cause)
	assert.Zero(t, cmds[0].HeldUntil)
	f.Tell(dispatch.Event{Kind: dispatch.EvContent, Number: cmd.Number})
	kinds, _ = s.take()
	assert.Equal(t, []dispatch.CommandKind{dispatch.CmdRelay, dispatch.CmdDiscard}, kinds)
	f.Tell(dispatch.Event{Kind: dispatch.EvEnded, Number: cmd.Number})
	kinds, _ = s.take()
	assert.Equal(t, []dispatch.CommandKind{dispatch.CmdRelease, dispatch.CmdCount}, kinds)
}

// TestFlightManyTell: events may come from any goroutine at any time; each flight ends once.
func TestFlightManyTell(t *testing.T) {
	p, _ := bareProxy()
	for range 200 {
		s := &tape{}
		f := begin(t, p, s, dispatch.PrefillFirst, false)
		cmd := next(t, f, dispatch.CmdSend)
		var all sync.WaitGroup
		for _, ev := range []dispatch.Event{
			{Kind: dispatch.EvEnded, Number: cmd.Number, Params: 5},
			{Kind: dispatch.EvFenced, Side: dispatch.Prefill, Rank: rankP},
			{Kind: dispatch.EvFenced, Side: dispatch.Decode, Rank: rankD},
			{Kind: dispatch.EvDeadline},
			{Kind: dispatch.EvClientGone},
			{Kind: dispatch.EvTick},
		} {
			all.Go(func() { f.Tell(ev) })
		}
		f.Later(dispatch.Event{Kind: dispatch.EvTick})
		all.Wait()
		for {
			cmd, ok := f.Next(t.Context(), nil)
			if !ok {
				break
			}
			switch cmd.Kind {
			case dispatch.CmdPick:
				f.Tell(dispatch.Event{Kind: dispatch.EvNoRank, Number: cmd.Number})
			case dispatch.CmdReserve:
				f.Tell(dispatch.Event{Kind: dispatch.EvRefused, Number: cmd.Number})
			default:
			}
		}
		f.End()
		counted, released := 0, map[uint32]int{}
		_, cmds := s.take()
		for _, c := range cmds {
			switch c.Kind {
			case dispatch.CmdCount:
				counted++
			case dispatch.CmdRelease:
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
