package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// maxSnapshot bounds how many bytes Restore reads: far more than any state has, far less than the memory of a
// node.
const maxSnapshot = 256 << 20

// applyResult is the answer to one command: state.Apply's result and typed error, unchanged.
type applyResult struct {
	result state.Result
	err    error
}

// fsm applies committed commands. Raft calls ApplyBatch, Snapshot and Restore from one goroutine. Readers
// load the published copy.
type fsm struct {
	work      *state.State       // only raft's goroutine uses it
	stopped   error              // why this run applies nothing any more; only raft's goroutine uses it
	endRun    func(error)        // ends the present run of raft
	restored  func(*state.State) // told of every snapshot that is restored
	published atomic.Pointer[state.State]

	mu      sync.Mutex
	changed chan struct{} // closed and replaced after each publication
	applied uint64        // index of the last command, also of one that changed nothing
	moved   chan struct{} // closed when applied grows; nil if no caller waits
}

var _ raft.BatchingFSM = (*fsm)(nil)

func newFSM() *fsm {
	f := &fsm{work: state.New(), changed: make(chan struct{}), restored: func(*state.State) {}}
	f.published.Store(f.work.Clone())
	return f
}

// startRun empties the working copy for a run of raft, which restores the state from its snapshot and its
// log. endRun ends that run if the log has an entry that this version cannot read.
func (f *fsm) startRun(endRun func(error)) { f.work, f.stopped, f.endRun = state.New(), nil, endRun }

// stopUnreadable ends the run, because this copy would differ from the copies of nodes that can read the
// entry. From now on the fsm applies nothing and makes no snapshot.
func (f *fsm) stopUnreadable(what string, err error) error {
	f.stopped = unreadableError(what, err)
	f.endRun(f.stopped)
	return f.stopped
}

func (f *fsm) State() *state.State { return f.published.Load() }

func (f *fsm) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

// publish stores a copy for readers, then wakes those that wait. It runs before raft answers the proposer, so
// a proposer always reads its own write. While a later run replays old entries, readers keep their newer
// copy.
func (f *fsm) publish() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.work.Index < f.State().Index {
		return
	}
	f.published.Store(f.work.Clone())
	close(f.changed)
	f.changed = make(chan struct{})
}

// recall publishes a state that an earlier process has applied, and reports whether readers have one now.
func (f *fsm) recall(s *state.State) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.Index > f.State().Index {
		f.published.Store(s)
		close(f.changed)
		f.changed = make(chan struct{})
	}
	return f.State().Cluster != ""
}

func (f *fsm) Apply(l *raft.Log) any { return f.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch applies commands in order and publishes once. A batch of refusals changes nothing and wakes no
// reader: an actor that proposes on every change must not be woken by its own refusal.
func (f *fsm) ApplyBatch(logs []*raft.Log) []any {
	out := make([]any, len(logs))
	changed := false
	for i, l := range logs {
		if l.Type != raft.LogCommand {
			continue
		}
		a := f.applyOne(l)
		changed = changed || (a.err == nil && !a.result.Unchanged)
		out[i] = a
	}
	if changed {
		f.publish()
	} else {
		f.updateIndex()
	}
	f.signalApplied()
	return out
}

// updateIndex raises the index of the published copy after commands that changed nothing, and wakes no
// reader. Readers that compare the indexes of two copies must not take one for older that lacks only refused
// commands.
func (f *fsm) updateIndex() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.work.Index > f.State().Index {
		f.published.Store(f.work.Clone())
	}
}

// signalApplied records how far commands are applied and wakes those that wait for it.
func (f *fsm) signalApplied() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.applied = max(f.applied, f.work.Index)
	if f.moved != nil {
		close(f.moved)
		f.moved = nil
	}
}

// await waits until the command at an index is applied.
func (f *fsm) await(ctx context.Context, index uint64) error {
	for {
		moved, ok := f.checkApplied(index)
		if ok {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("wait for entry %d: %w", index, context.Cause(ctx))
		}
	}
}

func (f *fsm) checkApplied(index uint64) (moved <-chan struct{}, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.applied >= index {
		return nil, true
	}
	if f.moved == nil {
		f.moved = make(chan struct{})
	}
	return f.moved, false
}

// awaitCluster waits until the state has the cluster's name.
func (f *fsm) awaitCluster(ctx context.Context) error {
	for {
		changed := f.Changed()
		if f.State().Cluster != "" {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for the state: %w", context.Cause(ctx))
		}
	}
}

func (f *fsm) applyOne(l *raft.Log) (a applyResult) {
	if f.stopped != nil {
		return applyResult{err: f.stopped}
	}
	cmd, err := state.DecodeCommand(l.Data)
	if err != nil {
		return applyResult{err: f.stopUnreadable(fmt.Sprintf("entry %d of the log", l.Index), err)}
	}
	a.result, a.err = f.work.Apply(l.Index, cmd)
	a.result.Index = l.Index
	return a
}

// Snapshot returns a copy of what this run has applied. The published copy may be newer, because a run that
// replays old entries does not take it back, and raft records the snapshot under the index that this run has
// reached. After an entry that was not applied there is no snapshot: raft would record it under the index of
// that entry.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	if f.stopped != nil {
		return nil, f.stopped
	}
	return snapshot{f.work.Clone()}, nil
}

// Restore replaces the state by that of a snapshot.
func (f *fsm) Restore(r io.ReadCloser) error {
	data, err := io.ReadAll(io.LimitReader(r, maxSnapshot+1))
	if err = cmp.Or(err, r.Close()); err != nil {
		return fmt.Errorf("read snapshot: %w", err)
	}
	if len(data) > maxSnapshot {
		return problem.New(problem.TooLarge, "snapshot is larger than %d bytes", maxSnapshot)
	}
	s, err := state.Decode(data)
	if errors.Is(err, state.ErrNewer) {
		return f.stopUnreadable("a snapshot", err)
	}
	if err != nil {
		return fmt.Errorf("decode snapshot: %w", err)
	}
	f.restored(s)
	f.work = s
	f.publish()
	f.signalApplied()
	return nil
}

// snapshot is an immutable state that raft writes to disk.
type snapshot struct{ state *state.State }

// Persist writes the state. If that fails, it cancels the snapshot.
func (s snapshot) Persist(sink raft.SnapshotSink) error {
	data, err := s.state.Encode()
	if err == nil {
		_, err = sink.Write(data)
	}
	if err != nil {
		return cmp.Or(fmt.Errorf("write snapshot: %w", err), sink.Cancel())
	}
	return sink.Close()
}

func (snapshot) Release() {}
