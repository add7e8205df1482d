package ingress

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

var byScore = app.Routing{Policy: "scoring", Preset: "documented", Identity: app.IdentityText}

// TestKV3IndexEqualsReplicasAtRest: whatever the stream loses, doubles and reorders, and whichever side
// restarts or subscribes again, at rest the ingress holds exactly the replicas' columns and counts the same
// load.
func TestKV3IndexEqualsReplicasAtRest(t *testing.T) {
	all := prompts(40, 60)
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newKVRig(t, 3, seed, byScore)
				g.feed.faults = []int{10, 50}[seed%2] // 1 % of each kind, or 5 %
				for step := range 2000 {
					g.step(t, all)
					if step%10 == 0 {
						g.pass(time.Duration(g.feed.rand.IntN(200)) * time.Millisecond)
					}
				}
				g.rest(t)
				g.requireEqual(t, all)
				assert.NotZero(t, g.in.Index("demo").Resyncs)
			})
		})
	}
}

// step lets one replica do something, or restarts something.
func (g *kvRig) step(t *testing.T, all [][]uint64) {
	f := g.feed
	if f.rand.IntN(400) == 0 {
		g.in.resubscribe()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.replicas[f.rand.IntN(len(f.replicas))]
	switch n := f.rand.IntN(500); {
	case !r.alive && n < 50:
		r.begin(t, r.epoch+1, f.rand.Uint64())
	case !r.alive:
	case n == 0:
		r.emit(&msg.Record{Kind: msg.RecGone})
		r.alive = false
	case n == 1:
		r.begin(t, r.epoch+1, f.rand.Uint64())
	case n == 2:
		r.begin(t, r.epoch, f.rand.Uint64())
	default:
		r.act(t, all)
	}
}

// pass lets time go by.
func (g *kvRig) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
	g.feed.answer()
	synctest.Wait()
	g.feed.mu.Lock()
	defer g.feed.mu.Unlock()
	for _, r := range g.feed.replicas {
		if r.now += d; r.alive {
			r.index.Advance(r.now)
		}
	}
}

// rest ends the faults and waits until every gap is repaired.
func (g *kvRig) rest(t *testing.T) {
	g.feed.mu.Lock()
	g.feed.faults = 0
	for i, r := range g.feed.replicas {
		if !r.alive {
			r.begin(t, r.epoch+1, uint64(i+1))
		}
		r.reveal(t, 77)
	}
	g.feed.mu.Unlock()
	for range 40 {
		g.pass(100 * time.Millisecond)
	}
}

// TestColumnIsHiddenUntilItsEnd: a column is hidden until its snapshot is complete, and a restarted rank has
// no hits at once.
func TestColumnIsHiddenUntilItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newKVRig(t, 1, 1, byScore)
		r, chain := g.feed.replicas[0], prompts(1, 10)[0]
		hits := func() int {
			synctest.Wait()
			return len(found(g.router.inputs().cache.index.Match(chain, nil)))
		}
		sum := uint64(0)
		for _, h := range chain {
			sum += h
		}
		r.part(&msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{Tier: kvindex.GPU, BlockSize: 16}})
		r.part(&msg.Record{Kind: msg.RecKV, KV: msg.KV{
			Tier: kvindex.GPU, Delta: kvindex.Delta{Change: kvindex.Stored, Hashes: chain},
		}})
		assert.Zero(t, hits())
		r.part(&msg.Record{Kind: msg.RecKVEnd, KV: msg.KV{Tier: kvindex.GPU, Len: len(chain), Sum: sum}})
		assert.Equal(t, 1, hits())
		r.begin(t, 2, 99)
		assert.Zero(t, hits())
		r.stamp(&msg.Record{})
		old := msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{Tier: kvindex.GPU}}
		r.stamp(&old)
		old.Epoch, old.Incarnation, old.Seq = 1, 1, 50
		r.feed.sink.Deliver(&old)
		assert.Zero(t, hits(), "a ghost")
	})
}

// TestLostEndOfSnapshotIsAskedFor: the ingress asks again for a snapshot whose end is lost.
func TestLostEndOfSnapshotIsAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newKVRig(t, 1, 1, byScore)
		r, chain := g.feed.replicas[0], prompts(1, 10)[0]
		r.column(t, kvindex.GPU).Apply(kvindex.Delta{Change: kvindex.Stored, Hashes: chain})
		r.part(&msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{Tier: kvindex.GPU, BlockSize: 16}})
		for range 10 {
			g.pass(500 * time.Millisecond)
		}
		g.requireEqual(t, [][]uint64{chain})
		assert.Equal(t, uint64(1), g.in.Index("demo").Resyncs)
	})
}

// TestOverflowIsAGap: records without room are dropped as a whole, and a snapshot repairs the columns once
// there is room.
func TestOverflowIsAGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newKVRig(t, 2, 1, byScore)
		hold, held := make(chan struct{}), make(chan struct{})
		go g.router.inputs().cache.inspect(t.Context(), func([]*column) { close(held); <-hold })
		<-held
		long := make([]uint64, batchHashes)
		for i := range long {
			long[i] = mix(uint64(i + 1))
		}
		for n := range maxBatches + 100 {
			r := g.feed.replicas[n%2]
			r.feed.mu.Lock()
			if c := r.column(t, kvindex.GPU); c.Len() == 0 {
				c.Apply(kvindex.Delta{Change: kvindex.Stored, Hashes: long})
			} else { // it takes room and changes nothing
				r.emit(&msg.Record{
					Kind: msg.RecKV,
					KV:   msg.KV{Tier: kvindex.GPU, Delta: kvindex.Delta{Hashes: long}},
				})
			}
			r.feed.mu.Unlock()
		}
		q := &g.router.inputs().cache.queue
		q.mu.Lock()
		assert.LessOrEqual(t, q.size, maxBatches+2)
		q.mu.Unlock()
		close(hold)
		for range 20 {
			g.pass(200 * time.Millisecond)
		}
		g.requireEqual(t, nil)
		assert.Equal(t, uint64(2), g.in.Index("demo").Resyncs, "one per rank")
	})
}

// TestKV14FreshIngressEqualsSnapshot: an ingress that starts while the replicas work learns everything that
// they hold.
func TestKV14FreshIngressEqualsSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := prompts(40, 60)
		g := newKVRig(t, 4, 3, byScore)
		for range 500 {
			g.step(t, all)
		}
		g.rest(t)
		second, err := New(Config{
			Node: "n2", Store: g.in.store, Feed: g.feed, Metrics: g.in.metrics,
			Log: g.in.log, Seed: 8,
		})
		require.NoError(t, err)
		first := g.in
		g.in, g.router = second, second.findAppRouter("demo")
		for range 200 {
			g.step(t, all)
		}
		g.rest(t)
		g.requireEqual(t, all)
		require.NoError(t, first.Close(t.Context()))
		require.NoError(t, second.Close(t.Context()))
	})
}

// TestIndexFollowsThePolicy: the index is made for policies that read it, kept while they do, and its
// goroutine ends with it.
func TestIndexFollowsThePolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newKVRig(t, 2, 1, app.Routing{Policy: "round-robin", Preset: "documented"})
		assert.Nil(t, g.in.Index("demo"))
		assert.Empty(t, g.in.Identity("demo"))
		s, _ := g.in.store.(*store)
		change := func(revision uint64, ranks int, policy string) *cache {
			a := demoApp()
			a.DataParallel.DPSize, a.NumReplicas, a.Routing = ranks, ranks, byScore
			a.Routing.Policy = policy
			deploy(t, s, a, revision)
			synctest.Wait()
			return g.router.inputs().cache
		}
		g.feed.replicas[0].column(t, kvindex.GPU).Apply(
			kvindex.Delta{Change: kvindex.Stored, Hashes: []uint64{1, 2, 3}})
		made := change(2, 2, "scoring")
		require.NotNil(t, made)
		assert.Equal(t, 3, g.in.Index("demo").Blocks, "by the snapshots of a new subscription")
		assert.Equal(t, app.IdentityText, g.in.Identity("demo"))
		assert.Same(t, made, change(3, 2, "lpwl"))
		assert.NotSame(t, made, change(4, 20, "lpwl"), "too small for so many ranks")
		assert.Equal(t, 3, g.in.Index("demo").Blocks)
		assert.Nil(t, change(5, 2, "random"))
		assert.Nil(t, g.in.Index("demo"))
	})
}

// TestLoadGoesOnOverAGap: the Router's load is updated while a rank's cache is masked.
func TestLoadGoesOnOverAGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newKVRig(t, 1, 1, byScore)
		r := g.feed.replicas[0]
		r.seq += 5
		r.emit(&msg.Record{Kind: msg.RecAdmitted, ReqID: 1, Ingress: "other", Tokens: 10})
		view := g.router.router.Load().Snapshot()
		i, ok := view.Find(routing.ID(0, 0))
		require.True(t, ok)
		assert.Equal(t, 1, view.Ranks[i].Load.O())
	})
}

// TestKVQueueForgetsTakenBatches: a queue that is never empty grows with what waits, not with what passed.
func TestKVQueueForgetsTakenBatches(t *testing.T) {
	q := kvQueue{wake: make(chan struct{}, 1)}
	fill := func() {
		for range batchOps {
			require.True(t, q.push(kvOp{kind: opDelta}, nil))
		}
	}
	fill()
	for range 1000 {
		fill()
		b := q.take()
		require.NotNil(t, b)
		q.release(b)
	}
	assert.LessOrEqual(t, cap(q.list), 8)
}
