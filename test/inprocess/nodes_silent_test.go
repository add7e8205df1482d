package inprocess

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/harness"
)

// Times of the leases and streams, as they are promised. test/acceptance.md, row MB1.
const (
	suspectAt = time.Second
	outAt     = 3 * time.Second
	lostAt    = 12 * time.Second // after the last renewal, which is up to 2 s old
	pingOut   = 8 * time.Second  // of the data connection, whose streams then end
	beat      = 300 * time.Millisecond
)

// MB1: A node's power is cut: no connection is reset.
func TestSilentNodeLosesItsRanks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(4))
		c.Expect(harness.NodeFails, harness.StreamBreaks)
		c.WaitVoters(3)
		c.Deploy(spread("a", 6, "routing: {policy: round-robin}"))
		c.WaitStatus("a", "RUNNING")
		silent := c.Peer(2)
		gone := ranksOn(c.Peer(0), silent.ID)
		require.Len(t, gone, 2)
		diaries := []*recordLog{follow(c.Peer(0)), follow(c.Peer(1))}
		time.Sleep(5 * time.Second)
		long := askAtOnce(t, c.Peer(0), "a", 12, 400)
		loads := []*traffic{
			ask(t, c.Peer(0), "a", 50*time.Millisecond, 10),
			ask(t, c.Peer(1), "a", 50*time.Millisecond, 10),
		}
		time.Sleep(time.Second)

		cut := time.Now()
		wasLost := c.Peer(0).When(lost(silent.ID))
		wereGranted := c.Peer(0).When(func(s *state.State) bool {
			for k := range gone {
				if s.Epochs["a/"+k] < 2 {
					return false
				}
			}
			return true
		})
		silent.Silence()
		at := (<-wasLost).Sub(cut)
		assert.LessOrEqual(t, at, lostAt+beat)
		assert.GreaterOrEqual(t, at, lostAt-2*time.Second-beat)
		assert.LessOrEqual(t, (<-wereGranted).Sub(cut), lostAt+beat, "all of its ranks are granted again")
		c.Until("all ranks elsewhere", func() error { return allReady(c, "a", 6) })
		time.Sleep(time.Second)
		assert.Zero(t, clean(t, long.end()), "streams that the silent node had begun go on")
		assert.NotEmpty(t, c.Journal.Find("a stream broke and goes on from another rank"))
		for i, l := range loads {
			list := l.end()
			broken := clean(t, list)
			t.Logf("ingress %d: %d requests, %d broken after the first byte, node lost after %s", i+1,
				len(list), broken, at)
			for _, a := range list {
				if when := a.at.Sub(cut); when > suspectAt+beat && when < outAt+beat {
					assert.False(t, gone[a.Rank], "rank %s was picked %s after the cut", a.Rank, when)
				}
				assert.Less(t, a.First, outAt+time.Second, "asked %s after the cut: %s", a.at.Sub(cut),
					a.Stream)
				assert.LessOrEqual(t, a.Total, pingOut+time.Second, "asked %s after the cut: %s",
					a.at.Sub(cut), a.Stream)
			}
		}
		for i, d := range diaries {
			for what, limit := range map[msg.RecordKind]time.Duration{
				msg.RecSilent: suspectAt,
				msg.RecGone:   outAt,
			} {
				list := d.all(func(h rankRecord) bool {
					return h.kind == what && h.at.After(cut) && h.epoch == 1
				})
				require.Len(t, list, 2, "ingress %d, record %d", i+1, what)
				for _, h := range list {
					assert.LessOrEqual(t, h.at.Sub(cut), limit+beat)
					assert.GreaterOrEqual(t, h.at.Sub(cut), limit-beat)
				}
			}
		}
		for id, u := range c.Peer(0).State().Units {
			want := uint64(1)
			for k := range gone {
				if id == "a/"+k {
					want = 2
				}
			}
			assert.Equal(t, want, u.Epoch, "unit %s", id)
		}
	})
}

// A node comes back after it was lost: it stops the ranks that were granted elsewhere, and takes ranks again.
func TestNodeReturns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(2))
		c.Expect(harness.NodeFails, harness.RanksMove)
		c.WaitVoters(3)
		c.Deploy(spread("a", 6))
		c.WaitStatus("a", "RUNNING")
		away := c.Peer(2)
		wasLost := c.Peer(0).When(lost(away.ID))
		away.Silence()
		<-wasLost
		time.Sleep(5 * time.Second)
		old := away.Engines.Live()
		require.Len(t, old, 6, "it serves on")

		healed := time.Now()
		wasBack := c.Peer(0).When(back(away.ID))
		c.Reconnect()
		assert.LessOrEqual(t, (<-wasBack).Sub(healed), 10*time.Second)
		c.Until("all ranks again", func() error { return allReady(c, "a", 6) })
		t.Logf("6 of 6 ready %s after the heal", time.Since(healed))
		assert.Less(t, time.Since(healed), 15*time.Second)
		assert.Len(t, ranksOn(c.Peer(0), away.ID), 2)
		for _, u := range c.Peer(0).State().Units {
			want := uint64(1)
			if u.Ranks[0].Node == away.ID {
				want = 2
			}
			assert.Equal(t, want, u.Epoch, u.ID)
		}
		for _, p := range c.Peers() {
			s := p.StreamChat(t.Context(), "a", 5)
			assert.True(t, s.OK(), s)
		}
	})
}
