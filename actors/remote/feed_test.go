package remote

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
	"github.com/dpserve/dpserve/routing/kvindex"
	"github.com/dpserve/dpserve/state"
)

// burst is more records than may wait for one stream.
func (r *fakeRank) burst(n int) {
	r.do(func() {
		for i := range n {
			r.admit(uint64(1000+i), "i9")
			r.finish(uint64(1000 + i))
		}
	})
}

// TestOverflow: a reader that is too slow loses everything that waits, hears which ranks are left, and is given them anew.
func TestOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		w := c.worker("n1")
		defer w.stop()
		a, b, gone := w.rank(0, 10), w.rank(1, 11), w.rank(2, 12)
		a.do(func() { a.store(kvindex.GPU, 1, 2, 3) })
		slow, fast := c.ingress("i1", nil), c.ingress("i2", nil)
		defer slow.stop()
		defer fast.stop()
		calm()
		c.mu.Lock()
		mine := c.conns["n1"][0]
		c.mu.Unlock()
		mine.mu.Lock()
		mine.frozen = true
		mine.mu.Unlock()
		for range 20 {
			a.burst(200)
			time.Sleep(10 * time.Millisecond) // the other one keeps up
		}
		gone.stop()
		b.do(func() { b.id.incarnation, b.seq = 21, 0; b.publish() })
		late := w.rank(3, 13)
		a.do(func() { a.store(kvindex.GPU, 4); a.admit(7, "i1") })
		time.Sleep(200 * time.Millisecond)
		mine.mu.Lock()
		mine.frozen = false
		mine.cond.Broadcast()
		mine.mu.Unlock()
		time.Sleep(3 * time.Second)
		assert.EqualValues(t, 1, w.streams.Stats().Gaps)
		for _, n := range []*node{slow, fast} {
			n.equals(t, a)
			n.equals(t, b)
			n.equals(t, late)
			assert.Len(t, n.ids(), 3)
			assert.Zero(t, n.wrong)
		}
	})
}

// TestLargeSnapshots: columns and open requests of many messages, asked for by several ingresses at once.
func TestLargeSnapshots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		w := c.worker("n1")
		defer w.stop()
		var ranks []*fakeRank
		for i := range 4 {
			r := w.rank(i, uint64(10+i))
			ranks = append(ranks, r)
			r.do(func() {
				hashes := make([]uint64, 40_000)
				for k := range hashes {
					hashes[k] = uint64(k+1) * 0x9e3779b97f4a7c15
				}
				r.store(kvindex.GPU, hashes...)
				for k := range 3000 {
					r.open[uint64(k)] = msg.OpenRequest{ReqID: uint64(k), Ingress: "i1", Tokens: k}
				}
			})
		}
		a, b := c.ingress("i1", nil), c.ingress("i2", nil)
		defer a.stop()
		defer b.stop()
		time.Sleep(3 * time.Second)
		for _, r := range ranks {
			a.equals(t, r)
			b.equals(t, r)
			r.do(func() { assert.LessOrEqual(t, r.resyncs, 2) })
		}
		assert.Zero(t, a.wrong+b.wrong)
		assert.Zero(t, w.streams.Stats().Gaps)
	})
}

// TestAskedAgain: a rank that does not answer is asked every second, and holds up no other.
func TestAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		w := c.worker("n1")
		defer w.stop()
		a, b := w.rank(0, 10), w.rank(1, 11)
		a.do(func() { a.mute = true })
		synctest.Wait()
		n := c.ingress("i1", nil)
		defer n.stop()
		time.Sleep(5 * time.Second)
		n.equals(t, b)
		a.do(func() {
			assert.InDelta(t, 4, a.resyncs, 1)
			a.mute = false
		})
		time.Sleep(2 * time.Second)
		n.equals(t, a)
	})
}

// TestSubscriptions: each begins with snapshots, and hears nothing after its end.
func TestSubscriptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		w := c.worker("n1")
		defer w.stop()
		a := w.rank(0, 10)
		n := c.ingress("i1", nil)
		defer n.stop()
		calm()
		second := newReader(t)
		cancel := n.feed.Subscribe(firstIsSnapshot{t, map[uint64]bool{}, second})
		a.do(func() { a.admit(1, "i1") })
		calm()
		second.equals(t, a)
		cancel()
		cancel()
		before := second.count
		a.do(func() { a.finish(1) })
		calm()
		assert.Equal(t, before, second.count)
		n.equals(t, a)
	})
}

type firstIsSnapshot struct {
	t    *testing.T
	seen map[uint64]bool
	to   msg.Sink
}

func (f firstIsSnapshot) Deliver(rec *msg.Record) {
	assert.True(f.t, f.seen[rec.Incarnation] || rec.Kind == msg.RecSnapshot)
	f.seen[rec.Incarnation] = true
	f.to.Deliver(rec)
}

// TestAnotherStreamOfTheSameIngress takes the place of the first; the name is held against the connection's.
func TestAnotherStreamOfTheSameIngress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		w := c.worker("n1")
		w.rank(0, 10)
		first, second := c.stream("i1"), c.stream("i1")
		require.NoError(t, first.Send(&dpservev1.SubscribeRequest{Ingress: "i1"}))
		_, err := first.Recv() // a heartbeat
		require.NoError(t, err)
		require.NoError(t, second.Send(&dpservev1.SubscribeRequest{Ingress: "i1"}))
		for err == nil {
			_, err = first.Recv()
		}
		assert.Equal(t, codes.Aborted, status.Code(err))
		_, err = second.Recv()
		require.NoError(t, err)
		assert.Equal(t, 1, w.streams.Stats().Streams)

		nameless := c.stream("i2")
		require.NoError(t, nameless.Send(&dpservev1.SubscribeRequest{}))
		_, err = nameless.Recv()
		assert.Equal(t, codes.InvalidArgument, status.Code(err))

		w.streams.config.Peer = func(context.Context) (string, bool) { return "n9", true }
		wrong := c.stream("i3")
		require.NoError(t, wrong.Send(&dpservev1.SubscribeRequest{Ingress: "i3"}))
		_, err = wrong.Recv()
		assert.Equal(t, codes.PermissionDenied, status.Code(err))

		w.streams.Close()
		w.streams.Close()
		for err = nil; err == nil; {
			_, err = second.Recv()
		}
		assert.Equal(t, codes.Unavailable, status.Code(err))
		w.stop()
		c.hangUp()
	})
}

// TestWrongStreams: what cannot be read ends the stream, and a node that cannot be reached is tried again ever more rarely.
func TestWrongStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		book, tries := newBook(), 0
		book.change(func(nodes map[string]*state.Node) {
			nodes["n1"] = &state.Node{ID: "n1", Address: "n1:1", Roles: []state.Role{state.RoleWorker}}
		})
		f, err := NewFeed(FeedConfig{Self: "i1", Store: book, Log: newCluster(t).log, Open: func(context.Context, state.Node) (StreamClient, error) {
			tries++
			return nil, errors.New("no route to host")
		}})
		require.NoError(t, err)
		time.Sleep(10 * time.Second)
		f.Close()
		f.Close()
		assert.InDelta(t, 13, tries, 2)
	})
}

// TestAnyHistory: whatever the ranks do, and whatever the network does to the streams, at rest every ingress holds every rank's own
// account, and its KV columns block for block.
func TestAnyHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(t, func(rt *rapid.T) { anyHistory(t, rt) })
	})
}

type history struct {
	*rapid.T
	c       *cluster
	workers []*worker
	nodes   []*node
	next    uint64
}

func anyHistory(t *testing.T, rt *rapid.T) {
	h := &history{T: rt, c: newCluster(t), next: 100}
	h.workers = []*worker{h.c.worker("n1"), h.c.worker("n2")}
	for i, w := range h.workers {
		w.rank(2*i, h.fresh())
		w.rank(2*i+1, h.fresh())
	}
	for i := range 3 {
		h.nodes = append(h.nodes, h.c.ingress(fmt.Sprintf("i%d", i), nil))
	}
	defer func() {
		for _, n := range h.nodes {
			n.stop()
		}
		for _, w := range h.workers {
			w.stop()
		}
	}()
	for range rapid.IntRange(1, 40).Draw(rt, "steps") {
		h.step()
	}
	for _, w := range h.workers {
		h.c.freeze(w.id, false)
	}
	time.Sleep(8 * time.Second)
	for _, n := range h.nodes {
		count := 0
		for _, w := range h.workers {
			for _, r := range w.hub.ranks {
				n.equals(rt, r)
				count++
			}
		}
		require.Len(rt, n.ids(), count)
		require.Zero(rt, n.wrong)
	}
}

func (h *history) fresh() uint64 { h.next++; return h.next }

func (h *history) step() {
	w := rapid.SampledFrom(h.workers).Draw(h, "worker")
	n := rapid.SampledFrom(h.nodes).Draw(h, "ingress")
	if what := rapid.IntRange(0, 9).Draw(h, "step"); what < 5 || len(w.hub.ranks) == 0 {
		h.network(what, w, n)
		return
	}
	h.rank(rapid.SampledFrom(w.hub.ranks).Draw(h, "rank"))
}

// network is what happens to streams.
func (h *history) network(what int, w *worker, n *node) {
	switch what {
	case 0:
		h.c.freeze(w.id, rapid.Bool().Draw(h, "freeze"))
	case 1:
		h.c.reset(w.id)
	case 2:
		n.cancel()
		n.cancel = n.feed.Subscribe(n.reader)
	case 3:
		w.kill()
		w.listen()
	default:
		time.Sleep(rapid.SampledFrom([]time.Duration{0, time.Millisecond, 30 * time.Millisecond, 900 * time.Millisecond, 4 * time.Second}).Draw(h, "sleep"))
	}
}

// rank is what happens to a rank.
func (h *history) rank(r *fakeRank) {
	blocks := rapid.SliceOfNDistinct(rapid.Uint64Range(1, 50), 1, 20, rapid.ID).Draw(h, "blocks")
	tier := rapid.SampledFrom([]kvindex.Tier{kvindex.GPU, kvindex.Sent}).Draw(h, "tier")
	switch rapid.IntRange(0, 8).Draw(h, "change") {
	case 0:
		r.burst(3000)
	case 1:
		r.do(func() { r.id.incarnation, r.seq, r.open = h.fresh(), 0, map[uint64]msg.OpenRequest{}; r.publish() })
	case 2: // after a panic: same incarnation, nothing in hand
		r.do(func() {
			r.open, r.columns = map[uint64]msg.OpenRequest{}, map[kvindex.Tier]map[uint64]bool{}
			r.publish()
		})
	case 3:
		r.stop()
		if rapid.Bool().Draw(h, "again") {
			id := r.id
			id.epoch, id.incarnation = id.epoch+1, h.fresh()
			r.hub.start(r.node, id)
		}
	case 4:
		r.do(func() { r.accepting = !r.accepting; r.emit(msg.Record{Kind: msg.RecState, Accepting: r.accepting}) })
	case 5, 6:
		r.do(func() { r.store(tier, blocks...) })
	case 7:
		r.do(func() { r.remove(tier, blocks...) })
	default:
		r.do(func() {
			for _, b := range blocks {
				r.admit(b, "i1")
			}
			r.finish(blocks[0])
		})
	}
}
