package node

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/process"
)

// LaunchOrder is one start of an engine: the command, and for whom it is started. The later process of a node
// that finds the engine reads it from the engine's shim, so its JSON names stay.
type LaunchOrder struct {
	engine.Launch `json:"launch"`

	App          string   `json:"app"`
	Revision     uint64   `json:"revision"` // of the application
	Unit         string   `json:"unit"`
	Group        int      `json:"group"`
	Epoch        uint64   `json:"epoch"`
	Ranks        []int    `json:"ranks"`        // hosted by this process
	Incarnations []uint64 `json:"incarnations"` // of Ranks, in their order
	Devices      []int    `json:"devices,omitempty"`
	Ports        []int    `json:"ports,omitempty"` // that the engine binds

	Output string `json:"output,omitempty"` // the file of its output; "" = none

	// Order is what the node was told: the later process adopts the unit by it.
	Order *msg.StartRank `json:"order"`
}

// Found is an engine that an earlier process of this node left in its shim.
type Found struct {
	LaunchOrder

	Process Process // may have ended already
	Began   time.Time
}

// Launcher starts engines. The node's own one starts each in a shim; tests start engines inside their own
// process. All methods are safe for concurrent use.
type Launcher interface {
	// Start runs o and returns once it runs. ctx bounds the start, not the engine. Lines of both streams go
	// to the writers.
	Start(ctx context.Context, o LaunchOrder, stdout, stderr io.Writer) (Process, error)
	// Found lists the engines that an earlier process of this node left, alive or ended. The list is made
	// before the node takes commands and does not change; the caller ends or adopts, and releases, each one.
	Found() []Found
	// Extend lets engines in shims live for ttl from now, whether or not this process does. It counts with
	// on_lease_loss fence only.
	Extend(ttl time.Duration)
}

// Process is a started engine and everything that it started. All methods are safe for concurrent use and
// return at once.
type Process interface {
	PID() int                // 0 if it has no process of its own
	Exited() <-chan struct{} // closed when the front process has ended; what it has started may live on
	Exit() Exit              // valid once Exited is closed
	Terminate()              // SIGTERM to the front process
	Kill()                   // SIGKILL to everything that was started
	Held() string            // describes what lives of it; "" when nothing does
	Memory() uint64          // what it uses, in bytes; 0 = not known

	// Adopt passes the output of a found engine on, beginning some lines before the first one that no node
	// has read. No effect on a started engine, and the second time.
	Adopt(stdout, stderr io.Writer)
	// Release forgets an engine that has ended, once its end is reported: its shim ends and its files are
	// removed.
	Release()
	// Detach lets go of an engine that is to outlive this process. Nothing is heard of it afterwards.
	Detach()
}

// Exit describes the end of a front process.
type Exit = process.Exit

// ShimConfig lets engines outlive this process.
type ShimConfig struct {
	Cluster       string        // id of the cluster
	Node          string        // UID of this node
	OrphanTimeout time.Duration // how long an engine lives without a node; 0 = not at all
	Sought        time.Time     // since when this process asks for a leader; zero = since New
}

// sought is Sought, also of no ShimConfig.
func (c *ShimConfig) sought() time.Time {
	if c == nil {
		return time.Time{}
	}
	return c.Sought
}

// reapEach is the pause between two checks for orphans that process 1 has to reap.
const reapEach = 5 * time.Second

// errClosed says that the node is closed.
var errClosed = errors.New("the node is closed")

// imageOf is what to execute for the first word of a command if that is this program: the program as it runs,
// because the file at its path may be a newer version, which is not in use yet. "": it is another program.
func imageOf(word string) string {
	if path, err := process.Path(); err == nil && word == path {
		return process.Self()
	}
	return ""
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
