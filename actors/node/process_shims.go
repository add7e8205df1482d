package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/shim"
)

const (
	findAtOnce  = 32              // shims that are asked, or ended, at a time when the node starts
	ownerWait   = 2 * time.Second // until a shim has noticed the end of the process before
	ownerPoll   = 10 * time.Millisecond
	releaseWait = 10 * time.Second // until a shim whose engine has ended has ended itself
	closeWait   = 2 * releaseWait  // until all these are gone, with their folders
	leastLease  = time.Second      // on_lease_loss fence: what a new engine gets at least
	silentMost  = time.Minute      // longest time that a silent shim is asked again
)

// errNoDataDir says that shims have no place for their folders.
var errNoDataDir = errors.New("a node that starts engines needs a data dir")

// shims is the Launcher of a node: each engine runs in a shim of its own, and outlives the node if
// Config.Shims is set.
type shims struct {
	cfg        ShimConfig
	dir        string
	executable string // of shims
	boot       string
	fence      bool          // engines end with the lease
	grace      time.Duration // from SIGTERM to SIGKILL, when a shim ends its engine
	lease      time.Duration // fence: before the first Extend
	log        *slog.Logger

	found     []Found
	foreign   []string       // folders that are left alone, with the reason
	releasing sync.WaitGroup // shims that are about to end
	done      chan struct{}
	once      sync.Once
	noCgroup  sync.Once // it was said that engines have none of their own

	mu       sync.Mutex
	id       uint64 // of this process; begins those of its launches
	launches int
	until    time.Time // fence: when the last Extend runs out
	live     map[*shimProcess]struct{}
}

var _ Launcher = (*shims)(nil)

// openShims finds what an earlier process of the node left: engines to adopt are connected, all else that is
// this node's is ended.
func openShims(cfg *Config, timers *Timers) (*shims, error) {
	if cfg.DataDir == "" {
		return nil, errNoDataDir
	}
	l := &shims{
		dir:        filepath.Join(cfg.DataDir, EnginesDir),
		executable: cmp.Or(imageOf(cfg.Executable), cfg.Executable),
		boot:       process.BootID(), fence: cfg.OnLeaseLoss == Fence, lease: timers.LeaseTTL, log: cfg.Log,
		id: cfg.Rand(), done: make(chan struct{}), live: map[*shimProcess]struct{}{},
	}
	if cfg.Shims != nil { // otherwise a shim ends its engine at once when this process has ended
		l.cfg, l.grace = *cfg.Shims, timers.KillGrace
	}
	if l.fence {
		l.grace /= cutPart
	}
	if err := l.discover(); err != nil {
		return nil, err
	}
	process.RemoveEmptyCgroups()
	if os.Getpid() == 1 {
		go reapOrphans(l.done, reapEach)
	}
	return l, nil
}

// Found implements Launcher.
func (l *shims) Found() []Found { return l.found }

// Start implements Launcher.
func (l *shims) Start(ctx context.Context, o LaunchOrder, stdout, stderr io.Writer) (Process, error) {
	spec, err := l.spec(o)
	if err != nil {
		return nil, fmt.Errorf("start engine %s: %w", o.Argv[0], err)
	}
	client, info, err := shim.Start(ctx, l.executable, l.dir, spec)
	if err != nil {
		return nil, fmt.Errorf("start engine %s: %w", o.Argv[0], err)
	}
	if why := info.State.NoCgroup; why != "" {
		l.noCgroup.Do(func() {
			l.log.Info("engines have no cgroup of their own: what belongs to one is known by its shim "+
				"and its session", slog.String("err", why))
		})
	}
	p := newShimProcess(l, filepath.Join(l.dir, spec.ID), spec.Output, &info.State)
	if err := p.watch(ctx, client); err != nil {
		client.Close()
		return nil, errors.Join(err, shim.Remove(p.dir))
	}
	p.follow(0, stdout, stderr) //nolint:contextcheck // ctx bounds the start only
	return p, nil
}

// spec is what the shim of a launch is told.
func (l *shims) spec(o LaunchOrder) (shim.Spec, error) {
	path := cmp.Or(imageOf(o.Argv[0]), o.Argv[0])
	if !strings.Contains(path, "/") { // the shim has no PATH
		found, err := exec.LookPath(path)
		if err != nil {
			return shim.Spec{}, err
		}
		path = found
	}
	here, err := os.Getwd()
	if err != nil {
		return shim.Spec{}, err
	}
	output := o.Output
	if output != "" && !filepath.IsAbs(output) { // the shim runs elsewhere
		output = filepath.Join(here, output)
	}
	spec := shim.Spec{
		Cluster: l.cfg.Cluster, Node: l.cfg.Node, Boot: l.boot, ID: l.newLaunch(),
		Path: path, Argv: o.Argv, Env: o.Env, Dir: here, Output: output,
		Orphan: l.cfg.OrphanTimeout, Lease: l.leaseLeft(), Grace: l.grace,
	}
	o.Argv, o.Env, o.Output = nil, nil, "" // the spec has them
	spec.Order, err = json.Marshal(&o)
	return spec, err
}

// newLaunch draws the id of a launch.
func (l *shims) newLaunch() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.launches++
	return fmt.Sprintf("%016x.%d", l.id, l.launches)
}

// leaseLeft is how long a new engine lives before an Extend; 0 = on_lease_loss serve.
func (l *shims) leaseLeft() time.Duration {
	if !l.fence {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.until.IsZero() {
		return l.lease
	}
	return max(time.Until(l.until), leastLease)
}

// Extend implements Launcher.
func (l *shims) Extend(ttl time.Duration) {
	if !l.fence {
		return
	}
	l.mu.Lock()
	l.until = time.Now().Add(ttl)
	l.mu.Unlock()
	for _, p := range l.engines() {
		if c := p.connected(); c != nil && !closed(p.exited) {
			_ = c.Extend(ttl) // a shim that is gone is noticed by its watch
		}
	}
}

func (l *shims) add(p *shimProcess) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live[p] = struct{}{}
}

func (l *shims) remove(p *shimProcess) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.live, p)
}

// engines lists the engines that are not released.
func (l *shims) engines() []*shimProcess {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Keys(l.live))
}

// close waits until released shims have ended, and lets go of the others. A folder that a disk that hangs
// does not remove is left to the next process of the node. Idempotent.
func (l *shims) close() {
	err := diskfile.Await(l.dir, closeWait, func() error { l.releasing.Wait(); return nil })
	if err != nil {
		l.log.Warn("what ended shims have left is not removed yet", slog.String("err", err.Error()))
	}
	for _, p := range l.engines() {
		p.Detach()
	}
	l.once.Do(func() { close(l.done) })
}

// discover fills found and foreign.
func (l *shims) discover() error {
	entries, err := shim.Discover(context.Background(), l.dir)
	if err != nil {
		return fmt.Errorf("read %s: %w", l.dir, err)
	}
	found := make([]*Found, len(entries))
	foreign := make([]string, len(entries))
	var g errgroup.Group
	g.SetLimit(findAtOnce)
	for i := range entries {
		g.Go(func() error {
			found[i], foreign[i] = l.take(&entries[i])
			return nil
		})
	}
	_ = g.Wait()
	var copies []string
	for i := range entries {
		if found[i] != nil {
			l.found = append(l.found, *found[i])
		}
		if foreign[i] != "" {
			l.foreign = append(l.foreign, foreign[i])
			if errors.Is(entries[i].Err, shim.ErrCopy) {
				copies = append(copies, foreign[i])
			}
		}
	}
	if len(copies) > 0 {
		l.log.Warn("the data dir is a copy: the engines of the original are left alone. End this dpserve if "+
			"the original is in use; if it is not, end the shims that are named here, and start again",
			slog.Any("engines", copies))
	}
	slices.SortFunc(l.found, func(a, b Found) int { return a.Began.Compare(b.Began) })
	return nil
}

// Reasons why what was found is not adopted.
var (
	errOtherCluster = errors.New("another cluster started it")
	errOtherNode    = errors.New("another node started it")
	errOtherBoot    = errors.New("the machine has been booted since")
	errNotKept      = errors.New("engines end with dpserve here")
)

// take sorts a folder: an engine of this node to adopt or to report, one that is left alone, because it may
// be somebody else's, with the reason, or one that is ended and forgotten.
func (l *shims) take(e *shim.Entry) (*Found, string) {
	err := l.mine(e)
	if err == nil {
		var f *Found
		if f, err = l.adopt(e); err == nil {
			return f, ""
		}
	}
	if e.Client != nil {
		defer e.Client.Close()
	}
	switch {
	case errors.Is(err, shim.ErrCopy) && len(e.State.Left()) > 0:
		return nil, fmt.Sprintf("%s: %v; its shim is process %d", e.Dir, err, e.State.Shim)
	case errors.Is(err, shim.ErrForeign), errors.Is(err, shim.ErrOwned):
		l.log.Warn("an engine's shim is left alone", slog.String("dir", e.Dir),
			slog.String("err", err.Error()))
		return nil, fmt.Sprintf("%s: %v", e.Dir, err)
	}
	if !errors.Is(err, shim.ErrCopy) { // of which nothing lives
		l.log.Warn("ending an engine that an earlier process left behind", slog.String("dir", e.Dir),
			slog.String("reason", err.Error()))
	}
	if err := shim.Remove(e.Dir); err != nil {
		l.log.Error("what an earlier process left behind does not end", slog.String("err", err.Error()))
		return nil, fmt.Sprintf("%s: %v", e.Dir, err)
	}
	return nil, ""
}

// mine says why an engine is not one of this node's that can be adopted or reported.
func (l *shims) mine(e *shim.Entry) error {
	gone, silent := errors.Is(e.Err, shim.ErrGone), errors.Is(e.Err, shim.ErrSilent)
	switch {
	case e.Err != nil && !gone && !silent:
		return e.Err
	case e.Spec.Cluster != l.cfg.Cluster:
		return errOtherCluster
	case e.Spec.Node != l.cfg.Node:
		return errOtherNode
	case e.Spec.Boot != l.boot:
		return errOtherBoot
	case l.cfg.OrphanTimeout == 0:
		return errNotKept
	case gone && e.State.PID == 0:
		return e.Err // the engine has never run
	}
	return nil
}

// adopt makes this process the owner of an engine. An engine whose shim is gone has ended, or ends now. A
// shim that is silent is asked again beside the start of the node.
func (l *shims) adopt(e *shim.Entry) (*Found, error) {
	var o LaunchOrder
	if err := json.Unmarshal(e.Spec.Order, &o); err != nil {
		return nil, err
	}
	o.Argv, o.Env, o.Output = e.Spec.Argv, e.Spec.Env, e.Spec.Output
	p := newShimProcess(l, e.Dir, o.Output, &e.State)
	found := &Found{o, p, e.State.Began}
	if errors.Is(e.Err, shim.ErrGone) {
		if err := e.State.End(); err != nil {
			return nil, err
		}
		exit := exitWithShim(e.State.Began)
		if e.State.Exit != nil { // it is on disk
			exit = *e.State.Exit
		}
		p.end(exit)
		return found, nil
	}
	if errors.Is(e.Err, shim.ErrSilent) {
		p.reach()
		return found, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), ownerWait)
	defer cancel()
	if err := p.own(ctx, e.Client, e.Unread, e.State.Phase); err != nil {
		return nil, err
	}
	return found, nil
}

// exitWithShim is the end of an engine that has ended with its shim.
func exitWithShim(began time.Time) Exit {
	return Exit{Code: -1, Signal: "killed (its shim was killed)", After: time.Since(began)}
}
