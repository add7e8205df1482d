package inbox

import (
	"fmt"
	"log/slog"
	"runtime/debug"

	"github.com/asynkron/protoactor-go/actor"
)

// adapter is the protoactor side of an Inbox; one per start of the actor.
type adapter struct {
	box      *Inbox
	receiver Receiver
}

// Receive sorts protoactor's own messages from ours. A panic is logged here, with the type of the message and
// never its content, and passed on, so that supervision builds a new adapter.
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
// bounded by the messages; the default strategy would stop the actor at the eleventh and leave its callers
// alone. It is a comparable value: protoactor keeps one guardian per distinct strategy.
type alwaysRestart struct{}

var _ actor.SupervisorStrategy = alwaysRestart{}

// HandleFailure implements actor.SupervisorStrategy.
func (alwaysRestart) HandleFailure(_ *actor.ActorSystem, s actor.Supervisor, child *actor.PID,
	_ *actor.RestartStatistics, _, _ any) {
	s.RestartChildren(child)
}
