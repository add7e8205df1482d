package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// maxSnapshot bounds what Restore reads: far above any state (a few KiB per app), far below the memory of a node. Bytes.
const maxSnapshot = 256 << 20

// applied is the answer to one command: state.Apply's result and typed error, unchanged.
type applied struct {
	result state.Result
	err    error
}

// fsm applies committed commands. Raft calls ApplyBatch, Snapshot and Restore from one goroutine; readers load the published copy.
type fsm struct {
	work      *state.State // raft's goroutine only
	stopped   error        // why nothing is applied any more in this run; raft's goroutine only
	endRun    func(error)  // ends the run of raft that applies
	published atomic.Pointer[state.State]

	mu      sync.Mutex
	changed chan struct{} // closed and replaced after each publication
	applied uint64        // index of the last command, whether it changed something or not
	moved   chan struct{} // closed when applied grows; nil while nobody waits
}

var _ raft.BatchingFSM = (*fsm)(nil)

func newFSM() *fsm {
	f := &fsm{work: state.New(), changed: make(chan struct{})}
	f.published.Store(f.work.Clone())
	return f
}

// begin empties the working copy for a run of raft, which brings the past back from its snapshot and its log. endRun ends that run
// where the log has an entry that cannot be read.
func (f *fsm) begin(endRun func(error)) { f.work, f.stopped, f.endRun = state.New(), nil, endRun }

// stop ends the run: this copy would be another one than those of the nodes that can read what this version cannot. From here on the
// fsm applies nothing and gives no snapshot.
func (f *fsm) stop(what string, err error) error {
	f.stopped = unreadable(what, err)
	f.endRun(f.stopped)
	return f.stopped
}

// State is the published copy.
func (f *fsm) State() *state.State { return f.published.Load() }

// Changed is closed at the next publication.
func (f *fsm) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

// publish shows the state to readers, then wakes those who wait. It runs before raft answers the proposer, so a proposer
// always reads its own write. While a later run repeats the past, readers keep what they have seen.
func (f *fsm) publish() {
	if f.work.Index < f.State().Index {
		return
	}
	f.published.Store(f.work.Clone())
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.changed)
	f.changed = make(chan struct{})
}

// Apply applies one command.
func (f *fsm) Apply(l *raft.Log) any { return f.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch applies commands in order and publishes once. A batch of refusals changes nothing and wakes nobody: an actor
// that proposes on every change must not be woken by its own refusal.
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
		f.date()
	}
	f.advance()
	return out
}

// date brings the index of the published copy up to commands that changed nothing, and wakes nobody: whoever compares indexes of two
// copies must not take one for old that lacks refusals only.
func (f *fsm) date() {
	if now := f.State(); f.work.Index > now.Index {
		dated := *now
		dated.Index = f.work.Index
		f.published.Store(&dated)
	}
}

// advance tells those who wait how far the commands are applied.
func (f *fsm) advance() {
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
		moved, ok := f.reached(index)
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

func (f *fsm) reached(index uint64) (moved <-chan struct{}, ok bool) {
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

func (f *fsm) applyOne(l *raft.Log) (a applied) {
	if f.stopped != nil {
		return applied{err: f.stopped}
	}
	cmd, err := state.DecodeCommand(l.Data)
	if err != nil {
		return applied{err: f.stop(fmt.Sprintf("entry %d of the log", l.Index), err)}
	}
	a.result, a.err = f.work.Apply(l.Index, cmd)
	a.result.Index = l.Index
	return a
}

// Snapshot hands out a copy of what this run has applied. The published copy may be newer than that: a run that repeats the past
// does not take back what readers have seen, and raft files the snapshot under the index that this run has reached. Behind an entry
// that was not applied there is none: raft would keep it under the index of that entry.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	if f.stopped != nil {
		return nil, f.stopped
	}
	return snapshot{f.work.Clone()}, nil
}

// Restore replaces the state by a snapshot's.
func (f *fsm) Restore(r io.ReadCloser) error {
	data, err := io.ReadAll(io.LimitReader(r, maxSnapshot+1))
	if err = firstError(err, r.Close()); err != nil {
		return fmt.Errorf("read snapshot: %w", err)
	}
	if len(data) > maxSnapshot {
		return problem.New(problem.TooLarge, "snapshot is larger than %d bytes", maxSnapshot)
	}
	s, err := state.Decode(data)
	if errors.Is(err, state.ErrNewer) {
		return f.stop("a snapshot", err)
	}
	if err != nil {
		return fmt.Errorf("decode snapshot: %w", err)
	}
	f.work = s
	f.publish()
	f.advance()
	return nil
}

// snapshot is an immutable state on its way to disk.
type snapshot struct{ state *state.State }

// Persist writes the state, and cancels the snapshot if that fails.
func (s snapshot) Persist(sink raft.SnapshotSink) error {
	data, err := s.state.Encode()
	if err == nil {
		_, err = sink.Write(data)
	}
	if err != nil {
		return firstError(fmt.Errorf("write snapshot: %w", err), sink.Cancel())
	}
	return sink.Close()
}

// Release has nothing to release.
func (snapshot) Release() {}
