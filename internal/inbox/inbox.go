// Package inbox puts a bound and a stop signal around a protoactor actor. The mailbox behind it stays
// unbounded, because protoactor's bounded one blocks the sender; the bound is a counter in front of it.
//
// TrySend refuses above the bound and posts nothing then; Send always posts, and what it posted counts. Order
// is kept per sender, over both. Halt is a system message that overtakes the queue; once Stopped is closed no
// Receive runs and none will. A panic costs exactly the message that caused it.
//
// protoactor's own bounded mailbox blocks the sender, and a blocked ingress goroutine holds a client;
// messages behind a Stop vanish without a dead letter, hence Stopped; its supervision stops an actor for good
// after ten panics in ten seconds; its dispatcher starts a goroutine per burst.
package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/asynkron/protoactor-go/actor"
)

// ErrOverloaded is returned by TrySend when the inbox holds as many unreceived messages as its bound. Nothing
// was sent.
var ErrOverloaded = errors.New("mailbox is full")

// ErrStopped is returned by TrySend once the actor has stopped. Nothing was sent.
var ErrStopped = errors.New("actor is stopped")

// Receiver is an actor's behaviour. Receive runs for one message at a time and must not block, because the
// messages behind it wait.
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
// message that panicked is lost, and a new Receiver gets the next one. A name should contain the actor's kind
// and its object ("dpserver/chat/0/3").
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

// Send posts m whatever the bound. It is for messages that release something (a ticket, a process), whose
// number is bounded by those. After a stop it does nothing.
func (b *Inbox) Send(m any) {
	if b.halted.Load() {
		return
	}
	b.pending.Add(1)
	b.system.Root.Send(b.pid, m)
}

// Pending is the number of messages sent and not yet received.
func (b *Inbox) Pending() int { return int(b.pending.Load()) }

// Stopped is closed once the actor has stopped; messages that were still queued are lost.
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

// worker runs one actor's mailbox on one goroutine that lives as long as the actor. protoactor's own
// dispatcher starts a goroutine per burst, whose small stack grows anew each time: that was two thirds of the
// 4 µs of a question and answer.
type worker struct{ runs chan func() }

var _ actor.Dispatcher = (*worker)(nil)

func newWorker() *worker { return &worker{runs: make(chan func(), 1)} }

// Schedule implements actor.Dispatcher. It never blocks: the mailbox schedules again only after the run
// before it began to return, so one slot is enough. After the actor's stop the slot may keep one run; that
// run has no messages to handle.
func (w *worker) Schedule(run func()) { w.runs <- run }

// Throughput implements actor.Dispatcher: messages between two yields, protoactor's default.
func (w *worker) Throughput() int { return 300 }

// serve runs the mailbox until stopped is closed by a run.
func (w *worker) serve(stopped <-chan struct{}) {
	for run := range w.runs {
		run()
		select {
		case <-stopped:
			return
		default:
		}
	}
}

// adapter is the protoactor side of an Inbox; one per start of the actor.
type adapter struct {
	box      *Inbox
	receiver Receiver
}

// Receive separates protoactor's own messages from the actor's. A panic is logged here, with the type of the
// message and never its content, and passed on, so that supervision builds a new adapter.
func (a *adapter) Receive(ctx actor.Context) {
	switch m := ctx.Message().(type) {
	case *actor.Started, *actor.Stopping, *actor.Restarting, *actor.Terminated:
	case *actor.Stopped:
		close(a.box.stopped)
	default:
		a.box.pending.Add(-1) // before the message is handled: a panic must not keep its place
		defer a.logPanic(m)
		a.receiver.Receive(m)
	}
}

func (a *adapter) logPanic(m any) {
	r := recover()
	if r == nil {
		return
	}
	a.box.system.Logger().Error("actor panicked, restarting it", slog.String("actor", a.box.name),
		slog.String("type", fmt.Sprintf("%T", m)), slog.String("err", fmt.Sprint(r)),
		slog.String("stack", string(debug.Stack())))
	panic(r)
}

// alwaysRestart restarts an actor after every panic. Each panic costs one message, so the restarts are
// bounded by the messages; the default strategy would stop the actor at the eleventh panic, and its callers
// would wait for ever. It is a comparable value: protoactor keeps one guardian per distinct strategy.
type alwaysRestart struct{}

var _ actor.SupervisorStrategy = alwaysRestart{}

// HandleFailure implements actor.SupervisorStrategy.
func (alwaysRestart) HandleFailure(_ *actor.ActorSystem, s actor.Supervisor, child *actor.PID,
	_ *actor.RestartStatistics, _, _ any,
) {
	s.RestartChildren(child)
}

// deadLetterReset is how long protoactor keeps the goroutine that counts dead letters. dpserve does not use
// the count, so it is short.
const deadLetterReset = time.Millisecond

// NewSystem makes a node's actor system: one per node, ended by its Shutdown after every actor has stopped.
// Of protoactor's own log lines only warnings and errors reach log, without the messages that they quote:
// those hold prompts.
func NewSystem(log *slog.Logger) *actor.ActorSystem {
	return actor.NewActorSystem(
		actor.WithLoggerFactory(func(*actor.ActorSystem) *slog.Logger {
			return slog.New(quiet{log.Handler()})
		}),
		actor.WithDeadLetterThrottleInterval(deadLetterReset),
	)
}

// quiet passes warnings and errors on, stripped of whole messages.
type quiet struct{ next slog.Handler }

func (q quiet) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelWarn && q.next.Enabled(ctx, l)
}

func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	clean := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
	r.Attrs(func(a slog.Attr) bool {
		if a.Key != "message" {
			clean.AddAttrs(a)
		}
		return true
	})
	return q.next.Handle(ctx, clean)
}

func (q quiet) WithAttrs(as []slog.Attr) slog.Handler { return quiet{q.next.WithAttrs(as)} }

func (q quiet) WithGroup(name string) slog.Handler { return quiet{q.next.WithGroup(name)} }
