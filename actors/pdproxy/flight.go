package pdproxy

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/dispatch"
)

// Shell carries out what the Plan of one Flight asks for.
type Shell interface {
	// Do carries out a command that needs no wait: all but those that Flight.Next returns and the prefill
	// leg of a transfer that is not PrefillFirst. It is called with the Flight locked, by whoever tells an
	// event: it must not block, and must not call the Flight.
	Do(cmd *dispatch.Command)
	// RunPrefill runs a prefill leg beside the decode leg, on a goroutine of the Flight, and returns its end.
	// ok is false if the leg was cancelled and has nothing to say.
	RunPrefill(cmd dispatch.Command) (ev dispatch.Event, ok bool)
}

// Flight is one request on its way: a Plan behind a mutex. Events may be told by any goroutine. What takes no
// time is carried out by the goroutine that tells the event, so that a failure of one leg cancels the other
// at once. What takes time (choices, reservations, legs) is carried out by the goroutine of the request, in
// order: it calls Next until nothing is left. Only a prefill leg that runs beside its decode leg has another
// goroutine, which End waits for.
type Flight struct {
	proxy *Proxy
	shell Shell
	order dispatch.Order
	wake  chan struct{} // one slot: todo or the plan has changed

	mu     sync.Mutex
	plan   dispatch.Plan
	todo   []dispatch.Command // for the goroutine of the request
	own    []dispatch.Event   // by the Flight itself, in answer to commands cancelled before they began
	isOver bool               // End was called

	legs sync.WaitGroup // prefill legs beside the decode leg, and events told by Later
}

// Begin starts a flight. whole: its answer comes as a whole. The caller calls End.
func (p *Proxy) Begin(cfg *dispatch.Config, whole bool, s Shell) *Flight {
	f := &Flight{proxy: p, shell: s, order: cfg.Order, wake: make(chan struct{}, 1)}
	f.plan.Begin(cfg, whole)
	p.flights.add(f)
	return f
}

// Tell tells the plan an event, and carries out the commands that need no wait.
func (f *Flight) Tell(ev dispatch.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.isOver {
		f.step(f.proxy.clock.Now(), ev)
	}
}

// Later is Tell from a goroutine that may hold a lock which a command takes.
func (f *Flight) Later(ev dispatch.Event) { f.legs.Go(func() { f.Tell(ev) }) }

// tick tells the plan the time if it waits for it.
func (f *Flight) tick(at dispatch.Instant) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if due, ok := f.plan.Deadline(); ok && at.Now >= due && !f.isOver {
		f.step(at, dispatch.Event{Kind: dispatch.EvTick})
	}
}

// step is Tell under the lock.
func (f *Flight) step(at dispatch.Instant, ev dispatch.Event) {
	for {
		for i, cmds := 0, f.plan.Step(at, &ev); i < len(cmds); i++ {
			f.carryOut(&cmds[i])
		}
		if len(f.own) == 0 {
			break
		}
		ev, f.own = f.own[0], f.own[1:]
	}
	select {
	case f.wake <- struct{}{}:
	default: // the last signal was not received yet
	}
}

// carryOut carries out one command, or puts it on the list of the request's goroutine.
func (f *Flight) carryOut(cmd *dispatch.Command) {
	switch cmd.Kind {
	case dispatch.CmdPick, dispatch.CmdReserve:
		f.todo = append(f.todo, *cmd)
	case dispatch.CmdSend:
		if cmd.Side == dispatch.Decode || f.order == dispatch.PrefillFirst {
			f.todo = append(f.todo, *cmd)
			return
		}
		leg := *cmd
		f.legs.Go(func() {
			if ev, ok := f.shell.RunPrefill(leg); ok {
				f.Tell(ev)
			}
		})
	case dispatch.CmdCancel:
		if !f.drop(cmd.Number) {
			f.shell.Do(cmd)
		}
	default:
		f.shell.Do(cmd)
	}
}

// drop takes a command that has not begun off the list, and answers it; false if there is none.
func (f *Flight) drop(number uint32) bool {
	i := slices.IndexFunc(f.todo, func(c dispatch.Command) bool { return c.Number == number })
	if i < 0 {
		return false
	}
	switch c := &f.todo[i]; c.Kind {
	case dispatch.CmdPick:
		f.own = append(f.own, dispatch.Event{Kind: dispatch.EvNoRank, Number: number})
	case dispatch.CmdReserve:
		f.shell.Do(&dispatch.Command{Kind: dispatch.CmdUndo, Number: number, Side: c.Side, Rank: c.Rank})
		f.own = append(f.own, dispatch.Event{
			Kind: dispatch.EvRefused, Number: number, Cause: dispatch.GivenUp,
		})
	default: // a leg that has not begun: nobody waits for it
	}
	f.todo = slices.Delete(f.todo, i, i+1)
	return true
}

// Next returns the next command for the goroutine of the request: CmdPick, CmdReserve or CmdSend. It waits if
// the plan waits for a leg on another goroutine. ok is false if the request is over. If ctx ends, the plan is
// told why: by EvDeadline if isLate says so, else by EvClientGone.
func (f *Flight) Next(ctx context.Context, isLate func() bool) (cmd dispatch.Command, ok bool) {
	for done := ctx.Done(); ; {
		if cmd, ok, over := f.take(); ok || over {
			return cmd, ok
		}
		select {
		case <-f.wake:
		case <-done:
			done = nil // once is enough
			if isLate() {
				f.Tell(dispatch.Event{Kind: dispatch.EvDeadline})
			} else {
				f.Tell(dispatch.Event{Kind: dispatch.EvClientGone})
			}
		}
	}
}

func (f *Flight) take() (cmd dispatch.Command, ok, over bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.todo) == 0 {
		return dispatch.Command{}, false, f.plan.IsSettled()
	}
	cmd = f.todo[0]
	f.todo = slices.Delete(f.todo, 0, 1)
	return cmd, true, false
}

// AppendTried appends the ranks of a side that must not be picked again.
func (f *Flight) AppendTried(dst []dispatch.Excluded, s dispatch.Side) []dispatch.Excluded {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append(dst, f.plan.Tried(s)...)
}

// IsUsable reports whether parameters under fence may be sent now, directly before they are written.
func (f *Flight) IsUsable(fence *dispatch.Fence) bool { return fence.IsUsable(f.proxy.clock.Now()) }

// TimeLeft is how long parameters under fence may still be written.
func (f *Flight) TimeLeft(fence *dispatch.Fence) time.Duration {
	return max(fence.Deadline-f.proxy.clock.Now().Now, 0)
}

// AwaitLegs waits for the prefill legs beside a decode leg, which have been cancelled.
func (f *Flight) AwaitLegs() { f.legs.Wait() }

// End ends the flight: whatever is still under way after a panic is cancelled, and goroutines of the flight
// have ended when it returns. It is idempotent.
func (f *Flight) End() {
	f.mu.Lock()
	if !f.isOver && !f.plan.IsEnded() {
		f.step(f.proxy.clock.Now(), dispatch.Event{Kind: dispatch.EvClientGone})
	}
	f.isOver = true
	f.mu.Unlock()
	f.proxy.flights.remove(f)
	f.legs.Wait()
}
