package api

import (
	"context"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
)

// Backend is what the admin API needs of a node. Safe for concurrent use; a method ends when its ctx does. Errors that users
// can act on are *problem.Error or app.Faults; everything else is answered as internal. Nothing is called after Server.Close
// has returned.
type Backend interface {
	// Validate checks a file as Deploy would, and changes nothing. The error is app.Faults.
	Validate(file string, text []byte) ([]app.Warning, error)
	// Plan says what Deploy would do, with the place of every rank, and changes nothing.
	Plan(ctx context.Context, req DeployRequest) (msg.Plan, []app.Warning, error)
	// Deploy makes the apps of a file wanted and returns once that is committed, before anything runs.
	Deploy(ctx context.Context, req DeployRequest) (DeployResult, error)
	// Apps lists every application, by name.
	Apps(ctx context.Context) ([]msg.AppStatus, error)
	// App is one application; problem.NotFound names those there are.
	App(ctx context.Context, name string) (msg.AppStatus, error)
	// Delete makes an application unwanted and returns once that is committed, before its engines are gone.
	Delete(ctx context.Context, name string) error
	// Logs opens the engines' log lines; the server closes the stream.
	Logs(ctx context.Context, q LogQuery) (LogStream, error)
	// Events gives the events with a number above since that are still kept, oldest first, and a channel that is closed at the
	// next one. A since above the newest number (the node has restarted) is answered like 0.
	Events(since uint64) (events []Event, next <-chan struct{})
}

// LogStream yields log lines in order of time.
type LogStream interface {
	// Next waits for at least one line; io.EOF ends a stream that does not follow. The lines are valid until the next call.
	Next(ctx context.Context) ([]LogLine, error)
	Close() error
}
