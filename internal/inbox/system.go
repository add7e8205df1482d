package inbox

import (
	"context"
	"log/slog"
	"time"

	"github.com/asynkron/protoactor-go/actor"
)

// deadLetterReset is how long protoactor keeps the goroutine that counts dead letters; nobody reads its
// count.
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
func (q quiet) WithGroup(name string) slog.Handler    { return quiet{q.next.WithGroup(name)} }
