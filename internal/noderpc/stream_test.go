package noderpc

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// TestThreeIngressesTwoNodes: every ingress has every rank's account, whichever node runs it, before and
// after deltas.
func TestThreeIngressesTwoNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w1, w2 := c.worker("n1"), c.worker("n2")
		defer w1.stop()
		defer w2.stop()
		a, b := w1.rank(0, 10), w2.rank(1, 11)
		a.do(func() { a.admit(1, "i1"); a.store(kvindex.GPU, 5, 6, 7) })
		// the last has ranks of its own
		nodes := []*ingressNode{c.ingress("i1", nil), c.ingress("i2", nil), c.ingress("n1", w1.hub)}
		defer func() {
			for _, n := range nodes {
				n.stop()
			}
		}()
		settle()
		check := func() {
			t.Helper()
			settle()
			for _, n := range nodes {
				n.assertEqual(t, a)
				n.assertEqual(t, b)
			}
		}
		check()
		a.do(func() { a.admit(2, "i2"); a.finish(1); a.remove(kvindex.GPU, 6) })
		b.do(func() {
			b.store(kvindex.Sent, 9)
			b.accepting = false
			b.emit(msg.Record{Kind: msg.RecState, Cause: "ejected"})
		})
		check()
		late := w2.rank(2, 12) // starts later
		settle()
		for _, n := range nodes {
			n.assertEqual(t, late)
		}
		w2.stopRank(late)
		settle()
		for _, n := range nodes {
			assert.Equal(t, []string{"chat/0/0#1.10", "chat/0/1#1.11"}, n.ids())
		}
		assert.Equal(t, 2, w1.streams.Stats().Streams)
		assert.Equal(t, 3, w2.streams.Stats().Streams)
	})
}

// growingLog is a log that is read while it is written.
type growingLog struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (p *growingLog) Write(line []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.Write(line)
}

func (p *growingLog) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.String()
}

// TestSilenceOfANodeThatJoins: a node is known before it serves. Its silence is a warning only if it lasts,
// or if the node was heard before.
func TestSilenceOfANodeThatJoins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		var out growingLog
		c.log = slog.New(slog.NewTextHandler(&out, nil))
		w := c.worker("n1")
		w.kill()
		n := c.ingress("i1", nil)
		defer n.stop()
		time.Sleep(8 * time.Second)
		assert.Empty(t, out.String(), "it is joining")
		w.listen()
		w.rank(0, 10)
		time.Sleep(2 * time.Second)
		assert.NotContains(t, out.String(), "silent")
		assert.NotContains(t, out.String(), "heard again")
		w.stop()
		time.Sleep(time.Second)
		assert.Equal(t, 1, strings.Count(out.String(), "a node's stream is silent"), &out)

		gone := c.worker("n2")
		gone.kill()
		time.Sleep(9 * time.Second)
		assert.NotContains(t, out.String(), "peer=n2")
		time.Sleep(time.Minute)
		assert.Equal(t, 1, strings.Count(out.String(), "peer=n2"), "it never came: %s", &out)
		assert.Contains(t, out.String(), "level=WARN")
	})
}

// HF75: a node says that its process is replaced. Its silence is no warning then, unless it lasts.
func TestARestartThatWasAnnounced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		var out growingLog
		c.log = slog.New(slog.NewTextHandler(&out, nil))
		w := c.worker("n1")
		a := w.rank(0, 10)
		n := c.ingress("i1", nil)
		defer n.stop()
		time.Sleep(time.Minute)
		said := func(line string) int { return strings.Count(out.String(), line+" component=remote peer=n1") }
		for times := 1; times <= 2; times++ {
			w.streams.Restart()
			time.Sleep(time.Second / 2)
			w.kill()
			time.Sleep(4 * time.Second)
			assert.Empty(t, n.ids(), "its ranks are out")
			w.listen()
			time.Sleep(2 * time.Second)
			n.assertEqual(t, a)
			assert.Equal(t, times, said(`level=INFO msg="a node restarts, its engines go on"`))
			assert.Equal(t, times, said(`level=INFO msg="a node has restarted"`))
			assert.NotContains(t, out.String(), "WARN")
		}
		a.do(func() { // a rank says so too, in case the process ends before the end of the stream is sent
			a.emit(msg.Record{
				Kind: msg.RecState, Cause: msg.CauseRestarting, RankState: msg.RankState{Draining: true},
			})
		})
		settle()
		w.kill()
		time.Sleep(quietTime - time.Second)
		assert.NotContains(t, out.String(), "WARN")
		time.Sleep(time.Minute)
		assert.Equal(t, 1, strings.Count(out.String(), "level=WARN msg=\"a node's stream is silent"), &out)
		w.listen()
		time.Sleep(5 * time.Second)
		n.assertEqual(t, a)
		w.kill() // not announced
		settle()
		assert.Equal(t, 2, strings.Count(out.String(), "level=WARN msg=\"a node's stream is silent"), &out)
		assert.Equal(t, 1, strings.Count(out.String(), "level=WARN msg=\"a node's ranks are out"), &out)
		w.listen()
		w.stop()
	})
}

// TestSilence: after 1 s without a message the node is silent, after 3 s its ranks are out; a message brings
// the ranks back.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		defer w.stop()
		a, b := w.rank(0, 10), w.rank(1, 11)
		n := c.ingress("i1", nil)
		defer n.stop()
		settle()
		time.Sleep(10 * time.Second)
		assert.Empty(t, n.takeNotes(epoch), "heartbeats keep it alive")
		box := n.get(a.id).box

		began := time.Now()
		c.freeze("n1", true)
		time.Sleep(2 * time.Second)
		c.freeze("n1", false)
		settle()
		notes := n.takeNotes(began)
		assert.Len(t, notes, 4)
		assert.Contains(t, notes, "0/0 heard 2s")
		n.assertEqual(t, a)

		c.freeze("n1", true)
		time.Sleep(5 * time.Second)
		assert.Empty(t, n.ids())
		select {
		case <-box.Stopped():
		default:
			t.Error("the mailbox of a rank that is out goes on")
		}
		c.freeze("n1", false)
		time.Sleep(3 * time.Second)
		settle()
		n.assertEqual(t, a)
		n.assertEqual(t, b)
		assert.NotSame(t, box, n.get(a.id).box)
	})
}

// TestSilenceTimes: the times run from the last message, and heartbeats are 250 ms apart.
func TestSilenceTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		defer w.stop()
		a := w.rank(0, 10)
		n := c.ingress("i1", nil)
		defer n.stop()
		settle()
		a.do(func() { a.admit(1, "i1") })
		synctest.Wait()
		began := time.Now()
		c.freeze("n1", true)
		time.Sleep(5 * time.Second)
		assert.Equal(t, []string{"0/0 gone 3s", "0/0 silent 1s"}, n.takeNotes(began))
		c.freeze("n1", false)
		time.Sleep(2 * time.Second)
		n.assertEqual(t, a)
	})
}

// TestResetIsSilentAtOnce and back at once, with all missed records.
func TestResetIsSilentAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		defer w.stop()
		a, b := w.rank(0, 10), w.rank(1, 11)
		n := c.ingress("i1", nil)
		defer n.stop()
		time.Sleep(5 * time.Second)
		box := n.get(a.id).box
		began := time.Now()
		c.reset("n1")
		a.do(func() { a.admit(1, "i1") })
		w.stopRank(b)
		settle()
		notes := n.takeNotes(began)
		for i := range notes { // the stream was back before the end of b: that has a message of its own
			notes[i] = strings.Replace(notes[i], "0/1 gone "+coalesce.String(), "0/1 gone 0s", 1)
		}
		assert.Equal(t, []string{
			"0/0 heard 0s", "0/0 silent 0s", "0/1 gone 0s", "0/1 heard 0s",
			"0/1 silent 0s",
		}, notes)
		n.assertEqual(t, a)
		assert.Same(t, box, n.get(a.id).box)
	})
}

// TestRefusedIsOutAtOnce: the node's kernel refuses the connection.
func TestRefusedIsOutAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		a := w.rank(0, 10)
		n := c.ingress("i1", nil)
		defer n.stop()
		time.Sleep(5 * time.Second)
		began := time.Now()
		w.kill()
		settle()
		assert.Equal(t, []string{"0/0 gone 0s", "0/0 silent 0s"}, n.takeNotes(began))

		w.listen() // the process is back, with the same rank
		time.Sleep(2 * time.Second)
		n.assertEqual(t, a)
		w.stop()
	})
}

// TestLostAndRemovedNodesAreOutAtOnce: the state decides.
func TestLostAndRemovedNodesAreOutAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		defer w.stop()
		a := w.rank(0, 10)
		n := c.ingress("i1", nil)
		defer n.stop()
		settle()
		for what, f := range map[string]func(nodes map[string]*state.Node){
			"lost":    func(nodes map[string]*state.Node) { nodes["n1"].Lost = true },
			"removed": func(nodes map[string]*state.Node) { delete(nodes, "n1") },
			"no ranks": func(nodes map[string]*state.Node) {
				nodes["n1"].Roles = []state.Role{state.RoleIngress}
			},
			"no address": func(nodes map[string]*state.Node) { nodes["n1"].Address = "" },
		} {
			n.assertEqual(t, a)
			was := *c.book.State().Nodes["n1"]
			began := time.Now()
			c.book.change(f)
			synctest.Wait()
			assert.Equal(t, []string{"0/0 gone 0s"}, n.takeNotes(began), what)
			c.book.change(func(nodes map[string]*state.Node) { nodes["n1"] = &was })
			time.Sleep(2 * time.Second)
		}
		n.assertEqual(t, a)
	})
}

// RP44, RP48: messages that give something back reach their rank, in order, and no other incarnation.
func TestPosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		defer w.stop()
		a := w.rank(0, 10)
		n := c.ingress("i1", nil)
		defer n.stop()
		settle()
		box := n.get(a.id).box
		at := time.Now().Add(-30 * time.Millisecond)
		done := msg.Done{
			TicketID: 7, Outcome: msg.FailedOutcome, Cause: "upstream_lost", PromptTokens: 10,
			CachedTokens: 4, HasCached: true, CompletionTokens: 3,
			FirstToken: 40 * time.Millisecond, Charge: true, BusyFor: 3 * time.Second, CheckHealth: true,
		}
		first := &msg.FirstToken{TicketID: 7, At: at}
		box.Send(first)
		first.TicketID = 99 // the sender may re-use it
		box.Send(&msg.Progress{TicketID: 7, Out: 3})
		box.Send(&done)
		box.Send(&msg.Pardon{})
		box.Send(msg.Demand{Ingress: "another", Waits: true})
		settle()
		a.do(func() {
			assert.Equal(t, []any{
				&msg.FirstToken{TicketID: 7, At: at}, &msg.Progress{TicketID: 7, Out: 3},
				&done, &msg.Pardon{},
				&msg.Demand{Ingress: "i1", Waits: true},
			}, a.got, "whose stream it is says who waits")
			a.got = nil
		})
		require.ErrorIs(t, box.TrySend(&msg.Admit{}), errNotPosted)

		a.do(func() { a.id.incarnation, a.seq = 11, 0; a.publish() })
		box.Send(&done)
		settle()
		a.do(func() { assert.Empty(t, a.got, "of an incarnation that is over") })
		assert.EqualValues(t, 1, w.streams.Stats().StrangePosts)
		assert.EqualValues(t, 5, w.streams.Stats().Posts)
		n.assertEqual(t, a)
	})
}

// TestPostsWaitForTheNode, within their bound: Progress is dropped first.
func TestPostsWaitForTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newStreamNet(t)
		w := c.worker("n1")
		defer w.stop()
		a := w.rank(0, 10)
		n := c.ingress("i1", nil)
		defer n.stop()
		settle()
		box := n.get(a.id).box
		w.kill()
		settle()
		for i := range 2 * maxPosts {
			box.Send(&msg.Progress{TicketID: 1, Out: i})
		}
		for i := range maxPosts - 1 {
			box.Send(&msg.Done{TicketID: uint64(i)})
		}
		w.listen()
		time.Sleep(3 * time.Second)
		a.do(func() {
			assert.Len(t, a.got, maxPosts-1)
			assert.Equal(t, &msg.Done{TicketID: maxPosts - 2}, a.got[maxPosts-2])
		})
		assert.EqualValues(t, 2*maxPosts, n.links.Stats().LostPosts)
	})
}
