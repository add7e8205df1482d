package pdproxy

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/routing"
)

// Shell carries out what the Core of one Flight asks for.
type Shell interface {
	// Do carries out a command that needs no wait: all but those that Flight.Next returns and CmdStartPrefill
	// of a transfer that is not PrefillFirst. It is called with the Flight locked, by whoever tells an event:
	// it must not block, and must not call the Flight.
	Do(cmd *Command)
	// RunPrefill runs a prefill leg beside the decode leg, on a goroutine of the Flight, and returns its end.
	// ok is false if the leg was cancelled and has nothing to say.
	RunPrefill(cmd Command) (ev Event, ok bool)
}

// Flight is one request on its way: a Core behind a mutex. Events may be told by any goroutine. What takes no
// time is carried out by the goroutine that tells the event, so that a failure of one leg cancels the other
// at once. What takes time (choices, reservations, legs) is carried out by the goroutine of the request, in
// order: it calls Next until nothing is left. Only a prefill leg that runs beside its decode leg has another
// goroutine, which End waits for.
type Flight struct {
	proxy *Proxy
	shell Shell
	order transfer.Order
	wake  chan struct{} // one slot: todo or the core has changed

	mu     sync.Mutex
	core   Core
	todo   []Command // for the goroutine of the request
	told   []Event   // by the Flight itself, in answer to commands that were cancelled before they began
	isOver bool      // End was called

	legs sync.WaitGroup // prefill legs beside the decode leg, and events told by Later
}

// Begin starts a flight. The caller calls End.
func (p *Proxy) Begin(cfg Config, s Shell) *Flight {
	f := &Flight{
		proxy: p, shell: s, order: cfg.Order, wake: make(chan struct{}, 1), core: Core{cfg: cfg},
	}
	p.flights.add(f)
	return f
}

// Tell tells the core an event, and carries out the commands that need no wait.
func (f *Flight) Tell(ev Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.isOver {
		f.step(f.proxy.clock.Now(), ev)
	}
}

// Later is Tell from a goroutine that may hold a lock which a command takes.
func (f *Flight) Later(ev Event) { f.legs.Go(func() { f.Tell(ev) }) }

// tick tells the core the time if it waits for it.
func (f *Flight) tick(at Instant) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if due, ok := f.core.Deadline(); ok && at.Now >= due && !f.isOver {
		f.step(at, Event{Kind: EvTick})
	}
}

// step is Tell under the lock.
func (f *Flight) step(at Instant, ev Event) {
	for {
		for i, cmds := 0, f.core.Step(at, ev); i < len(cmds); i++ {
			f.carryOut(&cmds[i])
		}
		if len(f.told) == 0 {
			break
		}
		ev, f.told = f.told[0], f.told[1:]
	}
	select {
	case f.wake <- struct{}{}:
	default: // the last signal was not received yet
	}
}

// carryOut carries out one command, or puts it on the list of the request's goroutine.
func (f *Flight) carryOut(cmd *Command) {
	switch cmd.Kind {
	case CmdChoose, CmdReserve, CmdStartDecode, CmdStartLocal:
		f.todo = append(f.todo, *cmd)
	case CmdStartPrefill:
		if f.order == transfer.PrefillFirst {
			f.todo = append(f.todo, *cmd)
			return
		}
		leg := *cmd
		f.legs.Go(func() {
			if ev, ok := f.shell.RunPrefill(leg); ok {
				f.Tell(ev)
			}
		})
	case CmdCancel:
		if !f.drop(cmd.Number) {
			f.shell.Do(cmd)
		}
	default:
		f.shell.Do(cmd)
	}
}

// drop takes a command that has not begun off the list, and answers it; false if there is none.
func (f *Flight) drop(number uint32) bool {
	i := slices.IndexFunc(f.todo, func(c Command) bool { return c.Number == number })
	if i < 0 {
		return false
	}
	switch c := &f.todo[i]; c.Kind {
	case CmdChoose:
		f.told = append(f.told, Event{Kind: EvNoRank, Number: number})
	case CmdReserve:
		f.shell.Do(&Command{Kind: CmdUndoChoice, Number: number, Side: c.Side, Rank: c.Rank})
		f.told = append(f.told, Event{Kind: EvRefused, Number: number})
	default: // a leg that has not begun: nobody waits for it
	}
	f.todo = slices.Delete(f.todo, i, i+1)
	return true
}

// Next returns the next command for the goroutine of the request: CmdChoose, CmdReserve, CmdStartPrefill,
// CmdStartDecode or CmdStartLocal. It waits if the core waits for a leg on another goroutine. ok is false if
// the request is over. If ctx ends, the core is told why: by EvDeadline if isLate says so, else by
// EvClientGone.
func (f *Flight) Next(ctx context.Context, isLate func() bool) (cmd Command, ok bool) {
	for done := ctx.Done(); ; {
		if cmd, ok, over := f.take(); ok || over {
			return cmd, ok
		}
		select {
		case <-f.wake:
		case <-done:
			done = nil // once is enough
			if isLate() {
				f.Tell(Event{Kind: EvDeadline})
			} else {
				f.Tell(Event{Kind: EvClientGone})
			}
		}
	}
}

func (f *Flight) take() (cmd Command, ok, over bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.todo) == 0 {
		return Command{}, false, f.core.IsSettled()
	}
	cmd = f.todo[0]
	f.todo = slices.Delete(f.todo, 0, 1)
	return cmd, true, false
}

// AppendTried appends the ranks of a side that must not be chosen again.
func (f *Flight) AppendTried(dst []routing.RankRef, s Side) []routing.RankRef {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append(dst, f.core.Tried(s)...)
}

// IsUsable reports whether parameters under fence may be sent now, directly before they are written.
func (f *Flight) IsUsable(fence *Fence) bool { return fence.IsUsable(f.proxy.clock.Now()) }

// TimeLeft is how long parameters under fence may still be written.
func (f *Flight) TimeLeft(fence *Fence) time.Duration {
	return max(fence.Deadline-f.proxy.clock.Now().Now, 0)
}

// End ends the flight: whatever is still under way after a panic is cancelled, and goroutines of the flight
// have ended when it returns. It is idempotent.
func (f *Flight) End() {
	f.mu.Lock()
	if !f.isOver && !f.core.IsEnded() {
		f.step(f.proxy.clock.Now(), Event{Kind: EvClientGone})
	}
	f.isOver = true
	f.mu.Unlock()
	f.proxy.flights.remove(f)
	f.legs.Wait()
}
