// Package sim is the built-in engine: one rank in one process that speaks vLLM's HTTP, answers with made-up
// text at the speed of a cost model, and fails on demand. The engine itself is enginemodel; this is its
// process. See docs/simulated-engine.md.
package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/pause"
)

// Limits of the HTTP server, the imitated engine's where it has one.
const (
	maxHeaderBytes    = 4 << 20
	readHeaderTimeout = time.Minute
	maxBody           = 64 << 20
	endWait           = time.Second // for the last answers after an abort of everything
)

// errNotListening is given by Serve before Listen.
var errNotListening = errors.New("not listening: call Listen first")

// ExitError reports that the engine ended by itself (an injected failure, a dead core), and how its process
// ends.
type ExitError struct {
	Code  int
	Cause string
}

func (e *ExitError) Error() string {
	return fmt.Sprintf("engine ended: %s (exit code %d)", e.Cause, e.Code)
}

// Server is one engine process. Safe for concurrent use.
type Server struct {
	cfg     Config
	set     *settings
	log     *slog.Logger
	ranks   []*rank
	next    atomic.Uint32 // rotates ties of internal load balancing
	ids     atomic.Uint64
	faults  faults
	active  *inflight
	started time.Time

	stopping atomic.Bool
	dead     atomic.Bool
	paused   atomic.Bool // as /is_paused tells

	http   *http.Server
	gate   *gate
	link   *link
	cancel context.CancelFunc
	wg     sync.WaitGroup

	end     serverEnd
	headers struct{ server, vary, json []string } // shared by all answers
}

// serverEnd is what is known of the end of a server.
type serverEnd struct {
	mu     sync.Mutex
	timers []*time.Timer // schedule and delayed death
	exit   *ExitError
	closed bool
}

// New makes an engine that does nothing yet.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Model.Lockstep = cfg.lockstep()
	cfg.Model.BlockEvents = cfg.KVEvents.active()
	cfg.Model.Transfer = cfg.Transfer.active()
	cfg.Model.Lease, cfg.Model.Recompute = cfg.Transfer.lease(), cfg.Transfer.Recompute
	s := &Server{
		cfg: cfg, set: cfg.settings(), log: cfg.Logger, active: newInflight(), started: time.Now(),
	}
	s.headers.server, s.headers.vary = []string{"uvicorn"}, []string{"Origin"}
	s.headers.json = []string{"application/json"}
	s.ids.Store(uint64(s.started.UnixNano()))
	for i := range cfg.ranks() {
		r, err := newRank(strconv.Itoa(cfg.rankNumber(i)), cfg.Model, s.started)
		if err != nil {
			return nil, err
		}
		r.died = s.coreDied
		if cfg.KVEvents.active() {
			if r.kv, err = newKVPublisher(&s.cfg, cfg.rankNumber(i), &s.faults); err != nil {
				return nil, err
			}
		}
		if cfg.Transfer.active() {
			r.exchange = newExchange(s, r, cfg.rankNumber(i))
		}
		s.ranks = append(s.ranks, r)
	}
	s.http = &http.Server{
		Handler: api{s}, IdleTimeout: cfg.KeepAlive, ReadHeaderTimeout: readHeaderTimeout,
		MaxHeaderBytes: maxHeaderBytes,
		ErrorLog:       log.New(io.Discard, "", 0), ConnContext: withConn,
	}
	return s, nil
}

// Listen starts the engine up: it waits for the simulated load time and for the group, then opens the port,
// which refuses connections until then. ctx bounds the start only.
func (s *Server) Listen(ctx context.Context) error {
	if err := startup(ctx, &s.cfg); err != nil {
		return err
	}
	if s.cfg.lockstep() {
		l, err := join(ctx, &s.cfg, s.ranks[0])
		if err != nil {
			return err
		}
		s.link = l
	}
	if err := s.openKV(ctx); err != nil {
		return err
	}
	addr := hostPort(s.cfg.Host, s.cfg.Port)
	inner, err := s.cfg.listen(ctx, addr)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", addr, err)
	}
	addr = inner.Addr().String()
	again := context.WithoutCancel(ctx) // the engine outlives its start
	s.gate = newGate(inner, func() (net.Listener, error) { return s.cfg.listen(again, addr) })
	s.begin(again)
	return nil
}

// openKV opens the sockets of events and transfers before the port, so that they exist when a client asks for
// them.
func (s *Server) openKV(ctx context.Context) error {
	for _, r := range s.ranks {
		if r.kv != nil {
			if err := r.kv.open(ctx); err != nil {
				return err
			}
		}
		if r.exchange != nil {
			if err := r.exchange.open(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *Server) closeKV() {
	for _, r := range s.ranks {
		if r.kv != nil {
			r.kv.close()
		}
		if r.exchange != nil {
			r.exchange.close()
		}
	}
}

// begin starts the engine's goroutines and its schedule of faults.
func (s *Server) begin(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	s.cancel = cancel
	for _, r := range s.ranks {
		s.wg.Go(func() { r.run(ctx) })
	}
	if s.link != nil {
		s.link.run()
	}
	for _, entry := range s.cfg.Schedule {
		s.after(entry.After, func() { _ = s.Fail(entry.Fault) })
	}
}

// after runs f once, unless the server is closed before.
func (s *Server) after(d time.Duration, f func()) {
	s.end.mu.Lock()
	defer s.end.mu.Unlock()
	if !s.end.closed {
		s.end.timers = append(s.end.timers, time.AfterFunc(d, f))
	}
}

// Serve answers until Close (nil) or until the engine ends by itself (*ExitError).
func (s *Server) Serve() error {
	if s.gate == nil {
		return errNotListening
	}
	err := s.http.Serve(s.gate)
	s.end.mu.Lock()
	defer s.end.mu.Unlock()
	if s.end.exit != nil {
		return s.end.exit
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// URL is the base URL; "" before Listen.
func (s *Server) URL() string {
	if s.gate == nil {
		return ""
	}
	return "http://" + s.gate.Addr().String()
}

// Close ends everything at once, without answers, and waits.
func (s *Server) Close() error {
	s.drop(nil)
	err := s.http.Close()
	if s.gate != nil {
		err = errors.Join(err, s.gate.Close())
	}
	s.faults.clear()
	if s.cancel != nil {
		s.cancel()
	}
	if s.link != nil {
		s.link.close()
	}
	s.await(nil, endWait) // handlers end with their connections
	s.wg.Wait()
	s.closeKV()
	return err
}

// drop marks the end, with its cause if the engine ends by itself; true = it was the first one.
func (s *Server) drop(exit *ExitError) bool {
	s.end.mu.Lock()
	defer s.end.mu.Unlock()
	if s.end.closed {
		return false
	}
	s.end.closed, s.end.exit = true, exit
	for _, t := range s.end.timers {
		t.Stop()
	}
	return true
}

// leave ends the engine by itself: it closes the connections, and Serve returns the cause. The goroutines end
// with Close.
func (s *Server) leave(code int, cause string) {
	if !s.drop(&ExitError{Code: code, Cause: cause}) {
		return
	}
	if s.link != nil {
		s.link.hangUp()
	}
	_ = s.http.Close()
	_ = s.gate.Close()
	s.closeKV()
}

// coreDied is called by a rank, inside its turn: requests fail from now on, the process follows.
func (s *Server) coreDied() {
	s.dead.Store(true)
	s.after(s.cfg.scaled(deathDelay), func() { s.leave(0, "engine core died") })
}

// Shutdown ends the engine as SIGTERM does: with timeout 0 everything in flight is aborted, else it may
// finish until then. New requests get the answers of a stopping engine meanwhile. It returns when the port is
// closed; Close is still needed.
func (s *Server) Shutdown(ctx context.Context, timeout time.Duration) {
	s.stopping.Store(true)
	if timeout > 0 && s.drain(ctx, timeout) {
		s.leave(0, "stopped")
		return
	}
	kind := em.InputAbortAll
	if s.cfg.lockstep() {
		kind = em.InputKill // a coupled rank's streams end with the error event, not with abort
	}
	s.tellAll(em.Input{Kind: kind})
	s.await(ctx.Done(), endWait)
	s.leave(0, "stopped")
}

// drain waits for what is in flight; false = it did not end in time.
func (s *Server) drain(ctx context.Context, timeout time.Duration) bool {
	if s.active.count() == 0 {
		return true
	}
	begun := time.Now()
	if !s.await(ctx.Done(), timeout) {
		return false
	}
	_ = pause.For(ctx, min(s.cfg.scaled(s.cfg.Linger), timeout-time.Since(begun)))
	return true
}

// await waits until nothing is in flight, at most d or until quit.
func (s *Server) await(quit <-chan struct{}, d time.Duration) bool {
	select {
	case <-s.active.idle():
		return true
	case <-time.After(d):
	case <-quit:
	}
	return false
}

// wait is the engine's life while it serves.
func (s *Server) wait(ctx context.Context, signals <-chan os.Signal, served <-chan error) int {
	for {
		select {
		case err := <-served:
			return s.exitCode(err)
		case <-ctx.Done():
			s.log.Info("stopping", "cause", context.Cause(ctx).Error())
			return exitOK
		case sig := <-signals:
			if s.faults.is(ModeIgnoreSigterm) {
				s.log.Info("signal ignored as told", "signal", sig.String())
				continue
			}
			s.log.Info("stopping", "signal", sig.String(), "in_flight", s.active.count())
			s.Shutdown(ctx, s.cfg.ShutdownTimeout)
			return exitOK
		}
	}
}

func (s *Server) exitCode(err error) int {
	var exit *ExitError
	if errors.As(err, &exit) {
		s.log.Info("leaving", "cause", exit.Cause, "code", exit.Code)
		return exit.Code
	}
	if err != nil {
		s.log.Error("serving failed", "error", err.Error())
		return exitStartup
	}
	return exitOK
}
