package noderpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// burst emits more records than may wait for one stream.
func (r *fakeRank) burst(n int) {
	r.do(func() {
		for i := range n {
			r.admit(uint64(1000+i), "i9")
			r.finish(uint64(1000 + i))
		}
	})
}

// freezeOne stops or resumes the first connection to a node.
func (c *streamNet) freezeOne(node string, on bool) {
	c.mu.Lock()
	f := c.conns[node][0]
	c.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.frozen = on
	f.cond.Broadcast()
}

// TestOverflow: a reader that is too slow for the log loses its stream, and lists the ranks again. Its ranks
// are not suspected for that.
func TestOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		defer w.stop()
		a, b, gone := w.rank(0, 10), w.rank(1, 11), w.rank(2, 12)
		a.do(func() { a.store(kvindex.GPU, 1, 2, 3) })
		slow := c.ingress("i1", nil)
		defer slow.stop()
		settle() // the first connection is its own
		fast := c.ingress("i2", nil)
		defer fast.stop()
		settle()
		c.freezeOne("n1", true)
		hashes := make([]uint64, maxHashes)
		large := func() {
			a.emit(msg.Record{Kind: msg.RecKV, KV: msg.KV{Tier: kvindex.Disk, Delta: kvindex.Delta{
				Change: kvindex.Removed, Hashes: hashes,
			}}})
		}
		for range 2 * maxChunks {
			a.do(large)
			if synctest.Wait(); len(w.streams.records.chunks) > maxChunks {
				t.Fatal("the log grows")
			}
			time.Sleep(time.Millisecond) // the other one keeps up
		}
		w.stopRank(gone)
		b.do(func() { b.id.incarnation, b.seq = 21, 0; b.publish() })
		late := w.rank(3, 13)
		a.do(func() { a.store(kvindex.GPU, 4); a.admit(7, "i1") })
		slow.takeNotes(epoch)
		began := time.Now()
		c.freezeOne("n1", false)
		time.Sleep(2 * time.Second)
		assert.EqualValues(t, 1, w.streams.Stats().Gaps)
		for _, n := range []*ingressNode{slow, fast} {
			n.assertEqual(t, a)
			n.assertEqual(t, b)
			n.assertEqual(t, late)
			assert.Len(t, n.ids(), 3)
		}
		notes := slow.takeNotes(began)
		require.Len(t, notes, 1, "%v", notes)
		assert.Contains(t, notes[0], "0/2 gone")
		for range 4 {
			a.do(large)
			settle()
		}
		assert.LessOrEqual(t, len(w.streams.records.chunks), 3, "nobody needs the rest of the log")
		settle()
	})
}

// TestLinksCloseWithoutAWarning: when a node ends, it logs no warning about the ranks of others.
func TestLinksCloseWithoutAWarning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		var out bytes.Buffer
		c.log = slog.New(slog.NewTextHandler(&out, nil))
		w := c.worker("n1")
		defer w.stop()
		w.rank(0, 10)
		n := c.ingress("i1", nil)
		time.Sleep(2 * quietTime)
		require.Len(t, n.ids(), 1)
		n.links.Close()
		synctest.Wait()
		assert.Empty(t, n.ids())
		assert.NotContains(t, out.String(), "WARN")
		n.stop()
	})
}

// TestLargeSnapshots: block sets and open requests of many messages, requested by several ingresses at once.
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
			a.assertEqual(t, r)
			b.assertEqual(t, r)
			r.do(func() { assert.Equal(t, 2, r.lists, "each stream lists once") })
		}
		assert.Zero(t, w.streams.Stats().Gaps)
	})
}

// TestSubscriptions: each begins with snapshots, and gets no record after its end.
func TestSubscriptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		defer w.stop()
		a := w.rank(0, 10)
		settle()
		n := c.ingress("i1", nil)
		defer n.stop()
		settle()
		second := newReader(t)
		cancel := n.hub.Subscribe(firstIsSnapshot{t, map[uint64]bool{}, second})
		a.do(func() { a.admit(1, "i1") })
		settle()
		second.assertEqual(t, a)
		n.hub.List(n.reader)
		settle()
		a.do(func() { assert.Equal(t, 3, a.lists, "a stream lists for all its subscriptions") })
		second.assertEqual(t, a)
		cancel()
		cancel()
		before := second.count
		a.do(func() { a.finish(1) })
		settle()
		assert.Equal(t, before, second.count)
		n.assertEqual(t, a)
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

// TestAnotherStreamOfTheSameIngress replaces the first one. Each stream is told why it ends.
func TestAnotherStreamOfTheSameIngress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		w.rank(0, 10)
		first := c.stream("i1")
		settle()
		second := c.stream("i1")
		require.ErrorIs(t, lastWord(first), errReplaced)
		assert.Equal(t, 1, w.streams.Stats().Streams)
		w.streams.Restart()
		require.ErrorIs(t, lastWord(second), errRestarts)
		require.ErrorIs(t, lastWord(c.stream("i1")), errRestarts, "it comes back too early")
		w.streams.Close()
		w.streams.Close()
		require.ErrorIs(t, lastWord(c.stream("i1")), io.EOF)
		w.stop()
	})
}

// TestStuckReader: a reader that neither reads nor writes loses its stream, and does not delay the end of its
// node.
func TestStuckReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		defer w.stop()
		w.rank(0, 10)
		stuck := c.stream("i1")
		defer stuck.Close()
		time.Sleep(streamSilence - time.Millisecond)
		assert.Equal(t, 1, w.streams.Stats().Streams)
		time.Sleep(time.Millisecond + endTime)
		synctest.Wait()
		assert.Zero(t, w.streams.Stats().Streams)
		defer c.stream("i1").Close()
		synctest.Wait()
		began := time.Now()
		w.streams.Close()
		assert.Equal(t, endTime, time.Since(began))
	})
}

// TestWrongStreams: malformed messages end the stream, and a node that cannot be reached is tried with a
// growing backoff.
func TestWrongStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		book, tries := newNodeStore(), 0
		book.change(func(nodes map[string]*state.Node) {
			nodes["n1"] = &state.Node{ID: "n1", Address: "n1:1", Roles: []state.Role{state.RoleWorker}}
		})
		f := NewRankLinks(RankLinksConfig{
			Self: "i1", Hub: msg.NewHub(), Store: book, Log: newStreamNet(t).log,
			Open: func(context.Context, state.Node) (net.Conn, error) {
				tries++
				return nil, errors.New("no route to host")
			},
		})
		time.Sleep(10 * time.Second)
		f.Close()
		f.Close()
		assert.InDelta(t, 13, tries, 2)
	})
}

// TestAnyHistory: whatever the ranks and the network do, at rest every ingress holds every rank's own
// account, and its KV block sets block for block.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		script := rapid.SliceOfN(rapid.Custom(drawEvent), 1, 40).Draw(rt, "script")
		var found findings
		synctest.Test(t, func(t *testing.T) { runScript(t, script, &found) })
		if len(found) > 0 {
			rt.Fatalf("%s", found[0])
		}
	})
}

// findings collects the failures of a run on fake time.
type findings []string

func (m *findings) Errorf(format string, args ...any) { *m = append(*m, fmt.Sprintf(format, args...)) }

// scriptEvent is one step. Numbers are taken modulo the number of candidates.
type scriptEvent struct {
	What, Worker, Ingress, Rank int
	On                          bool
	Tier                        kvindex.Tier
	Blocks                      []uint64
	Sleep                       time.Duration
}

func drawEvent(t *rapid.T) scriptEvent {
	return scriptEvent{
		What: rapid.IntRange(0, 13).Draw(t, "what"), Worker: rapid.IntRange(0, 1).Draw(t, "worker"),
		Ingress: rapid.IntRange(0, 2).Draw(t, "ingress"),
		Rank:    rapid.IntRange(0, 1).Draw(t, "rank"), On: rapid.Bool().Draw(t, "on"),
		Tier:   rapid.SampledFrom([]kvindex.Tier{kvindex.GPU, kvindex.Sent}).Draw(t, "tier"),
		Blocks: rapid.SliceOfNDistinct(rapid.Uint64Range(1, 50), 1, 20, rapid.ID).Draw(t, "blocks"),
		Sleep: rapid.SampledFrom([]time.Duration{
			0, time.Millisecond, 30 * time.Millisecond,
			900 * time.Millisecond, 4 * time.Second,
		}).Draw(t, "sleep"),
	}
}

// runScript runs a script, and checks at the end that every ingress holds every rank.
func runScript(t *testing.T, script []scriptEvent, found *findings) {
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
		if w := workers[e.Worker]; e.What < 6 || len(w.ranks) == 0 {
			c.apply(e, w, nodes[e.Ingress])
		} else {
			w.applyToRank(e, w.ranks[e.Rank%len(w.ranks)], last)
		}
	}
	for _, w := range workers {
		c.freeze(w.id, false)
	}
	time.Sleep(8 * time.Second)
	for _, n := range nodes {
		assert.Len(found, n.ids(), len(workers[0].ranks)+len(workers[1].ranks))
		for _, w := range workers {
			for _, r := range w.ranks {
				n.assertEqual(found, r)
			}
		}
		n.stop()
	}
	for _, w := range workers {
		w.stop()
	}
}

// apply applies an event to the streams.
func (c *streamNet) apply(e scriptEvent, w *workerNode, n *ingressNode) {
	switch e.What {
	case 0:
		c.freeze(w.id, e.On)
	case 1:
		c.reset(w.id)
	case 2:
		n.hub.List(n.reader)
	case 3:
		w.kill()
		w.listen()
	default:
		time.Sleep(e.Sleep)
	}
}

// applyToRank applies an event to a rank.
func (w *workerNode) applyToRank(e scriptEvent, r *fakeRank, number uint64) {
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
			r.open, r.sets = map[uint64]msg.OpenRequest{}, map[kvindex.Tier]map[uint64]bool{}
			r.publish()
		})
	case 9:
		w.stopRank(r)
		if e.On {
			id := r.id
			id.epoch, id.incarnation = id.epoch+1, number
			w.start(id)
		}
	case 10:
		r.do(func() {
			r.accepting = !r.accepting
			r.emit(msg.Record{
				Kind:      msg.RecState,
				RankState: msg.RankState{Accepting: r.accepting},
			})
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
