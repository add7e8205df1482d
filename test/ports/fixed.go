package ports

import (
	"context"
	"io"
	"net"
	"slices"
	"sync"
)

// fixed is what the tests of this process hold together: the turn, and the listeners by address.
var fixed struct {
	sync.Mutex
	holders int
	turn    io.Closer
	taken   map[string]*taken
}

// taken is an address that tests of this process hold. Without a listener, a program of the machine's user is
// there.
type taken struct {
	holders  int
	listener net.Listener
	done     chan struct{} // closed when no more connections are accepted
}

// TakeFixed makes addresses taken until release: by listeners of its own, which close every connection, or
// because a program of the machine's user is there. Test processes take turns: what one has is not taken for
// good. Tests of one process share its turn and what it has taken, so that they run side by side.
func TakeFixed(ctx context.Context, addrs ...string) (release func(), err error) {
	fixed.Lock()
	defer fixed.Unlock()
	if fixed.holders == 0 {
		if fixed.turn, err = awaitTurn(ctx); err != nil {
			return nil, err
		}
		fixed.taken = map[string]*taken{}
	}
	fixed.holders++
	for _, addr := range addrs {
		if fixed.taken[addr] == nil {
			fixed.taken[addr] = listenAt(ctx, addr)
		}
		fixed.taken[addr].holders++
	}
	return sync.OnceFunc(func() { releaseFixed(addrs) }), nil
}

// releaseFixed ends one hold of addresses. The last hold of an address closes its listener, and the last one
// of all ends the turn.
func releaseFixed(addrs []string) {
	fixed.Lock()
	defer fixed.Unlock()
	for _, addr := range slices.Backward(addrs) {
		at := fixed.taken[addr]
		if at.holders--; at.holders == 0 {
			at.close()
			delete(fixed.taken, addr)
		}
	}
	if fixed.holders--; fixed.holders == 0 {
		_ = fixed.turn.Close()
	}
}

// listenAt listens and closes each connection, so that a client learns at once that no node is there.
func listenAt(ctx context.Context, addr string) *taken {
	out := &taken{done: make(chan struct{})}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		close(out.done)
		return out
	}
	out.listener = l
	go func() {
		defer close(out.done)
		for {
			c, err := l.Accept()
			if err != nil {
				return // the listener is closed
			}
			_ = c.Close()
		}
	}()
	return out
}

// close ends the hold of an address by this process, and by children of it that are about to be executed: the
// next test would take what they hold for a program of the machine's user.
func (a *taken) close() {
	if a.listener != nil {
		_ = a.listener.Close()
		awaitForks()
	}
	<-a.done
}
