package sim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/pause"
)

// maxPeers bounds the prefill engines that a decode engine remembers.
const maxPeers = 4096

// peers are the prefill engines that a decode engine has met: it asks for their blocks at the address where
// it met them, whatever later parameters say. Safe for concurrent use.
type peers struct {
	cfg    *Config
	thread chan struct{} // one handshake at a time, with whomever

	mu    sync.Mutex
	known map[string]string // engine id → address
}

func newPeers(cfg *Config) *peers {
	return &peers{cfg: cfg, thread: make(chan struct{}, 1), known: map[string]string{}}
}

// Why engines do not pair, or blocks do not come.
var (
	errOtherEngine  = errors.New("remote engine ID mismatch")
	errIncompatible = errors.New("the engines differ in version, model or blocks")
	errRefused      = errors.New("the prefill engine refused")
)

// address is where a known engine was met; "" = it was not.
func (p *peers) address(engine string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known[engine]
}

// reach returns the address of an engine, after a handshake if it is not known.
func (p *peers) reach(ctx context.Context, engine, addr string) (string, error) {
	if known := p.address(engine); known != "" {
		return known, nil
	}
	return p.meet(ctx, engine, addr)
}

// meet makes the handshake, unless another request has made it meanwhile.
func (p *peers) meet(ctx context.Context, engine, addr string) (string, error) {
	select {
	case p.thread <- struct{}{}:
		defer func() { <-p.thread }()
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	if known := p.address(engine); known != "" {
		return known, nil
	}
	answer, err := p.handshake(ctx, addr)
	switch {
	case err != nil:
		return "", err
	case answer.Engine != engine:
		return "", fmt.Errorf("%w: expected %s, received %s", errOtherEngine, engine, answer.Engine)
	case answer.Compat != p.cfg.compat():
		return "", fmt.Errorf("%w: %q here, %q there", errIncompatible, p.cfg.compat(), answer.Compat)
	}
	if err := pause.For(ctx, p.cfg.scaled(p.cfg.Transfer.FirstContact)); err != nil {
		return "", err
	}
	p.remember(engine, addr)
	return addr, nil
}

// remember replaces whoever was met at the address before.
func (p *peers) remember(engine, addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, at := range p.known {
		if at == addr || len(p.known) >= maxPeers {
			delete(p.known, id)
		}
	}
	p.known[engine] = addr
}

// handshake asks until somebody answers or the time is over: the real engines' sockets do not tell that
// nobody listens.
func (p *peers) handshake(ctx context.Context, addr string) (sideMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Transfer.HandshakeMax)
	defer cancel()
	for {
		answer, err := p.ask(ctx, addr, &sideMessage{Op: sideMeet})
		if err == nil {
			return answer, nil
		}
		if pause.For(ctx, dialPause) != nil {
			return sideMessage{}, fmt.Errorf("handshake with %s: %w", addr, err)
		}
	}
}

// read gives what blocks of a known engine hold, and how many seconds they took. Nothing but ctx bounds it: a
// frozen engine is waited for.
func (p *peers) read(ctx context.Context, addr string, m *sideMessage) ([]em.BlockKV, float64, error) {
	answer, err := p.ask(ctx, addr, m)
	switch {
	case err != nil:
		return nil, 0, err
	case answer.Error != "":
		return nil, 0, fmt.Errorf("%w: %s", errRefused, answer.Error)
	}
	return answer.blockKV(), answer.TookS, nil
}

// tell sends what has no answer.
func (p *peers) tell(ctx context.Context, addr string, m *sideMessage) error {
	ctx, cancel := context.WithTimeout(ctx, sideIOTimeout)
	defer cancel()
	c, err := p.cfg.dial(ctx, addr)
	if err != nil {
		return err
	}
	return errors.Join(writeSide(c, m), c.Close())
}

// ask sends a question and waits for the answer, until ctx ends.
func (p *peers) ask(ctx context.Context, addr string, m *sideMessage) (sideMessage, error) {
	c, err := p.cfg.dial(ctx, addr)
	if err != nil {
		return sideMessage{}, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer func() {
		stop()
		_ = c.Close()
	}()
	if err := writeSide(c, m); err != nil {
		return sideMessage{}, err
	}
	answer, err := readSide(c)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return answer, err
}

func hostPort(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// portOf is the port of an address; 0 on a memory transport.
func portOf(addr string) int {
	_, text, _ := net.SplitHostPort(addr)
	port, _ := strconv.Atoi(text)
	return port
}
