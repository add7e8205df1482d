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
	"github.com/dpserve/dpserve/routing/kvindex"
)

var byScore = app.Routing{Policy: "scoring", Preset: "documented", Identity: app.IdentityText}

// TestKV3IndexEqualsReplicasAtRest: whichever side restarts or lists again, the ingress holds exactly the
// replicas' block sets and counts the same load.
func TestKV3IndexEqualsReplicasAtRest(t *testing.T) {
	all := prompts(40, 60)
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newKVRig(t, 3, seed, byScore)
				for step := range 2000 {
					g.step(t, all)
					if step%10 == 0 {
						g.pass(time.Duration(g.feed.rand.IntN(200)) * time.Millisecond)
					}
				}
				g.rest(t)
				g.requireEqual(t, all)
			})
		})
	}
}

// step lets one replica do something, or restarts something.
func (g *kvRig) step(t *testing.T, all [][]uint64) {
	f := g.feed
	if f.rand.IntN(400) == 0 {
		g.in.listRanks()
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
	g.feed.mu.Lock()
	defer g.feed.mu.Unlock()
	for _, r := range g.feed.replicas {
		if r.now += d; r.alive {
			r.index.Advance(r.now)
		}
	}
}

// rest starts every replica that is down.
func (g *kvRig) rest(t *testing.T) {
	g.feed.mu.Lock()
	for i, r := range g.feed.replicas {
		if !r.alive {
			r.begin(t, r.epoch+1, uint64(i+1))
		}
	}
	g.feed.mu.Unlock()
	g.pass(100 * time.Millisecond)
}

// TestBlockSetIsHiddenUntilItsEnd: a block set is hidden until its snapshot is complete, and a restarted rank
// has no hits at once.
func TestBlockSetIsHiddenUntilItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newKVRig(t, 1, 1, byScore)
		r, chain := g.feed.replicas[0], prompts(1, 10)[0]
		hits := func() int {
			synctest.Wait()
			return len(found(g.router.inputs().cache.index.Match(chain, nil)))
		}
		r.emit(&msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{Tier: kvindex.GPU, BlockSize: 16}})
		r.emit(&msg.Record{Kind: msg.RecKV, KV: msg.KV{
			Tier: kvindex.GPU, Delta: kvindex.Delta{Change: kvindex.Stored, Hashes: chain},
		}})
		assert.Zero(t, hits())
		r.emit(&msg.Record{Kind: msg.RecKVEnd, KV: msg.KV{Tier: kvindex.GPU}})
		assert.Equal(t, 1, hits())
		r.begin(t, 2, 99)
		assert.Zero(t, hits())
		old := msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{Tier: kvindex.GPU}}
		r.stamp(&old)
		old.Epoch, old.Incarnation, old.Seq = 1, 1, 50
		r.feed.sinks[0].Deliver(&old)
		assert.Zero(t, hits(), "a ghost")
	})
}

// TestIndexFollowsThePolicy: the index is made for policies that read it, and kept while they do.
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
		g.feed.replicas[0].blockSet(t, kvindex.GPU).Apply(
			kvindex.Delta{Change: kvindex.Stored, Hashes: []uint64{1, 2, 3}})
		made := change(2, 2, "scoring")
		require.NotNil(t, made)
		assert.Equal(t, 3, g.in.Index("demo").Blocks, "by a new list")
		assert.Equal(t, app.IdentityText, g.in.Identity("demo"))
		assert.Same(t, made, change(3, 2, "lpwl"))
		assert.NotSame(t, made, change(4, 20, "lpwl"), "too small for so many ranks")
		assert.Equal(t, 3, g.in.Index("demo").Blocks)
		assert.Nil(t, change(5, 2, "random"))
		assert.Nil(t, g.in.Index("demo"))
	})
}
