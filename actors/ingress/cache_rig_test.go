package ingress

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// kvFeed is a msg.Feed over kvReplicas.
type kvFeed struct {
	mu       sync.Mutex
	sinks    []msg.Sink
	replicas []*kvReplica
	rand     *rand.Rand
}

func (f *kvFeed) Subscribe(s msg.Sink) func() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sinks = append(f.sinks, s)
	f.listTo(s)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.sinks = slices.DeleteFunc(f.sinks, func(o msg.Sink) bool { return o == s })
	}
}

func (f *kvFeed) List(s msg.Sink) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listTo(s)
}

func (f *kvFeed) listTo(s msg.Sink) {
	for _, r := range f.replicas {
		if r.alive {
			r.snapshot(s)
		}
	}
}

// kvReplica is a fake DPServer with the contract of a rank's stream: it has its own account and KV block
// sets.
type kvReplica struct {
	feed  *kvFeed
	id    routing.RankID
	alive bool

	epoch, incarnation, seq, next uint64
	open                          map[uint64]int // request → tokens
	index                         *kvindex.Index
	sets                          map[kvindex.Tier]*kvindex.BlockSet
	now                           time.Duration
}

// begin starts an incarnation.
func (r *kvReplica) begin(tb testing.TB, epoch, incarnation uint64) {
	tb.Helper()
	r.alive, r.epoch, r.incarnation, r.seq = true, epoch, incarnation, 0
	r.open = map[uint64]int{}
	r.sets = map[kvindex.Tier]*kvindex.BlockSet{}
	ix, err := kvindex.New(kvindex.Config{
		Bytes: 64 << 20,
		OnChange: func(c *kvindex.BlockSet, d kvindex.Delta) {
			r.emit(&msg.Record{Kind: msg.RecKV, KV: msg.KV{Tier: c.Owner().Tier, Delta: d}})
		},
	})
	require.NoError(tb, err)
	r.index = ix
	for _, s := range r.feed.sinks {
		r.snapshot(s)
	}
}

func (r *kvReplica) emit(rec *msg.Record) {
	r.seq++
	r.stamp(rec)
	for _, s := range r.feed.sinks {
		s.Deliver(rec)
	}
}

func (r *kvReplica) stamp(rec *msg.Record) {
	rec.App, rec.Unit, rec.Rank, rec.Epoch, rec.Incarnation, rec.Seq = "demo",
		fmt.Sprintf("demo/0/%d", r.id.Rank()), r.id, r.epoch, r.incarnation, r.seq
}

// snapshot sends the whole account and every block set, all under one number.
func (r *kvReplica) snapshot(to msg.Sink) {
	give := func(rec *msg.Record) {
		r.stamp(rec)
		to.Deliver(rec)
	}
	s := &msg.Snapshot{
		Accepting: true, MaxOngoing: 1000, BlockSize: 16, Capacity: 1 << 20, Node: "n1",
		Target: msg.Target{URL: "http://127.0.0.1:1"},
	}
	for id, tokens := range r.open {
		s.Open = append(s.Open, msg.OpenRequest{ReqID: id, Ingress: "other", Tokens: tokens})
	}
	give(&msg.Record{Kind: msg.RecSnapshot, Snapshot: s})
	for tier := range kvindex.Sent + 1 {
		c := r.sets[tier]
		if c == nil {
			continue
		}
		give(&msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{Tier: tier, BlockSize: c.BlockSize()}})
		c.Snapshot(64, func(d kvindex.Delta) {
			give(&msg.Record{Kind: msg.RecKV, KV: msg.KV{Tier: tier, Delta: d}})
		})
		give(&msg.Record{Kind: msg.RecKVEnd, KV: msg.KV{Tier: tier}})
	}
}

// block set is the replica's block set of a tier, begun in the stream with its first use.
func (r *kvReplica) blockSet(tb testing.TB, tier kvindex.Tier) *kvindex.BlockSet {
	tb.Helper()
	if c := r.sets[tier]; c != nil {
		return c
	}
	opt := kvindex.Options{Feed: kvindex.FromDeltas, BlockSize: 16}
	if tier == kvindex.Sent {
		opt = kvindex.Options{Feed: kvindex.FromRecords, BlockSize: 64, TTL: 20 * time.Second, Capacity: 400}
	}
	c, err := r.index.Open(kvindex.Owner{
		Rank: uint32(r.id), Tier: tier, Epoch: r.epoch,
		Incarnation: r.incarnation,
	}, opt)
	require.NoError(tb, err)
	r.sets[tier] = c
	r.emit(&msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{Tier: tier, BlockSize: c.BlockSize()}})
	r.emit(&msg.Record{Kind: msg.RecKVEnd, KV: msg.KV{Tier: tier}})
	return c
}

// prompts are chains that share beginnings: what is stored, removed and asked for.
func prompts(n, length int) [][]uint64 {
	r := rand.New(rand.NewPCG(5, 6))
	h := kvindex.NewHasher([]byte("prompts"))
	out := make([][]uint64, n)
	text := make([]byte, 64*length)
	for i := range out {
		for k := 64 * (i % 5) * length / 5; k < len(text); k++ {
			text[k] = byte(r.Uint32N(256))
		}
		out[i] = h.Bytes(nil, h.Root(kvindex.Salt{Unit: kvindex.Text, BlockSize: 64}), text, 64)
	}
	return out
}

// act does one random operation of the replica.
func (r *kvReplica) act(tb testing.TB, all [][]uint64) {
	tb.Helper()
	rnd := r.feed.rand
	chain := all[rnd.IntN(len(all))]
	chain = chain[:1+rnd.IntN(len(chain))]
	tier := kvindex.Tier(rnd.IntN(3))
	switch rnd.IntN(10) {
	case 0, 1, 2:
		r.blockSet(tb, kvindex.Sent).Record(chain, r.now)
	case 3, 4:
		r.blockSet(tb, tier).Apply(kvindex.Delta{Change: kvindex.Stored, Hashes: chain})
	case 5:
		from := rnd.IntN(len(chain))
		r.blockSet(tb, tier).Apply(kvindex.Delta{Change: kvindex.Removed, Hashes: chain[from:]})
	case 6:
		if rnd.IntN(20) == 0 {
			r.blockSet(tb, tier).Clear()
		}
	case 7, 8:
		r.next++
		r.open[r.next] = 1 + rnd.IntN(1000)
		r.emit(&msg.Record{Kind: msg.RecAdmitted, ReqID: r.next, Ingress: "other", Tokens: r.open[r.next]})
	default:
		for id := range r.open {
			delete(r.open, id)
			r.emit(&msg.Record{Kind: msg.RecDone, ReqID: id, Ingress: "other"})
			break
		}
	}
}

// kvRig is an ingress without sockets in front of kvReplicas.
type kvRig struct {
	feed   *kvFeed
	in     *Ingress
	router *appRouter
}

func newKVRig(tb testing.TB, ranks int, seed uint64, r app.Routing) *kvRig {
	tb.Helper()
	g := &kvRig{feed: &kvFeed{rand: rand.New(rand.NewPCG(seed, 1))}}
	for i := range ranks {
		rep := &kvReplica{feed: g.feed, id: routing.ID(0, i)}
		rep.begin(tb, 1, g.feed.rand.Uint64())
		g.feed.replicas = append(g.feed.replicas, rep)
	}
	s := newStore()
	a := demoApp()
	a.DataParallel.DPSize, a.NumReplicas, a.Routing = ranks, ranks, r
	deploy(tb, s, a, 1)
	in, err := New(Config{
		Node: "n1", Store: s, Feed: g.feed, Metrics: telemetry.New(),
		Log: slog.New(slog.DiscardHandler), Seed: 7,
	})
	require.NoError(tb, err)
	g.in, g.router = in, in.findAppRouter("demo")
	tb.Cleanup(func() {
		require.NoError(tb, in.Close(tb.Context()))
	})
	return g
}

// block sets is what the ingress holds, by rank and tier.
func (g *kvRig) sets() map[blockSetKey]kvindex.BlockSet {
	out := map[blockSetKey]kvindex.BlockSet{}
	g.router.inputs().cache.inspect(func(held []*kvindex.BlockSet) {
		for _, col := range held {
			out[blockSetKey{col.Owner().Rank, col.Owner().Tier}] = *col
		}
	})
	return out
}

// requireEqual compares every block set, what look-ups find, and the load.
func (g *kvRig) requireEqual(tb testing.TB, all [][]uint64) {
	tb.Helper()
	got := g.sets()
	view := g.router.router.Load().Snapshot()
	for _, r := range g.feed.replicas {
		for tier, want := range r.sets {
			have, ok := got[blockSetKey{uint32(r.id), tier}]
			require.True(tb, ok, "rank %s tier %d", r.id, tier)
			require.True(tb, have.Shown(), "rank %s tier %d is hidden", r.id, tier)
			require.Equal(tb, want.Owner(), have.Owner())
			require.Equal(tb, want.Len(), have.Len(), "rank %s tier %d", r.id, tier)
			require.Equal(tb, blocksOf(want), blocksOf(&have), "rank %s tier %d", r.id, tier)
		}
		i, ok := view.Find(r.id)
		require.True(tb, ok)
		require.Equal(tb, len(r.open), view.Ranks[i].Load.O(), "load of %s", r.id)
	}
	for _, chain := range all {
		require.Equal(tb, g.expected(chain), found(g.router.inputs().cache.index.Match(chain, nil)))
	}
}

// blocksOf are the hashes of the blocks that a block set holds, in order.
func blocksOf(c *kvindex.BlockSet) (out []uint64) {
	c.Snapshot(c.Len(), func(d kvindex.Delta) { out = append(out, d.Hashes...) })
	slices.Sort(out)
	return out
}

// expected is what the replicas' own block sets answer; hidden ones are shown for the moment.
func (g *kvRig) expected(chain []uint64) map[blockSetKey]int32 {
	out := map[blockSetKey]int32{}
	for _, r := range g.feed.replicas {
		for _, c := range r.sets {
			c.Show()
		}
		for at, n := range found(r.index.Match(chain, nil)) {
			out[at] = n
		}
	}
	return out
}

func found(hits []kvindex.Hit) map[blockSetKey]int32 {
	out := map[blockSetKey]int32{}
	for _, h := range hits {
		if h.Blocks > 0 {
			out[blockSetKey{h.Rank, h.Tier}] = h.Blocks
		}
	}
	return out
}
