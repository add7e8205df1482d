package node

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/dpserve/dpserve/engine"
)

// Launcher starts engines. The node's own launcher starts processes; tests start engines inside their own
// process.
type Launcher interface {
	// Start runs l and returns once it runs. ctx bounds the start, not the engine. Lines of both streams go
	// to the writers.
	Start(ctx context.Context, l engine.Launch, stdout, stderr io.Writer) (Process, error)
}

// Process is a started engine and everything that it started. All methods are safe for concurrent use and
// return at once.
type Process interface {
	PID() int                // 0 if it has no process of its own
	Exited() <-chan struct{} // closed when the front process has ended; the rest of its group may live on
	Exit() Exit              // valid once Exited is closed
	Terminate()              // SIGTERM to the front process
	Kill()                   // SIGKILL to the whole group
	Held() string            // describes the living processes of the group; "" when it is empty
}

// Exit describes the end of a front process.
type Exit struct {
	Code   int    // -1: by a signal
	Signal string // "" if by itself
	After  time.Duration
}

// String describes the exit. Exit code 0 is no success: engines exit with it when their core dies.
func (e Exit) String() string {
	if e.Signal != "" {
		return fmt.Sprintf("engine was ended by signal %s after %s", e.Signal,
			e.After.Round(time.Millisecond))
	}
	return fmt.Sprintf("engine exited with code %d after %s", e.Code, e.After.Round(time.Millisecond))
}
