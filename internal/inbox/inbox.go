// Package inbox puts a bound and a stop signal around a protoactor actor. The mailbox behind it stays
// unbounded, because protoactor's bounded one blocks the sender; the bound is a counter in front of it (see
// DESIGN.md).
package inbox

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/asynkron/protoactor-go/actor"
)

// ErrOverloaded is returned by TrySend when the inbox holds as many unreceived messages as its bound. Nothing
// was sent.
var ErrOverloaded = errors.New("mailbox is full")

// ErrStopped is returned by TrySend once the actor answers nobody any more. Nothing was sent.
var ErrStopped = errors.New("actor is stopped")

// Receiver is an actor's behaviour. Receive runs for one message at a time and must not block: everything
// behind it waits.
type Receiver interface{ Receive(m any) }

// Inbox is one running actor. It implements the Mailbox of the messages room; all methods are safe for
// concurrent use.
type Inbox struct {
	system  *actor.ActorSystem
	pid     *actor.PID
	name    string
	bound   int64
	pending atomic.Int64 // sent and not yet received
	halted  atomic.Bool
	stopped chan struct{}
}

// Spawn starts an actor under name, which must be unique in the system, with room for bound unreceived
// messages of TrySend. newReceiver is called for the first start and again after each panic in Receive: the
// message that panicked is lost, the next one meets a new Receiver. Names should tell the actor's kind and
// its object ("dpserver/chat/0/3").
func Spawn(system *actor.ActorSystem, name string, bound int, newReceiver func() Receiver) (*Inbox, error) {
	if bound < 1 {
		return nil, fmt.Errorf("spawn %s: the bound must be at least 1, not %d", name, bound)
	}
	box := &Inbox{system: system, name: name, bound: int64(bound), stopped: make(chan struct{})}
	runner := newWorker()
	props := actor.PropsFromProducer(
		func() actor.Actor { return &adapter{box: box, receiver: newReceiver()} },
		actor.WithGuardian(alwaysRestart{}),
		actor.WithDispatcher(runner),
	)
	pid, err := system.Root.SpawnNamed(props, name)
	if err != nil {
		return nil, fmt.Errorf("spawn %s: %w", name, err)
	}
	box.pid = pid
	go runner.serve(box.stopped) // ends with Halt
	return box, nil
}

// TrySend posts m unless the inbox is full (ErrOverloaded) or the actor is stopped (ErrStopped). It never
// blocks. A nil error does not promise an answer: the actor may stop before it reads m, so a caller that
// waits selects on Stopped too.
func (b *Inbox) TrySend(m any) error {
	if b.halted.Load() {
		return ErrStopped
	}
	if b.pending.Add(1) > b.bound {
		b.pending.Add(-1)
		return ErrOverloaded
	}
	b.system.Root.Send(b.pid, m)
	return nil
}

// Send posts m whatever the bound: for messages that give something back, which tickets and processes bound
// already. After a stop it does nothing.
func (b *Inbox) Send(m any) {
	if b.halted.Load() {
		return
	}
	b.pending.Add(1)
	b.system.Root.Send(b.pid, m)
}

// Pending is the number of messages sent and not yet received.
func (b *Inbox) Pending() int { return int(b.pending.Load()) }

// Name is the name given to Spawn.
func (b *Inbox) Name() string { return b.name }

// Stopped is closed once the actor has stopped; messages that were still queued then are gone.
func (b *Inbox) Stopped() <-chan struct{} { return b.stopped }

// Halt asks the actor to stop and returns at once. The stop overtakes queued messages. An actor may halt
// itself.
func (b *Inbox) Halt() {
	if b.halted.CompareAndSwap(false, true) {
		b.system.Root.Stop(b.pid)
	}
}

// Stop halts the actor and waits until it has stopped. It may be called twice, and never from the actor's own
// Receive.
func (b *Inbox) Stop(ctx context.Context) error {
	b.Halt()
	select {
	case <-b.stopped:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop %s: %w", b.name, context.Cause(ctx))
	}
}
