package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/state"
)

// takenRefresh is how old what is known of foreign ports may become before these ports are tried again.
const takenRefresh = 10 * time.Minute

// takenPorts are the ports of this node's range that other programs hold, as failed starts have shown. The
// node's record has them, and placement leaves them out.
type takenPorts struct {
	mu     sync.Mutex
	ports  []int // ascending
	tested time.Time
}

// checkPorts binds every port for a moment that the unit needs. A port that another program holds ends the
// start; then all other ports of the node's range are tried too, so that the next grant has free ones.
func checkPorts(ctx context.Context, u *unit) error {
	part := partOf(u, engine.Bind{})
	for _, b := range append(part.Binds(), part.EventBinds()...) {
		err := u.n.cfg.bindTest(ctx, b)
		if err == nil {
			continue
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return &startError{-1, fmt.Errorf("port %d of the unit's block cannot be bound: %w", b.Port, err)}
		}
		u.n.taken.find(ctx, u, b.Port)
		if holder := process.Holder(b.Host, b.Port); holder != "" {
			return &startError{-1, fmt.Errorf("port %d of the unit's block is taken by %s", b.Port, holder)}
		}
		return &startError{-1, fmt.Errorf("port %d of the unit's block is taken: %w", b.Port, err)}
	}
	return nil
}

// find records a port that a start found taken, and all others of the range that no unit of the node has and
// that are taken too.
func (t *takenPorts) find(ctx context.Context, failed *unit, port int) {
	n := failed.n
	offer := n.cfg.Self().Resources
	var own []state.Block
	for _, u := range n.list() {
		if u != failed && u.currentPhase() != state.Gone {
			own = append(own, u.m.Block)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if slices.Contains(t.ports, port) {
		return // another start has found it meanwhile
	}
	found := []int{port}
	for p := offer.PortLo; p <= offer.PortHi && p > 0; p++ {
		isOwn := slices.ContainsFunc(own, func(b state.Block) bool {
			return b.Base <= p && p < b.Base+b.Size
		})
		if p != port && !isOwn && n.cfg.isTaken(ctx, p) {
			found = append(found, p)
		}
	}
	found = append(found, t.ports...) // of blocks that units had meanwhile too
	slices.Sort(found)
	t.ports, t.tested = slices.Compact(found), time.Now()
}

// list returns the taken ports as ranges. Ports that are free again are dropped after takenRefresh.
func (t *takenPorts) list(ctx context.Context, c *Config) []state.PortRange {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.ports) > 0 && time.Since(t.tested) >= takenRefresh {
		t.ports = slices.DeleteFunc(t.ports, func(p int) bool {
			return !c.isTaken(ctx, p)
		})
		t.tested = time.Now()
	}
	return state.JoinPorts(t.ports)
}

func (c *Config) isTaken(ctx context.Context, port int) bool {
	return errors.Is(c.bindTest(ctx, engine.Bind{Host: c.EngineHost, Port: port}), syscall.EADDRINUSE)
}

// bindTest reports whether a port can be bound.
func (c *Config) bindTest(ctx context.Context, b engine.Bind) error {
	if c.BindTest != nil {
		return c.BindTest(b.Port)
	}
	if runtime.GOOS == "linux" {
		// An engine that is forked meanwhile would keep the port until it executes its program, and the one
		// that the port is for could not listen there.
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", net.JoinHostPort(b.Host, strconv.Itoa(b.Port)))
	if err != nil {
		return err
	}
	return l.Close()
}
