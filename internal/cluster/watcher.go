package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Timers of a Watcher.
const (
	watchSilence    = 3 * time.Second       // without a message of the control node: another one is asked
	watchBackoffMin = 50 * time.Millisecond // before the first attempt after one that received messages
	watchBackoffMax = time.Second
)

// WatcherConfig configures a Watcher: how a node without role control reaches the nodes that have it.
type WatcherConfig struct {
	NodeID    string                               // "" = the data dir's, or a new one
	ClusterID string                               // "" = the data dir's
	UID       string                               // "" = the data dir's, or a new one
	DataDir   string                               // "" = in memory
	Replace   func(path string, data []byte) error // writes the state to DataDir; nil = diskfile.Replace
	Log       *slog.Logger

	// Watch follows one control node, preferably another one at every call. It passes on the messages of that
	// node's Follow until ctx ends or the connection breaks.
	Watch func(ctx context.Context, from uint64, apply func(*Update)) error
	// Forward sends a command to the leader.
	Forward func(ctx context.Context, leader state.Node, c state.Command) (state.Result, error)
	// Resolve returns a node's HOST:PORT by its UID. It comes before State().Nodes; nil = only State().Nodes.
	Resolve func(uid string) (address string, ok bool)
	// Unknown counts the states with fields of a later version, which the node ignores; nil = not counted.
	Unknown func(what string)
}

// Watcher is a copy of the state on a node that takes no part in consensus. It saves the last state in the
// data dir, so that a node that starts while there is no leader still knows its applications. It is safe for
// concurrent use.
type Watcher struct {
	cfg   WatcherConfig
	log   *slog.Logger
	ident identity
	home  io.Closer

	published atomic.Pointer[stateCopy]
	cancel    context.CancelCauseFunc
	ctx       context.Context //nolint:containedctx // it ends with the watcher, not with a call
	loops     sync.WaitGroup
	once      sync.Once
	closed    error

	mu            sync.Mutex
	leader        string        // UID; "" = not known
	newer         string        // the last unknown field
	fresh         bool          // a control node with a leader has sent a message since Start
	changed       chan struct{} // closed and replaced after each publication
	leaderChanged chan struct{} // closed and replaced when leader or fresh changes
}

// NewWatcher locks the data dir, reads the saved state and begins to follow.
func NewWatcher(cfg WatcherConfig) (*Watcher, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Replace == nil {
		cfg.Replace = diskfile.Replace
	}
	if cfg.Unknown == nil {
		cfg.Unknown = func(string) {}
	}
	home, ident, err := openDataDir(Config{
		NodeID: cfg.NodeID, ClusterID: cfg.ClusterID, UID: cfg.UID, DataDir: cfg.DataDir,
	})
	if err != nil {
		return nil, err
	}
	w := &Watcher{
		cfg: cfg, log: cfg.Log, ident: ident, home: home, changed: make(chan struct{}),
		leaderChanged: make(chan struct{}),
	}
	w.ctx, w.cancel = context.WithCancelCause(context.Background())
	st, err := loadState(cfg.DataDir, ident.Cluster)
	if err != nil {
		w.log.Warn("the state of the last time cannot be read", "component", "cluster", "err", err)
	}
	w.published.Store(st)
	w.loops.Go(w.followControlNodes)
	if cfg.DataDir != "" {
		keep := keeper{
			dataDir: cfg.DataDir, replace: cfg.Replace, log: w.log, done: w.ctx.Done(), changed: w.Changed,
			newest: w.published.Load,
		}
		w.loops.Go(func() { keep.run(st.state.Index) })
	}
	return w, nil
}

// UID returns this node's id, which is made with its data dir.
func (w *Watcher) UID() string { return w.ident.UID }

// ClusterID returns the cluster's name.
func (w *Watcher) ClusterID() string { return w.ident.Cluster }

// State returns the newest state that this node has received. It is immutable and shared: callers must not
// change it.
func (w *Watcher) State() *state.State { return w.published.Load().state }

// Changed is closed at the next change of State. Take it before State, or a change in between goes unnoticed.
func (w *Watcher) Changed() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.changed
}

// Leader returns false: a node without role control never leads.
func (w *Watcher) Leader() bool { return false }

// LeaderNode returns the UID of the leader as the followed control node reports it.
func (w *Watcher) LeaderNode() (uid string, known bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.leader, w.leader != ""
}

// Leadership is closed at the next change of LeaderNode.
func (w *Watcher) Leadership() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.leaderChanged
}

// Ready waits until a control node that knows a leader has sent its state, or confirmed that ours is the
// newest.
func (w *Watcher) Ready(ctx context.Context) error {
	for {
		w.mu.Lock()
		fresh, leaderChanged := w.fresh, w.leaderChanged
		w.mu.Unlock()
		if fresh {
			return nil
		}
		select {
		case <-leaderChanged:
		case <-ctx.Done():
			return problem.New(problem.Timeout, "wait for a control node: %w", context.Cause(ctx)).
				WithHint("%s", w.leaderHint())
		case <-w.ctx.Done():
			return errClosed()
		}
	}
}

// Propose sends a command to the leader once and waits until this node's copy shows it. See Cluster.Propose.
func (w *Watcher) Propose(ctx context.Context, cmd state.Command) (state.Result, error) {
	if w.cfg.Forward == nil {
		return state.Result{}, errNotLeader()
	}
	cmd, err := w.State().Readable(cmd)
	if err != nil {
		return state.Result{}, err
	}
	leader, err := awaitLeader(ctx, w)
	if err != nil {
		return state.Result{}, err
	}
	res, err := forwarder(w.cfg.Forward).send(ctx, leader, cmd)
	if err == nil && !res.Unchanged {
		w.awaitApplied(ctx, res)
	}
	return res, err
}

// awaitApplied waits until this node's copy shows a command that the leader has acknowledged.
func (w *Watcher) awaitApplied(ctx context.Context, res state.Result) {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	for {
		changed := w.Changed()
		if w.State().Index >= res.Index {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		case <-w.ctx.Done():
			return
		}
	}
}

// Recall reports whether the node has a copy of the state: New has read the one of an earlier process.
func (w *Watcher) Recall() bool { return w.State().Cluster != "" }

// Close stops following and unlocks the data dir. It is idempotent and waits, at most diskGrace for a disk
// that hangs: the data dir stays locked then until the write has returned, or the process has ended.
func (w *Watcher) Close() error {
	w.once.Do(func() {
		w.cancel(ErrClosed)
		ended := func() error {
			w.loops.Wait()
			if w.home == nil {
				return nil
			}
			return w.home.Close()
		}
		w.closed = diskfile.Await(w.cfg.DataDir, diskGrace, ended)
		if errors.Is(w.closed, diskfile.ErrHangs) {
			w.closed = fmt.Errorf("close the copy of the state: %w", w.closed)
		}
	})
	return w.closed
}

func (w *Watcher) closing() <-chan struct{} { return w.ctx.Done() }

func (w *Watcher) refusal() error {
	if w.ctx.Err() != nil {
		return errClosed()
	}
	return nil
}

func (w *Watcher) findNode(uid string) state.Node {
	n := nodeByUID(w.State(), uid)
	if w.cfg.Resolve != nil {
		if address, ok := w.cfg.Resolve(uid); ok {
			n.Address = address
		}
	}
	return n
}

func (w *Watcher) leaderHint() string {
	var control []string
	for _, n := range w.State().Nodes {
		if n.Has(state.RoleControl) {
			control = append(control, n.UID)
		}
	}
	return controlNodesHint(w.State(), control)
}

// followControlNodes follows one control node after the other until Close.
func (w *Watcher) followControlNodes() {
	pause := watchBackoffMin
	for w.ctx.Err() == nil {
		heard, err := w.followOne()
		w.setLeader("")
		if heard {
			pause = watchBackoffMin
		}
		w.log.Debug("follows no control node", "component", "cluster", "err", err, "again_in", pause)
		select {
		case <-time.After(pause):
		case <-w.ctx.Done():
		}
		pause = min(2*pause, watchBackoffMax)
	}
}

// errSilent ends an attempt without a message for watchSilence.
var errSilent = errors.New("the control node is silent")

// followOne follows one control node while it sends messages. heard: it sent one.
func (w *Watcher) followOne() (heard bool, err error) {
	ctx, cancel := context.WithCancelCause(w.ctx)
	defer cancel(nil)
	silence := time.AfterFunc(watchSilence, func() { cancel(errSilent) })
	defer silence.Stop()
	var spoke atomic.Bool
	err = w.cfg.Watch(ctx, w.State().Index, func(u *Update) {
		if ctx.Err() != nil {
			return // too late: another attempt may be running
		}
		silence.Reset(watchSilence)
		if err := w.apply(u); err != nil {
			cancel(err)
			return
		}
		spoke.Store(true)
	})
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return spoke.Load(), err
}

// apply takes one message of the control node. Without a state, this copy is the newest that the node has.
func (w *Watcher) apply(u *Update) error {
	if len(u.State) > 0 {
		st, err := decodeCopy(u.State)
		if err != nil {
			return err
		}
		if st.newer != "" {
			w.reportNewer(st.newer)
		}
		if err := w.publish(st); err != nil {
			return err
		}
	}
	w.setLeader(u.Leader)
	if u.Leader != "" {
		w.setFresh()
	}
	return nil
}

// publish stores a copy for readers. It ignores an older one: this control node lags behind the previous one.
func (w *Watcher) publish(next *stateCopy) error {
	st := next.state
	if st.Cluster != w.ident.Cluster {
		return problem.New(problem.Conflict, "the control node is of cluster %q, not %q", st.Cluster,
			w.ident.Cluster).
			WithHint("join the cluster with an empty --data-dir")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if st.Index <= w.State().Index {
		return nil
	}
	w.published.Store(next)
	close(w.changed)
	w.changed = make(chan struct{})
	return nil
}

// reportNewer counts a state with a field of a later version, and logs the first one with that field.
func (w *Watcher) reportNewer(what string) {
	w.cfg.Unknown("state")
	w.mu.Lock()
	noted := w.newer == what
	w.newer = what
	w.mu.Unlock()
	if !noted {
		w.log.Info("the control nodes run a newer version of dpserve: this node passes over what it does "+
			"not know of the state", "component", "cluster", "err", what)
	}
}

func (w *Watcher) setLeader(uid string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.leader != uid {
		w.leader = uid
		w.signalLeader()
	}
}

func (w *Watcher) setFresh() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.fresh {
		w.fresh = true
		w.signalLeader()
	}
}

// signalLeader wakes those that wait for leader or fresh. The caller holds mu.
func (w *Watcher) signalLeader() {
	close(w.leaderChanged)
	w.leaderChanged = make(chan struct{})
}
