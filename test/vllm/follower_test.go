package vllm

import (
	"context"
	"encoding/binary"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// follower is the shortest way from an engine's events to a prediction: one subscriber, one index, one
// block set.
type follower struct {
	hasher kvindex.Hasher
	sub    *kvevents.Subscriber

	mu          sync.Mutex
	ix          *kvindex.Index
	blockSet    *kvindex.BlockSet
	incarnation uint64
	salts       int // events whose blocks no text prompt can match
}

var _ kvevents.Sink = (*follower)(nil)

// follow starts to follow a rank, from the first event that the engine's ring still has.
func follow(t *testing.T, r *rank) *follower {
	t.Helper()
	ix, err := kvindex.New(kvindex.Config{Bytes: 64 << 20})
	require.NoError(t, err)
	f := &follower{hasher: kvindex.NewHasher([]byte("any secret does")), ix: ix}
	f.sub, err = kvevents.New(kvevents.Config{
		Endpoints: kvevents.Endpoints{Bind: r.events, Replay: r.replay},
		Sink:      f,
	})
	require.NoError(t, err)
	require.NoError(t, f.sub.Start(t.Context()))
	t.Cleanup(func() { assert.NoError(t, f.sub.Close()) })
	f.wait(t, "follows "+r.addr, func(s kvevents.Stats) bool { return s.Synced && !s.Replaying })
	return f
}

// root is the hash in front of a prompt's first block.
func (f *follower) root(salt string) uint64 {
	return f.hasher.Root(kvindex.Salt{
		Unit: kvindex.Tokens, BlockSize: blockSize, Model: model,
		CacheSalt: salt,
	})
}

// Stored implements kvevents.Sink.
func (f *follower) Stored(ev *kvevents.Stored) {
	f.mu.Lock()
	defer f.mu.Unlock()
	salt, ok := ev.Salt()
	if !ok {
		f.salts++
		return
	}
	f.blockSet.Stored(f.hasher, &kvindex.StoredEvent{
		Root: f.root(salt), HasParent: !ev.Parent.IsZero(), Parent: handle(ev.Group, ev.Parent),
		Blocks: handles(ev.Group, ev.Hashes),
		Tokens: ev.Tokens, BlockSize: ev.BlockSize, Group: ev.Group, Kind: ev.Kind,
	})
}

// Removed implements kvevents.Sink.
func (f *follower) Removed(ev *kvevents.Removed) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.blockSet.Removed(ev.Group, handles(ev.Group, ev.Hashes))
}

// Cleared implements kvevents.Sink.
func (f *follower) Cleared() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.blockSet.Clear()
}

// Reset implements kvevents.Sink.
func (f *follower) Reset(bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.incarnation++
	blockSet, err := f.ix.Open(kvindex.Owner{Epoch: 1, Incarnation: f.incarnation},
		kvindex.Options{Feed: kvindex.FromEvents, BlockSize: blockSize, Shown: true})
	if err == nil { // there are more block sets than restarts
		f.blockSet = blockSet
	}
	f.ix.Sweep(1 << 20)
}

func handle(group int, h kvevents.Hash) kvindex.Handle {
	switch h.Kind {
	case kvevents.HashUint:
		return kvindex.UintHandle(group, binary.BigEndian.Uint64(h.Data[:]))
	case kvevents.HashInt:
		return kvindex.IntHandle(group, int64(binary.BigEndian.Uint64(h.Data[:])))
	case kvevents.HashBytes:
		return kvindex.BytesHandle(group, h.Data[:h.Len])
	case kvevents.HashNone:
	}
	return 0
}

func handles(group int, hashes []kvevents.Hash) []kvindex.Handle {
	out := make([]kvindex.Handle, len(hashes))
	for i, h := range hashes {
		out[i] = handle(group, h)
	}
	return out
}

// predict is how many tokens of a prompt the engine will report as cached: whole blocks, and one token at
// least is computed.
func (f *follower) predict(ids []uint32, salt string) int {
	hashes := f.hasher.Tokens(nil, f.root(salt), ids, blockSize, nil)
	held := 0
	for _, h := range f.ix.Match(hashes, nil) {
		held = max(held, int(h.Blocks))
	}
	return blockSize * min(held, (len(ids)-1)/blockSize)
}

// content names what the follower believes the engine holds: blocks, and the sum of their hashes.
func (f *follower) content() (blocks int, sum uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.blockSet.Snapshot(f.blockSet.Len(), func(d kvindex.Delta) {
		for _, h := range d.Hashes {
			sum += h
		}
	})
	return f.blockSet.Len(), sum
}

// faults are the index's counters of things that must not happen with a sound engine.
func (f *follower) faults() kvindex.Counters {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.ix.Stats().Counters
	c.Expired, c.Evicted = 0, 0
	return c
}

// wait waits until the subscription's counters are as wanted.
func (f *follower) wait(t *testing.T, what string, ok func(kvevents.Stats) bool) {
	t.Helper()
	if !eventually(t.Context(), func() bool { return ok(f.sub.Stats()) }) {
		t.Fatalf("waiting until the subscription %s: %+v", what, f.sub.Stats())
	}
}

// settle waits until the events of a request that has been answered are in: the block set stands still for a
// while. The engine's answer and its events take different ways.
func (f *follower) settle(ctx context.Context) {
	const still = 5 // looks
	for same, last := 0, uint64(0); same < still && ctx.Err() == nil; {
		n := f.sub.Stats().Batches
		if same++; n != last {
			same, last = 0, n
		}
		sleep(ctx, look)
	}
}
