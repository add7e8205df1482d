package remote

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// TestOverflow: a reader that is too slow loses everything that waits, hears which ranks are left, and is
// given them anew.
func TestOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
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
		for _, n := range []*ingressNode{slow, fast} {
			n.equals(t, a)
			n.equals(t, b)
			n.equals(t, late)
			assert.Len(t, n.ids(), 3)
			assert.Zero(t, n.wrong)
		}
	})
}

// TestFeedClosesWithoutAWarning: that the ranks of others are gone is no news for a node that ends.
func TestFeedClosesWithoutAWarning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		var out bytes.Buffer
		c.log = slog.New(slog.NewTextHandler(&out, nil))
		w := c.worker("n1")
		defer w.stop()
		w.rank(0, 10)
		n := c.ingress("i1", nil)
		time.Sleep(2 * joinTime)
		require.Len(t, n.ids(), 1)
		n.feed.Close()
		synctest.Wait()
		assert.Empty(t, n.ids())
		assert.NotContains(t, out.String(), "WARN")
		n.stop()
	})
}

// TestLargeSnapshots: columns and open requests of many messages, asked for by several ingresses at once.
func TestLargeSnapshots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
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
			// a stream's beginning, and a subscription, of each
			r.do(func() { assert.LessOrEqual(t, r.resyncs, 4) })
		}
		assert.Zero(t, a.wrong+b.wrong)
		assert.Zero(t, w.streams.Stats().Gaps)
	})
}

// TestAskedAgain: a rank that does not answer is asked every second, and holds up no other.
func TestAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		defer w.stop()
		a, b := w.rank(0, 10), w.rank(1, 11)
		a.do(func() { a.mute = true })
		synctest.Wait()
		n := c.ingress("i1", nil)
		defer n.stop()
		time.Sleep(4500 * time.Millisecond)
		n.equals(t, b)
		a.do(func() {
			assert.InDelta(t, 5, a.resyncs, 1)
			a.mute = false
		})
		time.Sleep(2 * time.Second)
		n.equals(t, a)
	})
}

// TestSubscriptions: each begins with snapshots, and hears nothing after its end.
func TestSubscriptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
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
		c := newStreamNet(t)
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

// TestWrongStreams: what cannot be read ends the stream, and a node that cannot be reached is tried again
// ever more rarely.
func TestWrongStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		book, tries := newNodeBook(), 0
		book.change(func(nodes map[string]*state.Node) {
			nodes["n1"] = &state.Node{ID: "n1", Address: "n1:1", Roles: []state.Role{state.RoleWorker}}
		})
		f, err := NewFeed(FeedConfig{Self: "i1", Store: book, Log: newStreamNet(t).log,
			Open: func(context.Context, state.Node) (StreamClient, error) {
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

// TestAnyHistory: whatever the ranks do, and whatever the network does to the streams, at rest every ingress
// holds every rank's own account, and its KV columns block for block.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		script := rapid.SliceOfN(rapid.Custom(drawEvent), 1, 40).Draw(rt, "script")
		var found mistakes
		synctest.Test(t, func(t *testing.T) { play(t, script, &found) })
		if len(found) > 0 {
			rt.Fatalf("%s", found[0])
		}
	})
}

// mistakes takes what a run in a bubble finds out of it.
type mistakes []string

func (m *mistakes) Errorf(format string, args ...any) { *m = append(*m, fmt.Sprintf(format, args...)) }

// event is one thing that happens. Numbers are taken modulo what there is.
type event struct {
	What, Worker, Ingress, Rank int
	On                          bool
	Tier                        kvindex.Tier
	Blocks                      []uint64
	Sleep                       time.Duration
}

func drawEvent(t *rapid.T) event {
	return event{
		What: rapid.IntRange(0, 13).Draw(t, "what"), Worker: rapid.IntRange(0, 1).Draw(t, "worker"),
		Ingress: rapid.IntRange(0, 2).Draw(t, "ingress"),
		Rank:    rapid.IntRange(0, 1).Draw(t, "rank"), On: rapid.Bool().Draw(t, "on"),
		Tier:   rapid.SampledFrom([]kvindex.Tier{kvindex.GPU, kvindex.Sent}).Draw(t, "tier"),
		Blocks: rapid.SliceOfNDistinct(rapid.Uint64Range(1, 50), 1, 20, rapid.ID).Draw(t, "blocks"),
		Sleep: rapid.SampledFrom([]time.Duration{0, time.Millisecond, 30 * time.Millisecond,
			900 * time.Millisecond, 4 * time.Second}).Draw(t, "sleep"),
	}
}

// play runs a script, and looks at the end whether everybody knows everything.
func play(t *testing.T, script []event, found *mistakes) {
	c, last := newStreamNet(t), uint64(100)
	workers := []*workerNode{c.worker("n1"), c.worker("n2")}
	var nodes []*ingressNode
	for i := range 4 {
		workers[i/2].rank(i, uint64(10+i))
	}
	for i := range 3 {
		nodes = append(nodes, c.ingress(fmt.Sprintf("i%d", i), nil))
	}
	for _, e := range script {
		last++
		if w := workers[e.Worker]; e.What < 6 || len(w.hub.ranks) == 0 {
			c.happen(e, w, nodes[e.Ingress])
		} else {
			w.hub.ranks[e.Rank%len(w.hub.ranks)].happen(e, last)
		}
	}
	for _, w := range workers {
		c.freeze(w.id, false)
	}
	time.Sleep(8 * time.Second)
	for _, n := range nodes {
		assert.Len(found, n.ids(), len(workers[0].hub.ranks)+len(workers[1].hub.ranks))
		assert.Zero(found, n.wrong)
		for _, w := range workers {
			for _, r := range w.hub.ranks {
				n.equals(found, r)
			}
		}
		n.stop()
	}
	for _, w := range workers {
		w.stop()
	}
}

// happen is what happens to streams.
func (c *streamNet) happen(e event, w *workerNode, n *ingressNode) {
	switch e.What {
	case 0:
		c.freeze(w.id, e.On)
	case 1:
		c.reset(w.id)
	case 2:
		old := n.cancel
		n.cancel = n.feed.Subscribe(n.reader)
		old()
	case 3:
		w.kill()
		w.listen()
	default:
		time.Sleep(e.Sleep)
	}
}

// happen is what happens to a rank.
func (r *fakeRank) happen(e event, number uint64) {
	switch e.What {
	case 6:
		r.burst(3000)
	case 7:
		r.do(func() {
			r.id.incarnation, r.seq, r.open = number, 0,
				map[uint64]msg.OpenRequest{}
			r.publish()
		})
	case 8: // after a panic: same incarnation, nothing in hand
		r.do(func() {
			r.open, r.columns = map[uint64]msg.OpenRequest{}, map[kvindex.Tier]map[uint64]bool{}
			r.publish()
		})
	case 9:
		r.stop()
		if e.On {
			id := r.id
			id.epoch, id.incarnation = id.epoch+1, number
			r.hub.start(r.node, id)
		}
	case 10:
		r.do(func() {
			r.accepting = !r.accepting
			r.emit(msg.Record{Kind: msg.RecState,
				Accepting: r.accepting})
		})
	case 11:
		r.do(func() { r.store(e.Tier, e.Blocks...) })
	case 12:
		r.do(func() { r.remove(e.Tier, e.Blocks...) })
	default:
		r.do(func() {
			for _, b := range e.Blocks {
				r.admit(b, "i1")
			}
			r.finish(e.Blocks[0])
		})
	}
}
