package harness

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/memnet"
)

// Engines starts simulated engines in this process, for the nodes of all hosts. It records two faults: two
// live engines of one rank, and an epoch of a unit that does not grow. Engines is safe for concurrent use.
type Engines struct {
	net *memnet.Network

	WhenFound func() // called when a starting node looks for engines; nil = nothing

	mu     sync.Mutex
	all    []*Engine
	epochs map[owner]uint64 // highest started
	faults []string
	shared []string
}

// owner is a rank over its epochs.
type owner struct {
	unit string
	rank int
}

// seat is APP/GROUP/RANK, whatever the coupling makes a unit.
func (o owner) seat() string {
	parts := strings.SplitN(o.unit, "/", 3)
	return strings.Join(parts[:min(2, len(parts))], "/") + "/" + strconv.Itoa(o.rank)
}

// launcher starts the engines of one host's node.
type launcher struct {
	*Engines

	host string
}

var _ node.Launcher = launcher{}

// Found implements node.Launcher: the engines that the node before has let go of.
func (l launcher) Found() []node.Found {
	if l.WhenFound != nil {
		l.WhenFound()
	}
	var out []node.Found
	for _, e := range l.On(l.host) {
		e.mu.Lock()
		if e.left {
			out = append(out, node.Found{LaunchOrder: e.order, Process: e, Began: e.began})
		}
		e.left = false
		e.mu.Unlock()
	}
	return out
}

func newEngines(n *memnet.Network) *Engines {
	return &Engines{net: n, epochs: map[owner]uint64{}}
}

// Start is that of a node.Launcher: the engine's own command line, without its process. The simulated engine
// stands for vLLM, whose flags it knows.
func (s *Engines) Start(_ context.Context, o node.LaunchOrder, stdout, stderr io.Writer) (
	node.Process, error,
) {
	l := o.Launch
	at := slices.IndexFunc(l.Argv, func(a string) bool { return strings.HasPrefix(a, "--") })
	args := slices.DeleteFunc(slices.Clone(l.Argv[max(0, at):]),
		func(a string) bool { return a == "--sim-watch-stdin" })
	cfg, _, err := sim.ParseFlags(args)
	if err != nil {
		return nil, err
	}
	cfg.KeepAlive = engine.KeepAliveS * time.Second
	cfg.Logger = slog.New(slog.NewTextHandler(stderr, nil))
	host := hostOf(l.URL)
	place := s.net.Host(host)
	cfg.Listen = func(_ context.Context, addr string) (net.Listener, error) { return place.Listen(addr) }
	cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
		return place.DialContext(ctx, "tcp", addr)
	}
	cfg.DevMode = slices.Contains(l.Env, "VLLM_SERVER_DEV_MODE=1")
	e := &Engine{
		URL: l.URL, Argv: l.Argv, host: host, order: o, began: time.Now(),
		signals: make(chan os.Signal, 1), exited: make(chan struct{}),
	}
	ctx, cancel := context.WithCancel(context.Background())
	e.cancel = cancel
	s.mu.Lock()
	s.all = append(s.all, e)
	s.mu.Unlock()
	go e.run(ctx, cfg, stdout, stderr)
	return e, nil
}

// Extend is that of a node.Launcher.
func (*Engines) Extend(time.Duration) {}

// StartSim serves a simulated engine in this process, without dpserve, until the test ends.
func StartSim(t testing.TB, cfg sim.Config) *sim.Server {
	t.Helper()
	s, err := sim.New(cfg)
	require.NoError(t, err)
	require.NoError(t, s.Listen(t.Context()))
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	t.Cleanup(func() {
		_ = s.Close()
		<-served
	})
	return s
}

// Live are the engines that have not ended, in order of their start.
func (s *Engines) Live() []*Engine {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*Engine
	for _, e := range s.all {
		if e.alive() {
			out = append(out, e)
		}
	}
	return out
}

// At is the live engine that answers at a URL; nil if there is none.
func (s *Engines) At(url string) *Engine {
	for _, e := range s.Live() {
		if e.URL == url {
			return e
		}
	}
	return nil
}

// Faults names every rank that had two live engines.
func (s *Engines) Faults() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.faults)
}

// Overlaps names every rank that started under a higher epoch while an engine of an older epoch lived on
// another host. That happens when the old node is cut off and goes on serving.
func (s *Engines) Overlaps() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.shared)
}

// On are the live engines of a host.
func (s *Engines) On(host string) []*Engine {
	return slices.DeleteFunc(s.Live(), func(e *Engine) bool { return e.host != host })
}

// hostOf is the host of an engine's URL.
func hostOf(engine string) string {
	u, err := url.Parse(engine)
	if err != nil {
		return ""
	}
	return u.Hostname()
}

// name returns the rank of the newest engine at a URL, as the node's log writes it.
func (s *Engines) name(unit string, rank int, epoch uint64, url string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	who := owner{unit, rank}
	if s.epochs[who] >= epoch {
		s.faults = append(s.faults, fmt.Sprintf("%s rank %d: started at epoch %d after epoch %d", unit, rank,
			epoch, s.epochs[who]))
	}
	s.epochs[who] = epoch
	for _, e := range s.all {
		switch {
		case e.URL == url && e.owner.unit == "":
			e.named(who, epoch)
		case e.owner.seat() == who.seat() && e.alive() && e.host != hostOf(url):
			s.shared = append(s.shared,
				fmt.Sprintf("%s rank %d: epoch %d lives on %s while epoch %d starts on %s",
					unit, rank, e.epoch, e.host, epoch, hostOf(url)))
		case e.owner.seat() == who.seat() && e.alive():
			s.faults = append(s.faults, fmt.Sprintf("%s rank %d: epoch %d lives while epoch %d starts", unit,
				rank, e.epoch, epoch))
		}
	}
}

// Engine is one simulated engine and a node.Process. Kill has the effect of SIGKILL.
type Engine struct {
	URL  string
	Argv []string

	host    string
	order   node.LaunchOrder
	owner   owner
	epoch   uint64
	began   time.Time
	signals chan os.Signal
	cancel  context.CancelFunc
	exited  chan struct{}
	exit    node.Exit // valid once exited is closed

	mu     sync.Mutex
	killed bool
	asked  bool // to end
	left   bool // its node has let go of it
}

var _ node.Process = (*Engine)(nil)

func (e *Engine) run(ctx context.Context, cfg sim.Config, stdout, stderr io.Writer) {
	code := sim.Run(ctx, cfg, e.signals, stdout, stderr)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.exit = node.Exit{Code: code, After: time.Since(e.began)}
	if e.killed || code < 0 {
		e.exit = node.Exit{Code: -1, Signal: syscall.SIGKILL.String(), After: time.Since(e.began)}
	}
	close(e.exited)
}

func (e *Engine) named(who owner, epoch uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.owner, e.epoch = who, epoch
}

func (e *Engine) alive() bool {
	select {
	case <-e.exited:
		return false
	default:
		return true
	}
}

// String names the rank, its epoch and where it answers.
func (e *Engine) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return fmt.Sprintf("%s rank %d epoch %d at %s", e.owner.unit, e.owner.rank, e.epoch, e.URL)
}

// PID implements node.Process.
func (*Engine) PID() int { return 0 }

// Exited implements node.Process.
func (e *Engine) Exited() <-chan struct{} { return e.exited }

// Exit implements node.Process.
func (e *Engine) Exit() node.Exit { return e.exit }

// Terminate implements node.Process.
func (e *Engine) Terminate() {
	e.mu.Lock()
	e.asked = true
	e.mu.Unlock()
	select {
	case e.signals <- syscall.SIGTERM:
	default: // one is on its way
	}
}

// Kill implements node.Process.
func (e *Engine) Kill() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.alive() {
		e.killed, e.asked = true, true
	}
	e.cancel()
}

// EndedByItself reports whether the engine has ended although nobody had asked it to.
func (e *Engine) EndedByItself() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return !e.alive() && !e.asked
}

// Held implements node.Process.
func (e *Engine) Held() string {
	if e.alive() {
		return "the engine at " + e.URL
	}
	return ""
}

// Adopt implements node.Process.
func (*Engine) Adopt(_, _ io.Writer) {}

// Release implements node.Process.
func (*Engine) Release() {}

// Memory implements node.Process.
func (*Engine) Memory() uint64 { return 0 }

// Detach implements node.Process.
func (e *Engine) Detach() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.left = true
}
